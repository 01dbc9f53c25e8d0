"""The paper's reclaimer: asynchronous, out of place, driven by memory pressure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.reclaim.base import Pressure, Reclaimer, reclaimers
from sim.kv.repack import RepackPlan, possible_gain
from sim.kv.state import H

__all__ = ["VToken"]


@reclaimers.register("vtoken")
@dataclass(frozen=True, slots=True)
class VToken(Reclaimer):
    """Copy live tokens out of thinly used blocks into fresh ones, beside the next step; free the old ones at the fence.

    From the paper: repack only while fragmentation is above ``theta_f`` and free blocks are near a low watermark,
    within one request, in logical order, into destinations held back at admission, and only if that frees more blocks
    than it takes. Our choices, since the paper does not say: the value of the watermark, the headroom (set by the
    cache), that the requests with most to gain come first and that a launch stops planning when it has won back twice
    the watermark. At most one launch is in flight.

    Parameters
    ----------
    theta_f
        Fragmentation (1 - live / allocated slots) above which to repack. Default from the paper.
    low_watermark
        Share of the pool: below that many free blocks there is pressure. Blocks that the scheduler asked for in vain
        are pressure too.
    repack_when
        ``pressure``, or ``always``: whenever a block can be won.
    shared_blocks
        ``skip`` leaves blocks alone that several requests share, as the paper does. ``copy_out`` has all readers of a
        run of shared blocks copy their tokens out of it in one launch, where their copies take fewer blocks than the
        run has (:meth:`KVCache.plan_copy_out`); before requests by themselves. Our extension.
    """

    needs_headroom: ClassVar[bool] = True

    theta_f: float = 0.25
    low_watermark: float = 0.1
    repack_when: Literal["pressure", "always"] = "pressure"
    shared_blocks: Literal["skip", "copy_out"] = "skip"

    def __post_init__(self) -> None:
        for name in ("theta_f", "low_watermark"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"vtoken: {name}: expected a share in [0, 1], got {getattr(self, name)}")

    def after_step(self, cache: KVCache, rows: NDArray[np.int64], pressure: Pressure, busy: bool) -> list[RepackPlan]:
        """Plan for the requests with most to gain, until enough is won back or the destinations run out."""
        if busy or len(rows) == 0:
            return []
        header = cache.store.s.header
        wanted = cache.pool.usable_blocks
        if self.repack_when == "pressure":
            low = self.low_watermark * cache.pool.usable_blocks
            if cache.pool.available_blocks >= low and not pressure.wanted_blocks:
                return []
            slots = int(header[H.IN_TABLES]) * cache.block_size
            if slots == 0 or 1 - int(header[H.LIVE]) / slots <= self.theta_f:
                return []
            wanted = max(0, int(2 * low) - cache.pool.available_blocks) + pressure.wanted_blocks
        plans: list[RepackPlan] = []
        # What lies above the headroom may serve as destinations too, but not the block that each request may need next.
        room = max(int(header[H.RESERVE]), cache.pool.free_blocks - pressure.running)
        if self.shared_blocks == "copy_out" and len(cache.store.s.readers):
            while wanted > 0 and room > 0 and (group := cache.plan_copy_out(rows, room)):
                plans += group
                room -= sum(len(plan.destinations) for plan in group)
                wanted -= sum(plan.gain for plan in group)
        gain = np.empty(len(rows), np.int64)
        if not possible_gain(cache.store.s, rows, gain):
            return plans
        for i in np.argsort(-gain, kind="stable"):
            if gain[i] == 0 or wanted <= 0 or room == 0:
                break
            plan = cache.plan_repack(int(rows[i]), room)
            if plan is not None:
                plans.append(plan)
                room -= len(plan.destinations)
                wanted -= plan.gain
        return plans
