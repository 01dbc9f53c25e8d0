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
        longest = int(view.n.max(initial=0))
        # Summed from the last query on, so that the small numbers are added first.
        share = np.cumsum(1.0 / np.arange(longest, 0, -1))[::-1].astype(np.float32)
        _column_sums(view.start, view.n, share, out)

    def query(self, view: View, back: int, out: NDArray[np.float32]) -> None:
        """Write 1 over the number of tokens that query could see."""
        _level(view.start, view.n, view.length - 1 - back, view.position, out)

    def attend(self, view: View, out: NDArray[np.float32]) -> None:
        """Write 1 over the number of live tokens."""
        _level(view.start, view.n, view.length - 1, view.position, out)


@njit
def _column_sums(
    start: NDArray[np.int64], n: NDArray[np.int64], share: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    for row in range(len(start)):
        # share[i] sums queries i .. longest-1; this prompt's end at n-1.
        beyond = share[n[row]] if n[row] < len(share) else np.float32(0)
        for i in range(n[row]):
            out[start[row] + i] = share[i] - beyond


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
