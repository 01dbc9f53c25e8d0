"""R-KV: importance less redundancy, every so many generated tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.jit import njit
from sim.kv.policies.base import NOBODY, ScorePolicy, policies
from sim.kv.view import View

__all__ = ["RKV"]

_WINDOW = "r_kv_window"


@policies.register("r_kv")
@dataclass(frozen=True, slots=True)
class RKV(ScorePolicy):
    """After every ``buffer`` generated tokens, keep what the last queries looked at and what is unlike the rest.

    Source: Cai et al. (arXiv 2505.24133); Zefan-Cai/R-KV, vLLM/rkv. A token is worth ``lam`` times its importance less
    ``1 - lam`` times its redundancy: the attention of the last ``window`` queries, the largest of ``pool`` neighbours,
    and the mean cosine of its key with the other live keys. The newest ``window`` tokens stay. As there, nothing dies
    before the first ``buffer`` tokens are generated, whatever the prompt holds, and nothing while a request is less
    than ``buffer`` tokens over its budget: it lives between its budget and ``buffer`` tokens more.

    Differences: one set of scores for all heads and layers; the reference's softmax over the mean cosines is
    taken to first order; it spares the newest of a group of similar tokens, here none is; after a preemption tokens are
    counted from the end of the recompute, there from the end of the prompt.

    Parameters
    ----------
    buffer
        Generated tokens from one compaction to the next.
    window
        Queries that are asked, and newest tokens that stay.
    lam
        Weight of importance; the rest is that of redundancy.
    pool
        Neighbours, the token itself among them, of which the most important counts; odd.
    """

    attends: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("similarity",)
    compares: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = (_WINDOW,)

    buffer: int = 128
    window: int = 8
    lam: float = 0.1
    pool: int = 7

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.buffer or not 0 <= self.lam <= 1 or self.pool < 1 or self.pool % 2 == 0:
            raise InputError(f"r_kv: expected 1 <= window <= buffer, lam in [0, 1] and an odd pool, got {self}")

    @property
    def every(self) -> int:  # type: ignore[override]
        """The buffer."""
        return self.buffer

    def observe(self, view: View) -> None:
        """Add the attention of the last queries before a compaction."""
        attention = view.attention()  # each time: the model may keep something of each new token
        left = (view.prompt - view.length) % self.buffer
        view.subset(left == self.window - 1).set(_WINDOW, attention)
        view.subset(left < self.window - 1).add(_WINDOW, attention)

    def score(self, view: View) -> NDArray[np.float32]:
        """Return importance less redundancy, both as multiples of what a token has on average."""
        out = view.similarity()
        _mix(view.start, view.n, view.columns[_WINDOW], self.window, self.pool // 2, np.float32(self.lam), out)
        return out

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Protect the window."""
        return NOBODY, np.full(len(view), self.window)

    def select(self, view: View, excess: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take the lowest scores of the requests whose buffer is full."""
        due = (view.length > view.prompt) & ((view.length - view.prompt) % self.buffer == 0) & (excess >= self.buffer)
        chosen = ScorePolicy.select(self, view.subset(due), excess[due])[0] if due.any() else NOBODY
        return chosen, np.where(due, excess, 0)


@njit
def _mix(
    start: np.ndarray, n: np.ndarray, window: np.ndarray, newest: int, reach: int, lam: np.float32, out: np.ndarray
) -> None:
    """Turn the similarity in ``out`` into the score; the newest tokens have no importance and do not need one."""
    for b in range(len(start)):
        first, past = start[b], max(n[b] - newest, 0)
        seen, worth = window[first : first + past], out[first : first + n[b]]
        total = np.float32(0)
        for i in range(past):
            total += seen[i]
        scale = lam * np.float32(n[b]) / max(total, np.float32(1e-30))
        for i in range(n[b]):
            most = np.float32(0)
            for j in range(max(i - reach, 0), min(i + reach + 1, past)):
                most = max(most, seen[j])
            worth[i] = scale * most - (np.float32(1) - lam) * worth[i]
