"""Number formats of the KV cache: what an element takes, and what its scales take beside it.

A scale that belongs to one token goes where the token goes: it counts for the pool, for what attention reads and for
what a repack copies. One for a whole layer is read once and costs nothing a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["AUTO", "KV_DTYPES", "KVDtype"]

AUTO = "auto"
"""Leaves the format to the model: bf16, for every preset."""


@dataclass(frozen=True, slots=True)
class KVDtype:
    """How the KV cache stores numbers.

    Parameters
    ----------
    name
        "bf16", "fp8" or "int4".
    bits
        Of an element.
    scale_bytes
        For each vector, which is what one head of one layer keeps of a token, keys and values by themselves: bytes of
        scale and zero point.
    source
        Who stores it that way.
    """

    name: str
    bits: int
    scale_bytes: int
    source: str

    def vector_bytes(self, elements: int) -> int:
        """Return the bytes of a vector of so many elements, packed to whole bytes, with its scales."""
        return -(-elements * self.bits // 8) + self.scale_bytes


KV_DTYPES = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            KVDtype("bf16", 16, 0, "as the model computes"),
            KVDtype("fp8", 8, 0, "vLLM 0.32, fp8: one scale for the keys and one for the values of a layer"),
            KVDtype(
                "int4",
                4,
                4,
                "vLLM 0.32, int4_per_token_head: 4 bytes of scale and zero point for each token and head; LMDeploy, "
                "too, quantises each token and head by itself",
            ),
        )
    }
)
"""All formats by name."""
