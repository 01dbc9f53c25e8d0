"""What a model is: the geometry of a transformer decoder, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sim.serving.geometry import Experts, Latent
from sim.serving.kv_dtype import AUTO, KV_DTYPES, KVDtype

__all__ = ["KVGroup", "Model"]


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
