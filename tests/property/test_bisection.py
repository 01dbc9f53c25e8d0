"""The search on any predicate: right where higher is harder, honest where it is not."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sim.study.bisection import Axis, Found, highest


def run(axis: Axis, start: float, checks: int, answers) -> tuple[Found, dict[float, bool]]:
    steps, asked = highest(axis, start, checks), {}
    value = next(steps)
    while True:
        assert value not in asked
        assert axis.low <= value <= axis.high
        asked[value] = answers(value)
        try:
            value = steps.send(asked[value])
        except StopIteration as end:
            return end.value, asked


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 2000), st.integers(1, 900), st.integers(0, 4))
def test_whole_numbers(low: int, width: int, limit: int, start: int, checks: int) -> None:
    axis = Axis(low, low + width, whole=True)
    found, asked = run(axis, start, checks, lambda n: n <= limit)
    if limit < low:
        assert (found.value, found.fails, found.outside) == (None, low, "below")
    elif limit >= low + width:
        assert (found.value, found.fails, found.outside) == (low + width, None, "above")
    else:
        assert (found.value, found.fails, found.outside) == (limit, limit + 1, "")
    assert found.monotone
    assert len(asked) <= 2 * math.log2(low + width) + 4 + 2 * checks


@given(st.floats(1e-3, 1e3), st.floats(1, 1e4), st.floats(1e-4, 1e8), st.floats(1e-3, 1e6), st.floats(1e-3, 1))
def test_real_numbers(low: float, width: float, limit: float, start: float, tolerance: float) -> None:
    axis = Axis(low, low * width, tolerance=tolerance)
    found, _ = run(axis, start, 2, lambda x: x <= limit)
    if found.outside:
        assert limit < axis.low if found.outside == "below" else limit >= axis.high
    else:
        assert found.value is not None
        assert found.fails is not None
        assert found.value <= limit < found.fails
        assert found.fails <= found.value * (1 + tolerance) * (1 + 1e-9)
    assert found.monotone


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 5), st.randoms(use_true_random=False))
def test_what_is_claimed_of_any_predicate_was_seen(high: int, start: int, checks: int, random) -> None:
    truth = {n: random.random() < 0.5 for n in range(1, high + 1)}
    found, asked = run(Axis(1, high, whole=True), start, checks, truth.__getitem__)
    failed = [n for n, held in asked.items() if not held]
    assert found.fails == min(failed, default=None)
    below = [n for n, held in asked.items() if held and (not failed or n < min(failed))]
    assert found.value == max(below, default=None)
    assert list(found.held_above) == sorted(n for n, held in asked.items() if held and failed and n > min(failed))
    assert (found.outside == "below") == (asked.get(1) is False)
    assert found.outside or found.fails == found.value + 1
    assert (found.outside == "above") == (not failed)
