"""Pages of one token."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.policies.base import EvictionPolicy
from sim.kv.reclaim.base import Reclaimer, reclaimers

__all__ = ["Token"]


@reclaimers.register("token")
@dataclass(frozen=True, slots=True)
class Token(Reclaimer):
    """Blocks of one slot: every dead token's memory is free at once, and nothing is ever moved.

    SGLang's ``page_size 1``. To be used with ``block_size`` 1, and so with block counts in tokens. The block table has
    4 bytes for each token, instead of for each 16, and a kernel that reads K and V token by token is slower.

    Parameters
    ----------
    attention_factor
        By how much attention is slower than with the step cost's pages. Default 1.5: what sgl-project/sglang-jax
        reports in issue 93 for its kernel at page size 1 (from 400 to 600, on a TPU, blamed on its tile sizes), the
        only figure that we found. A kernel tuned for it may come near 1: sweep what hangs on this.
    """

    attention_factor: float = 1.5

    def __post_init__(self) -> None:
        if not self.attention_factor >= 1:
            raise InputError(f"token: attention_factor: expected 1 or more, got {self.attention_factor}")

    def check(self, cache: KVCache, policy: EvictionPolicy) -> None:
        """Refuse blocks of several slots."""
        if cache.block_size != 1:
            raise InputError(f"reclaimer token has pages of one token: use block_size 1, not {cache.block_size}")
