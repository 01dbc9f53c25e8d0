"""The bound nobody can pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.kv.cache import KVCache
from sim.kv.reclaim.base import Pressure, Reclaimer, reclaimers
from sim.kv.repack import RepackPlan

__all__ = ["Ideal"]


@reclaimers.register("ideal")
@dataclass(frozen=True, slots=True)
class Ideal(Reclaimer):
    """Every request holds ceil(live / block size) blocks after every step, at no cost and at once.

    Blocks that requests share stay as they are, and what lies between two of them is packed by itself. So with a prefix
    cache it is the bound for reclaimers that leave shared blocks alone.
    """

    def after_step(self, cache: KVCache, rows: NDArray[np.int64], pressure: Pressure, busy: bool) -> list[RepackPlan]:
        """Pack the requests that have dead slots."""
        cache.pack(rows)
        return []
