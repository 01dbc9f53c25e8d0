"""New tokens by one kernel launch: the same bytes as by torch's operations."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu_validate.pool import PagedPool  # noqa: E402
from gpu_validate.store import TorchStore, TritonStore, build_store  # noqa: E402
from sim.serving.models import Model  # noqa: E402
from tests.support.pools import DTYPES, contents, filled, toy  # noqa: E402


def both(pool: PagedPool, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> list[PagedPool]:
    pools = []
    for store in (TorchStore(), TritonStore(pool.device)):
        one = PagedPool(
            pool.model, num_blocks=pool.num_blocks, block_size=pool.block_size, dtype=pool.dtype, device=pool.device
        )
        for mine, given in zip(one.planes, pool.planes, strict=True):
            mine.rows.copy_(given.rows)
        store(one, 1, k, v, slots)
        pools.append(one)
    return pools


MODELS = {"2x64": toy(), "3x64": toy(kv_heads=3, heads=3), "1x96": toy(kv_heads=1, heads=1, head_dim=96)}
SLOTS = [6, 23, -1, 7, 12, 22, -1, 9]


def tokens(model: Model, bits: int, exponents: int) -> list[torch.Tensor]:
    """Return keys and values [8, heads, head size] of so many bits, with a magnitude of its own for each head."""
    generator = torch.Generator().manual_seed(1)
    shape = (8, model.kv_heads, model.head_dim)
    made = []
    for _ in "kv":
        values = torch.randint(1 - (1 << bits), 1 << bits, shape, generator=generator).to(torch.float32)
        magnitude = torch.randint(-exponents, exponents, shape[:2], generator=generator)
        values *= (2.0**magnitude)[..., None]
        values[3, 0] = 0.0
        made.append(values)
    return made


@pytest.mark.parametrize("given", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_both_write_the_same_bytes(model: Model, dtype: str, given: str, kernel_device: str) -> None:
    """Values that need no rounding, since Triton's interpreter does not round as the hardware and torch do."""
    pool = filled(model, 4, 6, dtype, kernel_device)
    bits, exponents = {"fp8": (4, 20), "fp16": (8, 5)}.get(dtype, (8, 20))
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[given]
    k, v = (part.to(kernel_device, kind) for part in tokens(model, bits, exponents))
    by_torch, by_kernel = both(pool, k, v, torch.tensor(SLOTS, device=kernel_device))
    assert (contents(by_torch) == contents(by_kernel)).all()
    changed = (contents(by_kernel) != contents(pool)).any(1)
    assert changed.nonzero()[0].tolist() == sorted(slot for slot in SLOTS if slot >= 0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_the_interpreter_other_values_differ_by_a_step(dtype: str, kernel_device: str) -> None:
    """Of e4m3 it even loses the carry into the exponent; that the GPU has neither fault is the next test."""
    pool = filled(toy(), 4, 6, dtype, kernel_device)
    k, v = (torch.randn(8, 2, 64, device=kernel_device) for _ in "kv")
    by_torch, by_kernel = both(pool, k, v, torch.tensor(SLOTS, device=kernel_device))
    step = {"bf16": 2**-7, "fp16": 2**-10}[dtype]
    slots = torch.tensor([slot for slot in SLOTS if slot >= 0], device=kernel_device)
    for got, want in zip(by_kernel.read(1, slots), by_torch.read(1, slots), strict=True):
        torch.testing.assert_close(got, want, rtol=step, atol=2**-24)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_every_value_is_rounded_alike(dtype: str) -> None:
    pool = filled(toy(), 4, 6, dtype, "cuda")
    k, v = (torch.randn(8, 2, 64, device="cuda") for _ in "kv")
    by_torch, by_kernel = both(pool, k, v, torch.tensor(SLOTS, device="cuda"))
    assert (contents(by_torch) == contents(by_kernel)).all()


def test_a_slice_of_the_projection_is_taken_as_it_is(kernel_device: str) -> None:
    model = toy()
    pool = filled(model, 3, 4, "fp32", kernel_device)
    qkv = torch.randn(5, (4 + 2 + 2) * 64, device=kernel_device)
    k = qkv[:, 256:384].view(5, 2, 64)
    v = qkv[:, 384:].view(5, 2, 64)
    slots = torch.tensor([4, 5, 11, 7, 8], device=kernel_device)
    for one in both(pool, k, v, slots):
        for got, want in zip(one.read(1, slots), (k, v), strict=True):
            assert torch.equal(got, want)
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert (contents(both(pool, turned, v, slots)[1]) == contents(both(pool, k, v, slots)[0])).all()


def test_the_kernel_is_used_on_a_gpu_and_torch_on_a_cpu(kernel_device: str) -> None:
    assert isinstance(build_store(torch.device("cpu")), TorchStore)
    if kernel_device == "cuda":
        assert isinstance(build_store(torch.device("cuda")), TritonStore)
