"""Parts of a decoder that only some models have: latent attention, and experts in place of an MLP."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Experts", "Latent"]


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one vector a token and layer.

    Keys and values of all heads are projections of it, so that there is nothing else to store, and no values apart.

    Parameters
    ----------
    rank
        Elements that keys and values are projected from (``kv_lora_rank``).
    rope
        Elements of the key that carry the position, common to all heads (``qk_rope_head_dim``).
    nope, value
        Elements of a head's key without position, and of its value (``qk_nope_head_dim``, ``v_head_dim``).
    query_rank
        Width of the bottleneck of the queries (``q_lora_rank``); 0 without.
    """

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int = 0

    @property
    def width(self) -> int:
        """Elements in the cache, for one token in one layer."""
        return self.rank + self.rope

    def matrix_parameters(self, hidden: int, heads: int) -> int:
        """Return the parameters of a layer's projections: queries, latent, keys and values from it, and output."""
        queries = heads * (self.nope + self.rope)
        query = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        expansion = self.rank * heads * (self.nope + self.value)
        return query + hidden * self.width + expansion + heads * self.value * hidden

    def prefill_flops(self, heads: int) -> int:
        """Return operations for a query on a key, as vLLM computes prompts: with each head's own keys and values."""
        return 2 * heads * (self.nope + self.rope + self.value)

    def decode_flops(self, heads: int) -> int:
        """Return the same for decode: on the latent itself, the projections absorbed into query and output."""
        return 2 * heads * (self.width + self.rank)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: of each layer's MLPs a token goes through a few.

    Parameters
    ----------
    count, per_token
        Experts of a layer, and how many of them a token is routed to.
    width
        Width of an expert's MLP.
    shared
        Width of the MLP that every token goes through as well; 0 without.
    dense_layers
        Layers, the first ones, that have an ordinary MLP.
    element_bytes
        Bytes of an expert's weight as stored.
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    element_bytes: float = 2.0

    def touched(self, tokens: int) -> float:
        """Return how many different experts of a layer some tokens reach, on average.

        Routing is taken to be uniform and independent: ``n`` tokens miss an expert with probability
        ``(1 - k / E) ** n``.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)
