"""Attention without preferences: the control against which every other model is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.view import View
from sim.serving.attention.base import attention_models

__all__ = ["Uniform"]


@attention_models.register("uniform")
@dataclass(frozen=True)
class Uniform:
    """Every query attends to every live token alike."""

    columns: ClassVar[tuple[str, ...]] = ()

    def begin(self, view: View) -> None:
        """Do nothing: there is no state."""

    def accumulated(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the prompt's column sums: token i gets 1/(q+1) from each query q at or after it."""
        _column_sums(view.start, view.n, out)

    def query(self, view: View, back: int, out: NDArray[np.float32]) -> None:
        """Write 1 over the number of tokens that query could see."""
        _level(view.start, view.n, view.length - 1 - back, view.position, out)

    def similarity(self, view: View, out: NDArray[np.float32]) -> None:
        """Write 0: no key is like another."""
        _level(view.start, np.zeros_like(view.n), view.length - 1, view.position, out)

    def key_norms(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:  # noqa: ARG002
        """Write 1: all keys are as long."""
        _fill(view.start, view.n, out)

    def value_norms(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:  # noqa: ARG002
        """Write 1: all values are as long."""
        _fill(view.start, view.n, out)

    def expected(self, view: View, out: NDArray[np.float32]) -> None:
        """Write 1 over the number of tokens."""
        _level(view.start, view.n, view.length - 1, view.position, out)

    def attend(self, view: View, out: NDArray[np.float32]) -> None:
        """Write 1 over the number of live tokens."""
        _level(view.start, view.n, view.length - 1, view.position, out)


@njit
def _column_sums(start: NDArray[np.int64], n: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    for row in range(len(start)):
        total = 0.0
        for i in range(n[row] - 1, -1, -1):
            total += 1.0 / (i + 1)
            out[start[row] + i] = total


@njit
def _fill(start: NDArray[np.int64], n: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    for row in range(len(start)):
        out[start[row] : start[row] + n[row]] = np.float32(1)


@njit
def _level(
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    query: NDArray[np.int64],
    position: NDArray[np.int32],
    out: NDArray[np.float32],
) -> None:
    for row in range(len(start)):
        cells = position[start[row] : start[row] + n[row]]
        seen = np.searchsorted(cells, query[row], side="right")
        weights = out[start[row] : start[row] + n[row]]
        weights[:seen] = np.float32(1) / np.float32(max(seen, 1))
        weights[seen:] = np.float32(0)
