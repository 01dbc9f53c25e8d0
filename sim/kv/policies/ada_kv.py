"""Ada-KV: heads compete for the budget of their layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import policies
from sim.kv.policies.pooled import share_budget
from sim.kv.policies.snapkv import SnapKV
from sim.kv.view import View

__all__ = ["AdaKV"]


@policies.register("ada_kv")
@dataclass(frozen=True, slots=True)
class AdaKV(SnapKV):
    """Choose as SnapKV does, among the tokens of all heads of a layer: a head that looks at more keeps more.

    Source: Feng et al., 2024 (arXiv 2407.11550); FFY0/AdaKV, and AdaKVPress(SnapKVPress) of NVIDIA/kvpress, which this
    follows. Of all pairs of head and token in a layer those with the highest scores stay, as many as the budgets of the
    heads allow together. Each head keeps its window and at least the share ``floor`` of an equal budget.

    Differences: FFY0/AdaKV guarantees the floor by mixing, ``floor`` of each head's budget equal and the rest by its
    part of the best scores; kvpress hides the dead from attention and frees nothing. Among equal scores heads take
    turns. The others are SnapKV's.

    Parameters
    ----------
    floor
        Share of an equal budget that each head has for certain.
    """

    splits: ClassVar[str] = "head"

    floor: float = 0.2

    def __post_init__(self) -> None:
        SnapKV.__post_init__(self)
        if not 0 <= self.floor <= 1:
            raise InputError(f"ada_kv: floor: expected a share in [0, 1], got {self.floor}")

    def allot(self, view: View) -> NDArray[np.int64]:
        """Share out the budgets of each layer's heads by their scores."""
        layer = view.row // view.units.heads
        oldest, newest = self.protect(view)
        return share_budget(self.score(view), view.start, view.n, view.keep, layer, self.floor, oldest, newest)
