"""A reclaimer: when to win whose slots back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim import InputError
from sim.kv.cache import KVCache
from sim.kv.reclaim import Pressure, Reclaimer
from sim.kv.repack import RepackPlan


@dataclass(frozen=True, slots=True)
class Patient(Reclaimer):
    """Repack the thinnest request, one at a time, once it has more than ``blocks`` blocks' worth of dead slots."""

    needs_headroom: ClassVar[bool] = True

    blocks: int = 4

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise InputError(f"patient: blocks: expected 1 or more, got {self.blocks}")

    def after_step(self, cache: KVCache, rows: NDArray[np.int64], pressure: Pressure, busy: bool) -> list[RepackPlan]:  # noqa: ARG002
        """Plan for one request, or for nobody."""
        if busy or not len(rows):
            return []
        records = cache.store.s.rows[rows]
        dead = records["blocks"] * cache.block_size - records["live"]
        thinnest = int(np.argmax(dead))
        if dead[thinnest] <= self.blocks * cache.block_size:
            return []
        room = cache.pool.free_blocks - max(cache.pool.available_blocks, 0)
        plan = cache.plan_repack(int(rows[thinnest]), room)
        return [] if plan is None else [plan]
