"""Scissorhands: persistence of importance, by vote."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import NOBODY, ScorePolicy, lowest, policies
from sim.kv.policies.kernels import replace_vote
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
        return _columns(self.history)

    @property
    def pools(self) -> bool:  # type: ignore[override]
        """Votes compare across requests; batches of deaths would not be the least voted of all."""
        return self.drop == 1

    @property
    def granule(self) -> int:  # type: ignore[override]
        """The batch."""
        return self.drop

    def begin(self, view: View) -> None:
        """Let the last queries of the prompt vote, oldest first."""
        shortest = int(view.length.min())
        for back in range(min(self.history, int(view.length.max())) - 1, -1, -1):
            asked = view if back < shortest else view.subset(view.length > back)
            self._vote(asked, asked.query(back), back)

    def observe(self, view: View) -> None:
        """Let the newest query vote."""
        self._vote(view, view.attention(), 0)

    def score(self, view: View) -> NDArray[np.float32]:
        """Return the votes."""
        return view.columns["votes"]

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Protect the newest."""
        return NOBODY, np.full(len(view), self.recent)

    def select(self, view: View, excess: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take the least voted, ``drop`` at a time."""
        newest = np.maximum(1, np.minimum(self.recent, view.keep))
        counts = np.maximum(excess, np.minimum(self.drop, view.n - newest)) if self.drop > 1 else excess
        return lowest(self.score(view), view.start, view.n, view.keep, NOBODY, newest, counts), counts

    def _vote(self, view: View, attention: NDArray[np.float32], back: int) -> None:
        words = tuple(view.columns[name].view(np.uint32) for name in self.columns[1:])
        votes = view.columns["votes"]
        replace_vote(attention, view.start, view.n, view.length, back, self.history, self.threshold, votes, words)


@lru_cache
def _columns(history: int) -> tuple[str, ...]:
    return ("votes", *(f"votes_{word}" for word in range(-(-history // 32))))
