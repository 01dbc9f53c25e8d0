"""The search: parameters of ``Synthetic`` whose largest difference from the measurement is as small as it gets.

A difference is a mean over requests and comes with noise, so slopes from pairs of candidates mislead. Instead: scatter
candidates around the present parameters, each with requests of its own; fit a plane to the differences of all of them;
let a linear program find the step that promises most within reach; move there, and again.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import numpy as np
import open_loop
from measured import Measured, Table
from numpy.typing import NDArray
from scipy.optimize import linprog
from simulated import simulate

from sim.serving.attention.synthetic import Synthetic

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

RANGES: dict[str, tuple[float, float]] = {
    "second_share": (0.0, 0.6),
    "age_exponent": (0.3, 1.3),
    "age_offset": (0.12, 8.0),
    "row_sigma": (0.0, 0.25),
    "weight_sigma": (0.2, 1.5),
    "weight_skew": (0.0, 1.5),
    "weight_cluster": (0.0, 0.9),
    "heavy_share": (0.0, 0.08),
    "heavy_weight": (0.0, 4.0),
    "start_boost": (0.0, 3.0),
    "start_tokens": (5.0, 800.0),
    "region_sigma": (0.0, 1.5),
    "region_text": (0.0, 0.5),
    "region_time": (0.0, 0.6),
    "region_wide": (0.0, 1.0),
    "token_sigma": (0.0, 1.2),
    "token_jump": (0.0, 3.0),
    "noise_floor": (-1.0, 0.5),
    "score_sigma": (0.2, 0.8),
    "score_weight": (0.0, 0.95),
    "score_region": (0.0, 0.9),
    "score_region_memory": (0.6, 0.98),
    "score_exponent": (0.8, 2.6),
}
"""What the search may touch, and how far. Whole numbers (widths, periods) were set by trying their neighbours.

``age_offset`` is bounded by what the newest tokens hold: near 0, the newest alone would hold a third.
"""
LARGE = 2.3
"""Points: every difference beyond is fined, not only the largest."""
CANDIDATES, REQUESTS, SPREAD = 36, 14, 0.05
"""Candidates a step, requests a capture for each, and how far they scatter (in units of the ranges)."""


def differences(found: Table, measured: Table) -> Vector:
    """Return all differences in points, in one row."""
    return np.concatenate([(a - b).ravel() for name in found for a, b in zip(found[name], measured[name], strict=True)])


def plane(steps: Matrix, values: Matrix) -> tuple[Vector, Matrix]:
    """Return the value at no step, and the slopes [value, part]: ridge regression, near candidates count more."""
    near = np.exp(-(steps**2).sum(1) / (2.5 * SPREAD) ** 2 / steps.shape[1])
    scaled = np.hstack([np.ones((len(steps), 1)), steps / SPREAD])
    ridge = np.diag([1e-6] + [1.5] * steps.shape[1])
    found = np.linalg.solve(scaled.T @ (scaled * near[:, None]) + ridge, scaled.T @ (values * near[:, None]))
    return found[0], found[1:].T / SPREAD


def promised(off: Vector, slopes: Matrix, at: Vector, reach: float) -> Vector:
    """Return the step that would lower the largest difference most, with something for the mean and all large ones."""
    cells, parts = slopes.shape
    # Unknowns: steps up, steps down, the largest size, each size, each size beyond LARGE.
    step_price = np.full(2 * parts, 0.02 / reach)
    price = np.concatenate([step_price, [1.0], np.full(cells, 0.6 / cells), np.full(cells, 0.03)])
    eye, none, column, nothing = np.eye(cells), np.zeros((cells, cells)), np.ones((cells, 1)), np.zeros((cells, parts))
    rows = np.block(
        [
            [slopes, -slopes, 0 * column, -eye, none],
            [-slopes, slopes, 0 * column, -eye, none],
            [nothing, nothing, -column, eye, none],
            [nothing, nothing, 0 * column, eye, -eye],
        ]
    )
    limits = np.concatenate([-off, off, np.zeros(cells), np.full(cells, LARGE)])
    bounds = [(0, min(reach, 1 - x)) for x in at] + [(0, min(reach, x)) for x in at] + [(0, None)] * (1 + 2 * cells)
    found = linprog(price, A_ub=rows, b_ub=limits, bounds=bounds, method="highs").x
    step: Vector = found[:parts] - found[parts : 2 * parts]
    return step


def search(measured: Measured, start: Synthetic, seconds: float, seed: int = 0) -> Synthetic:
    """Improve on ``start`` for so long."""
    rng = np.random.default_rng(seed)
    low, high = np.array(list(RANGES.values())).T

    def model(at: Vector) -> Synthetic:
        values: dict[str, Any] = {n: round(float(v), 4) for n, v in zip(RANGES, low + at * (high - low), strict=True)}
        return dataclasses.replace(start, **values)

    at = (np.array([getattr(start, name) for name in RANGES]) - low) / (high - low)
    tried: list[Vector] = []
    values: list[Vector] = []
    reach, begun = 2 * SPREAD, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for _ in range(CANDIDATES):
            seeds = range(REQUESTS * len(tried), REQUESTS * (len(tried) + 1))
            tried.append(np.clip(at + SPREAD * rng.normal(size=len(at)), 0.002, 0.998))
            found = simulate(model(tried[-1]), measured, seeds, open_loop.ATTENDING)
            values.append(differences(found, measured.table))
        off, slopes = plane(np.array(tried) - at, np.array(values))
        print(f"largest {np.abs(off).max():.2f}, mean {np.abs(off).mean():.2f} points", file=sys.stderr)
        at = np.clip(at + promised(off, slopes, at, reach), 0.002, 0.998)
        reach *= 0.9
    return model(at)
