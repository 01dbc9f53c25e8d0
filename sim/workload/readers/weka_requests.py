"""The table of requests derived from the Weka sessions (Parquet)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from sim.errors import InputError
from sim.workload.parquet import parquet_columns
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.rows import Rows
from sim.workload.trace import MAX_TOKENS, Trace

_WANTED = ("session", "t_s", "depth", "input_tokens", "output_tokens")


@trace_readers.register("weka_requests")
@dataclass(frozen=True)
class WekaRequests(TraceReader):
    """Parquet: one row a request; times count from the start of the session.

    Requests of sub-agents (depth above 0) form a session of their own. The table counts blocks and prefix hits but
    holds no hashes, so the trace has none. All sessions start at time 0 unless an arrival process says when.
    """

    summary: ClassVar[str] = (
        "table of Weka agent requests (Parquet): session, t_s, depth, input_tokens, output_tokens; no hashes"
    )
    starts_sessions: ClassVar[bool] = True

    def matches(self, head: Head) -> bool:
        """Recognise the columns."""
        return head.parquet and head.columns >= set(_WANTED)

    def read(self, path: Path, how: Reading) -> Trace:
        """Read the table."""
        table = parquet_columns(path, _WANTED)
        prompt, output = (table[name].astype(np.int64) for name in ("input_tokens", "output_tokens"))
        for name, column in (("input_tokens", prompt), ("output_tokens", output)):
            if len(bad := np.flatnonzero((column < 0) | (column > MAX_TOKENS))):
                raise InputError(
                    f"{path}: row {bad[0] + 1}, field {name!r}: expected a token count, got {column[bad[0]]}"
                )
        seconds = table["t_s"].astype(np.float64)
        if len(bad := np.flatnonzero(~((seconds >= 0) & (seconds < 1e9)))):
            raise InputError(
                f"{path}: row {bad[0] + 1}, field 't_s': expected a time of at least 0 s, got {seconds[bad[0]]}"
            )
        sessions, which = np.unique(table["session"], return_inverse=True)
        starts = np.zeros(len(sessions), np.int64)
        rows = Rows(path)
        if how.arrivals is not None:
            starts = how.arrivals.times(how.seed, len(sessions))
        elif len(sessions) > 1:
            rows.notes.append(f"all {len(sessions)} sessions start at time 0: an arrival process would spread them")
        labels = [
            f"{session}/sub" if depth else str(session)
            for session, depth in zip(table["session"].tolist(), table["depth"].tolist(), strict=True)
        ]
        rows.extend(starts[which] + np.rint(seconds * 1e9).astype(np.int64), prompt, output, labels)
        return rows.trace(merged=True)
