"""What a reclaimer is, and the registry."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.kv.cache import KVCache
from sim.kv.repack import RepackPlan
from sim.registry import Registry

__all__ = ["Pressure", "Reclaimer", "reclaimers"]


class Pressure(NamedTuple):
    """How short of blocks the scheduler is after a step."""

    running: int
    """Requests that hold blocks; each may take one more in the next step."""
    wanted_blocks: int
    """Blocks by which the last allocation that failed fell short; 0 if none failed."""


class Reclaimer:
    """Decides when and whose slots are won back. Blocks whose last token died are freed before it is asked.

    A reclaimer is a frozen dataclass; what it plans is copied beside the next steps and takes effect at a fence.
    """

    name: ClassVar[str] = ""
    evicts: ClassVar[bool] = True
    """False for a reclaimer under which nothing may die."""
    needs_headroom: ClassVar[bool] = False
    """True if it needs free destination blocks that nobody else may take."""
    keep_blocks: int = 0
    """Blocks that a request does not give back while it runs, though nothing lives in them."""

    def after_step(self, cache: KVCache, rows: NDArray[np.int64], pressure: Pressure, busy: bool) -> list[RepackPlan]:
        """Look at the cache after the deaths of a step, and plan repacks.

        Parameters
        ----------
        cache
            The cache; plans come from :meth:`KVCache.plan_repack`.
        rows
            int64[B], running requests in the scheduler's order.
        pressure
            How short of blocks the scheduler is.
        busy
            A copy is in flight.

        Returns
        -------
        list of RepackPlan
            To be copied in one launch.
        """
        return []

    def repack_now(self, cache: KVCache, rows: NDArray[np.int64]) -> tuple[int, int]:
        """Repack in place, while nothing runs; asked after the deaths of a step, before :meth:`after_step`.

        Returns
        -------
        tuple of int
            Requests that were repacked, and tokens that moved. The next step waits for their copy.
        """
        return 0, 0


reclaimers: Registry[Reclaimer] = Registry(
    "reclaimer",
    "vtoken.reclaimers",
    tuple(f"sim.kv.reclaim.{name}" for name in ("none", "naive", "vtoken", "sync", "ideal")),
)
