"""Copies of tokens: right for every small case, everything of a token goes along, a refused plan changes nothing."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gpu_validate.kernels import runtime  # noqa: E402
from gpu_validate.mover import Mover, build_mover, choose_mover  # noqa: E402
from gpu_validate.moves import check_moves, overlaps, safe_in_order  # noqa: E402
from gpu_validate.payload import payload  # noqa: E402
from gpu_validate.pool import PagedPool  # noqa: E402
from gpu_validate.triton_mover import TritonMover, launch_constants  # noqa: E402
from sim.errors import InputError  # noqa: E402
from sim.serving.models import Model  # noqa: E402
from tests.support.pools import DTYPES, contents, filled, restore, toy  # noqa: E402

NAMES = ("torch", "triton")


def moved(before: np.ndarray, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    """Return what a pool holds when all tokens are read before any is written."""
    after = before.copy()
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        after[target] = before[source]
    return after


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# ---- the proof -------------------------------------------------------------------------------------------------------


def chunk_by_chunk(src: np.ndarray, dst: np.ndarray, chunk: int, size: int) -> list[int]:
    memory = list(range(size))
    for start in range(0, len(src), chunk):
        held = [memory[source] for source in src[start : start + chunk]]
        for target, value in zip(dst[start : start + chunk], held, strict=True):
            memory[target] = value
    return memory


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_an_order_is_called_safe_where_it_is_and_nowhere_else(chunk: int) -> None:
    """All moves of up to three tokens among four slots, each source any slot."""
    seen = set()
    for count in range(4):
        for src in itertools.product(range(4), repeat=count):
            for dst in itertools.permutations(range(4), count):
                a, b = np.array(src, np.int64), np.array(dst, np.int64)
                if (a == b).any():
                    continue  # dropped before it is asked
                right = chunk_by_chunk(a, b, chunk, 4) == chunk_by_chunk(a, b, 4, 4)
                assert safe_in_order(a, b, chunk) == right, (src, dst)
                seen.add(right)
                assert overlaps(a, b) == bool(set(src) & set(dst))
    assert seen == ({True, False} if chunk < 3 else {True})


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 9))
def test_ordered_compaction_is_always_safe(live: set[int], chunk: int) -> None:
    src = np.array(sorted(live), np.int64)
    assert safe_in_order(src, np.arange(len(src)), chunk)


# ---- the copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_small_copy_in_place(name: str, kernel_device: str) -> None:
    """All moves among four slots, of up to three tokens (the kernel: two): as if all were read first, or refused."""
    model = toy(layers=1, heads=1, kv_heads=1, head_dim=16)
    pool = filled(model, 3, 2, "bf16", kernel_device)
    start = contents(pool)
    most = {"torch": 3, "triton": 2}[name]
    mover = build_mover(name, pool, staging_tokens=most - 1)
    outcomes = set()
    for count in range(most + 1):
        for src in itertools.product(range(2, 6), repeat=count):
            for dst in itertools.permutations(range(2, 6), count):
                restore(pool, start)
                try:
                    mover.move_in_place(slots(*src), slots(*dst))
                except InputError:
                    outcomes.add("refused")
                    assert (contents(pool) == start).all()
                else:
                    outcomes.add("moved")
                    assert (contents(pool) == moved(start, slots(*src), slots(*dst))).all(), (src, dst)
    assert outcomes == {"moved", "refused"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "model",
    # Rows of 3 to 1,536 bytes, scales of 4 to 24: multiples of 16, of 8, of 4 and odd ones, powers of two and not.
    [
        toy(),
        toy(kv_heads=3, heads=3, layers=3),
        toy(kv_heads=1, heads=1),
        toy(kv_heads=6, heads=6, layers=1),
        toy(kv_heads=1, heads=1, head_dim=3),
    ],
    ids=lambda model: f"{model.kv_heads}x{model.head_dim}",
)
@pytest.mark.parametrize("name", NAMES)
def test_everything_that_a_token_carries_goes_along(name: str, model: Model, dtype: str, kernel_device: str) -> None:
    pool = filled(model, 16, 15, dtype, kernel_device)
    before = contents(pool)
    assert len(np.unique(before[15:], axis=0)) == 225
    order = np.random.default_rng(1).permutation(np.arange(15, 240))
    mover = build_mover(name, pool)
    # Tiles are of 1,024 tokens down to 10: neither number fills the last.
    for count in (97, 1):
        src, dst = order[:count], order[100 : 100 + count]
        mover.move(src, dst)
        before = moved(before, src, dst)
        assert (contents(pool) == before).all()
    # And it is the tokens that were meant, in every layer.
    device = torch.device(kernel_device)
    from_slot, to_slot = (torch.from_numpy(part[:97].copy()).to(device) for part in (order, order[100:]))
    for layer in range(model.layers):
        k, v = payload(torch.full_like(from_slot, 7), from_slot, layer, model, dtype)
        got_k, got_v = pool.read(layer, to_slot)
        assert torch.equal(got_k[1:], k[1:])
        assert torch.equal(got_v[1:], v[1:])


@given(st.data())
@settings(max_examples=25)
def test_movers_agree_on_whatever_is_lawful(data: st.DataObject) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.sampled_from([1, 3, 16]))
    model = toy(layers=1)
    pools = [filled(model, 40 // size + 2, size, dtype, device) for _ in NAMES]
    before = contents(pools[0])
    places = st.integers(size, pools[0].num_slots - 1)
    dst = data.draw(st.lists(places, unique=True, max_size=30))
    src = data.draw(st.lists(places, min_size=len(dst), max_size=len(dst)))
    staging = data.draw(st.integers(1, 8))
    results = []
    for name, pool in zip(NAMES, pools, strict=True):
        try:
            build_mover(name, pool, staging_tokens=staging).move_in_place(slots(*src), slots(*dst))
        except InputError as error:
            results.append(str(error))
            assert (contents(pool) == before).all()
        else:
            results.append("")
            assert (contents(pool) == moved(before, slots(*src), slots(*dst))).all()
    assert results[0] == results[1]


@pytest.mark.parametrize("name", NAMES)
def test_compaction_in_place_goes_through_a_staging_buffer_of_bounded_size(name: str, kernel_device: str) -> None:
    pool = filled(toy(), 9, 16, "fp8", kernel_device)
    before = contents(pool)
    src = np.flatnonzero(np.random.default_rng(0).random(144) < 0.6)
    src = src[src >= 16].astype(np.int64)
    dst = np.arange(16, 16 + len(src))
    mover = build_mover(name, pool, staging_tokens=10)
    with pytest.raises(InputError, match="a destination is the source of another move; move_in_place allows that"):
        mover.move(src, dst)
    # Spreading out is the same moves the other way round, and needs all of them staged.
    with pytest.raises(InputError, match=f"give the mover staging for {len(src) - sum(src == dst)} tokens"):
        mover.move_in_place(dst, src)
    assert (contents(pool) == before).all()
    mover.move_in_place(src, dst)
    assert (contents(pool) == moved(before, src, dst)).all()
    if isinstance(mover, TritonMover):
        assert sum(buffer.nbytes for buffer, _ in mover._get_staging()) == 10 * pool.token_bytes
    before = contents(pool)
    build_mover(name, pool, staging_tokens=len(src)).move_in_place(dst, src)
    assert (contents(pool) == moved(before, dst, src)).all()


@pytest.mark.parametrize("name", NAMES)
def test_one_shared_slot_may_go_to_several_places(name: str, kernel_device: str) -> None:
    """Readers of a shared block each copy their own out of it."""
    pool = filled(toy(), 5, 4, "bf16", kernel_device)
    before = contents(pool)
    src, dst = slots(5, 6, 5), slots(12, 13, 16)
    build_mover(name, pool).move(src, dst)
    assert (contents(pool) == moved(before, src, dst)).all()


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([4, 5], [12, 12], "destination slot 12 is given twice"),
        ([4, 20], [12, 13], "move 1: source slot 20, expected 4 to 19"),
        ([4, 5], [12, 20], "move 1: destination slot 20, expected 4 to 19"),
        ([4, -1], [12, 13], "move 1: source slot -1"),
        ([4, 5], [12, 3], "move 1: destination slot 3, expected 4 to 19"),
        ([0, 5], [12, 13], "move 0: source slot 0"),
        ([4], [12, 13], r"\(1,\) sources and \(2,\) destinations"),
    ],
)
@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_unlawful_plan_changes_nothing(
    name: str, tensors: bool, src: list[int], dst: list[int], message: str, kernel_device: str
) -> None:
    pool = filled(toy(), 5, 4, "bf16", kernel_device)
    before = contents(pool)
    mover = build_mover(name, pool)
    for move in (mover.move, mover.move_in_place):
        a, b = slots(*src), slots(*dst)
        with pytest.raises(InputError, match=message):
            move(torch.from_numpy(a).to(pool.device), torch.from_numpy(b).to(pool.device)) if tensors else move(a, b)
    assert (contents(pool) == before).all()


def test_nothing_to_move_is_fine(kernel_device: str) -> None:
    pool = filled(toy(), 3, 4, "fp8", kernel_device)
    before = contents(pool)
    for name in NAMES:
        mover = build_mover(name, pool)
        mover.move(slots(), slots())
        mover.move_in_place(slots(), slots())
        mover.move_in_place(slots(5, 6), slots(5, 6))
    assert (contents(pool) == before).all()


def watched(mover: TritonMover, calls: list[tuple[Any, ...]]) -> None:
    """Note the grid, the two pointer tables and the slots of every launch."""
    kernel = mover._kernel

    class Watching:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                calls.append((grid, *arguments[:4]))
                kernel[grid](*arguments, **constants)

            return launch

    mover._kernel = Watching()


def test_one_launch_whatever_the_number_of_layers(kernel_device: str) -> None:
    for dtype, launches in (("bf16", 1), ("fp8", 2)):
        mover = TritonMover(filled(toy(layers=5), 3, 4, dtype, kernel_device))
        calls: list[tuple[Any, ...]] = []
        watched(mover, calls)
        mover.move(slots(4, 5), slots(8, 9))
        assert [grid for grid, *_ in calls] == [(1, 10)] * launches


def test_no_launch_reads_and_writes_the_pool_where_moves_overlap(kernel_device: str) -> None:
    """The interpreter runs programs one after the other, a GPU does not: no order between them may be relied on."""
    mover = TritonMover(filled(toy(), 5, 4, "bf16", kernel_device), staging_tokens=3)
    calls: list[tuple[Any, ...]] = []
    watched(mover, calls)
    mover.move_in_place(slots(*range(5, 13)), slots(*range(4, 12)))
    pool = mover._bundles[0].table.data_ptr()
    sides = [(source.data_ptr() == pool, target.data_ptr() == pool) for _, source, target, _, _ in calls]
    assert sides == [(True, False), (False, True)] * 3
    moves = [(src.tolist(), dst.tolist()) for _, _, _, src, dst in calls]
    assert [src for src, _ in moves[::2]] == [[5, 6, 7], [8, 9, 10], [11, 12]]
    assert [dst for _, dst in moves[1::2]] == [[4, 5, 6], [7, 8, 9], [10, 11]]


def test_words_are_as_wide_as_every_row_allows(kernel_device: str) -> None:
    triton = pytest.importorskip("triton.language")
    wide = launch_constants(2048, 16)
    assert (wide["WORD"], wide["ROW"], wide["COLUMNS"], wide["TOKENS"]) == (triton.int64, 256, 256, 8)
    narrow = launch_constants(12, 4)
    assert (narrow["WORD"], narrow["ROW"], narrow["COLUMNS"]) == (triton.int32, 3, 4)
    # The values' scales begin where the keys' end: behind three rows of 8 bytes.
    pool = PagedPool(toy(), num_blocks=3, block_size=1, dtype="fp8", device=kernel_device)
    assert TritonMover(pool)._bundles[1].constants["ALIGNMENT"] == 8


def test_movers_are_chosen_by_device(monkeypatch: pytest.MonkeyPatch, kernel_device: str) -> None:
    assert choose_mover("auto", "cpu") == "torch"
    assert choose_mover("auto", "cuda") == "triton"
    assert choose_mover("torch", "cuda") == "torch"
    pool = PagedPool(toy(), num_blocks=2, block_size=2, device=kernel_device)
    for name in NAMES:
        mover = build_mover(name, pool)
        assert isinstance(mover, Mover)
        assert mover.name == name
    with pytest.raises(InputError, match=r"unknown mover 'tritn': .*did you mean 'triton'"):
        choose_mover("tritn", "cpu")
    with pytest.raises(InputError, match="staging_tokens: expected a positive number, got 0"):
        build_mover("torch", pool, staging_tokens=0)
    monkeypatch.setattr(runtime, "is_interpreted", lambda _: kernel_device == "cuda")
    with pytest.raises(InputError, match="TRITON_INTERPRET"):
        build_mover("triton", pool)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert choose_mover("auto", "cuda") == "torch"


def test_checks_hold_without_a_pool() -> None:
    check_moves(slots(4, 4), slots(8, 9), 5, 4)
    with pytest.raises(InputError, match="expected 4 to 19"):
        check_moves(slots(4), slots(20), 5, 4)
