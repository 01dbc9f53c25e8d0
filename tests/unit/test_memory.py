"""KV pool size: by hand, and against pools that others report."""

import pytest

from sim.errors import InputError
from sim.serving.hardware import Hardware, get_hardware
from sim.serving.memory import kv_blocks
from sim.serving.models import Model, get_model

H100 = get_hardware("h100")


def tiny(kv_heads: int = 2) -> Model:
    return Model(
        name="tiny",
        layers=1,
        hidden=4,
        heads=4,
        kv_heads=kv_heads,
        head_dim=1,
        intermediate=4,
        vocab=4,
        max_model_len=8,
        published_parameters=None,
        source="by hand",
    )


def device(memory_bytes: int) -> Hardware:
    return Hardware("toy", memory_bytes, "by hand", 1e9, 1e12, "by hand")


def test_by_hand() -> None:
    model = tiny()
    # 8 bytes of KV a token, 4 tokens a block: 32 bytes a block
    memory_bytes = model.weight_bytes + 100 + 3 * 32
    assert kv_blocks(model, device(memory_bytes), 4, 1.0, 100) == 3
    assert kv_blocks(model, device(memory_bytes - 1), 4, 1.0, 100) == 2
    assert kv_blocks(model, device(2 * memory_bytes), 4, 0.5, 100) == 3


def test_devices_share_weights_and_heads_but_a_head_is_whole() -> None:
    model = tiny(kv_heads=2)
    share = model.weight_bytes // 2
    assert kv_blocks(model, device(share + 3 * 16), 4, 1.0, 0, tensor_parallel=2) == 3
    # Four devices for two KV heads: each holds one head whole.
    assert kv_blocks(model, device(model.weight_bytes // 4 + 3 * 16), 4, 1.0, 0, tensor_parallel=4) == 3


@pytest.mark.parametrize("name", ["llama-3.1-8b", "minicpm3-4b"])
def test_the_pool_grows_as_a_token_shrinks(name: str) -> None:
    blocks = {kind: kv_blocks(get_model(name, kind), H100, 16) for kind in ("auto", "bf16", "fp8", "int4")}
    assert blocks["auto"] == blocks["bf16"]
    assert blocks["fp8"] in (2 * blocks["bf16"], 2 * blocks["bf16"] + 1)
    sizes = {kind: 16 * get_model(name, kind).kv_bytes_per_token for kind in ("bf16", "int4")}
    assert blocks["int4"] * sizes["int4"] == pytest.approx(blocks["bf16"] * sizes["bf16"], abs=sizes["bf16"])


def test_a_latent_is_on_every_device() -> None:
    model = get_model("minicpm3-4b")
    one, four = (kv_blocks(model, H100, 16, tensor_parallel=devices) for devices in (1, 4))
    assert 1 < four / one < 1.2  # room for weights that are elsewhere, none for a part of the latent


@pytest.mark.parametrize(
    ("name", "utilisation", "tokens"),
    [("llama-3.1-8b", 0.35, 93_000), ("llama-3.1-8b", 0.50, 190_000), ("qwen2.5-14b", 0.50, 59_000)],
)
def test_capacity_frontier(name: str, utilisation: float, tokens: int) -> None:
    """The pools behind the paper's capacity frontier, as estimated with the same reserve."""
    assert kv_blocks(get_model(name), H100, 16, utilisation) * 16 == pytest.approx(tokens, rel=0.015)


@pytest.mark.parametrize(("utilisation", "tokens"), [(0.50, 430_000), (0.40, 282_000), (0.30, 134_000), (0.25, 60_000)])
def test_one_reserve_gives_all_pools_of_r_kv_s_stress_test(utilisation: float, tokens: int) -> None:
    blocks = kv_blocks(get_model("qwen2.5-math-7b"), H100, 16, utilisation, 2_600_000_000)
    assert blocks * 16 == pytest.approx(tokens, rel=0.003)


def test_a_model_that_does_not_fit_says_so() -> None:
    with pytest.raises(InputError, match=r"llama-3\.1-70b does not fit on h100-sxm: weights of 141\.1 GB"):
        kv_blocks(get_model("llama-3.1-70b"), H100, 16)
    assert kv_blocks(get_model("llama-3.1-70b"), H100, 16, tensor_parallel=4) > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"block_size": 0}, "block size"),
        ({"utilisation": 0.0}, "utilisation"),
        ({"utilisation": 1.5}, "utilisation"),
        ({"activation_reserve_bytes": -1}, "activation reserve"),
        ({"tensor_parallel": 3}, "tensor parallel"),
        ({"tensor_parallel": 0}, "tensor parallel"),
    ],
)
def test_bad_parameters(overrides: dict[str, float], message: str) -> None:
    arguments = {"block_size": 16} | overrides
    with pytest.raises(InputError, match=message):
        kv_blocks(get_model("llama-3.1-8b"), H100, **arguments)  # type: ignore[arg-type]
