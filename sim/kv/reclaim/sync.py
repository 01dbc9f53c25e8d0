"""Stop-the-world repack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.reclaim.base import Reclaimer, reclaimers

__all__ = ["Sync"]


@reclaimers.register("sync")
@dataclass(frozen=True, slots=True)
class Sync(Reclaimer):
    """Pack a request into the first of its own blocks as soon as that wins one; every request waits for the copy.

    As R-KV's port for vLLM and KV-Compress do it, between two steps, when nobody reads the cache. In place: tokens move
    forward, in order, into blocks that the request holds already, so it needs no free block and cannot be stuck without
    one when memory is shortest. (The copy kernel has to allow for targets that are sources too: R-KV reads all of a
    layer before it writes, KV-Compress moves into dead slots only.) With a prefix cache it leaves shared blocks alone,
    and packs what the cache knows into free blocks while there are any.

    Parameters
    ----------
    keep_blocks
        Blocks that a request does not give back while it runs: they wait for its next tokens. R-KV's port keeps budget
        + buffer + one block; 0 gives back all that is won.
    """

    keep_blocks: int = 0

    def __post_init__(self) -> None:
        if self.keep_blocks < 0:
            raise InputError(f"sync: keep_blocks: expected 0 or more, got {self.keep_blocks}")

    def repack_now(self, cache: KVCache, rows: NDArray[np.int64]) -> tuple[int, int]:
        """Pack the requests whose tokens fit fewer blocks than they are spread over."""
        thin = rows[cache.packable(rows)]
        return len(thin), cache.pack(thin, counted=True) if len(thin) else 0
