"""Model presets: the geometry gives the published sizes."""

import dataclasses

import pytest

from sim.errors import InputError
from sim.serving.models import MODELS, Model, get_model, table

ROUNDED = {"opt-13b"}  # its publisher gives the count in billions only
MADE_UP = {"toy"}


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
    ],
)
def test_kv_bytes_of_a_token(name: str, kv_bytes: int) -> None:
    assert get_model(name).kv_bytes_per_token == kv_bytes


def test_an_fp8_cache_is_half_as_large() -> None:
    model = get_model("llama-3.1-8b")
    assert dataclasses.replace(model, kv_dtype_bytes=1).kv_bytes_per_token * 2 == model.kv_bytes_per_token


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
    assert toy.step_weight_bytes == 2 * (toy.layer_matrix_parameters + 80)
    assert toy.kv_bytes_per_token == 2 * 2 * 2 * 3 * 2
    assert toy.attention_flops_per_pair == 2 * 4 * (2 * 3 + 2 * 3)
    assert dataclasses.replace(toy, tied_embeddings=True).parameters == toy.parameters - 80
    assert dataclasses.replace(toy, qkv_bias=True).parameters == toy.parameters + 2 * (12 + 6 + 6)
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


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(InputError, match=r"unknown model 'lama-3\.1-8b'.*did you mean 'llama-3\.1-8b'"):
        get_model("lama-3.1-8b")


def test_table_has_a_row_a_preset() -> None:
    rows = table()
    assert [row["model"] for row in rows] == list(MODELS)
    assert all(row["source"] and row["kv_bytes_per_token"] > 0 for row in rows)
