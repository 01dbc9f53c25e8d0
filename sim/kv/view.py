"""What policies and attention models see of the token table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit

__all__ = ["View"]


@dataclass(slots=True)
class View:
    """Some requests (B of them) and the per-token columns of all (A cells).

    The live tokens of request ``i`` are the cells ``start[i] : start[i] + n[i]``, in logical order, without dead ones
    in between. Arrays are the table's own: change columns through :meth:`set` and :meth:`add`, which leave other
    requests alone, and nothing else.
    """

    row: NDArray[np.int64]
    """[B] row of the token table."""
    key: NDArray[np.uint64]
    """[B] where the request's random draws come from."""
    start: NDArray[np.int64]
    """[B] first cell."""
    n: NDArray[np.int64]
    """[B] live tokens."""
    length: NDArray[np.int64]
    """[B] logical length; the newest query and token are at position ``length - 1``."""
    prompt: NDArray[np.int64]
    """[B] length when decode began."""
    keep: NDArray[np.int64]
    """[B] live tokens that the budget allows."""
    position: NDArray[np.int32]
    """[A] logical position of each cell's token."""
    columns: dict[str, NDArray[np.float32]]
    """[A] each: the state that policy and attention model keep a token; it follows its token."""
    model: Any = None
    """The attention model, for :meth:`attention`, :meth:`accumulated` and :meth:`query`."""
    scratch: Any = None
    """float32[2, A]: where those put their answers."""
    _attended: bool = False

    def __len__(self) -> int:
        return len(self.row)

    def set(self, column: str, values: NDArray[np.float32]) -> None:
        """Copy ``values`` (float32[A]) into a column, in the cells of these requests."""
        _set(self.columns[column], values, self.start, self.n)

    def add(self, column: str, values: NDArray[np.float32]) -> None:
        """Add ``values`` (float32[A]) to a column, in the cells of these requests."""
        _add(self.columns[column], values, self.start, self.n)

    def attention(self) -> NDArray[np.float32]:
        """Return float32[A]: attention of each request's newest query over its live tokens, summing to 1 a request."""
        out: NDArray[np.float32] = self.scratch[0]
        if not self._attended:
            self.model.attend(self, out)
            self._attended = True
        return out

    def accumulated(self) -> NDArray[np.float32]:
        """Return float32[A]: attention each token got from all queries of its prompt, summing to ``length``."""
        out: NDArray[np.float32] = self.scratch[1]
        self.model.accumulated(self, out)
        return out

    def query(self, back: int) -> NDArray[np.float32]:
        """Return float32[A]: attention of the prompt's query at position ``length - 1 - back``."""
        out: NDArray[np.float32] = self.scratch[1]
        self.model.query(self, back, out)
        return out

    def subset(self, where: NDArray[np.bool_] | NDArray[np.int64]) -> View:
        """Return the view of some of these requests."""
        return View(
            self.row[where],
            self.key[where],
            self.start[where],
            self.n[where],
            self.length[where],
            self.prompt[where],
            self.keep[where],
            self.position,
            self.columns,
            self.model,
            self.scratch,
            self._attended,
        )


@njit
def _set(column: np.ndarray, values: np.ndarray, start: np.ndarray, n: np.ndarray) -> None:
    for b in range(len(start)):
        # Slices, and loops from 0: the compiler vectorises those.
        mine, new = column[start[b] : start[b] + n[b]], values[start[b] : start[b] + n[b]]
        for i in range(len(mine)):
            mine[i] = new[i]


@njit
def _add(column: np.ndarray, values: np.ndarray, start: np.ndarray, n: np.ndarray) -> None:
    for b in range(len(start)):
        mine, new = column[start[b] : start[b] + n[b]], values[start[b] : start[b] + n[b]]
        for i in range(len(mine)):
            mine[i] += new[i]
