"""Whole pages only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.cache import KVCache
from sim.kv.policies.base import NOBODY, EvictionPolicy, ScorePolicy
from sim.kv.reclaim.base import Reclaimer, reclaimers
from sim.kv.view import View

__all__ = ["Page"]


@reclaimers.register("page")
@dataclass(frozen=True, slots=True)
class Page(Reclaimer):
    """The policy may drop whole blocks only: those of least mean score, as soon as a block is over the budget.

    As PagedEviction (arXiv 2509.04377) and OpenVINO's cache eviction do it. Nothing is ever fragmented and nothing is
    copied; the price is whom it kills: tokens that the policy would keep die with their neighbours, and up to a block
    less one more than the budget live. Blocks with a protected token, and the tail while it has room, stay. Of a policy
    that does not score tokens those blocks die whose tokens all would.
    """

    def choose(
        self, cache: KVCache, policy: EvictionPolicy, view: View, excess: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Name whole blocks of those whose excess is a block or more, if the policy would drop so many now."""
        size = cache.block_size
        counts = np.zeros(len(view), np.int64)
        due = np.flatnonzero(excess >= size)
        if len(due) == 0:
            return NOBODY, counts
        over = view.subset(due)
        victims, wanted = policy.select(over, excess[due])
        slot = cache.store.s.slot
        if isinstance(policy, ScorePolicy):
            pages = wanted // size
            oldest, newest = policy.protect(over)
            score = policy.score(over)
            victims = _least_pages(score, slot, size, over.start, over.n, over.keep, oldest, newest, pages)
        else:
            pages = np.empty_like(wanted)
            victims = _whole_pages(slot, size, victims, wanted, pages)
        counts[due] = pages * size
        return victims, counts


@njit
def _whole_pages(slot: np.ndarray, size: int, victims: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Return those victims with which a whole block dies; fill ``pages`` with how many blocks of each request."""
    kept = np.empty(len(victims), np.int64)
    at, i = 0, 0
    end = 0
    for b in range(len(counts)):
        end += counts[b]
        pages[b] = 0
        while i + size <= end:
            last = victims[i] + size - 1
            if (
                victims[i + size - 1] == last
                and slot[victims[i]] % size == 0
                and slot[last] == slot[victims[i]] + size - 1
            ):
                kept[at : at + size] = victims[i : i + size]
                at += size
                i += size
                pages[b] += 1
            else:
                i += 1
        i = end
    return kept[:at]


@njit
def _least_pages(
    score: np.ndarray,
    slot: np.ndarray,
    size: int,
    start: np.ndarray,
    n: np.ndarray,
    keep: np.ndarray,
    oldest: np.ndarray,
    newest: np.ndarray,
    wanted: np.ndarray,
) -> np.ndarray:
    """Return the cells of each request's ``wanted`` blocks of least mean score; lower ``wanted`` where there are fewer.

    What is protected is what :func:`sim.kv.policies.base.lowest` leaves out. Among equal means the oldest goes first.
    """
    victims = np.empty(wanted.sum() * size, np.int64)
    at = 0
    for b in range(len(start)):
        spared = max(1, min(newest[b], keep[b])) if len(newest) > 0 else 1
        first, last = start[b], start[b] + n[b] - spared
        if len(oldest) > 0:
            first += max(0, min(oldest[b], keep[b] - spared))
        page = np.empty(n[b] // size + 1, np.int64)
        mean = np.empty(len(page), np.float64)
        count = 0
        cell = first
        while cell + size <= last:
            # Nobody dies alone: a block's tokens lie side by side and are all alive.
            if slot[cell] % size == 0 and slot[cell + size - 1] == slot[cell] + size - 1:
                page[count] = cell
                mean[count] = score[cell : cell + size].mean()
                count += 1
                cell += size
            else:
                cell += 1
        wanted[b] = min(wanted[b], count)
        for k in np.sort(np.argsort(mean[:count], kind="mergesort")[: wanted[b]]):
            for i in range(size):
                victims[at] = page[k] + i
                at += 1
    return victims[:at]
