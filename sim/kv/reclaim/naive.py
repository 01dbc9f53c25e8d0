"""Naive-Evict."""

from __future__ import annotations

from dataclasses import dataclass

from sim.kv.reclaim.base import Reclaimer, reclaimers

__all__ = ["Naive"]


@reclaimers.register("naive")
@dataclass(frozen=True, slots=True)
class Naive(Reclaimer):
    """A block is freed when its last live token dies; nothing moves. The paper's baseline Naive-Evict.

    The attention kernel goes on reading the dead slots of the blocks that stay.
    """
