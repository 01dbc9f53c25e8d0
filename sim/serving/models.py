"""Model presets: the published geometry of transformer decoders, and the sizes that follow from it.

The numbers are those of each model's ``config.json`` on the Hugging Face hub. The parameter count is computed from
them and tested against the count that the hub gives for the checkpoint, so that a slip in a row does not go unnoticed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from sim.errors import InputError, did_you_mean
from sim.serving.geometry import Experts, Latent
from sim.serving.kv_dtype import AUTO, KV_DTYPES, KVDtype
from sim.serving.presets import find_preset

__all__ = ["MODELS", "KVGroup", "Model", "get_model", "table"]


class KVGroup(NamedTuple):
    """Layers that share a block table."""

    window: int
    """Newest tokens that they attend to; 0 for all of them."""
    layers: int
    """How many they are, padding left out."""


@dataclass(frozen=True, slots=True)
class Model:
    """Geometry of a decoder-only transformer.

    Parameters
    ----------
    name
        Name of the preset.
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab
        Decoder layers, width of the residual stream, query heads, key/value heads, size of a head, width of the MLP,
        rows of the embedding. With a latent there is one KV head, as wide as the latent.
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
    dtype_bytes
        Bytes of a weight.
    kv_dtype
        Format of the KV cache (:data:`sim.serving.kv_dtype.KV_DTYPES`), or ``auto`` for the checkpoint's own, bf16.
    window, window_layers
        Newest tokens that layers with a sliding window attend to, and how many such layers there are; 0 without.
    latent, experts
        Latent attention, and experts in place of the MLP; None without.
    more_vectors
        Elements of a layer's vectors that nothing above counts: norms, biases and attention sinks of single models.
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
    kv_dtype: str = AUTO
    window: int = 0
    window_layers: int = 0
    latent: Latent | None = None
    experts: Experts | None = None
    more_vectors: int = 0

    @property
    def kv_format(self) -> KVDtype:
        """How the KV cache stores numbers."""
        return KV_DTYPES["bf16" if self.kv_dtype == AUTO else self.kv_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache over all layers: keys and values or the latent, with scales."""
        vectors = self.layers * self.kv_heads * (1 if self.latent else 2)
        return vectors * self.kv_format.vector_bytes(self.head_dim)

    @property
    def kind(self) -> str:
        """What attention keeps, in words: ``"MHA"``, ``"GQA"``, or ``"MLA 512 + 64"`` with the latent's two parts."""
        if self.latent:
            return f"MLA {self.latent.rank} + {self.latent.rope}"
        return "MHA" if self.kv_heads == self.heads else "GQA"

    @property
    def kv_group_layers(self) -> int:
        """Layers of which a block holds the keys and values, padding included: those of a group, alike for all.

        vLLM takes the number of layers of the rarer kind or, where the other has less than half as many more, of the
        other (``kv_cache_utils.py``, ``_get_kv_cache_groups_uniform_page_size``).
        """
        fewer, more = sorted((self.layers - self.window_layers, self.window_layers))
        return more if more < 1.5 * fewer or not fewer else fewer

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The groups of layers that have a block table each, those with a window first; one if all layers are alike.

        Blocks of all groups have the same size, so that a group of fewer layers than the others is padded. (In Gemma 3
        and gpt-oss, the first layer has a window, and vLLM goes by the first layers.)
        """
        groups = []
        for window, layers in ((self.window, self.window_layers), (0, self.layers - self.window_layers)):
            count = -(-layers // self.kv_group_layers)
            groups += [KVGroup(window, len(range(first, layers, count))) for first in range(count)]
        return tuple(groups)

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of the matrices that a token goes through, over all layers: of experts, those it is sent to."""
        if self.latent:
            attention = self.latent.matrix_parameters(self.hidden, self.heads)
        else:
            attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = self._mlp(self.intermediate)
        if self.experts is None:
            return self.layers * (attention + mlp)
        experts, dense = self.experts, self.experts.dense_layers
        routed = experts.per_token * self._mlp(experts.width) + self._mlp(experts.shared)
        router = self.hidden * experts.count
        return self.layers * attention + dense * mlp + (self.layers - dense) * (routed + router)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts' matrices over all layers; 0 without experts."""
        if self.experts is None:
            return 0
        return (self.layers - self.experts.dense_layers) * self.experts.count * self._mlp(self.experts.width)

    def _mlp(self, width: int) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden * width

    @property
    def _shared_matrix_parameters(self) -> int:
        """Parameters of the layers' matrices that are in use whatever the tokens: all but the routed experts'."""
        if self.experts is None:
            return self.layer_matrix_parameters
        return self.layer_matrix_parameters - self.expert_parameters * self.experts.per_token // self.experts.count

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, which only a token to be sampled from goes through."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters of the checkpoint."""
        norm = self.hidden * (2 if self.other_biases else 1)
        vectors = 2 * norm + self.more_vectors
        if self.qkv_bias or self.other_biases:
            vectors += self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.other_biases:
            vectors += self.hidden + (2 if self.gated_mlp else 1) * self.intermediate + self.hidden
        if self.qk_norm:
            vectors += 2 * self.head_dim
        embeddings = (
            self.vocab * self.hidden * (1 if self.tied_embeddings else 2) + self.learned_positions * self.hidden
        )
        matrices = self._shared_matrix_parameters + self.expert_parameters
        return embeddings + matrices + self.layers * vectors + norm

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in device memory."""
        if self.experts is None:
            return self.parameters * self.dtype_bytes
        experts = self.expert_parameters
        return (self.parameters - experts) * self.dtype_bytes + round(experts * self.experts.element_bytes)

    def step_weight_bytes(self, tokens: int = 1) -> float:
        """Return bytes of the weights that a step reads: all matrices once, of the input embedding only a few rows.

        Of experts, those that its tokens are expected to reach (:meth:`Experts.touched`).
        """
        shared = (self._shared_matrix_parameters + self.head_parameters) * self.dtype_bytes
        if self.experts is None:
            return shared
        reached = self.experts.touched(tokens) / self.experts.count
        return shared + self.expert_parameters * self.experts.element_bytes * reached

    @property
    def attention_flops_per_pair(self) -> int:
        """Operations for one query of a prompt on one key over all layers: multiply and add, for score and value."""
        if self.latent:
            return self.layers * self.latent.prefill_flops(self.heads)
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def decode_flops_per_slot(self) -> int:
        """The same for a query that decodes: more with a latent, which is then used as it is stored."""
        if self.latent:
            return self.layers * self.latent.decode_flops(self.heads)
        return self.attention_flops_per_pair


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
