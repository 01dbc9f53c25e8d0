"""CSV in pieces: columns of text with their line numbers, and their conversion to numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.workload.text import lines, missing_column, to_ns
from sim.workload.trace import MAX_TOKENS

__all__ = ["CsvBatch", "csv_batches", "split_csv"]

BATCH_ROWS = 16_384
_FLOAT_EXACT_S = 1e6  # below this, float64 seconds round to the right nanosecond
_CSV_FIELD = re.compile(r'(?:"((?:[^"]|"")*)"|([^",]*))(?:,|$)')


def split_csv(text: str) -> list[str]:
    """Split one line of comma-separated values; a quoted field may hold commas, not line ends.

    Raises
    ------
    ValueError
        If a quote is not closed, or stands in the middle of a field.
    """
    if '"' not in text:
        return text.split(",")
    fields: list[str] = []
    at = 0
    while at <= len(text):
        match = _CSV_FIELD.match(text, at)
        if match is None:
            raise ValueError(f"misplaced or unclosed quote in column {len(fields) + 1}")
        quoted, plain = match.groups()
        fields.append(plain if quoted is None else quoted.replace('""', '"'))
        if match.end() == len(text) and not text.endswith(",", match.start(), match.end()):
            break
        at = match.end()
    return fields


@dataclass(frozen=True)
class CsvBatch:
    """Some rows of a CSV file, still text.

    Attributes
    ----------
    path
        The file.
    line
        Line number of each row.
    columns
        Texts by column name.
    """

    path: Path
    line: list[int]
    columns: dict[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.line)

    def fail(self, row: int, field: str, expected: str) -> InputError:
        """Return the error that says what ``field`` of a row should have been."""
        where, got = f"{self.path}:{self.line[row]}", self.columns[field][row]
        if not got.strip():
            return InputError(f"{where}: field {field!r} is missing, expected {expected}")
        shown = repr(got) if len(got) <= 40 else repr(got[:37] + "...")
        return InputError(f"{where}: field {field!r}: expected {expected}, got {shown}")

    def tokens(self, field: str) -> NDArray[np.int64]:
        """Return a column as token counts, at least 0 (int64[rows])."""
        texts = self.columns[field]
        try:
            values = np.array(list(map(int, texts)), np.int64)
        except (ValueError, OverflowError):
            values = np.array([self._token(row, field) for row in range(len(self))], np.int64)
        bad = np.flatnonzero((values < 0) | (values > MAX_TOKENS))
        if len(bad):
            raise self.fail(int(bad[0]), field, "a token count from 0 to 2**31 - 1")
        return values

    def _token(self, row: int, field: str) -> int:
        """Read one count the slow way: whole numbers that were written as floats are welcome."""
        try:
            value = float(self.columns[field][row])
        except ValueError:
            value = math.nan
        if not value.is_integer() or abs(value) > MAX_TOKENS:
            raise self.fail(row, field, "a whole number of tokens")
        return int(value)

    def seconds(self, field: str) -> NDArray[np.int64]:
        """Return a column of times in seconds as whole nanoseconds (int64[rows])."""
        texts = self.columns[field]
        try:
            values = np.array(list(map(float, texts)))
        except ValueError:
            values = np.full(len(texts), math.nan)
        with np.errstate(invalid="ignore"):
            if (np.abs(values) < _FLOAT_EXACT_S).all():
                result = np.rint(values * 1e9).astype(np.int64)
            else:
                result = np.array([self._instant(row, field) for row in range(len(self))], np.int64)
        bad = np.flatnonzero(result < 0)
        if len(bad):
            raise self.fail(int(bad[0]), field, "a time of at least 0 s")
        return result

    def _instant(self, row: int, field: str) -> int:
        result = to_ns(self.columns[field][row])
        if result is None:
            raise self.fail(row, field, "a time in seconds")
        return result


def csv_batches(path: Path, required: tuple[str, ...] = (), rows: int = BATCH_ROWS) -> Iterator[CsvBatch]:
    """Yield the rows of a CSV file with a header, ``rows`` at a time.

    Raises
    ------
    InputError
        As :func:`lines`; also if a ``required`` column is missing, a column name comes twice, or a row has another
        number of fields than the header.
    """
    source = lines(path)
    header = next(source, None)
    if header is None:
        raise InputError(f"{path}: the file is empty, expected a header and rows")
    names = [name.strip() for name in _fields(path, *header)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{path}:{header[0]}: column {twice!r} comes twice")
    for name in required:
        if name not in names:
            raise InputError(f"{path}:{header[0]}: {missing_column(name, names)}")
    numbers: list[int] = []
    held: list[list[str]] = []
    for number, text in source:
        fields = _fields(path, number, text)
        if len(fields) != len(names):
            raise InputError(f"{path}:{number}: {len(fields)} fields, expected {len(names)} ({','.join(names)})")
        numbers.append(number)
        held.append(fields)
        if len(held) == rows:
            yield CsvBatch(path, numbers, dict(zip(names, zip(*held, strict=True), strict=True)))
            numbers, held = [], []
    if held:
        yield CsvBatch(path, numbers, dict(zip(names, zip(*held, strict=True), strict=True)))


def _fields(path: Path, number: int, text: str) -> list[str]:
    try:
        return split_csv(text)
    except ValueError as error:
        raise InputError(f"{path}:{number}: {error}") from None
