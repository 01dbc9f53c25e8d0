"""Reading other people's text files: packed or not, bounded lines, exact times, errors that name the place."""

from __future__ import annotations

import difflib
import gzip
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import BinaryIO

from sim.errors import InputError
from sim.workload.trace import MAX_TIME_NS

__all__ = ["MAX_LINE_BYTES", "lines", "missing_column", "opened", "to_ns"]

MAX_LINE_BYTES = 16 * 2**20
"""Longest line, or element of a JSON array, that is read."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, unpacking it if it begins like gzip.

    Raises
    ------
    InputError
        If it is missing, a directory, not readable, or gzip that ends early or is damaged; also while it is read.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if packed:
                with gzip.open(raw) as unpacked:
                    yield unpacked  # type: ignore[misc]
            else:
                yield raw
    except EOFError:
        raise InputError(f"{path}: the gzip data ends early: the file is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip data: {error}") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory, expected a file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: not UTF-8 text (byte {error.start + 1} of the line)") from None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line that is not blank.

    Raises
    ------
    InputError
        For a line longer than :data:`MAX_LINE_BYTES` (no more than that is read), not UTF-8, or with NUL bytes.
    """
    with opened(path) as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise InputError(
                    f"{path}:{number}: line longer than {MAX_LINE_BYTES >> 20} MiB, expected one record a line"
                )
            text = _decode(raw, path, number)
            if "\0" in text:
                raise InputError(f"{path}:{number}: binary data (NUL bytes), expected text")
            if text and not text.isspace():
                yield number, text


def to_ns(value: str | int | float, unit_ns: int = 10**9) -> int | None:
    """Return a time as whole nanoseconds, exactly rounded, or None if it is not a number in range.

    Parameters
    ----------
    value
        The time; text keeps all its digits.
    unit_ns
        Nanoseconds in one unit of ``value``.
    """
    try:
        result = Decimal(repr(value) if isinstance(value, float) else value) * unit_ns
        return int(result.to_integral_value()) if abs(result) <= MAX_TIME_NS else None
    except (InvalidOperation, ValueError, TypeError):
        return None


def missing_column(name: str, found: Collection[str]) -> str:
    """Say that a column is missing, and which of those found may be meant to be it."""
    close = difflib.get_close_matches(name, found, n=1, cutoff=0.6)
    hint = f"found {close[0]!r}; did you mean {name!r}?" if close else f"found {', '.join(sorted(found))[:200]}"
    return f"column {name!r} is missing, {hint}"
