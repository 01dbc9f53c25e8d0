"""Units: what decides alone which tokens live (the whole model, each layer, or each KV head of each layer).

A unit of a request has a row of its own: cells, columns, a budget, and a block table. The rows of a request are its
*bundle*: they lie side by side, from a multiple of their number on, so that a row's unit and the bundle's first row
follow from its number.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ONE_UNIT", "Units", "unit_key"]

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Units:
    """How a model is cut into units: layers times KV heads of a layer; unit ``layer * heads + head``.

    Attributes
    ----------
    layers, heads
        Units along the layers, and among the KV heads of one layer. 1 where these decide together.
    """

    layers: int = 1
    heads: int = 1

    @property
    def count(self) -> int:
        """Units of the model, and so rows of a request."""
        return self.layers * self.heads


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
