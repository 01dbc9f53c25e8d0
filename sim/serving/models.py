"""Model presets: the published geometry of transformer decoders.

The numbers are those of each model's ``config.json`` on the Hugging Face hub. The parameter count is computed from
them and tested against the count that the hub gives for the checkpoint, so that a slip in a row does not go unnoticed.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from sim.errors import InputError, did_you_mean
from sim.serving.geometry import Experts, Latent
from sim.serving.kv_dtype import AUTO, KV_DTYPES
from sim.serving.model import KVGroup, Model
from sim.serving.presets import find_preset

__all__ = ["MODELS", "KVGroup", "Model", "get_model", "table"]


def _hub(repository: str) -> str:
    return f"huggingface.co/{repository}: config.json; parameters: the hub's safetensors total"


def _decoder(name: str, repository: str, shape: tuple[int, ...], parameters: int, **options: Any) -> Model:
    layers, hidden, heads, kv_heads, head_dim, intermediate = shape
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        published_parameters=parameters,
        source=_hub(repository),
        **options,
    )


def _gemma(name: str, shape: tuple[int, ...], parameters: int, window_layers: int) -> Model:
    """Five layers with a window to one without, each with two norms more than others have; the text model alone."""
    model = _decoder(
        name,
        f"google/{name}-it",
        shape,
        parameters,
        vocab=262_144,
        max_model_len=131_072,
        tied_embeddings=True,
        qk_norm=True,
        window=1_024,
        window_layers=window_layers,
        more_vectors=2 * shape[1],
    )
    source = f"huggingface.co/google/{name}-it: config.json; parameters: KerasHub's count of the text model"
    return dataclasses.replace(model, source=source)


_LLAMA = {"vocab": 128_256, "max_model_len": 131_072}
_QWEN2 = {"vocab": 152_064, "max_model_len": 131_072, "qkv_bias": True}
_QWEN3 = {"vocab": 151_936, "max_model_len": 40_960, "qk_norm": True}
_SMOL = {"vocab": 49_152, "max_model_len": 8_192, "tied_embeddings": True}

# Shape: layers, hidden, query heads, KV heads, head size, MLP width.
_ALL = (
    _decoder("llama-3.1-8b", "meta-llama/Llama-3.1-8B", (32, 4096, 32, 8, 128, 14336), 8_030_261_248, **_LLAMA),
    _decoder("llama-3.1-70b", "meta-llama/Llama-3.1-70B", (80, 8192, 64, 8, 128, 28672), 70_553_706_496, **_LLAMA),
    _decoder(
        "llama-3.2-1b",
        "meta-llama/Llama-3.2-1B",
        (16, 2048, 32, 8, 64, 8192),
        1_235_814_400,
        tied_embeddings=True,
        **_LLAMA,
    ),
    _decoder(
        "llama-3.2-3b",
        "meta-llama/Llama-3.2-3B",
        (28, 3072, 24, 8, 128, 8192),
        3_212_749_824,
        tied_embeddings=True,
        **_LLAMA,
    ),
    _decoder(
        "mistral-7b",
        "mistralai/Mistral-7B-v0.3",
        (32, 4096, 32, 8, 128, 14336),
        7_248_023_552,
        vocab=32_768,
        max_model_len=32_768,
    ),
    Model(
        name="mistral-7b-v0.1",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=32_000,
        max_model_len=32_768,
        published_parameters=7_241_732_096,
        source=_hub("mistralai/Mistral-7B-v0.1"),
        window=4_096,
        window_layers=32,
    ),
    _decoder("qwen2.5-7b", "Qwen/Qwen2.5-7B", (28, 3584, 28, 4, 128, 18944), 7_615_616_512, **_QWEN2),
    _decoder("qwen2.5-14b", "Qwen/Qwen2.5-14B", (48, 5120, 40, 8, 128, 13824), 14_770_033_664, **_QWEN2),
    _decoder("qwen2.5-32b", "Qwen/Qwen2.5-32B", (64, 5120, 40, 8, 128, 27648), 32_763_876_352, **_QWEN2),
    _decoder(
        "qwen2.5-math-7b",
        "Qwen/Qwen2.5-Math-7B",
        (28, 3584, 28, 4, 128, 18944),
        7_615_616_512,
        **(_QWEN2 | {"max_model_len": 4_096}),
    ),
    _decoder("qwen3-8b", "Qwen/Qwen3-8B", (36, 4096, 32, 8, 128, 12288), 8_190_735_360, **_QWEN3),
    _decoder("qwen3-14b", "Qwen/Qwen3-14B", (40, 5120, 40, 8, 128, 17408), 14_768_307_200, **_QWEN3),
    _decoder("qwen3-32b", "Qwen/Qwen3-32B", (64, 5120, 64, 8, 128, 25600), 32_762_123_264, **_QWEN3),
    _decoder("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", (30, 576, 9, 3, 64, 1536), 134_515_008, **_SMOL),
    _decoder("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B", (24, 2048, 32, 32, 64, 8192), 1_711_376_384, **_SMOL),
    Model(
        name="opt-13b",
        layers=40,
        hidden=5120,
        heads=40,
        kv_heads=40,
        head_dim=128,
        intermediate=20480,
        vocab=50_272,
        max_model_len=2_048,
        published_parameters=13_000_000_000,
        source="huggingface.co/facebook/opt-13b: config.json; parameters: as named in the OPT paper (arXiv 2205.01068)",
        tied_embeddings=True,
        gated_mlp=False,
        qkv_bias=True,
        other_biases=True,
        learned_positions=2_050,
    ),
    _gemma("gemma-3-12b", (48, 3840, 16, 8, 256, 15360), 11_765_788_416, window_layers=40),
    _gemma("gemma-3-27b", (62, 5376, 32, 16, 128, 21504), 27_009_002_240, window_layers=52),
    Model(
        name="gpt-oss-20b",
        layers=24,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        intermediate=2880,
        vocab=201_088,
        max_model_len=131_072,
        published_parameters=20_914_757_184,
        source="huggingface.co/openai/gpt-oss-20b: config.json; parameters: Ollama's gpt-oss:20b (20.91 B in the model "
        "card, arXiv 2508.10925); experts in MXFP4, 4.25 bits a weight",
        qkv_bias=True,
        window=128,
        window_layers=12,
        experts=Experts(count=32, per_token=4, width=2880, element_bytes=4.25 / 8),
        # Biases of output, router and experts, and a sink for each query head.
        more_vectors=2880 + 32 + 32 * (2 * 2880 + 2880) + 64,
    ),
    Model(
        name="minicpm3-4b",
        layers=62,
        hidden=2560,
        heads=40,
        kv_heads=1,
        head_dim=288,
        intermediate=6400,
        vocab=73_448,
        max_model_len=32_768,
        published_parameters=4_000_000_000,
        source="huggingface.co/openbmb/MiniCPM3-4B: config.json, and MiniCPM3Config in transformers; parameters: as "
        "named",
        tied_embeddings=True,
        latent=Latent(rank=256, rope=32, nope=64, value=64, query_rank=768),
        more_vectors=768 + 256,
    ),
    _decoder(
        "deepseek-v2-lite",
        "deepseek-ai/DeepSeek-V2-Lite",
        (27, 2048, 16, 1, 576, 10944),
        15_706_484_224,
        vocab=102_400,
        max_model_len=163_840,
        latent=Latent(rank=512, rope=64, nope=128, value=128),
        experts=Experts(count=64, per_token=6, width=1408, shared=2 * 1408, dense_layers=1),
        more_vectors=512,
    ),
    Model(
        name="toy",
        layers=2,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=256,
        vocab=512,
        max_model_len=8_192,
        published_parameters=None,
        source="made up, small enough for a CPU",
    ),
    Model(
        name="toy-hybrid",
        layers=6,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=256,
        vocab=512,
        max_model_len=8_192,
        published_parameters=None,
        source="made up: two layers with full attention, four with a window of 128 tokens",
        window=128,
        window_layers=4,
    ),
)

MODELS = MappingProxyType({model.name: model for model in _ALL})
"""All presets by name."""

_ALIASES = {
    "llama3.1-8b": "llama-3.1-8b",
    "llama3.1-70b": "llama-3.1-70b",
    "llama3.2-1b": "llama-3.2-1b",
    "llama3.2-3b": "llama-3.2-3b",
    "mistral-7b-v0.3": "mistral-7b",
    "gemma-3-12b-it": "gemma-3-12b",
    "gemma-3-27b-it": "gemma-3-27b",
    "deepseek-v2-lite-chat": "deepseek-v2-lite",
}


def get_model(name: str, kv_dtype: str = AUTO) -> Model:
    """Return the preset called ``name``; case, the organisation in front and "-instruct" behind make no difference.

    Parameters
    ----------
    name
        Of the preset.
    kv_dtype
        Format of its KV cache; ``auto`` for its own.

    Raises
    ------
    InputError
        If there is no such preset or format.
    """
    if kv_dtype not in (AUTO, *KV_DTYPES):
        known = [AUTO, *KV_DTYPES]
        raise InputError(
            f"kv_dtype: expected one of {', '.join(known)}, got {kv_dtype!r}{did_you_mean(kv_dtype, known)}"
        )
    short = name.strip().lower().rpartition("/")[2].removeprefix("meta-").removesuffix("-instruct")
    model = find_preset("model", short, MODELS, _ALIASES)
    return model if kv_dtype == AUTO else dataclasses.replace(model, kv_dtype=kv_dtype)


def table() -> list[dict[str, Any]]:
    """Return one row a preset, for printing: name, geometry, parameters, KV bytes of a token (`auto`), source."""
    return [
        {
            "model": model.name,
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "attention": model.kind,
            "window": f"{model.window_layers} x {model.window:,}" if model.window else "-",
            "experts": f"{model.experts.per_token} of {model.experts.count}" if model.experts else "-",
            "parameters": model.parameters,
            "weight_gb": round(model.weight_bytes / 1e9, 2),
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "max_model_len": model.max_model_len,
            "source": model.source,
        }
        for model in MODELS.values()
    ]
