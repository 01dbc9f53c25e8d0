"""Loops over tokens that policies call: votes in a ring of bits, a softmax with noise, the worst pages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sim.bits import add, band, bits_of, mix, mul, normal, row_sum, shr, signed, truncated_float, xor
from sim.jit import njit

__all__ = ["add_noisy_softmax", "blur", "quantile", "replace_vote", "worst_pages"]

_OCTAVE = 2.0**23


@njit
def replace_vote(
    attention: np.ndarray,
    start: np.ndarray,
    n: np.ndarray,
    length: np.ndarray,
    back: int,
    history: int,
    threshold: float,
    votes: np.ndarray,
    words: tuple[np.ndarray, ...],
) -> None:
    """Replace, in each request's ring, the vote of the query ``history`` ago by that of the query at -1 - back."""
    for b in range(len(start)):
        first, last = start[b], start[b] + n[b] - back
        if last <= first:
            continue
        mine, count = attention[first:last], votes[first:last]
        bound = quantile(mine, int(threshold * (len(mine) - 1))) if threshold > 0 else np.float32(1.0 / len(mine))
        bit = (length[b] - 1 - back) % history
        shift = np.uint32(bit % 32)
        for w in range(len(words)):
            if w == bit // 32:
                # Tokens behind the query did not exist when it was asked: their bit is still 0.
                ring = words[w][first:last]
                for i in range(len(mine)):
                    old = np.uint32((ring[i] >> shift) & np.uint32(1))
                    new = np.uint32(mine[i] > bound)
                    ring[i] = np.uint32(ring[i] ^ np.uint32(np.uint32(old ^ new) << shift))
                    count[i] += np.float32(np.int32(new) - np.int32(old))


@njit
def quantile(values: np.ndarray, rank: int) -> Any:
    """Return the ``rank``-th smallest (from 0) of non-negative float32 values.

    Such floats sort as their bits do: a histogram of the upper bits finds the few that can be it.
    """
    bits = values.view(np.uint32)
    counts = np.zeros(2048, np.int32)
    for i in range(len(bits)):
        counts[bits[i] >> np.uint32(20)] += 1
    digit = 0
    while rank >= counts[digit]:
        rank -= counts[digit]
        digit += 1
    close = np.empty(counts[digit], np.float32)
    found = 0
    for i in range(len(bits)):
        if bits[i] >> np.uint32(20) == np.uint32(digit):
            close[found] = values[i]
            found += 1
    return np.partition(close, rank)[rank]


@njit
def _log2(x: np.float32) -> np.float32:
    """Return log2 of a positive float, 127 more than it is: exact at powers of two, and in slope there."""
    bits = bits_of(x)
    m = signed(band(bits, np.uint32(0x7FFFFF))) * np.float32(1 / _OCTAVE)
    left = np.float32(1) - m
    bend = m * left * (np.float32(0.4427) * left + np.float32(0.2787) * m)
    log: np.float32 = signed(bits) * np.float32(1 / _OCTAVE) + bend
    return log


@njit
def _exp2(x: np.float32) -> np.float32:
    """Return 2**(x - 127) for x in [1, 254]."""
    whole = np.float32(np.int32(x))
    m = x - whole
    bend = m * (np.float32(1) - m) * (np.float32(0.3069) + np.float32(0.0794) * m)
    power: np.float32 = truncated_float((x - bend) * np.float32(_OCTAVE))
    return power


@njit
def add_noisy_softmax(
    key: np.ndarray,
    start: np.ndarray,
    n: np.ndarray,
    length: np.ndarray,
    position: np.ndarray,
    inverse: np.ndarray,
    attention: np.ndarray,
    noisy: np.ndarray,
    score: np.ndarray,
) -> None:
    """Add softmax((ln p + Gumbel) / tau), with p the attention, 1 / tau = ``inverse``, and noise drawn anew.

    That is p / E to the power of 1 / tau over its sum, with E drawn exponentially for each (request, query, token).
    """
    for b in range(len(start)):
        first, past = start[b], start[b] + n[b]
        p, where, y = attention[first:past], position[first:past], noisy[first:past]
        seed = mix(xor(np.uint32(key[b]), mix(add(np.uint32(key[b] >> np.uint64(32)), np.uint32(length[b])))))
        power = inverse[b]
        for i in range(len(y)):
            x = mix(xor(mul(np.uint32(where[i]), np.uint32(0x9E3779B1)), seed))
            uniform = (signed(shr(x, np.uint32(9))) + np.float32(0.5)) * np.float32(2.0**-23)
            exponential = np.float32(127) - _log2(uniform)
            y[i] = _exp2(max(np.float32(1), (_log2(p[i]) - _log2(exponential)) * power + np.float32(127)))
        scale = np.float32(1) / row_sum(y)
        total = score[first:past]
        for i in range(len(y)):
            total[i] += y[i] * scale


@njit
def blur(
    key: np.ndarray, start: np.ndarray, n: np.ndarray, position: np.ndarray, spread: float, values: np.ndarray
) -> None:
    """Multiply each token's value by a lognormal draw of its own; ``spread`` is that of the logarithm."""
    octaves = np.float32(spread / math.log(2))
    for b in range(len(start)):
        where, mine = position[start[b] : start[b] + n[b]], values[start[b] : start[b] + n[b]]
        seed = mix(xor(np.uint32(key[b]), mix(add(np.uint32(key[b] >> np.uint64(32)), np.uint32(0x2FFD72DB)))))
        for i in range(len(mine)):
            z = normal(mix(xor(mul(np.uint32(where[i]), np.uint32(0x9E3779B1)), seed)))
            mine[i] *= _exp2(np.float32(127) + octaves * z)


@njit
def worst_pages(
    start: np.ndarray,
    n: np.ndarray,
    position: np.ndarray,
    score: np.ndarray,
    excess: np.ndarray,
    size: int,
    cells: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Name the tokens of the pages of least mean score but the newest, as few pages as make up for the excess.

    A page is ``size`` consecutive positions; among equals the older goes. Fills ``cells`` with the victims and
    ``counts`` with their number by request; returns how many there are.
    """
    found = 0
    for b in range(len(start)):
        if excess[b] == 0:
            continue
        where, worth = position[start[b] : start[b] + n[b]], score[start[b] : start[b] + n[b]]
        first = np.empty(len(where) + 1, np.int64)
        mean = np.empty(len(where), np.float32)
        pages = 0
        for i in range(len(where)):
            if i == 0 or where[i] // size != where[i - 1] // size:
                first[pages] = i
                mean[pages] = np.float32(0)
                pages += 1
            mean[pages - 1] += worth[i]
        first[pages] = len(where)
        for page in range(pages):
            mean[page] /= np.float32(first[page + 1] - first[page])
        dies = np.zeros(pages, np.bool_)
        left = excess[b]
        for page in np.argsort(mean[: pages - 1], kind="mergesort"):
            if left <= 0:
                break
            dies[page] = True
            left -= first[page + 1] - first[page]
        for page in range(pages):
            if dies[page]:
                for i in range(first[page], first[page + 1]):
                    cells[found] = start[b] + i
                    found += 1
                counts[b] += first[page + 1] - first[page]
    return found
