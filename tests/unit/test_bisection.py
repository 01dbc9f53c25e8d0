"""The search for the highest value that holds, on predicates whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from sim.errors import InputError
from sim.study.bisection import Axis, Found, highest


def found(axis: Axis, holds: Callable[[float], bool], start: float = 1, checks: int = 0) -> tuple[Found, list[float]]:
    """Run a search against a predicate; return its end and what it asked, in order."""
    steps, asked = highest(axis, start, checks), []
    value = next(steps)
    while True:
        asked.append(value)
        try:
            value = steps.send(holds(value))
        except StopIteration as end:
            return end.value, asked


def test_whole_numbers_are_found_exactly() -> None:
    answer, asked = found(Axis(1, 1000, whole=True), lambda n: n <= 37)
    assert (answer.value, answer.fails, answer.outside, answer.monotone) == (37, 38, "", True)
    assert asked == [1, 2, 3, 5, 9, 17, 33, 65, 49, 41, 37, 39, 38]
    assert all(type(value) is int for value in asked)


def test_from_a_guess_that_is_too_high_it_goes_down() -> None:
    answer, asked = found(Axis(1, 1000, whole=True), lambda n: n <= 37, start=400)
    assert (answer.value, answer.fails) == (37, 38)
    assert asked[:9] == [400, 399, 398, 396, 392, 384, 368, 336, 272]


def test_real_numbers_end_in_a_bracket_as_narrow_as_asked() -> None:
    for tolerance in (0.2, 0.02, 0.001):
        answer, _ = found(Axis(0.01, 1e6, tolerance=tolerance), lambda x: x <= math.pi, start=100)
        assert answer.value is not None
        assert answer.fails is not None
        assert answer.value <= math.pi < answer.fails <= answer.value * (1 + tolerance)


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_outside_the_range_is_said_to_be(whole: bool) -> None:
    axis = Axis(2, 50, whole=whole)
    above, asked = found(axis, lambda _: True, start=3)
    assert (above.value, above.fails, above.outside) == (50, None, "above")
    assert asked == ([3, 4, 5, 7, 11, 19, 35, 50] if whole else [3, 3.75, 4.6875, 7.32422, 14.6484, 29.2968, 50])
    below, asked = found(axis, lambda _: False, start=30, checks=3)
    assert (below.value, below.fails, below.outside) == (None, 2, "below")
    assert asked == [30, *([29, 28, 26, 22, 14, 7, 4] if whole else [24, 19.2, 12.288, 6.144, 3.072]), 2]


def test_the_ends_of_the_range_can_be_the_answer() -> None:
    axis = Axis(2, 50, whole=True)
    assert found(axis, lambda n: n <= 2)[0] == Found(2, 3, "")
    assert found(axis, lambda n: n <= 49)[0] == Found(49, 50, "")
    assert found(axis, lambda n: n <= 1)[0].outside == "below"
    assert found(Axis(7, 7, whole=True), lambda _: True)[0] == Found(7, None, "above")


def test_checks_look_on_both_sides_of_the_bracket() -> None:
    _, asked = found(Axis(1, 1000, whole=True), lambda n: n <= 37, start=37, checks=3)
    assert {39, 41, 45, 36, 34, 30} <= set(asked)
    axis = Axis(1, 1000, tolerance=0.01)
    answer, asked = found(axis, lambda x: x <= 37, start=37, checks=1)
    assert answer.value is not None
    assert answer.fails is not None
    width = answer.fails / answer.value
    for beyond in (answer.fails * width, answer.value / width):
        assert min(abs(value - beyond) for value in asked) <= axis.tolerance * beyond / 4 + 1e-3


def test_what_holds_above_a_failure_is_seen_by_the_checks_alone() -> None:
    def gap(n: float) -> bool:
        return n <= 10 or 13 <= n <= 14

    blind, _ = found(Axis(1, 1000, whole=True), gap, start=10)
    assert (blind.value, blind.held_above) == (10, ())
    seeing, _ = found(Axis(1, 1000, whole=True), gap, start=10, checks=2)
    assert (seeing.value, seeing.fails, seeing.held_above, seeing.monotone) == (10, 11, (14,), False)


def test_a_check_that_fails_below_makes_the_search_go_on_from_there() -> None:
    answer, _ = found(Axis(1, 1000, whole=True), lambda n: n <= 20 and n != 17, start=20, checks=2)
    assert (answer.value, answer.fails) == (16, 17)
    assert {19, 20} <= set(answer.held_above)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5), "0 .. 5"),
        ((6, 5), "6 .. 5"),
        ((1, math.inf), "inf"),
        ((1, 5, False, 0.0), "tolerance"),
        ((1, 5, False, 1.5), "tolerance"),
        ((math.nan, 5), "nan"),
    ],
)
def test_ranges_that_cannot_be_searched(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Axis(*arguments)  # type: ignore[arg-type]
