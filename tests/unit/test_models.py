"""Model presets: the geometry gives the published sizes."""

import dataclasses
import itertools

import pytest

from sim.errors import InputError
from sim.serving.geometry import Experts, Latent
from sim.serving.models import MODELS, Model, get_model, table

ROUNDED = {"opt-13b", "minicpm3-4b"}  # their publishers give the count in billions only
MADE_UP = ("toy", "toy-hybrid")


@pytest.mark.parametrize(
    "model", [model for model in MODELS.values() if model.name not in MADE_UP], ids=lambda m: m.name
)
def test_parameters_are_the_published_ones(model: Model) -> None:
    assert model.published_parameters is not None
    if model.name in ROUNDED:
        assert round(model.parameters, -9) == model.published_parameters
    else:
        assert model.parameters == model.published_parameters


@pytest.mark.parametrize("name", MADE_UP)
def test_a_made_up_model_says_so(name: str) -> None:
    assert MODELS[name].published_parameters is None
    assert "made up" in MODELS[name].source


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("toy", 1_024),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("qwen2.5-14b", 196_608),
        ("qwen2.5-math-7b", 57_344),
        ("smollm2-135m", 23_040),
        ("gemma-3-12b", 2 * 48 * 8 * 256 * 2),
        ("gpt-oss-20b", 2 * 24 * 8 * 64 * 2),
        ("minicpm3-4b", 62 * (256 + 32) * 2),
        ("deepseek-v2-lite", 27 * (512 + 64) * 2),
    ],
)
def test_kv_bytes_of_a_token(name: str, kv_bytes: int) -> None:
    assert get_model(name).kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize("name", MODELS)
def test_kv_bytes_by_format(name: str) -> None:
    """Half a byte an element and 4 bytes of scale and zero point a vector; fp8's scale is a layer's."""
    model = get_model(name)
    vectors = model.layers * (1 if model.latent else 2 * model.kv_heads)
    assert get_model(name, "bf16").kv_bytes_per_token == model.kv_bytes_per_token == 2 * vectors * model.head_dim
    assert get_model(name, "fp8").kv_bytes_per_token == vectors * model.head_dim
    assert get_model(name, "int4").kv_bytes_per_token == vectors * (model.head_dim // 2 + 4)


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "int4"),
    [
        ("llama-3.1-8b", 65_536, 32_768, 17_408),
        ("gpt-oss-20b", 32_768, 16_384, 9_216),
        ("minicpm3-4b", 9_216, 4_608, None),
        ("deepseek-v2-lite", 18_432, 9_216, None),
    ],
)
def test_a_block_of_a_layer_takes_vllm_s_bytes(name: str, bf16: int, fp8: int, int4: int | None) -> None:
    """``page_size_bytes`` for 16 tokens in vLLM 0.32.0.

    Of ``FullAttentionSpec``, for int4 (``int4_per_token_head``) as ``TritonAttentionBackend`` customises it, and of
    ``MLAAttentionSpec``.
    """
    for kv_dtype, page in {"auto": bf16, "fp8": fp8, "int4": int4}.items():
        model = get_model(name, kv_dtype)
        assert page is None or 16 * model.kv_bytes_per_token == page * model.layers


def test_an_unknown_format_gets_a_hint() -> None:
    with pytest.raises(InputError, match=r"kv_dtype: expected one of auto, .*got 'fp9'; did you mean 'fp8'"):
        get_model("toy", "fp9")


# ---- latent attention and experts ------------------------------------------------------------------------------------


def test_a_latent_by_hand() -> None:
    latent = Latent(rank=8, rope=2, nope=4, value=3, query_rank=5)
    # hidden 16, two heads: queries 16 x 5, 5 x 2(4 + 2); latent 16 x 10; keys and values 8 x 2(4 + 3); output 6 x 16
    assert latent.matrix_parameters(16, 2) == 80 + 60 + 160 + 112 + 96
    assert dataclasses.replace(latent, query_rank=0).matrix_parameters(16, 2) == 16 * 12 + 160 + 112 + 96
    # A prompt's query meets keys of 6 and values of 3 in each head, a decode's the 10 and the 8 of the latent.
    assert latent.prefill_flops(2) == 2 * 2 * 6 + 2 * 2 * 3
    assert latent.decode_flops(2) == 2 * 2 * 10 + 2 * 2 * 8


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.latent])
def test_a_latent_is_one_head_in_the_cache(name: str) -> None:
    model = get_model(name)
    assert model.latent is not None
    assert (model.kv_heads, model.head_dim) == (1, model.latent.width)
    assert model.decode_flops_per_slot > model.attention_flops_per_pair


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 2), (2, 2 + 2 * 6 / 8), (10**6, 8)])
def test_experts_that_tokens_reach(tokens: int, expected: float) -> None:
    assert Experts(count=8, per_token=2, width=4).touched(tokens) == pytest.approx(expected)


def test_experts_are_reached_as_often_as_counting_says() -> None:
    """All ways in which three tokens choose two of four experts each."""
    pairs = list(itertools.combinations(range(4), 2))
    mean = sum(len({*a, *b, *c}) for a, b, c in itertools.product(pairs, repeat=3)) / len(pairs) ** 3
    assert Experts(count=4, per_token=2, width=1).touched(3) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-oss-20b", 3.61), ("deepseek-v2-lite", 2.4)],  # model card, arXiv 2508.10925; arXiv 2405.04434, appendix B
)
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    model = get_model(name)
    active = model.layer_matrix_parameters + model.head_parameters
    assert active / 1e9 == pytest.approx(billions, rel=0.025)


def test_experts_in_mxfp4_give_the_checkpoint_s_size() -> None:
    assert get_model("gpt-oss-20b").weight_bytes / 2**30 == pytest.approx(12.8, abs=0.05)  # arXiv 2508.10925, table 1


def test_a_step_reads_the_experts_of_its_tokens() -> None:
    model = get_model("deepseek-v2-lite")
    assert model.experts is not None
    one = 2 * (model.layer_matrix_parameters + model.head_parameters)
    assert model.step_weight_bytes(1) == pytest.approx(one)
    everything = 2 * (model.parameters - model.vocab * model.hidden)
    assert model.step_weight_bytes(10_000) == pytest.approx(everything, rel=1e-4)  # but for vectors
    routed = 26 * 3 * 2048 * 1408 * 2
    assert model.step_weight_bytes(2) - one == pytest.approx(routed * 6 * 58 / 64)


# ---- sliding windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "window", "layers"),
    [
        ("gemma-3-12b", 1_024, 48 - 48 // 6),
        ("gemma-3-27b", 1_024, 62 - 62 // 6),
        ("gpt-oss-20b", 128, 24 // 2),
        ("mistral-7b-v0.1", 4_096, 32),
    ],
)
def test_windows(name: str, window: int, layers: int) -> None:
    assert (get_model(name).window, get_model(name).window_layers) == (window, layers)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_window_has_layers(model: Model) -> None:
    assert (model.window > 0) == (model.window_layers > 0)
    assert model.window_layers <= model.layers


def test_derived_sizes_by_hand() -> None:
    toy = Model(
        name="toy",
        layers=2,
        hidden=8,
        heads=4,
        kv_heads=2,
        head_dim=3,
        intermediate=16,
        vocab=10,
        max_model_len=32,
        published_parameters=None,
        source="by hand",
    )
    # q 8x12, k and v 8x6 each, o 12x8; gate, up 8x16 each, down 16x8
    assert toy.layer_matrix_parameters == 2 * (96 + 48 + 48 + 96 + 3 * 128)
    assert toy.head_parameters == 80
    # two embeddings, two norms a layer, one at the end
    assert toy.parameters == toy.layer_matrix_parameters + 2 * 80 + 2 * 2 * 8 + 8
    for tokens in (0, 1, 1000):
        assert toy.step_weight_bytes(tokens) == 2 * (toy.layer_matrix_parameters + 80)
    assert toy.kv_bytes_per_token == 2 * 2 * 2 * 3 * 2
    assert toy.attention_flops_per_pair == toy.decode_flops_per_slot == 2 * 4 * (2 * 3 + 2 * 3)
    assert dataclasses.replace(toy, tied_embeddings=True).parameters == toy.parameters - 80
    assert dataclasses.replace(toy, qkv_bias=True).parameters == toy.parameters + 2 * (12 + 6 + 6)
    assert dataclasses.replace(toy, more_vectors=5).parameters == toy.parameters + 2 * 5
    assert dataclasses.replace(toy, qk_norm=True).parameters == toy.parameters + 2 * (3 + 3)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_preset_is_usable(model: Model) -> None:
    assert model.source
    assert model.heads % model.kv_heads == 0
    assert model.name == model.name.lower()


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "LLAMA-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B", " llama3.1-8b "]
)
def test_names_are_forgiving(name: str) -> None:
    assert get_model(name).name == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("openbmb/MiniCPM3-4B", "minicpm3-4b"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
    ],
)
def test_names_on_the_hub(name: str, preset: str) -> None:
    assert get_model(name).name == preset


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(InputError, match=r"unknown model 'lama-3\.1-8b'.*did you mean 'llama-3\.1-8b'"):
        get_model("lama-3.1-8b")


def test_table_has_a_row_a_preset() -> None:
    rows = table()
    assert [row["model"] for row in rows] == list(MODELS)
    assert all(row["source"] and row["kv_bytes_per_token"] > 0 for row in rows)
    told = {row["model"]: (row["attention"], row["window"], row["experts"]) for row in rows}
    assert told["smollm2-1.7b"] == ("MHA", "-", "-")
    assert told["gpt-oss-20b"] == ("GQA", "12 x 128", "4 of 32")
    assert told["deepseek-v2-lite"] == ("MLA 512 + 64", "-", "6 of 64")
