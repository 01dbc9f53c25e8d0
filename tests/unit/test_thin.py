"""Merging rows of the step columns keeps totals and averages over time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.study.thin import COUNTS, thin_steps


def columns(n: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    dt_s = draw.uniform(0.001, 0.1, n)
    return {
        "step": np.arange(n),
        "n_steps": np.ones(n, np.int64),
        "clock_s": np.cumsum(dt_s) - dt_s,
        "dt_s": dt_s,
        "running": draw.integers(0, 100, n),
        "evicted": draw.integers(0, 100, n),
    }


@given(n=st.integers(1, 200), rows=st.integers(1, 50), seed=st.integers(0, 9))
def test_totals_and_time_averages_stay(n: int, rows: int, seed: int) -> None:
    steps = columns(n, seed)
    thin = thin_steps(steps, rows)
    assert len(thin["step"]) <= rows or n <= rows
    for name in COUNTS & steps.keys():
        assert thin[name].sum() == pytest.approx(steps[name].sum())
    mean = np.average(steps["running"], weights=steps["dt_s"])
    assert np.average(thin["running"], weights=thin["dt_s"]) == pytest.approx(mean)
    assert thin["step"][0] == 0
    assert thin["running"].dtype == np.float64


def test_short_columns_stay_as_they_are() -> None:
    steps = columns(10, 0)
    thin = thin_steps(steps, 10)
    assert all(np.array_equal(thin[name], steps[name]) for name in steps)


def test_steps_without_duration_are_weighed_alike() -> None:
    steps = columns(4, 0)
    steps["dt_s"] = np.array([0.0, 0.0, 1.0, 3.0])
    steps["running"] = np.array([2, 4, 10, 20])
    assert thin_steps(steps, 2)["running"].tolist() == [3.0, 17.5]
