"""Random streams that do not disturb each other.

Everything random is drawn either from a named numpy stream (:func:`stream`) or from a counter-based hash of
``(seed, request, token, query)`` (:func:`request_key` and the kernels that take it). So another policy leaves the
arrivals alone, and a request's draws do not depend on which requests run beside it.
"""

from __future__ import annotations

import zlib

import numpy as np

__all__ = ["request_key", "stream"]

_MASK = (1 << 64) - 1


def stream(seed: int, *names: str) -> np.random.Generator:
    """Return the random stream called ``names`` of a run with this ``seed``."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(zlib.crc32(n.encode()) for n in names)))


def request_key(seed: int, ordinal: int) -> int:
    """Return the 64-bit key from which request number ``ordinal`` draws (splitmix64 of both)."""
    x = (seed * 0x9E3779B97F4A7C15 + (ordinal + 1) * 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
