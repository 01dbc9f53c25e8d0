"""Frozen dataclasses as JSON, with errors that name the field: the standard library alone."""

from __future__ import annotations

import dataclasses
import datetime
import math
import types
import typing
from collections.abc import Callable
from typing import Any

from sim.errors import did_you_mean

__all__ = ["FieldError", "at_least", "plain", "read_record"]


class FieldError(ValueError):
    """What is wrong with a field, and where it is.

    Parameters
    ----------
    where
        The field, with dots between the levels; relative to its record while that is being made.
    message
        What was expected.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


def at_least(where: str, value: float | None, least: float) -> None:
    """Raise :class:`FieldError` unless ``value`` is None or a finite number of at least ``least``."""
    if value is not None and not least <= value < math.inf:
        raise FieldError(where, f"expected a number of at least {least}, got {value}")


def plain(value: Any) -> Any:
    """Turn a record into what JSON has; what is None or empty is left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = ((spec.name, getattr(value, spec.name)) for spec in dataclasses.fields(value))
        return {name: plain(item) for name, item in found if item is not None and item not in ("", (), {})}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date) else value


def _read(expected: Any, value: Any, where: str) -> Any:
    """Read a JSON value as the type that a field is annotated with."""
    if dataclasses.is_dataclass(expected):
        return read_record(typing.cast(type, expected), value, where)
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin is types.UnionType:
        options = [option for option in inner if option is not type(None)]
        return None if value is None and len(options) < len(inner) else _read(options[0], value, where)
    if origin is typing.Literal:
        if value not in inner or isinstance(value, bool):
            hint = did_you_mean(value, map(str, inner)) if isinstance(value, str) else ""
            raise FieldError(where, f"expected {' or '.join(map(repr, inner))}, got {value!r}{hint}")
        return value
    if origin is dict:
        _check(isinstance(value, dict), where, "a JSON object", value)
        return {key: _read(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is tuple:
        _check(isinstance(value, list), where, "a list", value)
        if inner[-1] is not Ellipsis:
            _check(len(value) == len(inner), where, f"{len(inner)} numbers", value)
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_read(kind, item, where) for kind, item in zip(kinds, value, strict=True))
    return _SCALARS[expected](value, where)


def read_record(expected: type, value: Any, where: str = "") -> Any:
    """Make a dataclass of a JSON object.

    Parameters
    ----------
    expected
        The class; its fields are texts, numbers, dates, choices, tuples, dictionaries, and classes of this kind.
    value
        What JSON gave.
    where
        The field that it is the value of.

    Raises
    ------
    FieldError
        For the first field that is unknown, missing, or not of its type.
    """
    _check(isinstance(value, dict), where, "a JSON object", value)
    dot = f"{where}." if where else ""
    hints = typing.get_type_hints(expected)
    specs = {spec.name: spec for spec in dataclasses.fields(expected)}
    for key in value:
        if key not in specs:
            raise FieldError(dot + key, f"no such field{did_you_mean(key, specs)}")
    for name, spec in specs.items():
        optional = spec.default is not dataclasses.MISSING or spec.default_factory is not dataclasses.MISSING
        if name not in value and not optional:
            raise FieldError(dot + name, "it is missing")
    values = {key: _read(hints[key], item, dot + key) for key, item in value.items()}
    try:
        return expected(**values)
    except FieldError as error:
        error.where = dot + error.where if error.where else where
        raise


def _check(holds: bool, where: str, expected: str, value: Any) -> None:
    if not holds:
        raise FieldError(where, f"expected {expected}, got {value!r}")


def _text(value: Any, where: str) -> str:
    _check(isinstance(value, str), where, "a text", value)
    return str(value)


def _number(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _check(is_number, where, "a finite number", value)
    return float(value)


def _count(value: Any, where: str) -> int:
    _check(isinstance(value, int) and not isinstance(value, bool), where, "an integer", value)
    return int(value)


def _date(value: Any, where: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(value)
    except (TypeError, ValueError):
        raise FieldError(where, f"expected a date as 2026-11-30, got {value!r}") from None


_SCALARS: dict[type, Callable[[Any, str], Any]] = {
    str: _text,
    float: _number,
    int: _count,
    datetime.date: _date,
}
