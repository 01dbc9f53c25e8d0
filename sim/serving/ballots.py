"""Units that decide alone and share one block table: a slot is free when the last of them has dropped its token.

Each unit of a request has a row here, with cells and columns of its own and no blocks: what a policy looks at. The
cache has one row a request, as ever, and of each token how many units have dropped it. When all have, it dies there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.arena import make_room
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.state import State
from sim.kv.tokens import close_gaps
from sim.kv.units import Units

__all__ = ["Ballots"]


@njit
def _catch_up(s: State, shared: np.ndarray, rows: np.ndarray, first: np.ndarray, units: int, at: int) -> int:
    """Give units the tokens that their requests have computed, from request ``at`` on; stop where cells are short.

    A cell's slot is its position, as if nothing had ever moved: so whole pages can be told.
    """
    while at < len(rows):
        theirs = shared[rows[at]]
        computed = theirs.computed - theirs.sched  # what the step after this one was given is not computed
        for row in range(first[at], first[at] + units):
            mine = s.rows[row]
            tokens = computed - mine.computed
            if not make_room(s, row, tokens):
                return at
            cell = mine.start + mine.live
            for i in range(tokens):
                s.position[cell + i] = mine.computed + i
                s.slot[cell + i] = mine.computed + i
                s.columns[:, cell + i] = 0.0
            mine.live += tokens
            mine.computed = computed
            mine.length = theirs.length
            mine.decode_from = theirs.decode_from
        at += 1
    return at


@njit
def _count(
    position: np.ndarray,
    s: State,
    shared: np.ndarray,
    victims: np.ndarray,
    counts: np.ndarray,
    units: int,
    rows: np.ndarray,
    cells: np.ndarray,
    died: np.ndarray,
) -> int:
    """Count the votes against tokens, and name those that no unit holds any more.

    Parameters
    ----------
    position
        Of the units' cells, which ``victims`` number, ``counts`` of them for each unit.
    s
        The cache; its one column has the votes so far.
    shared
        int64[B], row of each unit's request in the cache, those of a request side by side.
    rows, cells, died
        To be filled: requests, their cells ascending, and how many of them each.

    Returns
    -------
    int
        Requests that lose tokens.
    """
    dropped = s.columns[0]
    found, requests, at, first = 0, 0, 0, 0
    for b in range(len(shared)):
        record = s.rows[shared[b]]
        low = record.start
        for victim in victims[at : at + counts[b]]:
            high = record.start + record.live
            while low < high:
                middle = (low + high) // 2
                if s.position[middle] < position[victim]:
                    low = middle + 1
                else:
                    high = middle
            dropped[low] += np.float32(1)
            if dropped[low] == units:
                cells[found] = low
                found += 1
        at += counts[b]
        if b + 1 == len(shared) or shared[b + 1] != shared[b]:
            if found > first:
                cells[first:found] = np.sort(cells[first:found])
                rows[requests] = shared[b]
                died[requests] = found - first
                requests += 1
            first = found
    return requests


@njit
def _drop(s: State, rows: np.ndarray, victims: np.ndarray, counts: np.ndarray) -> None:
    """Take the victims out of the cells of their units."""
    at = 0
    for b in range(len(rows)):
        if counts[b] > 0:
            record = s.rows[rows[b]]
            mine = victims[at : at + counts[b]]
            record.start += close_gaps(s.position, s.slot, s.columns, mine, record.start, record.start + record.live)
            record.live -= counts[b]
            at += counts[b]


class Ballots(KVCache):
    """The token table of the units.

    Parameters
    ----------
    units
        How the model is cut.
    block_size
        Token slots a block of the cache.
    columns
        What policy and attention model keep of each token, by unit.
    """

    shared_columns = ("dropped",)
    """What the cache has to keep of each token: how many units have dropped it."""

    def __init__(self, units: Units, block_size: int, columns: Sequence[str]) -> None:
        super().__init__(2, block_size, columns=columns, units=units)
        self._first: NDArray[np.int64] = np.zeros(0, np.int64)  # by row of the cache: first row here, -1 if none
        self._shared: NDArray[np.int64] = np.zeros(0, np.int64)  # by row here: row of the cache

    def _make_tables(self, tokens: int) -> None:
        """Do nothing: there are no blocks to list."""

    def follow(self, cache: KVCache, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take over what requests have computed.

        Parameters
        ----------
        cache
            The cache that they share blocks of.
        rows
            int64[B], their rows there.

        Returns
        -------
        int64[B * units]
            The rows of their units, those of a request side by side.
        """
        theirs = cache.store.s.rows
        self._first = _longer(self._first, len(theirs))
        for row in rows[self._first[rows] < 0].tolist():
            record = theirs[row]
            opened = self.open(0, *(int(record[name]) for name in ("key", "length", "target", "produced")))
            self._first[row] = opened
            self._shared = _longer(self._shared, len(self.store.s.rows))
            self._shared[opened : opened + self.units.count] = row
        first = self._first[rows]
        at = 0
        while (at := int(_catch_up(self.store.s, theirs, rows, first, self.units.count, at))) < len(rows):
            record = theirs[int(rows[at])]
            for row in self.bundle(int(first[at])):
                tokens = int(record["computed"] - record["sched"] - self.store.s.rows[row]["computed"])
                if not make_room(self.store.s, row, tokens):
                    self.grow_cells(row, tokens)
        units: NDArray[np.int64] = (first[:, None] + np.arange(self.units.count)).ravel()
        return units

    def drop(
        self, cache: KVCache, rows: NDArray[np.int64], victims: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> None:
        """Let units drop the tokens in these cells (as :meth:`evict_cells`), and the cache those that no unit holds."""
        shared = self._shared[rows]
        requests, died = np.empty((2, len(rows)), np.int64)
        cells = np.empty(len(victims), np.int64)
        s = self.store.s
        count = _count(s.position, cache.store.s, shared, victims, counts, self.units.count, requests, cells, died)
        _drop(s, rows, victims, counts)
        if count:
            cache.evict_cells(requests[:count], cells[: died[:count].sum()], died[:count])

    def leave(self, row: int) -> None:
        """Forget the request in this row of the cache."""
        if row < len(self._first) and self._first[row] >= 0:
            self.close(int(self._first[row]), Kind.FINISH, 0)
            self._first[row] = -1


def _longer(array: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the array with so many entries at least, -1 in the new ones."""
    return np.concatenate([array, np.full(max(0, length - len(array)), -1)])
