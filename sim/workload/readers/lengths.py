"""CSV files that hold lengths only, such as those measured from ShareGPT conversations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from sim.errors import InputError
from sim.workload import source
from sim.workload.csv_text import csv_batches
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.rows import Rows

_PROMPT = ("prompt_tokens", "context_tokens_before")
_OUTPUT = ("output_tokens", "reply_tokens")
_SESSION = ("session", "conversation")


@trace_readers.register("lengths")
@dataclass(frozen=True)
class LengthsCsv(TraceReader):
    """CSV with a prompt and an output column and no times."""

    summary: ClassVar[str] = (
        "lengths-only CSV: prompt_tokens (or context_tokens_before), output_tokens (or reply_tokens)"
    )

    def matches(self, head: Head) -> bool:
        """Recognise one column of each kind, and nothing that looks like a time (that would be a misspelt trace)."""
        timed = any("arriv" in name.lower() or "time" in name.lower() or name.endswith("_s") for name in head.columns)
        return not head.parquet and not timed and _any(_PROMPT, head.columns) and _any(_OUTPUT, head.columns)

    def read(self, path: Path, how: Reading) -> source.Lengths:  # noqa: ARG002 (the protocol's signature)
        """Read the file."""
        rows = Rows(path)
        for batch in csv_batches(path):
            prompt = _first(_PROMPT, batch.columns, path)
            output = _first(_OUTPUT, batch.columns, path)
            session = next((batch.columns[name] for name in _SESSION if name in batch.columns), None)
            rows.extend(
                np.zeros(len(batch), np.int64),
                batch.tokens(prompt),
                batch.tokens(output),
                None if session is None else [text.strip() or None for text in session],
            )
        return rows.lengths()


def _any(names: tuple[str, ...], columns: frozenset[str]) -> bool:
    return any(name in columns for name in names)


def _first(names: tuple[str, ...], columns: dict[str, tuple[str, ...]], path: Path) -> str:
    for name in names:
        if name in columns:
            return name
    raise InputError(f"{path}:1: expected a column {' or '.join(names)}, found {', '.join(columns)}")
