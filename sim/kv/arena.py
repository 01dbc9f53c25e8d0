"""Where the cells of a row lie: side by side, with room to grow, and moved together when the arena gets thin."""

from __future__ import annotations

import numpy as np

from sim.jit import njit
from sim.kv.state import State, Store

__all__ = ["CellArena", "make_room"]


@njit
def _slide_row(s: State, row: int, to: int) -> None:
    """Move the row's cells down to ``to``."""
    record = s.rows[row]
    start = record.start
    if start != to:
        for i in range(record.live):
            s.position[to + i] = s.position[start + i]
        for i in range(record.live):
            s.slot[to + i] = s.slot[start + i]
        for c in range(len(s.columns)):
            column = s.columns[c]
            for i in range(record.live):
                column[to + i] = column[start + i]
    record.start = to


@njit
def make_room(s: State, row: int, count: int) -> bool:
    """Say whether the row has cells for ``count`` more tokens, after moving back to its first cell if that helps."""
    record = s.rows[row]
    if record.tracked and record.start + record.live + count > record.origin + record.cap:
        if record.live + count > record.cap:
            return False
        _slide_row(s, row, record.origin)
    return True


@njit
def _slide(s: State, rows: np.ndarray) -> int:
    """Move the cells of ``rows`` (ascending by start) to the front of the arena; return the cells in use."""
    top = 0
    for row in rows:
        _slide_row(s, row, top)
        s.rows[row].origin = top
        top += s.rows[row].cap
    return top


class CellArena:
    """Hands out runs of cells to rows, and slides them together when they have come to lie too far apart.

    The used part of the arena stays within twice what the running requests have asked for, so that an operation over a
    whole column costs by live tokens and not by what once was there.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: dict[int, int] = {}
        self._total = 0
        self.top = 0

    def open(self, row: int, cells: int) -> None:
        """Give ``row``, which has no tokens yet, room for ``cells`` tokens."""
        start = self._place(cells)
        record = self._store.s.rows[row]
        record["origin"], record["start"], record["cap"] = start, start, cells
        self._ask(row, cells)

    def resize(self, row: int, cells: int) -> None:
        """Give ``row`` room for ``cells`` tokens in all, keeping those it has."""
        record = self._store.s.rows[row]
        if cells > record["cap"]:
            s = self._store.s
            mine = slice(int(record["start"]), int(record["start"] + record["live"]))
            # Making a place may slide the other rows over these cells.
            position, slot, columns = s.position[mine].copy(), s.slot[mine].copy(), s.columns[:, mine].copy()
            self._forget(row)
            start = self._place(cells)
            s = self._store.s
            mine = slice(start, start + len(position))
            s.position[mine], s.slot[mine], s.columns[:, mine] = position, slot, columns
            record["origin"] = record["start"] = start
        else:
            _slide_row(self._store.s, row, int(record["origin"]))
            self._forget(row)
        record["cap"] = cells
        self._ask(row, cells)
        self._tidy()

    def close(self, row: int) -> None:
        """Take the cells of ``row`` back."""
        self._forget(row)
        self._tidy()

    def _ask(self, row: int, cells: int) -> None:
        self._asked[row] = cells
        self._total += cells

    def _forget(self, row: int) -> None:
        self._total -= self._asked.pop(row)

    def _place(self, cells: int) -> int:
        if self.top + cells > len(self._store.s.position):
            # Sliding together must win much, or it would be done again and again.
            if 2 * (self._total + cells) > len(self._store.s.position):
                self._store.grow_cells(2 * (self.top + cells))
            else:
                self._compact()
        start = self.top
        self.top += cells
        return start

    def _tidy(self) -> None:
        if self.top > 4096 and self.top > 2 * self._total:
            self._compact()

    def _compact(self) -> None:
        s = self._store.s
        rows = np.fromiter(self._asked, np.int64, len(self._asked))
        rows = rows[np.argsort(s.rows["start"][rows], kind="stable")]
        self.top = int(_slide(s, rows))
