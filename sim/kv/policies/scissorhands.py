"""Scissorhands: persistence of importance, by vote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.jit import njit
from sim.kv.policies.base import ScorePolicy, lowest, policies
from sim.kv.view import View

__all__ = ["Scissorhands"]


@policies.register("scissorhands")
@dataclass(frozen=True, slots=True)
class Scissorhands(ScorePolicy):
    """Each of the last ``history`` queries votes for the tokens it attends to most; the least voted die.

    Source: Liu et al., NeurIPS 2023 (arXiv 2305.17118); lzcemma/Scissorhands. The paper drops half of the budget at
    once when the cache is full, which holds fewer tokens than the budget allows most of the time; to compare policies
    at equal retention the default here drops one. Votes are of one token set for all layers and heads, on the mean over
    them.

    Parameters
    ----------
    history
        Queries whose votes count.
    recent
        Newest tokens that never die.
    drop
        Tokens to drop at once when over budget, at least as many as are over it.
    threshold
        A query votes for a token if its attention is above this quantile of the query's own; 0 means above the mean
        (1 / live tokens), as in the paper.
    """

    history: int = 100
    recent: int = 10
    drop: int = 1
    threshold: float = 0.9

    attends = True

    def __post_init__(self) -> None:
        if self.history < 1 or self.recent < 0 or self.drop < 1:
            raise InputError("scissorhands: expected history and drop of at least 1 and recent of at least 0")
        if not 0 <= self.threshold < 1:
            raise InputError(f"scissorhands: threshold: expected a quantile in [0, 1), got {self.threshold}")

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """The vote count, and the votes themselves: one bit a query in a ring of 32-bit words."""
        return ("votes", *(f"votes_{word}" for word in range(-(-self.history // 32))))

    def begin(self, view: View) -> None:
        """Let the last queries of the prompt vote, oldest first."""
        for back in range(min(self.history, int(view.length.max(initial=0))) - 1, -1, -1):
            asked = view.subset(view.length > back)
            self._vote(asked, asked.query(back), back)

    def observe(self, view: View) -> None:
        """Let the newest query vote."""
        self._vote(view, view.attention(), 0)

    def score(self, view: View) -> NDArray[np.float32]:
        """Return the votes."""
        return view.columns["votes"]

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Protect the newest."""
        return np.zeros(len(view), np.int64), np.full(len(view), self.recent)

    def select(self, view: View, excess: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take the least voted, ``drop`` at a time."""
        newest = np.clip(self.recent, 1, view.keep)
        counts = np.maximum(excess, np.minimum(self.drop, view.n - newest))
        return lowest(self.score(view), view.start, view.n, np.zeros_like(newest), newest, counts), counts

    def _vote(self, view: View, attention: NDArray[np.float32], back: int) -> None:
        words = tuple(view.columns[name].view(np.uint32) for name in self.columns[1:])
        votes = view.columns["votes"]
        _vote(attention, view.start, view.n, view.length, back, self.history, self.threshold, votes, words)


@njit
def _vote(
    attention: np.ndarray,
    start: np.ndarray,
    n: np.ndarray,
    length: np.ndarray,
    back: int,
    history: int,
    threshold: float,
    votes: np.ndarray,
    words: tuple[np.ndarray, ...],
) -> None:
    """Replace, in each request's ring, the vote of the query ``history`` ago by that of the query at -1 - back."""
    for b in range(len(start)):
        first, last = start[b], start[b] + n[b]
        mine = attention[first : last - back]
        if len(mine) == 0:
            continue
        bound = _quantile(mine, int(threshold * (len(mine) - 1))) if threshold > 0 else np.float32(1.0 / len(mine))
        bit = (length[b] - 1 - back) % history
        shift = np.uint32(bit % 32)
        for w in range(len(words)):
            if w == bit // 32:
                word = words[w]
                for cell in range(first, last):
                    old = np.uint32((word[cell] >> shift) & np.uint32(1))
                    new = np.uint32(attention[cell] > bound) if cell < last - back else np.uint32(0)
                    word[cell] = np.uint32(word[cell] ^ np.uint32((old ^ new) << shift))
                    votes[cell] += np.float32(new) - np.float32(old)


@njit
def _quantile(values: np.ndarray, rank: int) -> Any:
    """Return the ``rank``-th smallest (from 0) of non-negative float32 values: radix select on their bits."""
    bits = values.view(np.uint32)
    prefix = np.uint32(0)
    known = np.uint32(0)
    left = rank
    for low in (20, 8, 0):
        width = 12 if low else 8
        counts = np.zeros(1 << width, np.int64)
        mask = np.uint32((1 << width) - 1)
        for value in bits:
            if (value & known) == prefix:
                counts[(value >> np.uint32(low)) & mask] += 1
        digit = 0
        while left >= counts[digit]:
            left -= counts[digit]
            digit += 1
        prefix = np.uint32(prefix | np.uint32(np.uint32(digit) << np.uint32(low)))
        known = np.uint32(known | np.uint32(mask << np.uint32(low)))
    return np.array([prefix], np.uint32).view(np.float32)[0]
