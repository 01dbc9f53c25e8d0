"""Fields of JSON records, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.workload.text import to_ns
from sim.workload.trace import MAX_TOKENS

__all__ = ["characters_to_tokens", "hashes", "integer", "number_ns", "text_of"]


def integer(record: dict[str, Any], key: str, where: str) -> int:
    """Return a token count of at least 0 from a JSON record.

    Raises
    ------
    InputError
        If it is missing, or not a whole number in range.
    """
    value = record.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise InputError(f"{where}: field {key!r}: expected a token count of at least 0, got {_shown(record, key)}")
    return value


def number_ns(record: dict[str, Any], key: str, unit_ns: int, where: str) -> int:
    """Return a time of at least 0 from a JSON record, in ns; ``unit_ns`` is the length of its unit."""
    value = record.get(key)
    result = to_ns(value, unit_ns) if isinstance(value, int | float) and not isinstance(value, bool) else None
    if result is None or result < 0:
        raise InputError(f"{where}: field {key!r}: expected a time of at least 0, got {_shown(record, key)}")
    return result


def text_of(record: dict[str, Any], key: str, where: str) -> str:
    """Return a text from a JSON record."""
    value = record.get(key)
    if not isinstance(value, str):
        raise InputError(f"{where}: field {key!r}: expected text, got {_shown(record, key)}")
    return value


def hashes(record: dict[str, Any], key: str, where: str) -> NDArray[np.int64] | None:
    """Return the block ids of a JSON record, or None if it has none; unsigned 64-bit ids keep their bits."""
    value = record.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise InputError(f"{where}: field {key!r}: expected a list of whole numbers, got {_shown(record, key)}")
    try:
        return np.array(value, np.int64)
    except OverflowError:
        if all(0 <= item < 1 << 64 for item in value):
            return np.array(value, np.uint64).view(np.int64)
        raise InputError(f"{where}: field {key!r}: expected ids of at most 64 bits") from None


def _shown(record: dict[str, Any], key: str) -> str:
    text = repr(record[key]) if key in record else "nothing"
    return text if len(text) <= 40 else text[:37] + "..."


def characters_to_tokens(text: str) -> int:
    """Estimate the tokens of a text: one for every four characters, rounded up (a common rule for English)."""
    return -(-len(text) // 4)
