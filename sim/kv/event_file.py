"""KV events on disk: one column a field, and what the numbers mean beside them.

Two forms with the same contents: Parquet, and NumPy's ``.npz`` for machines that have nothing but NumPy. Nothing is
ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.errors import InputError
from sim.kv.events import CHUNK, EVENT, EVENT_SCHEMA_VERSION, Kind, KVEventLog

__all__ = ["EventFile", "write_events"]

VERSION = "vtoken.kv_events"
FIELDS = EVENT.names or ()
META = "meta."
"""What the names of an ``.npz`` member begin with that is not a column."""


def write_events(log: KVEventLog, path: Path) -> None:
    """Write a log as Parquet or, if the name ends in ``.npz``, as NumPy arrays."""
    columns = {name: np.ascontiguousarray(log.records[name]) for name in FIELDS}
    columns["kind"] = columns["kind"].astype(np.int8)
    meta = {
        VERSION: EVENT_SCHEMA_VERSION,
        "block_size": log.block_size,
        "num_blocks": log.num_blocks,
        "events": len(log),
        "model": log.model,
        "kv_dtype": log.kv_dtype,
    }
    if log.units > 1:
        meta["units"] = log.units
    text = {name: str(value) for name, value in meta.items()}
    if path.suffix == ".npz":
        members: dict[str, Any] = columns | {META + name: np.array(value) for name, value in text.items()}
        with path.open("wb") as file:
            np.savez_compressed(file, **members)
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns).replace_schema_metadata(text), path, compression="zstd", write_page_checksum=True)


class _Contents(NamedTuple):
    """A file that was opened."""

    meta: dict[str, str]
    columns: set[str]
    rows: int
    chunks: Callable[[int], Iterator[dict[str, np.ndarray]]]


class EventFile:
    """A log on disk, read a chunk at a time (the ``.npz`` form is held in memory whole, 21 bytes an event).

    Parameters
    ----------
    path
        File written by :func:`write_events`.

    Raises
    ------
    InputError
        If the file is not such a log, is truncated, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        try:
            self._file = (_open_npz if path.suffix == ".npz" else _open_parquet)(path)
        except InputError:
            raise
        except Exception as error:  # there is no end to what a damaged archive makes its reader raise
            raise self._not_a_log(error) from None
        meta = self._file.meta
        version = meta.get(VERSION)
        if version != str(EVENT_SCHEMA_VERSION):
            raise InputError(f"{path}: KV event log version {version}, expected {EVENT_SCHEMA_VERSION}")
        missing = [name for name in FIELDS if name not in self._file.columns]
        if missing:
            raise InputError(f"{path}: column {missing[0]!r} is missing, expected {', '.join(FIELDS)}")
        self.block_size = self._number("block_size", 1)
        self.num_blocks = self._number("num_blocks", 2)
        if "events" in meta and self._file.rows != self._number("events", 0):
            raise InputError(f"{path}: truncated: {self._file.rows:,} events, expected {self._number('events', 0):,}")
        self.model, self.kv_dtype = meta.get("model", ""), meta.get("kv_dtype", "")
        self.units = self._number("units", 1) if "units" in meta else 1

    def __len__(self) -> int:
        return self._file.rows

    def chunks(self, events: int = CHUNK) -> Iterator[np.ndarray]:
        """Yield arrays of :data:`EVENT`, none longer than ``events``.

        Raises
        ------
        InputError
            If the file is damaged, or an event is none.
        """
        first = 0
        source = self._file.chunks(events)
        while True:
            try:
                columns = next(source, None)
            except Exception as error:
                raise self._not_a_log(error) from None
            if columns is None:
                return
            records = np.zeros(len(columns["kind"]), EVENT)
            for name in FIELDS:
                records[name] = self._fitting(name, columns[name], EVENT[name], first)
            self._check(records, first)
            yield records
            first += len(records)

    def _fitting(self, name: str, column: np.ndarray, kind: np.dtype[Any], first: int) -> np.ndarray:
        """Return a column whose values are whole numbers that its type can hold."""
        if column.dtype.kind not in "iu":
            raise InputError(f"{self.path}: column {name!r}: expected whole numbers, got {column.dtype}")
        limits = np.iinfo(kind)
        self._refuse(name, column, (column < limits.min) | (column > limits.max), f"{limits.bits}-bit numbers", first)
        return column

    def _check(self, records: np.ndarray, first: int) -> None:
        """Refuse kinds that are not in the vocabulary, and numbers below zero."""
        known = np.isin(records["kind"], [int(kind) for kind in Kind])
        self._refuse("kind", records["kind"], ~known, f"1 to {max(Kind)}", first)
        step = records["kind"] == Kind.STEP
        wrong = np.where(step, records["req"] != -1, records["req"] < 0)
        self._refuse("req", records["req"], wrong, "a request, or -1 for STEP", first)
        for name in ("time_ns", "a", "b"):
            self._refuse(name, records[name], records[name] < 0, "at least 0", first)

    def _refuse(self, name: str, column: np.ndarray, wrong: np.ndarray, expected: str, first: int) -> None:
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(f"{self.path}: event {first + at}, column {name!r}: expected {expected}, got {column[at]}")

    def _number(self, name: str, least: int) -> int:
        text = self._file.meta.get(name, "")
        if not (text.isdecimal() and len(text) < 19 and int(text) >= least):
            raise InputError(f"{self.path}: {name}: expected a whole number of at least {least}, got {text!r}")
        return int(text)

    def _not_a_log(self, error: Exception) -> InputError:
        form = "NumPy .npz" if self.path.suffix == ".npz" else "Parquet"
        return InputError(f"{self.path}: not a KV event log ({form}), or damaged: {error}")


def _open_parquet(path: Path) -> _Contents:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(f"{path}: Parquet needs pyarrow: install it, or give the log as .npz") from None
    file = pq.ParquetFile(path, page_checksum_verification=True)
    names = set(file.schema_arrow.names)

    def chunks(events: int) -> Iterator[dict[str, np.ndarray]]:
        for batch in file.iter_batches(events, columns=list(FIELDS)):
            for name in FIELDS:
                if batch[name].null_count:
                    raise ValueError(f"column {name!r} has empty fields")
            yield {name: batch[name].to_numpy(zero_copy_only=False) for name in FIELDS}

    meta = {key.decode(): value.decode() for key, value in (file.schema_arrow.metadata or {}).items()}
    return _Contents(meta, names, file.metadata.num_rows, chunks)


def _open_npz(path: Path) -> _Contents:
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("one array, not several")
        meta = {name.removeprefix(META): str(archive[name]) for name in archive.files if name.startswith(META)}
        columns = {name: np.asarray(archive[name]) for name in FIELDS if name in archive.files}
    lengths = {column.shape for column in columns.values()}
    if len(lengths) > 1 or any(len(shape) != 1 for shape in lengths):
        raise ValueError("columns of different lengths")

    def chunks(events: int) -> Iterator[dict[str, np.ndarray]]:
        for first in range(0, len(columns["kind"]), events):
            yield {name: column[first : first + events] for name, column in columns.items()}

    return _Contents(meta, set(columns), len(columns["kind"]) if "kind" in columns else 0, chunks)
