"""New tokens into dead slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.policies.base import EvictionPolicy
from sim.kv.reclaim.base import Pressure, Reclaimer, reclaimers, refuse_windows
from sim.kv.reclaim.vtoken import VToken
from sim.kv.repack import RepackPlan
from sim.kv.scatter import most_to_win

__all__ = ["Reuse", "ReuseVToken"]


@reclaimers.register("reuse")
@dataclass(frozen=True, slots=True)
class Reuse(Reclaimer):
    """Write a new token's K and V into a dead slot of its own request, as long as there is one; nothing is copied.

    A request that evicts as many tokens as it generates stops growing at no cost. What the end of the prompt leaves
    behind stays: holes are filled one a step, the fullest block first. Compare H2O's code for FlexGen, whose new token
    takes the place of the one that is evicted.

    Tokens lie in memory out of logical order: right for queries of one token over keys that are rotated already, and
    for nothing else. A recompute after a preemption writes everything anew, in order. Blocks whose contents the prefix
    cache knows are not written to.
    """

    reuses: ClassVar[bool] = True

    def check(self, cache: KVCache, policy: EvictionPolicy) -> None:
        """Refuse a model with a sliding window."""
        refuse_windows(cache, "reuse")


@reclaimers.register("reuse+vtoken")
@dataclass(frozen=True, slots=True)
class ReuseVToken(Reclaimer):
    """``reuse`` while a request decodes, and ``vtoken`` for what the end of its prompt leaves behind. Ours.

    Decoding scatters nothing any more, so what is copied is copied once: there is no reason to wait for pressure, and
    none to keep an order that is lost anyway. So by default the copies go into dead slots too (``fill``), as soon as a
    block can be won. What is little is moved between two steps, and everybody waits for it: the step behind a prompt is
    often a long one, of another prompt, and a copy beside it gives the blocks back only when it ends. What is more goes
    on beside the steps, also in a request that writes into its holes: blocks that the copy reads or fills are left out
    until the fence.

    Parameters
    ----------
    when
        ``always``: whenever a block can be won; ``pressure``: as ``vtoken`` does.
    at_once
        Most tokens to move between two steps, with ``when=always`` and ``layout=fill``; 0 moves all beside the steps.
        Copying 4,096 tokens of an 8B model takes a fifteenth of reading its weights once. Of the whole model: a layer's
        or head's count for its share.
    theta_f, low_watermark, shared_blocks, layout, plan, copy_budget
        Of ``vtoken``.
    """

    reuses: ClassVar[bool] = True
    shares_headroom: ClassVar[bool] = True

    when: Literal["always", "pressure"] = "always"
    theta_f: float = 0.25
    low_watermark: float = 0.1
    shared_blocks: Literal["skip", "copy_out"] = "skip"
    layout: Literal["ordered", "scattered", "fill"] = "fill"
    plan: Literal["most", "gain"] = "most"
    copy_budget: float = 0.0
    at_once: int = 4096
    _copies: VToken = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.at_once < 0:
            raise InputError(f"{self.name}: at_once: expected 0 or more tokens, got {self.at_once}")
        copies = VToken(
            self.theta_f, self.low_watermark, self.when, self.shared_blocks, self.layout, self.plan, self.copy_budget
        )
        object.__setattr__(self, "_copies", copies)

    def check(self, cache: KVCache, policy: EvictionPolicy) -> None:
        """Refuse a model with a sliding window."""
        refuse_windows(cache, "reuse+vtoken")

    @property
    def needs_headroom(self) -> bool:  # type: ignore[override]
        """Whether copies go into fresh blocks, even where no block is shared."""
        return self._copies.needs_headroom

    def repack_now(self, cache: KVCache, rows: NDArray[np.int64]) -> tuple[int, int]:
        """Move what few copies win into dead slots, those with most to win first."""
        gain = np.empty(len(rows), np.int64)
        part, whole = cache.units.token_share
        most = self.at_once * whole // part if self.when == "always" and self.layout == "fill" else 0
        left = most
        if left == 0 or not most_to_win(cache.store.s, rows, gain):
            return 0, 0
        plans: list[RepackPlan] = []
        for i in np.argsort(-gain, kind="stable"):
            if gain[i] == 0:
                break
            plan = cache.plan_fill(int(rows[i]), most_gain=int(gain[i]), most_tokens=left)
            if plan is not None:
                plans.append(plan)
                left -= plan.tokens
        for plan in plans:
            cache.apply_moves(plan)
        return len(plans), most - left

    def after_step(self, cache: KVCache, rows: NDArray[np.int64], pressure: Pressure, busy: bool) -> list[RepackPlan]:
        """Plan as ``vtoken`` does."""
        return self._copies.after_step(cache, rows, pressure, busy)
