"""JSON of three shapes: an object a line, one object, one array of any length."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sim.errors import InputError
from sim.workload.text import MAX_LINE_BYTES, lines, opened

__all__ = ["json_items", "json_lines", "json_object"]

MAX_OBJECT_BYTES = 256 * 2**20
"""Largest file that is read as one JSON object."""

_DECODER = json.JSONDecoder()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise InputError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{where}: not valid JSON: {reason}") from None


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``"file:line"`` and the object of each line of a JSON-lines file."""
    found = False
    for number, text in lines(path):
        where = f"{path}:{number}"
        record = _parse(text, where)
        if not isinstance(record, dict):
            raise InputError(f"{where}: expected one JSON object a line, got {type(record).__name__}")
        found = True
        yield where, record
    if not found:
        raise InputError(f"{path}: the file is empty, expected one JSON object a line")


def json_object(path: Path) -> dict[str, Any]:
    """Read a file that is one JSON object of at most :data:`MAX_OBJECT_BYTES`."""
    with opened(path) as file:
        raw = file.read(MAX_OBJECT_BYTES + 1)
    if len(raw) > MAX_OBJECT_BYTES:
        raise InputError(f"{path}: larger than {MAX_OBJECT_BYTES >> 20} MiB, expected one JSON object")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{raw.count(10, 0, error.start) + 1}: not UTF-8 text") from None
    value = _parse(text, str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected one JSON object, got {type(value).__name__}")
    return value


def json_items(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield ``"file: item n"`` and each element of a file that is one JSON array, in constant memory.

    Raises
    ------
    InputError
        If it is not an array or ends early, or an element is not valid JSON or longer than :data:`MAX_LINE_BYTES`.
    """
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline=None) as text:
        buffer = _Window(text, path)
        if buffer.peek() != "[":
            raise InputError(f"{path}: expected a JSON array")
        buffer.skip(1)
        number = 0
        while (mark := buffer.peek()) != "]":
            if number:
                if mark != ",":
                    raise InputError(
                        f"{path}: expected ',' or ']' after item {number}, got {mark or 'the end of the file'!r}"
                    )
                buffer.skip(1)
            number += 1
            yield f"{path}: item {number}", buffer.value(f"{path}: item {number}")


class _Window:
    """The part of a text that is being decoded."""

    def __init__(self, text: io.TextIOWrapper, path: Path) -> None:
        self._text = text
        self._path = path
        self._held = ""
        self._at = 0

    def _more(self, size: int) -> bool:
        try:
            piece = self._text.read(size)
        except UnicodeDecodeError as error:
            raise InputError(f"{self._path}: not UTF-8 text: {error.reason}") from None
        self._held = self._held[self._at :] + piece
        self._at = 0
        return bool(piece)

    def peek(self) -> str:
        """Return the next character that is not white space, or nothing at the end."""
        while True:
            while self._at < len(self._held):
                if not self._held[self._at].isspace():
                    return self._held[self._at]
                self._at += 1
            if not self._more(1 << 16):
                return ""

    def skip(self, n: int) -> None:
        self._at += n

    def value(self, where: str) -> Any:
        """Decode the value that begins here, reading more until it is whole."""
        self.peek()
        size = 1 << 16
        while True:
            try:
                value, end = _DECODER.raw_decode(self._held, self._at)
            except RecursionError:
                raise InputError(f"{where}: JSON nested too deeply") from None
            except json.JSONDecodeError as error:
                if len(self._held) - self._at > MAX_LINE_BYTES:
                    raise InputError(f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB") from None
                # An unfinished value looks like a wrong one. The amount read doubles, so that retries stay cheap.
                if not self._more(size):
                    raise InputError(f"{where}: not valid JSON: {error.msg}") from None
                size *= 2
            else:
                self._at = end
                return value
