"""What policies and attention models see of the token table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.units import ONE_UNIT, Units

__all__ = ["View", "fill_view"]

_N, _KEEP = 2, 5


class View:
    """Some requests (B of them) and the per-token columns of all (A cells).

    The live tokens of request ``i`` are the cells ``start[i] : start[i] + n[i]``, in logical order, without dead ones
    in between. Arrays are the table's own: change columns through :meth:`set` and :meth:`add`, which leave other
    requests alone, and nothing else.

    Attributes
    ----------
    row
        int64[B], row of the token table.
    key
        uint64[B], where the request's random draws come from; with several units (:mod:`sim.kv.units`), the unit's.
    start
        int64[B], first cell.
    n
        int64[B], live tokens.
    length
        int64[B], logical length; the newest query and token are at position ``length - 1``.
    prompt
        int64[B], length when decode began.
    keep
        int64[B], live tokens that the budget allows.
    position
        int32[A], logical position of each cell's token.
    columns
        float32[A] each, by name: the state that policy and attention model keep a token; it follows its token.
    units
        How the model is cut into units. Each unit of a request is a row, so that B counts units.
    scratch
        float32[2, A]: where :meth:`attention` (0) and everything else (1) puts its answers.
    """

    __slots__ = (
        "_attended",
        "_keys",
        "_model",
        "_numbers",
        "columns",
        "keep",
        "key",
        "length",
        "n",
        "position",
        "prompt",
        "row",
        "scratch",
        "start",
        "units",
    )

    def __init__(
        self,
        numbers: NDArray[np.int64],
        key: NDArray[np.uint64],
        position: NDArray[np.int32],
        columns: dict[str, NDArray[np.float32]],
        scratch: NDArray[np.float32],
        model: Any = None,
        attended: bool = False,
        units: Units = ONE_UNIT,
        keys: NDArray[np.uint64] | None = None,
    ) -> None:
        self._numbers = numbers
        self.row, self.start, self.n, self.length, self.prompt, self.keep = numbers  # the order of _N and _KEEP
        self.key = key
        self.position = position
        self.columns = columns
        self.scratch = scratch
        self._model = model
        self._attended = attended
        self.units = units
        self._keys = keys

    def __len__(self) -> int:
        return len(self.row)

    @property
    def newest(self) -> NDArray[np.int64]:
        """int64[B], the cell of each request's newest token."""
        cells: NDArray[np.int64] = self.start + self.n - 1
        return cells

    @property
    def unit(self) -> NDArray[np.int64]:
        """int64[B], which unit of its request each row is; groups of a hybrid model decide together and are all 0."""
        number: NDArray[np.int64] = self._place if not self.units.windows else np.zeros_like(self.row)
        return number

    @property
    def _place(self) -> NDArray[np.int64]:
        """int64[B], where each row stands in its bundle."""
        place: NDArray[np.int64] = self.row % self.units.count
        return place

    @property
    def request_key(self) -> NDArray[np.uint64]:
        """uint64[B], where draws come from that all units of a request have in common."""
        keys: NDArray[np.uint64] = self.key if self._keys is None else self._keys[self.row - self._place]
        return keys

    def set(self, column: str, values: NDArray[np.float32], sign: int = 1) -> None:
        """Copy ``values`` (float32[A]), or with ``sign=-1`` their negatives, into a column, in the requests' cells."""
        _set(self.columns[column], values, self.start, self.n, np.float32(sign))

    def add(self, column: str, values: NDArray[np.float32]) -> None:
        """Add ``values`` (float32[A]) to a column, in the cells of these requests."""
        _add(self.columns[column], values, self.start, self.n)

    def multiply(self, column: str, values: NDArray[np.float32]) -> None:
        """Multiply a column by ``values`` (float32[A]), in the cells of these requests."""
        _multiply(self.columns[column], values, self.start, self.n)

    def divide(self, column: str, values: NDArray[np.float32]) -> None:
        """Divide a column by ``values`` (float32[A], positive), in the cells of these requests."""
        _divide(self.columns[column], values, self.start, self.n)

    def attention(self) -> NDArray[np.float32]:
        """Return float32[A]: attention of each request's newest query over its live tokens, summing to 1 a request."""
        out: NDArray[np.float32] = self.scratch[0]
        if not self._attended:
            self._model.attend(self, out)
            self._attended = True
        return out

    def add_attention(self, column: str) -> None:
        """Do ``add(column, attention())``, in one pass over memory if the model can (``attend_and_add``)."""
        both = getattr(self._model, "attend_and_add", None)
        if both is None or self._attended:
            self.add(column, self.attention())
        else:
            both(self, self.scratch[0], self.columns[column])
            self._attended = True

    def accumulated(self) -> NDArray[np.float32]:
        """Return float32[A]: attention each token got from all queries of its prompt, summing to ``length``."""
        out: NDArray[np.float32] = self.scratch[1]
        self._model.accumulated(self, out)
        return out

    def query(self, back: int) -> NDArray[np.float32]:
        """Return float32[A]: attention of the prompt's query at position ``length - 1 - back``."""
        out: NDArray[np.float32] = self.scratch[1]
        self._model.query(self, back, out)
        return out

    def similarity(self) -> NDArray[np.float32]:
        """Return float32[A]: mean cosine of each token's key with the request's other live keys."""
        out: NDArray[np.float32] = self.scratch[1]
        self._model.similarity(self, out)
        return out

    def key_norms(self, *, newest: bool = False) -> NDArray[np.float32]:
        """Return float32[A]: norm of each token's key, for ever the same; with ``newest``, of the newest alone."""
        out: NDArray[np.float32] = self.scratch[1]
        self._model.key_norms(self, newest, out)
        return out

    def value_norms(self, *, newest: bool = False) -> NDArray[np.float32]:
        """Return float32[A]: norm of each token's value, for ever the same; with ``newest``, of the newest alone."""
        out: NDArray[np.float32] = self.scratch[1]
        self._model.value_norms(self, newest, out)
        return out

    def expected(self) -> NDArray[np.float32]:
        """Return float32[A]: attention that each prompt token can expect of queries to come, summing to 1 a request."""
        out: NDArray[np.float32] = self.scratch[1]
        self._model.expected(self, out)
        return out

    def over_budget(self) -> tuple[View, NDArray[np.int64]]:
        """Return the view of the requests that hold more than their budget, and int64[B], by how many tokens each."""
        numbers, key = np.empty_like(self._numbers), np.empty_like(self.key)
        excess = np.empty(len(self), np.int64)
        count = _over_budget(self._numbers, self.key, numbers, key, excess)
        if count == len(self):
            return self, excess
        return self._with(numbers[:, :count], key[:count]), excess[:count]

    def subset(self, where: NDArray[np.bool_] | NDArray[np.int64]) -> View:
        """Return the view of some of these requests."""
        # Rows side by side in memory, as in any other view: kernels are compiled for that.
        return self._with(np.ascontiguousarray(self._numbers[:, where]), self.key[where])

    def _with(self, numbers: NDArray[np.int64], key: NDArray[np.uint64]) -> View:
        shown = self.position, self.columns, self.scratch, self._model, self._attended
        return View(numbers, key, *shown, self.units, self._keys)


@njit
def _over_budget(
    numbers: np.ndarray, key: np.ndarray, new_numbers: np.ndarray, new_key: np.ndarray, excess: np.ndarray
) -> int:
    """Move requests with more live tokens than they may keep together; return how many there are."""
    count = 0
    for b in range(len(key)):
        more = numbers[_N, b] - numbers[_KEEP, b]
        if more > 0:
            for k in range(len(numbers)):
                new_numbers[k, count] = numbers[k, b]
            new_key[count] = key[b]
            excess[count] = more
            count += 1
    return count


@njit
def _set(column: np.ndarray, values: np.ndarray, start: np.ndarray, n: np.ndarray, sign: np.float32) -> None:
    for b in range(len(start)):
        # Slices, and loops from 0: the compiler vectorises those.
        mine, new = column[start[b] : start[b] + n[b]], values[start[b] : start[b] + n[b]]
        for i in range(len(mine)):
            mine[i] = sign * new[i]


@njit
def _add(column: np.ndarray, values: np.ndarray, start: np.ndarray, n: np.ndarray) -> None:
    for b in range(len(start)):
        mine, new = column[start[b] : start[b] + n[b]], values[start[b] : start[b] + n[b]]
        for i in range(len(mine)):
            mine[i] += new[i]


@njit
def _multiply(column: np.ndarray, values: np.ndarray, start: np.ndarray, n: np.ndarray) -> None:
    for b in range(len(start)):
        mine, new = column[start[b] : start[b] + n[b]], values[start[b] : start[b] + n[b]]
        for i in range(len(mine)):
            mine[i] *= new[i]


@njit
def _divide(column: np.ndarray, values: np.ndarray, start: np.ndarray, n: np.ndarray) -> None:
    for b in range(len(start)):
        mine, new = column[start[b] : start[b] + n[b]], values[start[b] : start[b] + n[b]]
        for i in range(len(mine)):
            mine[i] /= new[i]


@njit
def fill_view(
    records: np.ndarray, rows: np.ndarray, share: float, tokens: int, out: np.ndarray, key: np.ndarray
) -> None:
    """Copy what a :class:`View` needs of each row, and work out the budget."""
    for i in range(len(rows)):
        record = records[rows[i]]
        key[i] = record.key
        out[0, i] = rows[i]
        out[1, i] = record.start
        # Slots are given before they are written; with asynchronous scheduling those of the next step are out already.
        length = record.computed - record.sched
        out[2, i] = record.live - record.sched
        out[3, i] = length
        out[4, i] = record.decode_from
        # A hair less, so that 0.1 * 30 = 3.0000000000000004 keeps 3 tokens and not 4.
        out[5, i] = max(1, int(np.ceil(share * length - 1e-9)) if tokens == 0 else tokens)
