"""Counter-based draws for synthetic attention and keys: hashes of (request, purpose, position)."""

from __future__ import annotations

import numpy as np

from sim.bits import add, mix, shr, signed, xor
from sim.jit import njit

__all__ = ["SPREAD", "happens", "seed_of"]

# What each draw of attention is for: two draws for the same token and query must not be the same number.
FOR_WEIGHT, FOR_SCORE, FOR_SCORE_REGION = np.uint32(0x243F6A88), np.uint32(0x13198A2E), np.uint32(0x03707344)
FOR_REGION, FOR_TOKEN, FOR_ROW = np.uint32(0xA4093822), np.uint32(0x299F31D0), np.uint32(0x082EFA98)
FOR_HEAVY, FOR_TEXT, FOR_STRENGTH = np.uint32(0xEC4E6C89), np.uint32(0x452821E6), np.uint32(0x38D01377)
FOR_WIDTH = np.uint32(0xBE5466CF)

SPREAD = np.uint32(0x9E3779B1)
"""Multiplied with a position before hashing: neighbours are far apart then."""


@njit
def seed_of(key: np.uint64, purpose: np.uint32) -> np.uint32:
    """Return 32 bits from a request's key, different for each purpose."""
    return mix(xor(np.uint32(key), mix(add(np.uint32(key >> np.uint64(32)), purpose))))


@njit
def happens(h: np.uint32, share: np.float32) -> bool:
    """Return whether a thing happens that does so in ``share`` of 2**24 cases."""
    return bool(signed(shr(h, np.uint32(8))) < share)
