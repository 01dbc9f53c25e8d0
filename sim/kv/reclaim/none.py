"""No eviction at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sim.kv.reclaim.base import Reclaimer, reclaimers

__all__ = ["NoReclaim"]


@reclaimers.register("none")
@dataclass(frozen=True, slots=True)
class NoReclaim(Reclaimer):
    """Full retention: native vLLM. Goes with policy ``full`` alone."""

    evicts: ClassVar[bool] = False
