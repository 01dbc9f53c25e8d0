"""Synthetic keys: how alike the keys of a request's tokens are, for policies that drop what is redundant.

Nothing here is fitted to a model. It has the three properties that such a policy lives on: all keys of a request point
somewhat the same way, neighbours are alike, and so are passages far apart that speak of the same thing. Keys come from
(request, position) alone, so they cost no memory and do not depend on who else is alive.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.view import View
from sim.serving.attention.bits import add, band, mix, mul, shr, signed, xor

__all__ = ["similarity"]

_DIMENSIONS = 8
_TOPICS = 16
"""Of a request; a segment of 8 tokens has one."""
_COMMON, _TOPIC, _OWN = math.sqrt(0.3), math.sqrt(0.4), math.sqrt(0.3)
"""Length of what all keys, keys of a topic and a key alone contribute: cosines of 0.3 and, within a topic, 0.7."""
_UNIT = np.float32(math.sqrt(3 / _DIMENSIONS) / 2**31)
"""Makes a vector of signed 32-bit hashes one of length 1, on average."""
_FOR_SEGMENT, _FOR_TOPIC, _FOR_OWN = np.uint32(0x452821E6), np.uint32(0x38D01377), np.uint32(0xBE5466CF)
_SPREAD, _SPREAD_DIMENSION = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)


def similarity(view: View, out: NDArray[np.float32]) -> None:
    """Write the mean cosine of each live token's key with the request's other live keys; 0 for a token alone."""
    _similarity(view.key, view.start, view.n, view.position, out)


@njit
def _seed(key: np.uint64, purpose: np.uint32) -> np.uint32:
    return mix(xor(np.uint32(key), mix(add(np.uint32(key >> np.uint64(32)), purpose))))


@njit
def _component(seed: np.uint32, which: np.uint32, dimension: np.uint32) -> np.float32:
    """Return one component of the vector number ``which``, of unit length over all dimensions on average."""
    mixed = mix(xor(add(mul(which, _SPREAD), seed), mul(dimension, _SPREAD_DIMENSION)))
    component: np.float32 = signed(mixed) * _UNIT
    return component


@njit
def _similarity(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    out: NDArray[np.float32],
) -> None:
    common, by_topic, by_own = np.float32(_COMMON), np.float32(_TOPIC), np.float32(_OWN)
    topics = np.empty((_TOPICS, _DIMENSIONS), np.float32)
    for row in range(len(start)):
        segments, own = _seed(key[row], _FOR_SEGMENT), _seed(key[row], _FOR_OWN)
        seed = _seed(key[row], _FOR_TOPIC)
        for topic in range(_TOPICS):
            for d in range(_DIMENSIONS):
                topics[topic, d] = by_topic * _component(seed, np.uint32(topic), np.uint32(d))
        where = position[start[row] : start[row] + n[row]]
        answer = out[start[row] : start[row] + n[row]]
        keys = np.empty((len(where), _DIMENSIONS), np.float32)
        total = np.zeros(_DIMENSIONS, np.float32)
        for i in range(len(where)):
            at = np.uint32(where[i])
            # Segments begin at a place of the request's own, so that they are not blocks.
            segment = shr(add(at, band(segments, np.uint32(7))), np.uint32(3))
            topic = int(mix(add(mul(segment, _SPREAD), segments))) % _TOPICS
            mine = keys[i]
            square = np.float32(0)
            for d in range(_DIMENSIONS):
                mine[d] = topics[topic, d] + by_own * _component(own, at, np.uint32(d))
                if d == 0:
                    mine[d] += common
                square += mine[d] * mine[d]
            scale = np.float32(1) / np.sqrt(square)
            for d in range(_DIMENSIONS):
                mine[d] *= scale
                total[d] += mine[d]
        others = np.float32(max(len(where) - 1, 1))
        for i in range(len(where)):
            # Linear in the others: the mean of the cosines is the cosine with their sum, over their number.
            cosine = np.float32(0)
            for d in range(_DIMENSIONS):
                cosine += keys[i, d] * (total[d] - keys[i, d])
            answer[i] = cosine / others
