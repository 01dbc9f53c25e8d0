"""Rows of somebody else's trace on their way to a canonical one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.workload.source import Lengths
from sim.workload.trace import HASH_TOKENS, Trace

__all__ = ["Rows"]


class Rows:
    """Collects the rows of somebody else's trace and makes them canonical.

    Rows without a prompt or an output token are left out and counted, rows out of order are sorted (equal times keep
    their order), and both are said in the notes.

    Parameters
    ----------
    path
        The file, for the name of the trace and for messages.
    hash_tokens
        Prompt tokens that one hash covers.
    empty
        What a row with zero tokens means in this format.
    """

    def __init__(self, path: Path, hash_tokens: int = HASH_TOKENS, empty: str = "0 prompt or 0 output tokens") -> None:
        self.path = path
        self.hash_tokens = hash_tokens
        self.notes: list[str] = []
        self._empty = empty
        self._columns: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
        self._pending: list[tuple[int, int, int]] = []
        self._hashes: list[NDArray[np.int64] | None] = []
        self._sessions: list[str | None] = []

    def add(
        self,
        arrival_ns: int,
        prompt_tokens: int,
        output_tokens: int,
        prefix_hashes: NDArray[np.int64] | None = None,
        session: str | None = None,
    ) -> None:
        """Add one row; lengths-only formats pass 0 as arrival."""
        self._pending.append((arrival_ns, prompt_tokens, output_tokens))
        self._hashes.append(prefix_hashes)
        self._sessions.append(session)

    def extend(
        self,
        arrival_ns: NDArray[np.int64],
        prompt_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
        session: Sequence[str | None] | None = None,
    ) -> None:
        """Add many rows (arrays of one length)."""
        self._flush()
        self._columns.append((arrival_ns, prompt_tokens, output_tokens))
        self._hashes.extend([None] * len(arrival_ns))
        self._sessions.extend([None] * len(arrival_ns) if session is None else session)

    def _flush(self) -> None:
        if self._pending:
            block = np.array(self._pending, np.int64)
            self._columns.append((block[:, 0], block[:, 1], block[:, 2]))
            self._pending = []

    def _joined(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        self._flush()
        if not self._columns:
            raise InputError(f"{self.path}: holds no requests")
        arrival, prompt, output = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        return arrival, prompt, output

    def _usable(self, prompt: NDArray[np.int64], output: NDArray[np.int64]) -> NDArray[np.bool_]:
        usable = (prompt > 0) & (output > 0)
        if dropped := int((~usable).sum()):
            self.notes.append(f"left out {dropped} of {len(usable)} rows: {self._empty}")
        if not usable.any():
            raise InputError(f"{self.path}: no row is left: {'; '.join(self.notes)}")
        return usable

    def lengths(self) -> Lengths:
        """Return the lengths, in the order of the file."""
        _, prompt, output = self._joined()
        usable = self._usable(prompt, output)
        sessions = [s for s, ok in zip(self._sessions, usable.tolist(), strict=True) if ok]
        has_sessions = any(s is not None for s in sessions)
        return Lengths(
            prompt[usable], output[usable], sessions if has_sessions else None, self.path.name, tuple(self.notes)
        )

    def trace(self, *, from_zero: bool = False, merged: bool = False) -> Trace:
        """Return the trace.

        Parameters
        ----------
        from_zero
            Count time from the first arrival (for wall-clock times).
        merged
            The rows come session by session, so that sorting them is no news.
        """
        arrival, prompt, output = self._joined()
        if not merged and (back := int((arrival[1:] < arrival[:-1]).sum())):
            self.notes.append(f"sorted by arrival: {back} rows were earlier than the one before")
        usable = self._usable(prompt, output)
        order = np.argsort(arrival, kind="stable")
        order = order[usable[order]]
        arrival = arrival[order]
        hashed = any(h is not None and len(h) for h in self._hashes)
        none = np.empty(0, np.int64)
        picked = order.tolist()
        sessions = any(s is not None for s in self._sessions)
        return Trace(
            arrival - arrival[0] if from_zero else arrival,
            prompt[order],
            output[order],
            prefix_hashes=[none if (h := self._hashes[i]) is None else h for i in picked] if hashed else None,
            session=[self._sessions[i] for i in picked] if sessions else None,
            hash_tokens=self.hash_tokens,
            name=self.path.name,
            notes=tuple(self.notes),
        )
