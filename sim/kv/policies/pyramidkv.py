"""PyramidKV: more for the lower layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import policies
from sim.kv.policies.snapkv import SnapKV
from sim.kv.view import View

__all__ = ["PyramidKV"]


@policies.register("pyramidkv")
@dataclass(frozen=True, slots=True)
class PyramidKV(SnapKV):
    """Choose as SnapKV does, with a budget that falls linearly from the first layer to the last.

    Source: Cai et al., 2024 (arXiv 2406.02069); Zefan-Cai/KVCache-Factory, pyramidkv_utils.py. Each layer keeps the
    window. Of what the budget leaves beside it, b tokens a layer on average, the last layer gets ``b / beta`` and the
    first the rest of ``2 b``; if that is more than the prompt has, the first keeps all and the last what is then left.
    Where ``2 b`` is more than the prompt itself, all layers get the same. The heads of a layer have equal budgets.

    Differences: budgets are rounded, halves to the even number, so that their sum is exactly that of equal ones; the
    source rounds the last layer's and the steps between layers down. The others are SnapKV's. PyramidKVPress of
    NVIDIA/kvpress has the window inside what falls, and equal budgets wherever the last layer would not hold the whole
    window: ``inside=true``.

    Parameters
    ----------
    beta
        How steep: the last layer's part of the mean is one in ``beta``; 1 is level.
    inside
        Whether the window is part of what falls from layer to layer.
    """

    splits: ClassVar[str] = "layer"

    beta: int = 20
    inside: bool = False

    def __post_init__(self) -> None:
        SnapKV.__post_init__(self)
        if self.beta < 1:
            raise InputError(f"pyramidkv: expected beta >= 1, got {self.beta}")

    def allot(self, view: View) -> NDArray[np.int64]:
        """Let the budgets fall from layer to layer."""
        layers, beta = view.units.layers, self.beta
        window = np.minimum(self.window, view.keep)
        aside = 0 if self.inside else window
        mean = view.keep - aside
        # In parts of 1 / beta of a token, and below of 1 / (layers - 1) of that: whole numbers, so that sums come out.
        first = np.minimum((2 * beta - 1) * mean, beta * (view.n - window))
        last = 2 * beta * mean - first
        falls = (first >= last) & (last >= beta * self.window if self.inside else view.n >= 2 * mean)
        steps = max(1, layers - 1)
        amount, part = first * steps - view.unit // view.units.heads * (first - last), beta * steps
        whole, rest = np.divmod(amount, part)
        rounded = whole + ((2 * rest > part) | ((2 * rest == part) & (whole % 2 == 1)))
        keep: NDArray[np.int64] = np.where(falls & (layers > 1), aside + rounded, view.keep)
        return keep
