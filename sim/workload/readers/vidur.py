"""Vidur's processed traces (microsoft/vidur; MIT)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from sim.workload.csv_text import csv_batches
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.rows import Rows
from sim.workload.source import Lengths
from sim.workload.trace import Trace


@trace_readers.register("vidur")
@dataclass(frozen=True)
class Vidur(TraceReader):
    """CSV with prefill and decode lengths, and arrival times in some files."""

    summary: ClassVar[str] = (
        "Vidur CSV: num_prefill_tokens, num_decode_tokens; lengths only, unless there is arrived_at (s)"
    )
    columns: ClassVar[tuple[str, ...]] = ("num_prefill_tokens", "num_decode_tokens")

    def matches(self, head: Head) -> bool:
        """Recognise the two columns."""
        return not head.parquet and head.columns >= set(self.columns)

    def read(self, path: Path, how: Reading) -> Trace | Lengths:  # noqa: ARG002 (the protocol's signature)
        """Read the file."""
        rows = Rows(path)
        timed = False
        for batch in csv_batches(path, self.columns):
            prompt, output = batch.tokens("num_prefill_tokens"), batch.tokens("num_decode_tokens")
            timed = "arrived_at" in batch.columns
            rows.extend(batch.seconds("arrived_at") if timed else np.zeros(len(batch), np.int64), prompt, output)
        return rows.trace() if timed else rows.lengths()
