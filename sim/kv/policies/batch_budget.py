"""One budget for all requests that decode: their tokens compete with each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.bits import row_sum
from sim.errors import InputError
from sim.jit import njit
from sim.kv.policies.base import NOBODY, EvictionPolicy, ScorePolicy, lowest, sortable
from sim.kv.policies.pooled import share_budget
from sim.kv.view import View

__all__ = ["FLOOR", "BatchBudget", "few_victims", "shares"]

FLOOR = 0.2
"""Ada-KV's (FFY0/AdaKV): of what a request could keep alone, the share that it keeps for certain."""

_CHUNK = 128
_NOTHING = np.int32(0x7FFFFFFF)


class BatchBudget:
    """Names who dies when requests may keep together what each could keep alone, and no more.

    A token is worth its share of its request's score; the least worth of all requests die. So if scores are attention,
    what is dropped is as little attention as can be, summed over requests: the argument of Ada-KV (Feng et al., arXiv
    2407.11550) among heads, made among requests. What a policy protects under a request's own budget stays, and so do
    ``floor`` of that budget. Nobody gets a token back: a request whose tokens are worth more later grows with what it
    generates.

    Parameters
    ----------
    policy
        Says what tokens are worth.
    floor
        Share of its own budget that a request keeps for certain.

    Raises
    ------
    InputError
        If scores of the policy do not compare across requests.
    """

    def __init__(self, policy: EvictionPolicy, floor: float = FLOOR) -> None:
        if not isinstance(policy, ScorePolicy) or not policy.pools:
            raise InputError(
                f"budget_scope batch: tokens of different requests cannot compete by what policy {policy.name!r} says "
                "of them (`pools` of a policy is true where they can, as in h2o, tova, scissorhands and keyformer)"
            )
        self._policy = policy
        self._floor = floor
        self._shares = np.zeros(0, np.float32)

    def select(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Name the victims among all requests that decode.

        Parameters
        ----------
        view
            All of them, each with the budget that it would have alone.

        Returns
        -------
        victims : int64[V]
            Cells, request by request, ascending inside one.
        counts : int64[B]
            How many of them belong to each request.
        """
        start, n, keep = view.start, view.n, view.keep
        live = int(n.sum())
        dead = live - int(keep.sum())
        if dead <= 0:
            return NOBODY, np.zeros(len(view), np.int64)
        score = self._policy.score(view)
        oldest, newest = _protected(*self._policy.protect(view), keep)
        if dead * (len(view) + 2 * _CHUNK) < live:
            return few_victims(score, start, n, keep, self._floor, oldest, newest, dead)
        if len(self._shares) < len(score):
            self._shares = np.zeros(len(score), np.float32)
        shares(score, start, n, self._shares)
        one = np.zeros(len(view), np.int64)
        left = share_budget(self._shares, start, n, keep, one, self._floor, oldest, newest)
        counts = n - left
        over = counts > 0
        return lowest(score, start[over], n[over], left[over], oldest[over], newest[over], counts[over]), counts


def _protected(
    oldest: NDArray[np.int64], newest: NDArray[np.int64], keep: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many tokens :func:`sim.kv.policies.base.lowest` would protect under each request's own budget."""
    recent = np.maximum(1, np.minimum(newest if len(newest) else 1, keep))
    return np.maximum(0, np.minimum(oldest if len(oldest) else 0, keep - recent)), recent


@njit
def shares(score: np.ndarray, start: np.ndarray, n: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` with each token's share of its request's score; 0 where that has none."""
    for b in range(len(start)):
        mine, answer = score[start[b] : start[b] + n[b]], out[start[b] : start[b] + n[b]]
        scale = _scale(mine)
        for i in range(len(mine)):
            answer[i] = mine[i] * scale


@njit
def _scale(mine: np.ndarray) -> np.float32:
    total = row_sum(mine)
    return np.float32(1) / total if total > 0 else np.float32(0)


@njit
def few_victims(
    score: np.ndarray,
    start: np.ndarray,
    n: np.ndarray,
    keep: np.ndarray,
    floor: float,
    oldest: np.ndarray,
    newest: np.ndarray,
    dead: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Name who dies by :func:`shares` and :func:`share_budget`, where that is few: without sorting the living.

    Scores are passed over once for their sum and once for the least of each chunk. Then the least of all is taken out,
    ``dead`` times, each time looking again at one chunk.

    Parameters
    ----------
    score, start, n, keep, floor
        Of :func:`sim.kv.policies.pooled.share_budget`, for a single group.
    oldest, newest
        int64[B], tokens of each row that are protected: together at most ``keep``.
    dead
        ``n.sum() - keep.sum()``, at least 1.

    Returns
    -------
    victims : ndarray
        int64[dead], cells, row by row, ascending inside one.
    counts : ndarray
        int64[B], how many of them belong to each row.
    """
    bits = score.view(np.int32)
    rows = len(start)
    first, last, most, chunk = np.zeros((4, rows + 1), np.int64)
    for b in range(rows):
        spared = min(newest[b], n[b])
        old = min(oldest[b], n[b] - spared)
        first[b], last[b] = start[b] + old, start[b] + n[b] - spared
        most[b] = n[b] - max(spared + old, min(n[b], int(floor * keep[b])))
        chunk[b + 1] = chunk[b] + (last[b] - first[b] + _CHUNK - 1) // _CHUNK
    least = np.empty(chunk[-1], np.int32)
    scale = np.empty(rows, np.float32)
    head = np.full(rows, _NOTHING)
    for b in range(rows):
        if most[b] > 0:
            scale[b] = _scale(score[start[b] : start[b] + n[b]])
            mine = bits[first[b] : last[b]]
            for c in range(chunk[b + 1] - chunk[b]):
                least[chunk[b] + c] = _least(mine[c * _CHUNK : (c + 1) * _CHUNK])
            head[b] = _share(least[chunk[b] : chunk[b + 1]].min(), scale[b])
    whose, cells = np.empty((2, 2 * dead), np.int64)
    taken, at_bound = np.zeros((2, rows), np.int64)
    gone = np.full((rows, 2), np.int64(_NOTHING))
    bound = head.min()
    for k in range(dead):
        b = int(np.argmin(head))
        if head[b] > bound:
            bound = head[b]
            at_bound[:] = 0
        whose[k] = b
        cells[k] = _take(bits, first[b], last[b], least[chunk[b] : chunk[b + 1]], gone[b])
        taken[b] += 1
        at_bound[b] += 1
        head[b] = _NOTHING if taken[b] == most[b] else _share(least[chunk[b] : chunk[b + 1]].min(), scale[b])
    # Of those that are worth as much as the last one, rows keep as many in turn.
    ties = np.zeros(rows, np.int64)
    for b in range(rows):
        if at_bound[b] > 0 or head[b] == bound:
            ties[b] = min(_count(score[first[b] : last[b]], scale[b], bound), most[b] - taken[b] + at_bound[b])
    counts = taken - at_bound + ties - _in_turn(ties, ties.sum() - dead + (taken - at_bound).sum())
    k = dead
    for b in range(rows):
        for _ in range(counts[b] - taken[b]):
            whose[k] = b
            cells[k] = _take(bits, first[b], last[b], least[chunk[b] : chunk[b + 1]], gone[b])
            k += 1
    ends = np.cumsum(counts)
    at = ends - counts
    victims = np.empty(dead, np.int64)
    for i in range(k):
        if at[whose[i]] < ends[whose[i]]:  # taken too many: the last ones live
            victims[at[whose[i]]] = cells[i]
            at[whose[i]] += 1
    for b in range(rows):
        victims[ends[b] - counts[b] : ends[b]].sort()
    return victims, counts


@njit
def _least(run: np.ndarray) -> np.int32:
    low = _NOTHING
    for i in range(len(run)):
        low = min(low, sortable(run[i]))
    return low


@njit
def _share(least: np.int32, scale: np.float32) -> np.int32:
    """Return a score times ``scale``, both as :func:`sortable` bits."""
    bits = np.empty(1, np.int32)
    bits[0] = sortable(least)  # its own inverse
    share = bits.view(np.float32)
    share[0] *= scale
    return sortable(bits[0])


@njit
def _take(bits: np.ndarray, first: int, last: int, least: np.ndarray, taken: np.ndarray) -> int:
    """Return the cell of least score among those not taken, the first among equals, and take it out of ``least``.

    ``taken`` is the last one before it, as score and cell: whoever comes before that, in this order, has been taken.
    """
    c = int(np.argmin(least))
    value, low = least[c], _NOTHING
    begin = first + c * _CHUNK
    run = bits[begin : min(begin + _CHUNK, last)]
    at = max(0, taken[1] - begin + 1) if taken[0] == value else 0
    while sortable(run[at]) != value:
        at += 1
    again = at + 1
    while again < len(run) and sortable(run[again]) != value:
        again += 1
    if again < len(run):
        low = value
    else:
        for i in range(len(run)):
            key = sortable(run[i])
            low = min(low, key if key > value else _NOTHING)
    least[c] = low
    taken[0], taken[1] = value, begin + at
    return int(begin + at)


@njit
def _count(score: np.ndarray, scale: np.float32, bound: np.int32) -> int:
    """Count the tokens whose share is ``bound`` (:func:`sortable` bits)."""
    low = np.empty(1, np.int32)
    low[0] = sortable(bound)
    share = low.view(np.float32)[0]
    found = np.int32(0)
    for i in range(len(score)):
        found += np.int32(score[i] * scale == share)
    return int(found)


@njit
def _in_turn(ties: np.ndarray, kept: int) -> np.ndarray:
    """Share out ``kept`` places among rows with so many candidates: one a turn, in order, as long as there are any."""
    low, high = 0, ties.max()
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(ties, middle).sum() <= kept:
            low = middle
        else:
            high = middle - 1
    shared: np.ndarray = np.minimum(ties, low)
    left = kept - shared.sum()
    for b in range(len(ties)):
        if left > 0 and ties[b] > shared[b]:
            shared[b] += 1
            left -= 1
    return shared
