"""BurstGPT traces, v1.1 and v1.2 (HPMLL/BurstGPT; CC-BY 4.0)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sim.workload.csv_text import csv_batches
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.rows import Rows
from sim.workload.trace import Trace


@trace_readers.register("burstgpt")
@dataclass(frozen=True)
class BurstGPT(TraceReader):
    """CSV with times in seconds, often whole ones; rows without response tokens are failed requests."""

    summary: ClassVar[str] = (
        "BurstGPT CSV: Timestamp (s), Request tokens, Response tokens (0: failed, left out), Session ID"
    )
    columns: ClassVar[tuple[str, ...]] = ("Timestamp", "Request tokens", "Response tokens")

    def matches(self, head: Head) -> bool:
        """Recognise the three columns."""
        return not head.parquet and head.columns >= set(self.columns)

    def read(self, path: Path, how: Reading) -> Trace:  # noqa: ARG002 (the protocol's signature)
        """Read the file."""
        rows = Rows(path, empty="failed requests (0 response tokens) or empty prompts")
        for batch in csv_batches(path, self.columns):
            sessions = batch.columns.get("Session ID")
            rows.extend(
                batch.seconds("Timestamp"),
                batch.tokens("Request tokens"),
                batch.tokens("Response tokens"),
                None if sessions is None else [text.strip() or None for text in sessions],
            )
        return rows.trace()
