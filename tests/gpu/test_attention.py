"""Decode attention over the paged pool: every backend against float64 by hand, and what a captured graph relies on."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu_validate.attention.base import BACKENDS, DecodeAttention, build_attention, choose_attention  # noqa: E402
from gpu_validate.attention.paged import PagedDecode, choose_splits, launch_constants  # noqa: E402
from gpu_validate.attention.sdpa import SdpaDecode, prefill  # noqa: E402
from gpu_validate.kernels import decode, runtime  # noqa: E402
from gpu_validate.payload import fill_random, queries  # noqa: E402
from gpu_validate.pool import PagedPool  # noqa: E402
from sim.errors import InputError  # noqa: E402
from tests.support.pools import DTYPES, contents, filled, toy  # noqa: E402

# Triton 3.6's interpreter counts loops in arrays of one element, which numpy 2.3 warns of and 2.4 refuses.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")

# One rounding of the result, to 8, 11 or 24 bits; the narrow types also round the weights before the values.
RELATIVE = {"bf16": 2**-7, "fp16": 2**-10, "fp32": 2**-19, "fp8": 2**-7}


def by_hand(pool: PagedPool, layer: int, q: torch.Tensor, slots: np.ndarray) -> np.ndarray:
    """Attend from one query [Hq, D] to the slots, in float64."""
    if len(slots) == 0:
        return np.zeros(q.shape)
    k, v = (part.double().cpu().numpy() for part in pool.read(layer, torch.from_numpy(slots).to(pool.device)))
    group = q.shape[0] // k.shape[1]
    out = []
    for head, query in enumerate(q.double().cpu().numpy()):
        scores = k[:, head // group] @ query / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out.append(weights @ v[:, head // group] / weights.sum())
    return np.array(out)


def random_plan(
    rng: np.random.Generator, pool: PagedPool, lengths: list[int], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return a block table of scattered blocks, the lengths, live bits, and the slots [B, width * size]."""
    rows = len(lengths)
    table = rng.permutation(np.arange(1, pool.num_blocks))[: rows * width].reshape(rows, width).astype(np.int32)
    slots = (table[:, :, None].astype(np.int64) * pool.block_size + np.arange(pool.block_size)).reshape(rows, -1)
    live = rng.random(slots.shape) < 0.6
    return table, np.array(lengths, np.int32), live, slots


def check(
    attention: DecodeAttention,
    pool: PagedPool,
    plan: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    masked: bool,
    bucket: int,
) -> None:
    table, lengths, live, slots = plan
    attention.plan(table, lengths, live=live if masked else None, rows=bucket)
    q = queries(9, torch.arange(bucket, device=pool.device), 1, pool.model, pool.dtype)
    out = attention.run(1, q, torch.full_like(q, 7.0))
    for row in range(bucket):
        length = lengths[row] if row < len(lengths) else 0
        seen = slots[row, :length] if length else np.zeros(0, np.int64)
        if masked and length:
            seen = seen[live[row, :length]]
        want = by_hand(pool, 1, q[row], seen)
        got = out[row].double().cpu().numpy()
        relative = RELATIVE[pool.dtype.name]
        np.testing.assert_allclose(got, want, rtol=relative, atol=2 * relative * max(np.abs(want).max(), 0.1))
        if len(seen) == 0:
            assert not got.any()


@pytest.mark.parametrize("masked", [False, True], ids=["listed", "live"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 64), (2, 2, 128), (8, 1, 128)])
@pytest.mark.parametrize("name", ["sdpa", "paged"])
def test_every_backend_is_right(
    name: str, heads: int, kv_heads: int, head_dim: int, dtype: str, masked: bool, kernel_device: str
) -> None:
    model = toy(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    pool = filled(model, 3 * 9 + 1, 16, dtype, kernel_device)
    options = {"splits": 3} if name == "paged" else {}
    attention = build_attention(name, pool, 5, 9, masked=masked, **options)
    plan = random_plan(np.random.default_rng(heads), pool, [137, 0, 16], 9)
    plan[2][2] = False  # written, all dead
    check(attention, pool, plan, masked, 5)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 48])
@pytest.mark.parametrize("splits", [1, 4])
def test_any_block_size_and_any_number_of_splits(block_size: int, splits: int, kernel_device: str) -> None:
    width = -(-130 // block_size)
    pool = filled(toy(heads=2, kv_heads=1), 4 * width + 1, block_size, "fp32", kernel_device)
    attention = PagedDecode(pool, 4, width, splits=splits, masked=True)
    # 64 slots are a tile: full, one more, one less; the last split has the odd slots.
    plan = random_plan(np.random.default_rng(block_size), pool, [130, 64, 65, 1], width)
    check(attention, pool, plan, True, 4)


def test_the_last_slot_counts(kernel_device: str) -> None:
    """A key that outshines all others, at each place in turn: whichever split has it, it is seen, and not beyond."""
    model = toy(heads=2, kv_heads=1)
    pool = PagedPool(model, num_blocks=14, block_size=16, dtype="fp32", device=kernel_device)
    attention = PagedDecode(pool, 1, 13, splits=4)
    q = torch.ones(1, 2, 64, device=kernel_device)
    table = np.arange(1, 14, dtype=np.int32)[None]
    for at in (0, 63, 64, 127, 128, 191, 199, 200):
        fill_random(pool, seed=at)
        pool.write(0, torch.full((1, 1, 64), 5.0), torch.full((1, 1, 64), 3.0), torch.tensor([16 + at]))
        attention.plan(table, np.array([200], np.int32))
        out = attention.run(0, q, torch.empty_like(q))
        assert bool((out == 3.0).all()) == (at < 200)


def test_padding_behind_a_row_is_never_read(kernel_device: str) -> None:
    pool = filled(toy(), 9, 16, "bf16", kernel_device)
    attention = PagedDecode(pool, 2, 4, splits=3, masked=True)
    table, lengths, live, slots = random_plan(np.random.default_rng(0), pool, [33, 16], 4)
    attention.plan(table, lengths, live=live)
    # Were these read, the address would be far outside of the process.
    attention.buffers.table[0, 3:] = 2**31 - 1
    attention.buffers.table[1, 1:] = -(2**31)
    q = queries(0, torch.arange(2, device=kernel_device), 0, pool.model)
    out = attention.run(0, q, torch.empty_like(q))
    for row in range(2):
        seen = slots[row, : lengths[row]][live[row, : lengths[row]]]
        np.testing.assert_allclose(out[row].double().cpu(), by_hand(pool, 0, q[row], seen), rtol=2**-7, atol=2**-7)


def test_bits_of_live_slots_cross_words(kernel_device: str) -> None:
    """A block size that does not divide 32, and one slot alive at a time."""
    pool = filled(toy(), 4, 48, "fp32", kernel_device)
    paged, sdpa = (build_attention(name, pool, 1, 3, masked=True) for name in ("paged", "sdpa"))
    table, lengths = np.array([[3, 1, 2]], np.int32), np.array([100], np.int32)
    q = queries(0, torch.arange(1, device=kernel_device), 0, pool.model, "fp32")
    for at in (0, 31, 32, 47, 48, 63, 64, 95, 96, 99):
        live = np.zeros((1, 100), np.bool_)
        live[0, at] = True
        slot = int(table[0, at // 48]) * 48 + at % 48
        want = pool.read(0, torch.tensor([slot], device=kernel_device))[1].repeat_interleave(2, 1)
        for attention in (paged, sdpa):
            attention.plan(table, lengths, live=live)
            assert torch.equal(attention.run(0, q, torch.empty_like(q)), want)


def addresses(attention: SdpaDecode | PagedDecode) -> dict[str, int]:
    held = vars(attention) | vars(attention.buffers)
    return {name: value.data_ptr() for name, value in held.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["sdpa", "paged"])
def test_a_plan_changes_no_address(name: str, kernel_device: str) -> None:
    """What a captured graph relies on: later plans write into the same tensors, and run reads only those."""
    pool = filled(toy(), 13, 16, "bf16", kernel_device)
    attention = build_attention(name, pool, 3, 4, masked=True, capture=True)
    assert isinstance(attention, SdpaDecode | PagedDecode)
    assert attention.capturable
    before = addresses(attention)
    assert len(before) >= 4
    q = queries(0, torch.arange(3, device=kernel_device), 1, pool.model)
    for lengths in ([60, 3, 17], [1], [17, 64]):
        table, lengths_, live, slots = random_plan(np.random.default_rng(len(lengths)), pool, lengths, 4)
        attention.plan(table, lengths_, live=live, rows=3)
        kept = live.copy()
        table[:], lengths_[:], live[:] = 0, 0, False  # the caller's arrays are the caller's again
        out = attention.run(1, q, torch.empty_like(q))
        for row, length in enumerate(lengths):
            want = by_hand(pool, 1, q[row], slots[row, :length][kept[row, :length]])
            np.testing.assert_allclose(out[row].double().cpu(), want, rtol=2**-7, atol=2**-6)
        assert not out[len(lengths) :].any()
    assert addresses(attention) == before


def test_captured_sdpa_gathers_as_much_whatever_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph keeps the shapes that it was captured with: a longer row would be cut off."""
    pool = filled(toy(), 9, 16, "bf16")
    read, widths = pool.read, []
    monkeypatch.setattr(pool, "read", lambda layer, slots: (widths.append(slots.shape[1]), read(layer, slots))[1])
    q = queries(0, torch.arange(1), 0, pool.model)
    for capture in (True, False):
        attention = SdpaDecode(pool, 1, 4, capture=capture)
        assert attention.capturable == capture
        for length in (5, 60):
            attention.plan(np.array([[1, 2, 3, 4]], np.int32), np.array([length], np.int32))
            attention.run(0, q, torch.empty_like(q))
    assert widths == [64, 64, 5, 60]


@pytest.mark.parametrize("name", ["sdpa", "paged"])
def test_the_layout_is_read_back_from_the_kernels_own_tensors(name: str, kernel_device: str) -> None:
    pool = filled(toy(), 13, 16, "bf16", kernel_device)
    attention = build_attention(name, pool, 4, 4)
    assert isinstance(attention, SdpaDecode | PagedDecode)
    attention.plan(np.array([[9, 8, 7, 6], [5, 4, 3, 2], [1, 2, 3, 4]], np.int32), np.array([33, 0, 16], np.int32))
    table, lengths = attention.layout()
    assert table.tolist() == [[9, 8, 7], [0, 0, 0], [1, 0, 0]]
    assert lengths.tolist() == [33, 0, 16]
    attention.buffers.table[2, 0] = 11
    assert attention.layout()[0][2, 0] == 11
    attention.plan(np.zeros((0, 0), np.int32), np.zeros(0, np.int32))
    assert attention.layout()[0].shape == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("masked", "flash"), [(False, False), (False, True), (True, None)])
def test_prefill_is_causal_behind_its_context(dtype: str, masked: bool, flash: bool | None, device: str) -> None:
    pool = filled(toy(), 8, 16, dtype, device)
    table = torch.tensor([5, 2, 7, 1], device=device)
    slots = (table.cpu().numpy()[:, None] * 16 + np.arange(16)).reshape(-1)
    live = np.random.default_rng(3).random(64) < 0.5
    live[30:40] = True
    for length, tokens in ((40, 40), (40, 10), (37, 1)):
        q = queries(1, torch.arange(tokens, device=device), 0, pool.model, dtype)
        mask = torch.from_numpy(live).to(device) if masked else None
        out = prefill(pool, 0, q, table, length, live=mask, flash=flash)
        assert out.dtype == q.dtype
        for i in range(tokens):
            at = length - tokens + i
            seen = slots[: at + 1][live[: at + 1]] if masked else slots[: at + 1]
            relative = RELATIVE[dtype] * (2 if flash else 1)
            np.testing.assert_allclose(
                out[i].double().cpu(), by_hand(pool, 0, q[i], seen), rtol=relative, atol=2 * relative
            )


def test_attention_only_reads_the_pool(kernel_device: str) -> None:
    pool = filled(toy(), 9, 16, "fp8", kernel_device)
    before = contents(pool)
    for name in ("sdpa", "paged"):
        attention = build_attention(name, pool, 2, 4)
        attention.plan(np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32), np.array([64, 50], np.int32))
        q = queries(0, torch.arange(2, device=kernel_device), 0, pool.model)
        attention.run(0, q, torch.empty_like(q))
    assert (contents(pool) == before).all()


@pytest.mark.skipif(not runtime.is_interpreted(decode.decode_split), reason="about Triton's interpreter")
def test_the_interpreter_multiplies_in_float32() -> None:
    """Its tl.dot multiplies the bits of bfloat16 as integers, and says nothing: products are made in float32 there."""
    pool = filled(toy(), 5, 16, "bf16")
    attention = PagedDecode(pool, 1, 4, splits=1)
    assert attention._constants["UPCAST"] is True
    attention.plan(np.array([[1, 2, 3, 4]], np.int32), np.array([64], np.int32))
    q = queries(0, torch.arange(1), 0, pool.model)
    want = by_hand(pool, 0, q[0], np.arange(16, 80))
    np.testing.assert_allclose(attention.run(0, q, torch.empty_like(q))[0].double(), want, rtol=2**-7, atol=2**-7)
    # Without, the result is nowhere near: that is why. (Should this fail, the interpreter has learnt it.)
    attention._constants = launch_constants(pool.model, 16, pool.dtype, masked=False, upcast=False)
    with np.errstate(all="ignore"):
        wrong = attention.run(0, q, torch.empty_like(q))[0].double().numpy()
    assert not np.allclose(wrong, want, rtol=0.2, atol=0.2)


def test_the_number_of_splits_follows_from_the_launch_alone() -> None:
    # 132 multiprocessors, Llama-3.1-8B: 8 KV heads.
    assert [choose_splits(rows, 8, 8192, 132) for rows in (1, 2, 4, 8, 16, 32, 33, 64, 256)] == [
        32, 32, 16, 8, 4, 2, 1, 1, 1,
    ]  # fmt: skip
    assert choose_splits(1, 8, 255, 132) == 1
    assert choose_splits(1, 8, 1024, 132) == 4
    assert choose_splits(1, 1, 131_072, 132) == 64
    for rows, heads, longest in itertools.product((1, 3, 17, 300), (1, 2, 8), (1, 500, 5000)):
        splits = choose_splits(rows, heads, longest, 132)
        assert splits == 1 or (longest // splits >= 256 and splits & (splits - 1) == 0)
        assert splits == 1 or rows * heads * splits < 4 * 132 * 2


def test_partial_results_have_room_in_every_launch(kernel_device: str) -> None:
    pool = PagedPool(toy(), num_blocks=2, block_size=4096, dtype="bf16", device=kernel_device)
    attention = PagedDecode(pool, 9, 2, splits=7)
    assert len(attention._partial_lse) == 9 * 7 * 4
    assert attention._partial.shape == (9 * 7 * 4, 64)


@pytest.mark.parametrize(
    ("table", "lengths", "live", "message"),
    [
        (np.ones((4, 2)), np.ones(4), None, "block table of 4 x 2 for 4 rows: the attention buffers are 3 x 4"),
        (np.ones((2, 5)), np.ones(2), None, "block table of 2 x 5"),
        (np.ones((2, 2)), np.ones(3), None, r"lengths of shape \(3,\): expected one for each of the table's 2 rows"),
        (np.ones((2, 2)), np.array([3, 33]), None, "lengths from 3 to 33: 2 blocks hold 32"),
        (np.ones((2, 2)), np.array([-1, 3]), None, "lengths from -1 to 3"),
        (np.full((1, 2), 5), np.ones(1), None, "lists blocks 5 to 5: the pool has 0 to 4"),
        (np.full((1, 2), -1), np.ones(1), None, "lists blocks -1 to -1"),
        (np.ones((2, 2)), np.array([9, 3]), np.ones((2, 8)), r"live mask of shape \(2, 8\): expected 2 rows of at"),
    ],
)
@pytest.mark.parametrize("name", ["sdpa", "paged"])
def test_a_plan_that_does_not_fit_is_refused(
    name: str, table: np.ndarray, lengths: np.ndarray, live: np.ndarray | None, message: str, kernel_device: str
) -> None:
    pool = PagedPool(toy(), num_blocks=5, block_size=16, device=kernel_device)
    attention = build_attention(name, pool, 3, 4, masked=True)
    with pytest.raises(InputError, match=message):
        attention.plan(
            table.astype(np.int32),
            lengths.astype(np.int32),
            live=None if live is None else live.astype(np.bool_),
        )


def test_what_cannot_be_served_is_refused(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagedPool(toy(), num_blocks=5, block_size=16, device=kernel_device)
    with pytest.raises(InputError, match="a live mask for attention that was built without"):
        build_attention("sdpa", pool, 1, 1).plan(
            np.ones((1, 1), np.int32), np.ones(1, np.int32), live=np.ones((1, 16), np.bool_)
        )
    with pytest.raises(InputError, match=r"unknown attention backend 'pagde': .*did you mean 'paged'"):
        build_attention("pagde", pool, 1, 1)
    odd = PagedPool(toy(head_dim=96), num_blocks=2, block_size=16, device=kernel_device)
    with pytest.raises(InputError, match="head size 96 of toy"):
        build_attention("paged", odd, 1, 1)
    monkeypatch.setattr(runtime, "is_interpreted", lambda _: kernel_device == "cuda")
    with pytest.raises(InputError, match="TRITON_INTERPRET"):
        build_attention("paged", pool, 1, 1)
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="needs triton, which is not installed"):
        build_attention("paged", pool, 1, 1)


def test_auto_is_what_the_device_does_best(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_attention("auto", "cpu") == "sdpa"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert choose_attention("auto", "cuda") == "paged"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert choose_attention("auto", "cuda:1") == "flashinfer"
    for name in BACKENDS:
        assert choose_attention(name, "cpu") == name
