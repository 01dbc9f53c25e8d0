"""Find the highest value that holds: bracket, halve, look around. Values go out, answers come in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterator
from typing import Literal

from sim.errors import InputError

__all__ = ["Axis", "Found", "highest"]

DIGITS = 6
"""Significant digits of a probed real value: enough for any tolerance allowed, and readable."""

LEAST_TOLERANCE = 1e-4

STRIDE = 1.25
"""Least factor between values while no bracket is known."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """What is searched: whole numbers, or positive numbers on a logarithmic scale.

    Parameters
    ----------
    low, high
        The range; both ends may be probed.
    whole
        Whole numbers: the answer is exact.
    tolerance
        Otherwise, how far apart the highest that holds and the lowest that fails may end, as a share of the former.

    Raises
    ------
    InputError
        If the range is empty or not positive, or the tolerance is out of ``1e-4 .. 1``.
    """

    low: float
    high: float
    whole: bool = False
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise InputError(f"range: expected 0 < from <= to, got {self.low:g} .. {self.high:g}")
        if not LEAST_TOLERANCE <= self.tolerance <= 1:
            raise InputError(f"tolerance: expected {LEAST_TOLERANCE:g} .. 1, got {self.tolerance:g}")
        if not self.whole:
            object.__setattr__(self, "low", _rounded(self.low))
            object.__setattr__(self, "high", _rounded(self.high))

    def clip(self, value: float) -> float:
        """Return the value of the axis nearest to ``value``."""
        value = round(value) if self.whole else _rounded(value)
        return min(max(value, self.low), self.high)

    def higher(self, holds: float, start: float) -> float:
        """Return where to look above a value that holds, when nothing has failed: as far again as ``start`` is away."""
        if self.whole:
            return holds + max(1, min(holds, holds - start))
        return holds * min(max(STRIDE, holds / start), 2)

    def lower(self, fails: float, start: float) -> float:
        """Return where to look below a value that fails, when nothing has held."""
        if self.whole:
            return fails - max(1, min(fails // 2, start - fails))
        return fails / min(max(STRIDE, start / fails), 2)

    def close(self, holds: float, fails: float) -> bool:
        """Tell whether the bracket is narrow enough."""
        return fails - holds <= (1 if self.whole else self.tolerance * holds)

    def middle(self, holds: float, fails: float) -> float:
        """Return the value to probe next, strictly inside the bracket unless that is close."""
        return (int(holds) + int(fails)) // 2 if self.whole else _rounded(math.sqrt(holds * fails))

    def alike(self, value: float, other: float) -> bool:
        """Tell whether two values are too near to each other for both to be worth a probe."""
        return value == other if self.whole else abs(value - other) < self.tolerance * value / 4

    def around(self, holds: float, fails: float, each: int) -> Iterator[float]:
        """Yield values outside the bracket, ``each`` on either side: 1, 3, 7, ... widths of the bracket away."""
        for k in range(1, each + 1):
            widths = 2**k - 1
            if self.whole:
                yield from (fails + widths * (fails - holds), holds - widths * (fails - holds))
            else:
                yield from (_rounded(fails * (fails / holds) ** widths), _rounded(holds * (holds / fails) ** widths))


@dataclasses.dataclass(frozen=True)
class Found:
    """The end of a search.

    Attributes
    ----------
    value
        The highest probed value below which no probe failed; None if the lowest of the range fails.
    fails
        The lowest probed value that failed; None if the highest of the range holds.
    outside
        ``"below"`` if the lowest value of the range fails, ``"above"`` if the highest holds: the answer is not in the
        range. Otherwise empty.
    held_above
        Probed values above ``fails`` that held all the same. There should be none: that what holds at a value holds at
        all lower ones is the assumption behind the search.
    """

    value: float | None
    fails: float | None
    outside: Literal["", "below", "above"]
    held_above: tuple[float, ...] = ()

    @property
    def monotone(self) -> bool:
        """Whether the probes agree with the assumption."""
        return not self.held_above


def highest(axis: Axis, start: float, checks: int = 0) -> Generator[float, bool, Found]:
    """Search for the highest value that holds; a generator that is sent whether the value it yielded holds.

    From ``start`` it goes up (down) in growing strides, at most doubling (halving), until the answer changes or the
    range ends; then it halves the bracket: of whole numbers the interval, of others its logarithm. No value is asked
    for twice. The answer is the highest value that holds below the lowest that fails.

    Parameters
    ----------
    axis
        Where to search.
    start
        First guess.
    checks
        Further probes on either side of the final bracket. Without them a bisection cannot see that it is wrong to
        assume that whatever holds at a value holds below: it never looks above a failure.
    """
    answers: dict[float, bool] = {}
    while True:
        value = _next(axis, start, checks, answers)
        if value is None:
            return _found(answers)
        answers[value] = yield value


def _next(axis: Axis, start: float, checks: int, answers: dict[float, bool]) -> float | None:
    """Return the value to probe next; None if there is no more to know."""
    holds, fails = _bracket(answers)
    if holds is None and fails is None:
        return axis.clip(start)
    if fails is None:
        assert holds is not None
        return None if holds == axis.high else axis.clip(axis.higher(holds, axis.clip(start)))
    if holds is None:
        return None if fails == axis.low else axis.clip(axis.lower(fails, axis.clip(start)))
    if not axis.close(holds, fails):
        return axis.middle(holds, fails)
    # A check that fails below the bracket makes a new one, and the search goes on from there.
    for value in axis.around(holds, fails, checks):
        if axis.low <= value <= axis.high and not any(axis.alike(value, known) for known in answers):
            return value
    return None


def _bracket(answers: dict[float, bool]) -> tuple[float | None, float | None]:
    """Return the highest value that held below the first failure, and that failure."""
    fails = min((value for value, held in answers.items() if not held), default=None)
    below = (value for value, held in answers.items() if held and (fails is None or value < fails))
    return max(below, default=None), fails


def _found(answers: dict[float, bool]) -> Found:
    holds, fails = _bracket(answers)
    if fails is None:
        return Found(holds, None, "above")
    above = tuple(sorted(value for value, held in answers.items() if held and value > fails))
    return Found(holds, fails, "below" if holds is None else "", above)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
