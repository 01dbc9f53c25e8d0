"""Canonical traces in Parquet, read and written a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.workload.source import Source
from sim.workload.text import missing_column, to_ns
from sim.workload.trace import HASH_TOKENS, MAX_TOKENS, Trace

__all__ = ["ParquetSource", "parquet_columns", "write_parquet"]


class ParquetSource:
    """A canonical Parquet file, read in pieces each time.

    Parameters
    ----------
    path
        The file.
    required
        Columns it must have.

    Raises
    ------
    InputError
        At once for a damaged file or a missing column; while reading, for the first row that is wrong.
    """

    def __init__(self, path: Path, required: tuple[str, ...]) -> None:
        self.path = path
        self.name = path.name
        self.notes: tuple[str, ...] = ()
        file = _open(path, required)
        self.total: int | None = file.metadata.num_rows
        self._columns = [
            name
            for name in (*required, "req_id", "prefix_hashes", "session", "hash_tokens")
            if name in file.schema_arrow.names
        ]
        if not self.total:
            raise InputError(f"{path}: no rows, expected at least one request")
        self.hash_tokens = HASH_TOKENS
        if "hash_tokens" in self._columns:
            self.hash_tokens = int(next(file.iter_batches(1, columns=["hash_tokens"]))[0][0].as_py() or 0)
            if self.hash_tokens < 1:
                raise InputError(f"{path}: row 1, field 'hash_tokens': expected at least 1")

    def chunks(self, size: int = 8192) -> Iterator[Trace]:
        """Yield the requests, at most ``size`` at a time."""
        first, before = 0, 0
        for batch in _batches(self.path, self._columns, size):
            chunk = self._chunk(batch, first, before)
            first += len(chunk)
            before = int(chunk.arrival_ns[-1])
            yield chunk

    def _chunk(self, batch: Any, first: int, before: int) -> Trace:
        def check(bad: NDArray[np.bool_], field: str, expected: str) -> None:
            if bad.any():
                row = int(np.argmax(bad))
                got = batch.column(field)[row].as_py()
                raise InputError(f"{self.path}: row {first + row + 1}, field {field!r}: expected {expected}, got {got}")

        arrival, known = _nanoseconds(batch.column("arrival_s"))
        check(~known | (arrival < 0), "arrival_s", "a time of at least 0 s")
        back = np.diff(arrival, prepend=before) < 0
        check(back, "arrival_s", "a time not before the previous row's (rows in order of arrival)")
        lengths = {}
        for field in ("prompt_tokens", "output_tokens"):
            values = _floats(batch.column(field))
            check(~((values >= 1) & (values <= MAX_TOKENS) & (values % 1 == 0)), field, "a whole number of at least 1")
            lengths[field] = values.astype(np.int64)
        if "hash_tokens" in self._columns:
            check(_floats(batch.column("hash_tokens")) != self.hash_tokens, "hash_tokens", f"{self.hash_tokens}")
        return Trace(
            arrival,
            lengths["prompt_tokens"],
            lengths["output_tokens"],
            [str(label) for label in batch.column("req_id").to_pylist()] if "req_id" in self._columns else None,
            self._hashes(batch.column("prefix_hashes")) if "prefix_hashes" in self._columns else None,
            [None if s is None or s == "" else str(s) for s in batch.column("session").to_pylist()]
            if "session" in self._columns
            else None,
            self.hash_tokens,
            self.name,
            self.notes,
            first,
        )

    def _hashes(self, column: Any) -> list[NDArray[np.int64]]:
        """Cut the flat values of a list column into one array a row; a missing list is an empty one."""
        import pyarrow
        import pyarrow.compute

        if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
            raise InputError(f"{self.path}: field 'prefix_hashes': expected lists of integers, got {column.type}")
        flat = column.flatten()
        if flat.null_count or not pyarrow.types.is_integer(flat.type):
            raise InputError(f"{self.path}: field 'prefix_hashes': expected lists of integers without gaps")
        values = flat.to_numpy(zero_copy_only=False).astype(np.int64)
        lengths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        return np.split(values, np.cumsum(lengths)[:-1])


def _open(path: Path, required: tuple[str, ...]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: damaged or unreadable Parquet file: {error}") from None
    names = file.schema_arrow.names
    for name in required:
        if name not in names:
            raise InputError(f"{path}: {missing_column(name, names)}")
    return file


def _batches(path: Path, columns: list[str], size: int) -> Iterator[Any]:
    import pyarrow

    try:
        yield from (batch for batch in _open(path, ()).iter_batches(size, columns=columns) if batch.num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: damaged Parquet file: {error}") from None


def parquet_columns(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Read whole columns of numbers; missing values are refused.

    Raises
    ------
    InputError
        If the file is damaged, a column is missing, or has a missing value.
    """
    _open(path, names)
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for batch in _batches(path, list(names), 65_536):
        for name in names:
            column = batch.column(name)
            if column.null_count:
                raise InputError(f"{path}: field {name!r}: {column.null_count} values are missing")
            parts[name].append(column.to_numpy(zero_copy_only=False))
    if not parts[names[0]]:
        raise InputError(f"{path}: no rows, expected at least one request")
    return {name: np.concatenate(column) for name, column in parts.items()}


def _floats(column: Any) -> NDArray[np.float64]:
    """Return a column of numbers with NaN for what is missing or not a number (float64[rows])."""
    try:
        return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)
    except (TypeError, ValueError):
        return np.full(len(column), np.nan)


def _nanoseconds(column: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return times in ns, and which of them are times (int64[rows], bool[rows])."""
    values = _floats(column)
    with np.errstate(invalid="ignore"):
        if (np.abs(values) < 1e6).all() and "decimal" not in str(column.type):
            return np.rint(values * 1e9).astype(np.int64), np.ones(len(values), np.bool_)
    exact = [to_ns(value) for value in column.to_pylist()]
    return np.array([t or 0 for t in exact], np.int64), np.array([t is not None for t in exact], np.bool_)


def write_parquet(source: Source, path: Path) -> int:
    """Write a workload as canonical Parquet and return the number of requests.

    Arrival times are float64 seconds, which keep the nanosecond for 97 days; a trace in memory that lasts longer gets
    decimals with nine digits after the point.

    Raises
    ------
    InputError
        If a source that is read in pieces lasts so long that float64 loses nanoseconds.
    """
    import pyarrow
    import pyarrow.parquet

    count = 0
    writer: Any = None
    schema: Any = None
    try:
        for chunk in source.chunks():
            if schema is None:
                whole = source if isinstance(source, Trace) else chunk
                schema = _schema(chunk, decimal=not _float_is_exact(whole.arrival_ns))
                writer = pyarrow.parquet.ParquetWriter(path, schema, compression="zstd")
            writer.write_batch(pyarrow.record_batch(_arrays(chunk, schema, path), schema=schema))
            count += len(chunk)
    finally:
        if writer is not None:
            writer.close()
    if schema is None:
        raise InputError(f"{path}: there are no requests to write")
    return count


def _float_is_exact(arrival_ns: NDArray[np.int64]) -> bool:
    """Say whether float64 seconds give every time back (nanoseconds stay distinct below 2**23 s)."""
    return len(arrival_ns) == 0 or int(arrival_ns[-1]) < 2**23 * 10**9


def _schema(chunk: Trace, *, decimal: bool) -> Any:
    import pyarrow

    fields = [
        ("req_id", pyarrow.string()),
        ("arrival_s", pyarrow.decimal128(28, 9) if decimal else pyarrow.float64()),
        ("prompt_tokens", pyarrow.int64()),
        ("output_tokens", pyarrow.int64()),
    ]
    if chunk.prefix_hashes is not None:
        fields.append(("prefix_hashes", pyarrow.list_(pyarrow.int64())))
        if chunk.hash_tokens != HASH_TOKENS:
            fields.append(("hash_tokens", pyarrow.int64()))
    if chunk.session is not None:
        fields.append(("session", pyarrow.string()))
    return pyarrow.schema(fields)


def _arrays(chunk: Trace, schema: Any, path: Path) -> list[Any]:
    import pyarrow

    if (chunk.prefix_hashes is not None) != ("prefix_hashes" in schema.names) or (chunk.session is not None) != (
        "session" in schema.names
    ):
        raise InputError(f"{path}: prefix hashes or sessions begin or end in the middle of {chunk.name!r}")
    columns: dict[str, Any] = {
        "req_id": chunk.ids,
        "prompt_tokens": chunk.prompt_tokens,
        "output_tokens": chunk.output_tokens,
        "hash_tokens": np.full(len(chunk), chunk.hash_tokens),
        "session": None if chunk.session is None else list(chunk.session),
    }
    if pyarrow.types.is_decimal(schema.field("arrival_s").type):
        columns["arrival_s"] = [Decimal(t).scaleb(-9) for t in chunk.arrival_ns.tolist()]
    elif _float_is_exact(chunk.arrival_ns):
        columns["arrival_s"] = chunk.arrival_ns / 1e9
    else:
        raise InputError(
            f"{path}: arrivals later than 97 days lose nanoseconds in Parquet: write CSV, or shift to zero"
        )
    if chunk.prefix_hashes is not None:
        columns["prefix_hashes"] = list(chunk.prefix_hashes)
    return [pyarrow.array(columns[field.name], field.type) for field in schema]
