"""Writing canonical traces: CSV, CSV packed by gzip, Parquet."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sim.errors import InputError
from sim.workload.source import Source
from sim.workload.trace import HASH_TOKENS, Trace

__all__ = ["csv_lines", "write_trace"]


def write_trace(source: Source, path: str | os.PathLike[str]) -> int:
    """Write a workload to ``.csv``, ``.csv.gz`` or ``.parquet``, in constant memory, and return the number of requests.

    The file appears under its name only when it is complete. The same requests give the same bytes.

    Raises
    ------
    InputError
        If the ending is another one, the file cannot be written, or a label cannot be kept.
    """
    target = Path(path)
    kind = next((k for k in (".csv", ".csv.gz", ".parquet") if target.name.endswith(k) and target.name != k), None)
    if kind is None:
        raise InputError(f"{target}: expected a name that ends in .csv, .csv.gz or .parquet")
    with _replacing(target) as unfinished:
        if kind == ".parquet":
            from sim.workload.parquet import write_parquet

            return write_parquet(source, unfinished)
        with unfinished.open("wb") as file:
            if kind == ".csv":
                return _write_csv(source, file)
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                return _write_csv(source, packed)  # type: ignore[arg-type]


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Give a name to write to, and move the file to its place if nothing went wrong."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            yield unfinished
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None


def _write_csv(source: Source, file: BinaryIO) -> int:
    count = -1
    for line in csv_lines(source):
        try:
            file.write(line.encode())
        except UnicodeEncodeError:
            raise InputError(f"request {count}: a label is not valid Unicode text") from None
        count += 1
    return max(count, 0)


def csv_lines(source: Source) -> Iterator[str]:
    """Yield the header and one line a request, each with its line end."""
    optional: list[str] | None = None
    for chunk in source.chunks():
        columns = _optional(chunk)
        if optional is None:
            optional = columns
            yield ",".join(["req_id", "arrival_s", "prompt_tokens", "output_tokens", *columns]) + "\n"
        elif optional != columns:
            raise InputError(f"{chunk.name}: prefix hashes or sessions begin or end in the middle of the trace")
        parts = [
            [_quoted(label) for label in chunk.ids],
            [_seconds(t) for t in chunk.arrival_ns.tolist()],
            map(str, chunk.prompt_tokens.tolist()),
            map(str, chunk.output_tokens.tolist()),
        ]
        if chunk.prefix_hashes is not None:
            parts.append([" ".join(map(str, ids.tolist())) for ids in chunk.prefix_hashes])
        if "hash_tokens" in columns:
            parts.append([str(chunk.hash_tokens)] * len(chunk))
        if chunk.session is not None:
            parts.append(["" if label is None else _quoted(label) for label in chunk.session])
        for row in zip(*parts, strict=True):
            yield ",".join(row) + "\n"


def _optional(chunk: Trace) -> list[str]:
    """Return the optional columns that a chunk needs."""
    hashed = ["prefix_hashes"] if chunk.prefix_hashes is not None else []
    # How much a hash covers is a property of the trace; without this column a reader takes it to be 512 tokens.
    covers = ["hash_tokens"] if hashed and chunk.hash_tokens != HASH_TOKENS else []
    return hashed + covers + (["session"] if chunk.session is not None else [])


def _seconds(t: int) -> str:
    """Write nanoseconds as seconds with all their digits and no more."""
    whole, rest = divmod(t, 1_000_000_000)
    return f"{whole}.{rest:09d}".rstrip("0") if rest else str(whole)


def _quoted(label: str) -> str:
    if any(mark in label for mark in "\n\r\0"):
        raise InputError(f"label {label!r} holds a line end or a NUL, which CSV traces cannot keep")
    return '"' + label.replace('"', '""') + '"' if '"' in label or "," in label else label
