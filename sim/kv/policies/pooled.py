"""One budget for several rows: their tokens compete with each other."""

from __future__ import annotations

import numpy as np

from sim.jit import njit
from sim.kv.policies.base import sortable

__all__ = ["share_budget"]


@njit
def share_budget(
    score: np.ndarray,
    start: np.ndarray,
    n: np.ndarray,
    keep: np.ndarray,
    group: np.ndarray,
    floor: float,
    oldest: np.ndarray,
    newest: np.ndarray,
) -> np.ndarray:
    """Share out the budgets of the rows of a group by their tokens' scores: the best of all of them stay.

    Of each row at least ``int(floor * keep)`` tokens stay, its best, and those that are protected, as
    :func:`sim.kv.policies.base.lowest` protects them under the row's own budget. Where equal scores compete for the
    last places, the rows take turns, so that rows whose tokens all look alike end up alike.

    Parameters
    ----------
    score
        float32[A], not NaN.
    start, n, keep
        int64[B]: first cell, live tokens (at least 1) and own budget (at least 1) of each row.
    group
        int64[B]: rows with equal numbers share. They need not lie side by side.
    floor
        Share in [0, 1] of its own budget that a row has for certain.
    oldest, newest
        int64[B] or empty: tokens of each row that are protected; the newest token always is.

    Returns
    -------
    ndarray
        int64[B]: budgets with the same sum in each group, none above ``n`` unless that of all is.
    """
    shared = keep.copy()
    order = np.argsort(group, kind="mergesort")
    first = 0
    while first < len(order):
        last, live, total = first, 0, 0
        while last < len(order) and group[order[last]] == group[order[first]]:
            live += n[order[last]]
            total += keep[order[last]]
            last += 1
        if last - first > 1:
            if total >= live:
                _keep_all(n, keep, order[first:last], shared)
            else:
                _compete(score, start, n, keep, order[first:last], total, live, floor, oldest, newest, shared)
        first = last
    return shared


@njit
def _keep_all(n: np.ndarray, keep: np.ndarray, rows: np.ndarray, shared: np.ndarray) -> None:
    """Let rows that have more than they need give it to those that have less."""
    short = 0
    for b in rows:
        short += max(0, n[b] - keep[b])
    for b in rows:
        given = min(max(0, keep[b] - n[b]), short)
        short -= given
        shared[b] = max(keep[b] - given, n[b])


@njit
def _compete(
    score: np.ndarray,
    start: np.ndarray,
    n: np.ndarray,
    keep: np.ndarray,
    rows: np.ndarray,
    total: int,
    live: int,
    floor: float,
    oldest: np.ndarray,
    newest: np.ndarray,
    shared: np.ndarray,
) -> None:
    bits = score.view(np.int32)
    rivals = np.empty(live, np.int32)
    ends = np.empty(len(rows), np.int64)
    count = 0
    for r in range(len(rows)):
        b = rows[r]
        spared = min(max(1, min(newest[b], keep[b])) if len(newest) > 0 else 1, n[b])
        old = max(0, min(min(oldest[b], keep[b] - spared), n[b] - spared)) if len(oldest) > 0 else 0
        certain = max(spared + old, min(n[b], int(floor * keep[b])))
        mine = np.empty(n[b] - spared - old, np.int32)
        for i in range(len(mine)):
            mine[i] = sortable(bits[start[b] + old + i])
        left = n[b] - certain
        if 0 < left < len(mine):
            mine = np.partition(mine, left)
        rivals[count : count + left] = mine[:left]
        count += left
        ends[r] = count
        shared[b] = certain
        total -= certain
    if total == 0:
        return
    bound = np.partition(rivals[:count], count - total)[count - total]
    ties = np.zeros(len(rows), np.int64)
    at = 0
    for r in range(len(rows)):
        while at < ends[r]:
            if rivals[at] > bound:
                shared[rows[r]] += 1
                total -= 1
            elif rivals[at] == bound:
                ties[r] += 1
            at += 1
    while total > 0:
        for r in range(len(rows)):
            if total > 0 and ties[r] > 0:
                shared[rows[r]] += 1
                ties[r] -= 1
                total -= 1
