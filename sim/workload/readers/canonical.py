"""The project's own format: CSV and Parquet, read in pieces."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.workload.csv_text import CsvBatch, csv_batches
from sim.workload.parquet import ParquetSource
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.text import opened
from sim.workload.trace import HASH_TOKENS, Trace

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("req_id", "prefix_hashes", "session", "hash_tokens")


@trace_readers.register("canonical")
@dataclass(frozen=True)
class Canonical(TraceReader):
    """CSV or Parquet with the columns of :class:`sim.workload.request.Request`; strict, and streamed."""

    summary: ClassVar[str] = (
        "this project's CSV / Parquet: req_id, arrival_s, prompt_tokens, output_tokens, [prefix_hashes, session]"
    )
    columns: ClassVar[tuple[str, ...]] = REQUIRED

    def matches(self, head: Head) -> bool:
        """Recognise the three columns that every trace has."""
        return head.columns >= set(REQUIRED)

    def read(self, path: Path, how: Reading) -> CsvSource | ParquetSource:  # noqa: ARG002 (the protocol's signature)
        """Open the file; its rows are checked as they are read."""
        with opened(path) as file:
            parquet = file.read(4) == b"PAR1"
        return ParquetSource(path, REQUIRED) if parquet else CsvSource(path)


class CsvSource:
    """A canonical CSV file, read in pieces each time.

    Parameters
    ----------
    path
        The file, packed by gzip or not.

    Raises
    ------
    InputError
        At once for a missing column or an unusable first piece; while reading, for the first row that is wrong.
    """

    total: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.notes: tuple[str, ...] = ()
        first = next(csv_batches(path, REQUIRED, rows=1), None)
        if first is None:
            raise InputError(f"{path}: a header and no rows, expected at least one request")
        self.hash_tokens = _hash_tokens(first)
        self.notes = _unknown_columns(first, path)

    def chunks(self, size: int = 8192) -> Iterator[Trace]:
        """Yield the requests, at most ``size`` at a time."""
        first, before = 0, 0
        for batch in csv_batches(self.path, REQUIRED, rows=size):
            chunk = self._chunk(batch, first, before)
            first += len(chunk)
            before = int(chunk.arrival_ns[-1])
            yield chunk

    def _chunk(self, batch: CsvBatch, first: int, before: int) -> Trace:
        arrival = batch.seconds("arrival_s")
        back = np.flatnonzero(np.diff(arrival, prepend=before) < 0)
        if len(back):
            raise batch.fail(
                int(back[0]), "arrival_s", "a time not before the previous row's (rows in order of arrival)"
            )
        prompt, output = (_at_least_one(batch, name) for name in ("prompt_tokens", "output_tokens"))
        if "hash_tokens" in batch.columns:
            other = np.flatnonzero(batch.tokens("hash_tokens") != self.hash_tokens)
            if len(other):
                raise batch.fail(int(other[0]), "hash_tokens", f"{self.hash_tokens} as in the first row")
        sessions = batch.columns.get("session")
        return Trace(
            arrival,
            prompt,
            output,
            batch.columns.get("req_id"),
            _hashes(batch) if "prefix_hashes" in batch.columns else None,
            None if sessions is None else [text or None for text in sessions],
            self.hash_tokens,
            self.name,
            self.notes,
            first,
        )


def _at_least_one(batch: CsvBatch, name: str) -> NDArray[np.int64]:
    values = batch.tokens(name)
    bad = np.flatnonzero(values < 1)
    if len(bad):
        raise batch.fail(int(bad[0]), name, "at least 1 token")
    return values


def _hash_tokens(batch: CsvBatch) -> int:
    if "hash_tokens" not in batch.columns:
        return HASH_TOKENS
    return int(_at_least_one(batch, "hash_tokens")[0])


def _hashes(batch: CsvBatch) -> list[NDArray[np.int64]]:
    result = []
    for row, text in enumerate(batch.columns["prefix_hashes"]):
        try:
            result.append(np.array(text.split(), np.int64))
        except (ValueError, OverflowError):
            raise batch.fail(row, "prefix_hashes", "64-bit whole numbers separated by spaces") from None
    return result


def _unknown_columns(batch: CsvBatch, path: Path) -> tuple[str, ...]:
    """Refuse columns that look like a misspelt optional one; note the rest."""
    unknown = [name for name in batch.columns if name not in REQUIRED + OPTIONAL]
    for name in unknown:
        close = difflib.get_close_matches(name.lower(), OPTIONAL, n=1, cutoff=0.8)
        if close and close[0] not in batch.columns:
            raise InputError(f"{path}:1: unknown column {name!r}; did you mean {close[0]!r}?")
    return (f"ignored columns: {', '.join(unknown)}",) if unknown else ()
