"""Times of matrix products between and beyond those that were measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.serving.aiconfigurator import Table

__all__ = ["GemmGrid"]

LARGE = 1 << 20
"""Weights of a matrix from which on errors are counted: smaller ones are launches."""

Floats = NDArray[np.float64]


class GemmGrid:
    """Times of bf16 matrix products by (m, n, k): m tokens, n outputs, k inputs."""

    def __init__(self, table: Table) -> None:
        rows = table["gemm_dtype"] == "bfloat16"
        if not rows.any():
            raise InputError("the table of matrix products has no bfloat16 rows")
        m, n, k = (table[name][rows].astype(np.int64) for name in "mnk")
        self.m = np.unique(m)
        self._n, self._k = np.log(np.unique(n)), np.log(np.unique(k))
        self._log_ns = np.full((len(self._n), len(self._k), len(self.m)), np.nan)
        where = (np.searchsorted(np.unique(n), n), np.searchsorted(np.unique(k), k), np.searchsorted(self.m, m))
        self._log_ns[where] = np.log(table["latency"][rows].astype(np.float64))
        # A size that was measured for few matrices only would make holes.
        whole = np.isfinite(self._log_ns).mean(axis=(0, 1)) > 0.9
        self.m, self._log_ns = self.m[whole], self._log_ns[:, :, whole]

    def inside(self, n: int, k: int) -> bool:
        """Return whether the grid reaches around (n, k)."""
        return bool(self._n[0] <= np.log(n) <= self._n[-1] and self._k[0] <= np.log(k) <= self._k[-1])

    def times(self, n: int, k: int) -> Floats:
        """Return float64[len(m)]: ns, linear in the logarithms between the grid's points, in proportion beyond."""
        found, weights = np.zeros(len(self.m)), np.zeros(len(self.m))
        for i, weight_n in _between(self._n, np.log(n)):
            for j, weight_k in _between(self._k, np.log(k)):
                value = self._log_ns[i, j] + self._beyond(n, k)
                there = np.isfinite(value)
                found[there] += weight_n * weight_k * value[there]
                weights[there] += weight_n * weight_k
        return np.asarray(np.exp(found / weights), np.float64)

    def _beyond(self, n: int, k: int) -> float:
        """Return the logarithm of by how much (n, k) is larger than the grid's end."""
        ends = ((np.log(n), self._n), (np.log(k), self._k))
        return float(sum(max(value - axis[-1], 0.0) + min(value - axis[0], 0.0) for value, axis in ends))

    def held_out_shapes(self) -> tuple[Floats, Floats]:
        """Return what is predicted for each (n, k) inside the grid from its neighbours alone, and its time."""
        log = self._log_ns
        guess = np.full_like(log, np.nan)
        for i in range(1, len(self._n) - 1):
            for j in range(1, len(self._k) - 1):
                along_n = _line(self._n[i - 1 : i + 2], log[i - 1, j], log[i + 1, j])
                along_k = _line(self._k[j - 1 : j + 2], log[i, j - 1], log[i, j + 1])
                guess[i, j] = (along_n + along_k) / 2
        return self._large(guess)

    def held_out_tokens(self) -> tuple[Floats, Floats]:
        """Return what is predicted for each inner m of each matrix from the m below and above, and its time."""
        guess = np.full_like(self._log_ns, np.nan)
        for t in range(1, len(self.m) - 1):
            ends = np.exp(self._log_ns[:, :, [t - 1, t + 1]])
            guess[:, :, t] = np.log(_line(self.m[t - 1 : t + 2].astype(np.float64), ends[..., 0], ends[..., 1]))
        return self._large(guess)

    def _large(self, guess: Floats) -> tuple[Floats, Floats]:
        """Keep what is known of matrices that are not tiny."""
        large = self._n[:, None, None] + self._k[None, :, None] >= np.log(LARGE) - 1e-9
        known = np.isfinite(guess) & np.isfinite(self._log_ns) & large
        return np.exp(guess[known]), np.exp(self._log_ns[known])


def _between(axis: Floats, value: float) -> list[tuple[int, float]]:
    """Return the points of an axis around a value, with their weights; one point beyond its ends."""
    j = int(np.searchsorted(axis, value - 1e-9))
    if j == len(axis):
        return [(j - 1, 1.0)]
    if j == 0 or abs(axis[j] - value) < 1e-9:
        return [(j, 1.0)]
    share = float((value - axis[j - 1]) / (axis[j] - axis[j - 1]))
    return [(j - 1, 1 - share), (j, share)]


def _line(x: Floats, first: Floats, last: Floats) -> Floats:
    """Return the value at the middle one of three x, from those at the outer ones."""
    share = (x[1] - x[0]) / (x[2] - x[0])
    return np.asarray((1 - share) * first + share * last, np.float64)
