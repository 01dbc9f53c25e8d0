"""What a trace reader is, and what it sees of a file to recognise it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from sim.errors import InputError
from sim.workload.csv_text import split_csv
from sim.workload.generate import Generator
from sim.workload.source import Lengths, Source
from sim.workload.text import MAX_LINE_BYTES, opened

__all__ = ["HEAD_BYTES", "Head", "Reading", "TraceReader", "look"]

HEAD_BYTES = 64 * 1024
"""How much of a file is looked at to recognise it."""


@dataclass(frozen=True)
class Head:
    """The beginning of a file, enough to recognise its format.

    Attributes
    ----------
    path
        The file or folder.
    text
        The first 64 KiB as text; empty for a folder or Parquet.
    columns
        Names in the header, if the first line reads as CSV or the file is Parquet.
    record
        The first line as a JSON object, if it is one.
    parquet
        Whether the file is Parquet.
    """

    path: Path
    text: str = ""
    columns: frozenset[str] = frozenset()
    record: dict[str, Any] = field(default_factory=dict)
    parquet: bool = False


@dataclass(frozen=True)
class Reading:
    """What a reader may need beside the file.

    Attributes
    ----------
    seed
        Seed of whatever the reader draws.
    arrivals
        Process that gives the starts of sessions, for readers with ``starts_sessions``.
    """

    seed: int = 0
    arrivals: Generator | None = None


class TraceReader(ABC):
    """Reads one format. Implementations are frozen dataclasses without fields, registered by name.

    Attributes
    ----------
    name
        The name it is registered under; the registry sets it.
    summary
        One line: whose format it is and what is particular about it.
    columns
        Columns that a CSV of this format must have, if it is a CSV; used to say which one is missing.
    starts_sessions
        Whether an arrival process may say when recorded sessions start.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str]
    columns: ClassVar[tuple[str, ...]] = ()
    starts_sessions: ClassVar[bool] = False

    @abstractmethod
    def matches(self, head: Head) -> bool:
        """Say whether a file that begins like this has the format."""

    @abstractmethod
    def read(self, path: Path, how: Reading) -> Source | Lengths:
        """Read the file; :class:`Lengths` if it has no arrival times."""


def look(path: Path) -> Head:
    """Read the beginning of a file.

    Raises
    ------
    InputError
        If it cannot be read, is empty, or is neither text nor Parquet.
    """
    if path.is_dir():
        return Head(path)
    with opened(path) as file:
        raw = file.read(HEAD_BYTES)
        if raw[:4] == b"PAR1":
            return Head(path, columns=_parquet_columns(path), parquet=True)
        first = raw.lstrip()
        if not first:
            raise InputError(f"{path}: the file is empty, expected a trace")
        if b"\0" in raw:
            raise InputError(f"{path}: binary data (NUL bytes), expected a trace in text or Parquet")
        # Lines of JSON can be long (whole prompts): read on to the end of the first one, within bounds.
        if first[:1] == b"{" and b"\n" not in first:
            raw += file.readline(MAX_LINE_BYTES)
            first = raw.lstrip()
    text = raw[:HEAD_BYTES].decode("utf-8-sig", errors="replace")
    line = first.partition(b"\n")[0].decode("utf-8-sig", errors="replace").rstrip("\r")
    if line[:1] in "{[":
        return Head(path, text, record=_record(line))
    try:
        names = frozenset(name.strip() for name in split_csv(line))
    except ValueError:
        names = frozenset()
    return Head(path, text, names)


def _record(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _parquet_columns(path: Path) -> frozenset[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        return frozenset(pyarrow.parquet.read_schema(path).names)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: damaged Parquet file: {error}") from None
