"""The paper's reclaimer: asynchronous, out of place, driven by memory pressure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.policies.base import EvictionPolicy
from sim.kv.reclaim.base import Pressure, Reclaimer, reclaimers, refuse_windows
from sim.kv.repack import RepackPlan
from sim.kv.scatter import most_to_win, share_out
from sim.kv.state import H
from sim.kv.window import possible_gain, prices

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
    layout
        What a request's plan moves, and to where. ``ordered``: a run of neighbouring blocks into fresh ones; logical
        order is kept. ``scattered``: the least used blocks, wherever they stand, into fresh ones, as the paper's
        readers report it; the moved tokens are in order among themselves. ``fill``: the least used blocks into dead
        slots of the request's other blocks (KV-Compress's move rule, but beside the steps); it needs no fresh block.
        After the last two a request takes new tokens one at a time only. They leave alone what the prefix cache
        knows: with one, a request of which they win nothing is repacked in order.
    plan
        ``most``: requests with most to gain first, each as far as it goes. ``gain``: those blocks first, of whatever
        request, that cost the fewest copies, and no more than are wanted. Ours.
    copy_budget
        Most by which a launch may make a step longer, as a share of the shortest step of late; 0 is no limit. Ours.
    """

    shares_headroom: ClassVar[bool] = True

    theta_f: float = 0.25
    low_watermark: float = 0.1
    repack_when: Literal["pressure", "always"] = "pressure"
    shared_blocks: Literal["skip", "copy_out"] = "skip"
    layout: Literal["ordered", "scattered", "fill"] = "ordered"
    plan: Literal["most", "gain"] = "most"
    copy_budget: float = 0.0

    def __post_init__(self) -> None:
        for name in ("theta_f", "low_watermark"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{self.name}: {name}: expected a share in [0, 1], got {getattr(self, name)}")
        if not 0 <= self.copy_budget < math.inf:
            raise InputError(f"{self.name}: copy_budget: expected a share of at least 0, got {self.copy_budget}")

    def check(self, cache: KVCache, policy: EvictionPolicy) -> None:
        """Refuse a model with a sliding window, if order is lost."""
        if self.layout != "ordered":
            refuse_windows(cache, f"{self.name}: layout {self.layout}")

    @property
    def needs_headroom(self) -> bool:  # type: ignore[override]
        """Whether copies go into fresh blocks, even where no block is shared."""
        return self.layout != "fill"

    def after_step(self, cache: KVCache, rows: NDArray[np.int64], pressure: Pressure, busy: bool) -> list[RepackPlan]:
        """Plan for the requests that are first in line, until enough is won back or the destinations run out."""
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
        limit = self.copy_budget * pressure.step_tokens if self.copy_budget else math.inf
        tokens = int(min(limit, cache.most_slots)) - sum(plan.tokens for plan in plans)
        order, gain = self._line_up(cache, rows, wanted, max(tokens, 0))
        for i in order:
            if gain[i] == 0 or wanted <= 0 or (room <= 0 and self.layout != "fill"):
                break
            plan = self._plan(cache, int(rows[i]), room, int(gain[i]), tokens)
            if plan is not None:
                plans.append(plan)
                room -= len(plan.destinations)
                wanted -= plan.gain
                tokens -= plan.tokens
        return plans

    def _line_up(
        self, cache: KVCache, rows: NDArray[np.int64], wanted: int, tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return in which order to plan for the requests (places in ``rows``), and the blocks to win from each."""
        s = cache.store.s
        gain = np.empty(len(rows), np.int64)
        shared = len(s.readers) > 0
        possible = possible_gain if self.layout == "ordered" or shared else most_to_win
        if wanted <= 0 or not possible(s, rows, gain):
            return rows[:0], gain
        if self.plan == "gain" and self.layout == "ordered":
            return np.argsort(prices(s, rows, gain), kind="stable"), gain
        if self.plan == "gain" and not shared:
            share_out(s, rows, self.layout == "fill", wanted, tokens, gain)
        return np.argsort(-gain, kind="stable"), gain

    def _plan(self, cache: KVCache, row: int, room: int, gain: int, tokens: int) -> RepackPlan | None:
        plan = None
        if self.layout == "scattered":
            plan = cache.plan_scattered(row, room, most_gain=gain, most_tokens=tokens)
        elif self.layout == "fill":
            plan = cache.plan_fill(row, most_gain=gain, most_tokens=tokens)
        if plan is None and (self.layout == "ordered" or len(cache.store.s.readers)):
            plan = cache.plan_repack(row, min(room, tokens // cache.block_size))
        return plan
