"""Recognisable keys and values: the same everywhere, exact in every dtype, different for every token."""

import hashlib

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gpu_validate.payload import fill_random, payload, queries  # noqa: E402
from gpu_validate.pool import PagedPool  # noqa: E402
from tests.support.pools import DTYPES, contents, toy  # noqa: E402

MASK = 2**32 - 1
KEYS, VALUES, QUERIES = 1, 2, 3


def mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x21F0AAAD & MASK
    x = (x ^ x >> 15) * 0x735A2D97 & MASK
    return x ^ x >> 15


def by_hand(owner: int, index: int, layer: int, what: int, head: int, element: int, head_dim: int, bits: int) -> float:
    """One value in Python's integers, which are never too small."""
    keys = []
    for stream in (1, 2):
        state = mix(mix(4 * what + stream) ^ layer)
        for word in (owner, owner >> 32, index, index >> 32):
            state = mix((word & MASK) ^ state) + 0x9E3779B9 & MASK
        keys.append(state)
    drawn = mix(mix(keys[0] ^ mix((head * head_dim + element) * 0x9E3779B9 & MASK)) ^ keys[1])
    total = sum((drawn >> 8 * i & (1 << bits) - 1) - ((1 << bits) - 1) / 2 for i in range(4))
    magnitude = 3 - (mix(keys[1] ^ mix(head + 0x9E3779B9)) & 3)
    return total * 2.0 ** (magnitude - bits - 1)


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 127),
    st.integers(0, 1),
    st.integers(0, 63),
    st.sampled_from(["bf16", "fp8"]),
)
def test_no_step_overflows(writer: int, position: int, layer: int, head: int, element: int, dtype: str) -> None:
    one = torch.tensor([writer]), torch.tensor([position])
    k, v = payload(*one, layer, toy(), dtype)
    for what, got in ((KEYS, k), (VALUES, v)):
        want = by_hand(writer, position, layer, what, head, element, 64, 3 if dtype == "fp8" else 7)
        assert float(got[0, head, element]) == want
    q = queries(position, one[0], layer, toy(), dtype)
    assert float(q[0, head, element]) == by_hand(
        writer, position, layer, QUERIES, head, element, 64, 3 if dtype == "fp8" else 7
    )


@pytest.mark.parametrize(
    ("dtype", "digest"),
    [
        ("bf16", "0f1a7b50e04aa3f2"),
        ("fp16", "ca0e9c0c14433965"),
        ("fp32", "d1952078a9288632"),
        ("fp8", "ea653c3dc6c5ddd2"),
    ],
)
def test_the_bytes_are_the_same_on_every_device(dtype: str, digest: str, device: str) -> None:
    tokens = torch.arange(50, device=device)
    parts = [*payload(tokens % 7, tokens * 3, 1, toy(), dtype), queries(5, tokens, 1, toy(), dtype)]
    raw = b"".join(part.view(torch.uint8).cpu().numpy().tobytes() for part in parts)
    assert hashlib.sha256(raw).hexdigest()[:16] == digest


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_how_tokens_are_split_into_calls_makes_no_difference(sizes: list[int]) -> None:
    total = sum(sizes)
    writer, position = torch.arange(total) // 4, torch.arange(total) * 5
    whole = payload(writer, position, 0, toy())
    parts = [payload(w, p, 0, toy()) for w, p in zip(writer.split(sizes), position.split(sizes), strict=True)]
    for one, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(one, torch.cat(pieces))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_holds_the_values_exactly(dtype: str, device: str) -> None:
    model = toy()
    pool = PagedPool(model, num_blocks=65, block_size=16, dtype=dtype, device=device)
    slots = torch.arange(16, pool.num_slots, device=device)
    k, v = payload(slots // 50, slots % 50, 1, model, dtype)
    pool.write(1, k, v, slots)
    got_k, got_v = pool.read(1, slots)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_no_two_tokens_are_alike(dtype: str) -> None:
    model = toy()
    writer, position = torch.meshgrid(torch.arange(24), torch.arange(64), indexing="ij")
    far = torch.tensor([2**32, 2**40, 2**62])
    writer = torch.cat([writer.flatten(), far, torch.zeros_like(far)])
    position = torch.cat([position.flatten(), torch.zeros_like(far), far])
    rows = [part for layer in range(3) for part in payload(writer, position, layer, model, dtype)]
    # Heads too: what is written to a wrong head is seen.
    heads = torch.cat(rows).reshape(-1, model.head_dim)
    assert len(torch.unique(heads.to(torch.float32), dim=0)) == len(heads) == 2 * 3 * 2 * (24 * 64 + 6)


def test_values_look_like_a_normal_distribution() -> None:
    k, v = payload(torch.arange(400), torch.arange(400), 0, toy())
    for part in (k, v):
        wide = part.to(torch.float32)
        assert abs(float(wide.mean())) < 0.03
        # Four magnitudes: the root of the mean of 1.15**2 / 16, / 4, 1 and 4 is 1.33.
        assert 1.25 < float(wide.std()) < 1.42
    q = queries(3, torch.arange(400), 0, toy())
    scores = torch.einsum("qhd,khd->hqk", q[:, :2].to(torch.float32), k.to(torch.float32)) / 8
    weights = torch.softmax(scores, -1)
    # Neither flat (1/400 each) nor a single spike.
    assert 0.01 < float(weights.amax(-1).median()) < 0.5


def test_scales_differ_between_tokens() -> None:
    model = toy()
    pool = PagedPool(model, num_blocks=9, block_size=8, dtype="fp8")
    slots = torch.arange(8, 72)
    pool.write(0, *payload(slots, slots, 0, model, "fp8"), slots)
    assert pool.scales is not None
    for part in pool.scales[0]:
        assert len(torch.unique(part.view(72, 2)[8:, 0])) >= 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_data_for_timing_is_normal_numbers_only(dtype: str, device: str) -> None:
    pool = PagedPool(toy(), num_blocks=9, block_size=8, dtype=dtype, device=device)
    fill_random(pool, seed=1)
    first = contents(pool)
    slots = torch.arange(8, 72, device=device)
    for layer in range(2):
        for part in pool.read(layer, slots):
            wide = part.to(torch.float32)
            assert bool(wide.isfinite().all())
            assert float(wide.abs().min()) > 0
            assert float(wide.std()) > 0.3
    assert not first[:8].any()  # the null block
    fill_random(pool, seed=2)
    assert (first != contents(pool)).any()
    fill_random(pool, seed=1)
    assert (first == contents(pool)).all()
