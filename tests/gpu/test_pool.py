"""The paged pool: layout, bytes, quantising, and what it refuses."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gpu_validate import memory  # noqa: E402
from gpu_validate.dtypes import FP8_MAX, dequantise, get_dtype, power_of_two_scale, quantise  # noqa: E402
from gpu_validate.pool import PagedPool  # noqa: E402
from sim.errors import InputError  # noqa: E402
from sim.serving.models import MODELS, Model, get_model  # noqa: E402
from tests.support.pools import DTYPES, contents, filled, toy  # noqa: E402


@pytest.mark.parametrize(
    "model", [model for model in MODELS.values() if not model.latent], ids=lambda model: model.name
)
def test_a_token_takes_the_bytes_that_the_simulator_counts(model: Model) -> None:
    shape = (model.layers, model.kv_heads, model.head_dim)
    assert get_dtype("bf16").token_bytes(*shape) == model.kv_bytes_per_token
    assert get_dtype("fp32").token_bytes(*shape) == 2 * model.kv_bytes_per_token
    scales = 2 * model.layers * model.kv_heads * 4
    assert get_dtype("fp8").token_bytes(*shape) == model.kv_bytes_per_token // 2 + scales


def test_formats_and_models_that_a_device_s_pool_does_not_hold() -> None:
    with pytest.raises(InputError, match="KV dtype int4: the pool on a device does not store it, give --dtype: bf16"):
        PagedPool(toy(), num_blocks=5, block_size=4, dtype="int4")
    with pytest.raises(InputError, match=r"minicpm3-4b keeps a latent \(MLA 256 \+ 32\)"):
        PagedPool(get_model("minicpm3-4b"), num_blocks=5, block_size=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pool_is_as_large_as_it_says(dtype: str) -> None:
    model = toy(kv_heads=3, heads=6, layers=3)
    pool = PagedPool(model, num_blocks=5, block_size=6, dtype=dtype)
    tensors = [*pool.kv, *(pool.scales or [])]
    assert sum(tensor.nbytes for tensor in tensors) == pool.nbytes
    assert pool.nbytes == PagedPool.bytes_needed(model, num_blocks=5, block_size=6, dtype=dtype)
    assert pool.token_bytes == get_dtype(dtype).token_bytes(3, 3, 64)
    # The planes are the pool's memory, each byte once.
    spans = sorted((plane.rows.data_ptr(), plane.rows.nbytes) for plane in pool.planes)
    assert sum(size for _, size in spans) == pool.nbytes
    assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(spans))
    assert len(pool.planes) == (12 if dtype == "fp8" else 6)


def test_a_slot_is_a_block_and_an_offset(device: str) -> None:
    pool = PagedPool(toy(), num_blocks=4, block_size=5, device=device)
    k = torch.full((1, 2, 64), 3.0, device=device)
    pool.write(1, k, -k, torch.tensor([2 * 5 + 4], device=device))
    assert pool.kv[1].shape == (2, 4, 5, 2, 64)
    assert bool((pool.kv[1][0, 2, 4] == 3.0).all())
    assert bool((pool.kv[1][1, 2, 4] == -3.0).all())
    assert int(pool.kv[1].count_nonzero()) == 2 * 2 * 64
    assert int(pool.kv[0].count_nonzero()) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_writes_nothing(dtype: str, device: str) -> None:
    pool = filled(toy(), 3, 4, dtype, device)
    before = contents(pool)
    some = torch.randn(4, 2, 64, device=device)
    pool.write(0, some, some, torch.tensor([-1, 6, -1, -1], device=device))
    after = contents(pool)
    changed = np.flatnonzero((before != after).any(1))
    assert changed.tolist() == [6]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_what_is_written_comes_back_rounded_once(dtype: str) -> None:
    pool = PagedPool(toy(), num_blocks=3, block_size=4, dtype=dtype)
    k, v = torch.randn(2, 5, 2, 64)
    slots = torch.tensor([4, 11, 7, 5, 6])
    pool.write(0, k, v, slots)
    kind = pool.dtype.storage
    for got, want in zip(pool.read(0, slots), (k.to(kind), v.to(kind)), strict=True):
        assert torch.equal(got, want)
    grid = slots[:4].view(2, 2)
    assert torch.equal(pool.read(0, grid)[0], k.to(kind)[:4].view(2, 2, 2, 64))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=16))
def test_quantising_uses_the_range_and_errs_by_half_a_step(values: list[float]) -> None:
    wide = torch.tensor(values, dtype=torch.float32)
    stored, scale = quantise(wide)
    largest = float(wide.abs().max())
    if largest < 2.0**-110:
        assert float(scale) in (0.0, 2.0**-126)
        return
    mantissa, _ = math.frexp(float(scale))
    assert mantissa == 0.5  # a power of two
    top = float(stored.to(torch.float32).abs().max())
    assert FP8_MAX / 2 <= top <= FP8_MAX
    # Half of a step: 2**-4 of a normal number; below e4m3's smallest normal, 2**-6, steps are 2**-9.
    allowed = torch.maximum(wide.abs() * 2.0**-4, scale * 2.0**-10)
    assert bool(((dequantise(stored, scale) - wide).abs() <= allowed).all())


@pytest.mark.parametrize(
    ("largest", "scale"), [(0.0, 0.0), (448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (225.0, 1.0), (1.75, 2.0**-8)]
)
def test_the_scale_is_the_least_power_of_two_that_does(largest: float, scale: float) -> None:
    got, inverse = power_of_two_scale(torch.tensor(largest))
    assert float(got) == scale
    assert float(inverse) == (1 / scale if scale else 0.0)


def test_each_head_of_each_token_has_its_own_scale() -> None:
    pool = PagedPool(toy(), num_blocks=3, block_size=4, dtype="fp8")
    k = torch.tensor([1.75, 448.0])[None, :, None].expand(1, 2, 64)
    pool.write(0, k, 2 * k, torch.tensor([9]))
    assert pool.scales is not None
    assert pool.scales[0][0, 2, 1].tolist() == [2.0**-8, 1.0]
    assert pool.scales[0][1, 2, 1].tolist() == [2.0**-7, 2.0]
    assert torch.equal(pool.read(0, torch.tensor([9]))[1], (2 * k).to(torch.bfloat16))


def test_raw_bytes_are_all_that_a_token_carries() -> None:
    pool = filled(toy(), 3, 4, "fp8")
    before = pool.raw(torch.arange(12))
    for plane in pool.planes:
        plane.rows[5, -1] ^= 1
    changed = before != pool.raw(torch.arange(12))
    assert changed[5].sum() == len(pool.planes)
    assert changed.sum() == len(pool.planes)


def _never(*_: object, **__: object) -> None:
    pytest.fail("allocated")


def test_a_pool_that_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch, "zeros", _never)
    # 16384 blocks of 16 tokens of 128 KiB are 32 GiB.
    with pytest.raises(InputError, match=r"cpu has 3\.00 GiB free, needed are 32\.00 GiB .*lower the number of blocks"):
        PagedPool(MODELS["llama-3.1-8b"], num_blocks=16384, block_size=16)


def test_free_memory_is_what_the_machine_or_the_container_has_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_bytes("cpu") == 2048 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes("cpu") == 2048 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert memory.free_bytes("cpu") == 600_000
    (tmp_path / "memory.current").write_text("2000000\n")
    assert memory.free_bytes("cpu") == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 0}, "num_blocks: expected a positive number, got 0"),
        ({"block_size": -1}, "block_size: expected a positive number, got -1"),
        ({"dtype": "bf61"}, "unknown KV dtype 'bf61': expected one of bf16, fp16, fp32, fp8; did you mean 'bf16'"),
        ({"layout": "HND"}, "unknown KV layout 'HND': expected NHD"),
    ],
)
def test_bad_input_is_refused_in_one_line(change: dict[str, object], message: str) -> None:
    arguments = {"num_blocks": 4, "block_size": 4} | change
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        PagedPool(dataclasses.replace(toy()), **arguments)  # type: ignore[arg-type]
