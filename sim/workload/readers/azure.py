"""Azure LLM inference traces, 2023 and 2024 (Azure/AzurePublicDataset; CC-BY 4.0)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.workload.csv_text import CsvBatch, csv_batches
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.rows import Rows
from sim.workload.trace import Trace

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:\.\d{1,9})?)\s*(?:Z|([+-])(\d\d):?(\d\d))?")


@trace_readers.register("azure")
@dataclass(frozen=True)
class Azure(TraceReader):
    """CSV with wall-clock times: 100 ns digits in 2023; microseconds, with or without an offset from UTC, in 2024."""

    summary: ClassVar[str] = "Azure 2023 / 2024 CSV: TIMESTAMP, ContextTokens, GeneratedTokens; time from the first row"
    columns: ClassVar[tuple[str, ...]] = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def matches(self, head: Head) -> bool:
        """Recognise the three columns."""
        return not head.parquet and head.columns >= set(self.columns)

    def read(self, path: Path, how: Reading) -> Trace:  # noqa: ARG002 (the protocol's signature)
        """Read the file; time 0 is the earliest arrival."""
        rows = Rows(path)
        for batch in csv_batches(path, self.columns):
            rows.extend(_instants(batch), batch.tokens("ContextTokens"), batch.tokens("GeneratedTokens"))
        return rows.trace(from_zero=True)


def _instants(batch: CsvBatch) -> NDArray[np.int64]:
    """Read wall-clock times as ns since 1970, to the last digit."""
    bare, offsets_min = [], []
    for row, text in enumerate(batch.columns["TIMESTAMP"]):
        match = _STAMP.fullmatch(text.strip())
        if match is None:
            raise batch.fail(row, "TIMESTAMP", "YYYY-MM-DD HH:MM:SS.fffffff")
        date, time, sign, hours, minutes = match.groups()
        bare.append(f"{date}T{time}")
        offset = int(hours) * 60 + int(minutes) if sign else 0
        offsets_min.append(-offset if sign == "-" else offset)
    try:
        instants = np.array(bare, "datetime64[ns]").astype(np.int64)
    except ValueError:
        row = next(i for i, text in enumerate(bare) if not _is_date(text))
        raise batch.fail(row, "TIMESTAMP", "a date and time that exist") from None
    return instants - np.array(offsets_min, np.int64) * 60_000_000_000


def _is_date(text: str) -> bool:
    try:
        np.datetime64(text, "ns")
    except ValueError:
        return False
    return True
