"""A workload in memory, as columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.workload.request import Request

if TYPE_CHECKING:
    from sim.workload.describe import Description

__all__ = ["HASH_TOKENS", "MAX_TIME_NS", "MAX_TOKENS", "Trace"]

HASH_TOKENS = 512
"""Tokens a prefix hash covers where nothing else is said (Mooncake's convention)."""

MAX_TOKENS = 2**31 - 1
"""Longest prompt or output; token positions are 32-bit integers in the simulator."""

MAX_TIME_NS = 2**62
"""Latest arrival, about 146 years; leaves room for the simulation to go on after it."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival, one array a column; valid by construction.

    Parameters
    ----------
    arrival_ns
        int64[n], not decreasing, at least 0.
    prompt_tokens, output_tokens
        int64[n], at least 1.
    req_id
        n labels, or None for the ordinals ``first``, ``first + 1``, ... as text.
    prefix_hashes
        n int64 arrays (see :class:`Request`), or None where the workload knows nothing of shared text.
    session
        n labels (None where a request has none), or None.
    hash_tokens
        Prompt tokens that one prefix hash covers.
    name
        What to call the trace in results.
    notes
        What a reader left out, changed or estimated, one sentence each.
    first
        Ordinal of the first request: chunks of a longer trace keep their place in it.

    Raises
    ------
    InputError
        If columns differ in length, times are negative or go back, or a length is below 1.
    """

    arrival_ns: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    req_id: Sequence[str] | NDArray[Any] | None = None
    prefix_hashes: Sequence[NDArray[np.int64]] | None = None
    session: Sequence[str | None] | NDArray[Any] | None = None
    hash_tokens: int = HASH_TOKENS
    name: str = "trace"
    notes: tuple[str, ...] = ()
    first: int = 0

    def __post_init__(self) -> None:
        for field in ("arrival_ns", "prompt_tokens", "output_tokens"):
            object.__setattr__(self, field, self._integers(field))
        n = len(self.arrival_ns)
        for field in ("req_id", "prompt_tokens", "output_tokens", "prefix_hashes", "session"):
            column = getattr(self, field)
            if column is not None and len(column) != n:
                raise InputError(f"trace {self.name!r}: {field} has {len(column)} entries, arrival_ns has {n}")
        if self.hash_tokens < 1:
            raise InputError(f"trace {self.name!r}: hash_tokens is {self.hash_tokens}, expected at least 1")
        if n == 0:
            return
        if self.arrival_ns[0] < 0 or self.arrival_ns.max() > MAX_TIME_NS:
            raise InputError(f"trace {self.name!r}: arrival_ns must lie in 0 .. 2**62")
        back = np.flatnonzero(self.arrival_ns[1:] < self.arrival_ns[:-1])
        if len(back):
            raise InputError(f"trace {self.name!r}: request {self.first + back[0] + 1} arrives before its predecessor")
        for field in ("prompt_tokens", "output_tokens"):
            column = getattr(self, field)
            bad = np.flatnonzero((column < 1) | (column > MAX_TOKENS))
            if len(bad):
                raise InputError(
                    f"trace {self.name!r}: request {self.first + bad[0]}, {field}: expected 1 .. 2**31 - 1, "
                    f"got {column[bad[0]]}"
                )

    def _integers(self, field: str) -> NDArray[np.int64]:
        """Return the column as a read-only int64 array of its own dimension."""
        column = np.asarray(getattr(self, field))
        if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
            raise InputError(f"trace {self.name!r}: {field} must be a one-dimensional array of integers")
        column = column.astype(np.int64, copy=False).view()
        column.flags.writeable = False
        return column

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def total(self) -> int:
        """Number of requests."""
        return len(self)

    @property
    def ids(self) -> list[str]:
        """Labels of the requests."""
        if self.req_id is None:
            return [str(i) for i in range(self.first, self.first + len(self))]
        return [str(label) for label in self.req_id]

    @property
    def arrival_s(self) -> NDArray[np.float64]:
        """Arrival times in seconds (float64[n])."""
        return self.arrival_ns / 1e9

    def __getitem__(self, rows: slice | NDArray[Any]) -> Trace:
        """Return the requests in a slice, a boolean mask or an index array, with their labels."""
        picked = np.arange(len(self))[rows]
        contiguous = isinstance(rows, slice) and rows.step in (None, 1)
        first = self.first + int(picked[0]) if contiguous and len(picked) else self.first

        def pick(column: Any) -> Any:
            if column is None or isinstance(column, np.ndarray):
                return None if column is None else column[rows]
            return [column[i] for i in picked]

        return dataclasses.replace(
            self,
            arrival_ns=self.arrival_ns[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            req_id=None
            if contiguous and self.req_id is None
            else pick(self.ids if self.req_id is None else self.req_id),
            prefix_hashes=pick(self.prefix_hashes),
            session=pick(self.session),
            first=first,
        )

    def chunks(self, size: int = 8192) -> Iterator[Trace]:
        """Yield the trace in pieces of at most ``size`` requests; an empty trace yields nothing."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def requests(self) -> Iterator[Request]:
        """Yield the requests one by one."""
        ids = self.ids
        for i in range(len(self)):
            yield Request(
                ids[i],
                int(self.arrival_ns[i]),
                int(self.prompt_tokens[i]),
                int(self.output_tokens[i]),
                () if self.prefix_hashes is None else tuple(self.prefix_hashes[i].tolist()),
                None if self.session is None else self.session[i],
            )

    def same_requests(self, other: Trace) -> bool:
        """Say whether both traces hold the same requests; names and notes do not matter."""
        hashes = self.prefix_hashes is not None and any(map(len, self.prefix_hashes))
        return (not hashes or self.hash_tokens == other.hash_tokens) and list(self.requests()) == list(other.requests())

    def describe(self) -> Description:
        """Summarise lengths, rate, burstiness and sharing."""
        from sim.workload.describe import describe

        return describe(self)

    @classmethod
    def from_requests(
        cls, requests: Iterable[Request], *, hash_tokens: int = HASH_TOKENS, name: str = "trace"
    ) -> Trace:
        """Make a trace of single requests, given in order of arrival."""
        rows = list(requests)
        hashed = any(row.prefix_hashes for row in rows)
        return cls(
            np.array([row.arrival_ns for row in rows], np.int64),
            np.array([row.prompt_tokens for row in rows], np.int64),
            np.array([row.output_tokens for row in rows], np.int64),
            [row.req_id for row in rows],
            [np.array(row.prefix_hashes, np.int64) for row in rows] if hashed else None,
            [row.session for row in rows] if any(row.session is not None for row in rows) else None,
            hash_tokens,
            name,
        )

    @classmethod
    def concat(cls, chunks: Iterable[Trace], *, name: str | None = None) -> Trace:
        """Join consecutive chunks of one workload into one trace."""
        parts = list(chunks)
        if not parts:
            empty = np.empty(0, np.int64)
            return cls(empty, empty, empty, name=name or "trace")
        head = parts[0]
        if len(parts) == 1:
            return head if name is None else dataclasses.replace(head, name=name)
        if len({part.hash_tokens for part in parts}) > 1:
            raise InputError(f"trace {head.name!r}: chunks disagree on hash_tokens")
        none = np.empty(0, np.int64)
        hashed = any(part.prefix_hashes is not None for part in parts)
        sessions = any(part.session is not None for part in parts)
        named = any(part.req_id is not None for part in parts)
        return cls(
            np.concatenate([part.arrival_ns for part in parts]),
            np.concatenate([part.prompt_tokens for part in parts]),
            np.concatenate([part.output_tokens for part in parts]),
            [label for part in parts for label in part.ids] if named else None,
            [h for part in parts for h in part.prefix_hashes or [none] * len(part)] if hashed else None,
            [s for part in parts for s in ([None] * len(part) if part.session is None else part.session)]
            if sessions
            else None,
            head.hash_tokens,
            name or head.name,
            tuple(dict.fromkeys(note for part in parts for note in part.notes)),
            head.first,
        )
