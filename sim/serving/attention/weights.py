"""What a token of synthetic attention weighs for ever, in logarithms that are the bit patterns of floats."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sim.bits import add, band, mix, mul, normal, shr, signed, xor
from sim.jit import njit
from sim.serving.attention.draws import FOR_HEAVY, FOR_WEIGHT, SPREAD, happens, seed_of

__all__ = ["LOG2_E", "OCTAVE", "ONE", "begin_rows", "second_sink", "token_weight"]

LOG2_E = 1.0 / math.log(2.0)
OCTAVE = 2.0**23
"""A factor of two, as a step in the bit pattern of a float32: kernels add up logarithms in this unit."""
ONE = np.float32(127 * OCTAVE)
"""The bit pattern of 1.0, as a number."""


@njit
def token_weight(seed: np.uint32, position: np.uint32, w: NDArray[np.float32]) -> np.float32:
    """Return a token's weight as the bit pattern of its value: a function of the request and the position alone."""
    # Segments begin at a place of the request's own, so that they are not blocks.
    segment = shr(add(position, band(seed, np.uint32(7))), np.uint32(3))
    shared = normal(mix(add(mul(segment, SPREAD), seed)))
    own = normal(mix(xor(mul(position, np.uint32(0x85EBCA6B)), seed)))
    z = w[2] * shared + w[3] * own
    boost = w[4] / (np.float32(1) + signed(position) * w[5])
    weight: np.float32 = w[0] * (z + w[1] * (z * z - np.float32(1))) + boost + ONE
    if happens(mix(xor(mul(position, np.uint32(0x27D4EB2F)), add(seed, FOR_HEAVY))), w[6]):
        weight += w[7]
    return weight


@njit
def second_sink(seed: np.uint32, where: NDArray[np.int32]) -> int:
    """Return which of these tokens is the second sink; -1 if it is dead, not yet there, or alone."""
    position = 4 + np.int64(shr(mul(shr(seed, np.uint32(16)), np.uint32(232)), np.uint32(16)))
    # Positions ascend, so it is no further than where it would be if nothing before it had died.
    low, high = 0, min(position - where[0], len(where) - 1)
    if len(where) < 2 or high < 0:
        return -1
    if where[high] == position:
        return int(high)
    while low < high:
        middle = (low + high) // 2
        if where[middle] < position:
            low = middle + 1
        else:
            high = middle
    return int(low) if where[low] == position else -1


@njit
def begin_rows(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    w: NDArray[np.float32],
) -> None:
    """Write the weight of each row's tokens."""
    for row in range(len(start)):
        seed = seed_of(key[row], FOR_WEIGHT)
        where = position[start[row] : start[row] + n[row]]
        answer = weight[start[row] : start[row] + n[row]]
        for i in range(len(where)):
            answer[i] = token_weight(seed, np.uint32(where[i]), w)
