"""Units: what has a block table of its own, and decides alone which tokens live.

That is the whole model, each layer, each KV head of each layer, or each group of layers of a hybrid model (full
attention here, a sliding window there). A unit of a request has a row of its own: cells, columns, a budget, and a
block table. The rows of a request are its *bundle*: they lie side by side, from a multiple of their number on, so that
a row's unit and the bundle's first row follow from its number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["ONE_UNIT", "Units", "unit_key"]

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Units:
    """How a model is cut into units: layers times KV heads of a layer; unit ``layer * heads + head``.

    Or, where layers with a sliding window have memory of their own, into groups of layers.

    Attributes
    ----------
    layers, heads
        Units along the layers, and among the KV heads of one layer. 1 where these decide together.
    windows
        Of each group of a hybrid model, how many of the newest tokens its layers attend to; 0 for all of them. Groups
        decide together: what a policy lets die dies in all groups without a window.
    weights
        Of each unit, how many layers it stands for; all the same if empty.
    of
        Units that the model has, where fewer stand for them; 0 if that is as many as there are.
    """

    layers: int = 1
    heads: int = 1
    windows: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    of: int = 0

    count: int = field(init=False)
    """Units of the model, and so rows of a request."""

    def __post_init__(self) -> None:
        if self.windows and self.layers * self.heads > 1:
            raise ValueError("groups with windows decide together: layers and heads have to be 1")
        object.__setattr__(self, "count", self.layers * self.heads * max(1, len(self.windows)))
        if self.weights and (len(self.weights) != self.count or min(self.weights) < 1):
            raise ValueError(f"expected a positive weight for each of {self.count} units, got {self.weights}")

    @property
    def tables(self) -> int:
        """Block tables that a request has in the model."""
        return self.of or self.count

    @property
    def window_of(self) -> NDArray[np.int64]:
        """int64[count], the window of each unit; 0 without."""
        return np.array(self.windows or (0,) * self.count, np.int64)

    @property
    def weight_of(self) -> NDArray[np.int64]:
        """int64[count], the layers that each unit stands for, as parts of their sum."""
        return np.array(self.weights or (1,) * self.count, np.int64)

    @property
    def token_share(self) -> tuple[int, int]:
        """A token of a unit that decides, by a token of the whole model: numerator and denominator.

        Of groups the mean: with padding one of them may have a layer less than another.
        """
        weights = self.weight_of
        deciding = weights[self.window_of == 0]
        if not len(deciding):
            return 1, 1
        return int(deciding.sum()), int(len(deciding) * weights.sum())

    def decides(self, unit: int) -> int:
        """Return which of the model's deciders a unit belongs to: its own number, or 0 for groups."""
        return 0 if self.windows else unit


ONE_UNIT = Units()
"""The whole model decides together."""


def unit_key(key: int, unit: int) -> int:
    """Return the 64-bit key from which a unit of the request with this ``key`` draws; unit 0 has the request's own."""
    if unit == 0:
        return key
    x = (key ^ (unit * 0xA0761D6478BD642F)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
