"""Model presets: the published geometry of transformer decoders, and the sizes that follow from it.

The numbers are those of each model's ``config.json`` on the Hugging Face hub. The parameter count is computed from
them and tested against the count that the hub gives for the checkpoint, so that a slip in a row does not go unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sim.serving.presets import find_preset

__all__ = ["MODELS", "Model", "get_model", "table"]


@dataclass(frozen=True, slots=True)
class Model:
    """Geometry of a dense decoder-only transformer with one full-attention KV group.

    Parameters
    ----------
    name
        Name of the preset.
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab
        Decoder layers, width of the residual stream, query heads, key/value heads, size of a head, width of the MLP,
        rows of the embedding.
    max_model_len
        Longest sequence the checkpoint is configured for, in tokens.
    published_parameters
        Parameters of the checkpoint as its publisher counts them; None for a model of your own.
    source
        Where the figures are from.
    tied_embeddings
        Whether the output projection is the embedding.
    gated_mlp
        Whether the MLP has a gate projection (three matrices, not two).
    qkv_bias
        Whether the query, key and value projections have a bias.
    other_biases
        Whether the other projections and the norms have one too.
    qk_norm
        Whether each head's queries and keys are normalised (two vectors of ``head_dim`` a layer).
    learned_positions
        Rows of a learned position embedding; 0 with rotary positions.
    dtype_bytes, kv_dtype_bytes
        Bytes of a weight and of an element of the KV cache.
    window, window_layers
        Newest tokens that layers with a sliding window attend to, and how many such layers there are; 0 without.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_model_len: int
    published_parameters: int | None
    source: str
    tied_embeddings: bool = False
    gated_mlp: bool = True
    qkv_bias: bool = False
    other_biases: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    window: int = 0
    window_layers: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of the matrices that every token goes through, over all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated_mlp else 2) * self.hidden * self.intermediate
        return self.layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, which only a token to be sampled from goes through."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters of the checkpoint."""
        norm = self.hidden * (2 if self.other_biases else 1)
        vectors = 2 * norm
        if self.qkv_bias or self.other_biases:
            vectors += self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.other_biases:
            vectors += self.hidden + (2 if self.gated_mlp else 1) * self.intermediate + self.hidden
        if self.qk_norm:
            vectors += 2 * self.head_dim
        embeddings = (
            self.vocab * self.hidden * (1 if self.tied_embeddings else 2) + self.learned_positions * self.hidden
        )
        return embeddings + self.layer_matrix_parameters + self.layers * vectors + norm

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in device memory."""
        return self.parameters * self.dtype_bytes

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of the weights that one step reads: all matrices once, of the input embedding only a few rows."""
        return (self.layer_matrix_parameters + self.head_parameters) * self.dtype_bytes

    @property
    def attention_flops_per_pair(self) -> int:
        """Operations for one query on one key over all layers: multiply and add, for the score and for the value."""
        return 4 * self.layers * self.heads * self.head_dim


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
)

MODELS = MappingProxyType({model.name: model for model in _ALL})
"""All presets by name."""

_ALIASES = {
    "llama3.1-8b": "llama-3.1-8b",
    "llama3.1-70b": "llama-3.1-70b",
    "llama3.2-1b": "llama-3.2-1b",
    "llama3.2-3b": "llama-3.2-3b",
    "mistral-7b-v0.3": "mistral-7b",
}


def get_model(name: str) -> Model:
    """Return the preset called ``name``; case, the organisation in front and "-instruct" behind make no difference.

    Raises
    ------
    InputError
        If there is none.
    """
    short = name.strip().lower().rpartition("/")[2].removeprefix("meta-").removesuffix("-instruct")
    return find_preset("model", short, MODELS, _ALIASES)


def table() -> list[dict[str, Any]]:
    """Return one row a preset, for printing: name, geometry, parameters, KV bytes of a token, source."""
    return [
        {
            "model": model.name,
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "parameters": model.parameters,
            "weight_gb": round(model.weight_bytes / 1e9, 2),
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "max_model_len": model.max_model_len,
            "source": model.source,
        }
        for model in MODELS.values()
    ]
