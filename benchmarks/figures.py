"""A measured figure, with the bound it must keep if it has one."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["Figure", "best_and_median", "missed"]


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report.

    Parameters
    ----------
    part
        The benchmark it belongs to.
    name
        What was measured.
    value
        The median if there are several measurements; None if it could not be measured.
    unit
        What the value counts.
    best
        The lowest of several measurements: what the code costs when nothing disturbs it.
    most, least
        The bound that ``value`` must keep.
    note
        What else a reader must know.
    """

    part: str
    name: str
    value: float | None
    unit: str
    best: float | None = None
    most: float | None = None
    least: float | None = None
    note: str = ""

    @property
    def bound(self) -> str:
        """The bound in words; empty if there is none."""
        if self.most is not None:
            return f"at most {self.most:g}"
        return f"at least {self.least:g}" if self.least is not None else ""

    @property
    def kept(self) -> bool | None:
        """Whether the bound is kept; None if there is none, or nothing was measured."""
        if self.value is None or (self.most is None and self.least is None):
            return None
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return dataclasses.asdict(self)


def best_and_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest value and the median."""
    return min(values), statistics.median(values)


def missed(figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures that miss their bounds."""
    return [figure for figure in figures if figure.kept is False]
