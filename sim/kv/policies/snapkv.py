"""SnapKV: what the end of the prompt looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.jit import njit
from sim.kv.policies.base import NOBODY, ScorePolicy, policies
from sim.kv.view import View

__all__ = ["SnapKV"]

_WINDOW = "snapkv_window"


@policies.register("snapkv")
@dataclass(frozen=True, slots=True)
class SnapKV(ScorePolicy):
    """At the end of the prompt, keep what its last queries attend to, and its last tokens; what is generated stays.

    Source: Li et al., 2024 (arXiv 2404.14469); FasterDecoding/SnapKV, snapkv_utils.py. The attention of the last
    ``window`` queries to the tokens before them is added up and averaged over ``pool`` neighbours; at the ends of the
    prompt a neighbour that is missing counts as 0, as there. The budget is of the prompt: nothing dies in decode.

    Differences: one set of tokens for all layers and heads, on the mean over them; a prompt shorter than the window is
    cut like any other, there it stays whole; after a preemption the recomputed sequence is the prompt.

    Parameters
    ----------
    window
        Queries that are asked, and newest tokens that stay.
    pool
        Neighbours over which attention is averaged, the token itself among them; odd.
    """

    attends: ClassVar[bool] = True
    prompt_only: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = (_WINDOW,)

    window: int = 32
    pool: int = 5

    def __post_init__(self) -> None:
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise InputError(f"snapkv: expected window >= 1 and an odd pool, got {self.window} and {self.pool}")

    def begin(self, view: View) -> None:
        """Add up the attention of the window's queries."""
        view.set(_WINDOW, view.query(0))
        for back in range(1, min(self.window, int(view.length.max()))):
            view.add(_WINDOW, view.query(back))

    def score(self, view: View) -> NDArray[np.float32]:
        """Return the attention summed over neighbours: their mean has the same order."""
        out: NDArray[np.float32] = view.scratch[1]
        _pool(view.start, view.n, view.columns[_WINDOW], self.window, self.pool // 2, out)
        return out

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Protect the window."""
        return NOBODY, np.full(len(view), self.window)


@njit
def _pool(start: np.ndarray, n: np.ndarray, window: np.ndarray, newest: int, reach: int, out: np.ndarray) -> None:
    """Write sums over neighbours; the newest tokens are nobody's neighbours."""
    for b in range(len(start)):
        seen, worth = window[start[b] : start[b] + max(n[b] - newest, 0)], out[start[b] : start[b] + n[b]]
        for i in range(len(worth)):
            worth[i] = np.float32(0)
            for j in range(max(i - reach, 0), min(i + reach + 1, len(seen))):
                worth[i] += seen[j]
