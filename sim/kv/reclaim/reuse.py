"""New tokens into dead slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sim.kv.cache import KVCache
from sim.kv.reclaim.base import Pressure, Reclaimer, reclaimers
from sim.kv.reclaim.vtoken import VToken
from sim.kv.repack import RepackPlan

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


@reclaimers.register("reuse+vtoken")
@dataclass(frozen=True, slots=True)
class ReuseVToken(Reclaimer):
    """``reuse`` while a request decodes, and ``vtoken`` for what the end of its prompt leaves behind. Ours.

    Decoding scatters nothing any more, so what is copied is copied once: there is no reason to wait for pressure, and
    none to keep an order that is lost anyway. So by default the copies go into dead slots too (``fill``), as soon as a
    block can be won. A copy may go on in a request that writes into its holes: blocks that the copy reads or fills are
    left out until the fence.

    Parameters
    ----------
    when
        ``always``: whenever a block can be won; ``pressure``: as ``vtoken`` does.
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
    _copies: VToken = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        copies = VToken(
            self.theta_f, self.low_watermark, self.when, self.shared_blocks, self.layout, self.plan, self.copy_budget
        )
        object.__setattr__(self, "_copies", copies)

    @property
    def needs_headroom(self) -> bool:  # type: ignore[override]
        """Whether copies go into fresh blocks, even where no block is shared."""
        return self._copies.needs_headroom

    def after_step(self, cache: KVCache, rows: NDArray[np.int64], pressure: Pressure, busy: bool) -> list[RepackPlan]:
        """Plan as ``vtoken`` does."""
        return self._copies.after_step(cache, rows, pressure, busy)
