"""Readers of trace formats, and the choice between them.

Another package adds a format through the entry-point group ``vtoken.trace_readers``: a frozen dataclass derived
from :class:`TraceReader`.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from sim.errors import InputError
from sim.registry import Registry
from sim.workload.readers.base import HEAD_BYTES, Head, Reading, TraceReader, look
from sim.workload.readers.rows import Rows
from sim.workload.text import missing_column

__all__ = ["Head", "Reading", "Rows", "TraceReader", "reader_for", "trace_readers"]

trace_readers: Registry[TraceReader] = Registry(
    "trace format",
    "vtoken.trace_readers",
    tuple(
        f"sim.workload.readers.{module}"
        for module in (
            "azure",
            "bailian",
            "burstgpt",
            "canonical",
            "lengths",
            "llmservingsim",
            "mooncake",
            "servegen",
            "sharegpt",
            "vidur",
            "vllm_custom",
            "weka",
            "weka_requests",
        )
    ),
)


def reader_for(path: Path, format: str | None = None) -> TraceReader:
    """Return the reader for a file: the named one, or the one that recognises its beginning.

    Raises
    ------
    InputError
        If there is no such format, the file cannot be read or is empty, or nobody recognises it.
    """
    if format is not None:
        reader = trace_readers.build(format)
        if not path.is_dir():
            look(path)
        return reader
    head = look(path)
    broken = []
    for name in trace_readers:
        try:
            reader = trace_readers.build(name)
        except InputError as error:  # another package's: it stops nobody whose file somebody else recognises
            broken.append(str(error))
            continue
        if reader.matches(head):
            return reader
    raise _unrecognised(head, broken)


def _unrecognised(head: Head, broken: list[str]) -> InputError:
    """Say what is closest: the CSV format that lacks the fewest columns, if there is one."""
    if head.path.is_dir():
        return InputError(
            f"{head.path}: is a directory without Weka session files (*.json, *.json.gz), expected a file"
        )
    where = f"{head.path}" if head.parquet else f"{head.path}:1"
    if broken:
        return InputError(f"{where}: not a known trace format; {'; '.join(broken)}")
    candidates = [(name, trace_readers.get(name).columns) for name in trace_readers]
    near = [(len(columns) - _alike(columns, head.columns), name, columns) for name, columns in candidates if columns]
    if near and head.columns:
        missing, name, columns = min(near, key=lambda entry: (entry[0], entry[1] != "canonical"))
        if missing < len(columns):
            absent = next((column for column in columns if column not in head.columns), columns[0])
            return InputError(f"{where}: not a known trace format; of {name}, {missing_column(absent, head.columns)}")
    return InputError(
        f"{where}: not a known trace format: expected one of {', '.join(trace_readers)}{_first_line(head)}"
    )


def _first_line(head: Head) -> str:
    """Say what may be wrong with the first line, if it is worth saying."""
    line, end, _ = head.text.partition("\n")
    if line[:1] == "{" and not head.record:
        return "; line 1 is not a JSON object with fields"
    return "" if end or len(line) < HEAD_BYTES else f"; line 1 is longer than {HEAD_BYTES >> 10} KiB"


def _alike(wanted: tuple[str, ...], found: frozenset[str]) -> float:
    """Count the wanted columns that are there; a close spelling counts half."""
    return sum(
        1.0 if column in found else 0.5 * bool(difflib.get_close_matches(column, found, n=1, cutoff=0.75))
        for column in wanted
    )
