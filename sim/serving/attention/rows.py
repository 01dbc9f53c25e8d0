"""One query's attention under the synthetic model: the hot loop."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sim.bits import add, band, bits_of, mix, mul, normal, row_sum, shr, signed, sub, truncated_float, xor
from sim.jit import njit
from sim.serving.attention.draws import (
    FOR_REGION,
    FOR_ROW,
    FOR_STRENGTH,
    FOR_TEXT,
    FOR_TOKEN,
    FOR_WEIGHT,
    FOR_WIDTH,
    SPREAD,
    happens,
    seed_of,
)
from sim.serving.attention.weights import ONE, second_sink, token_weight

__all__ = ["HALVES_STD", "attend", "share_out_row"]

HALVES_MEAN = 65535.0
HALVES_STD = math.sqrt(2 * (65536.0**2 - 1) / 12)
"""Of the sum of the two halves of a hash, which is drawn where a sum of four bytes would cost more."""


@njit(inline="always")
def share_out_row(
    answer: NDArray[np.float32], share: np.float32, second: int, of_second: np.float32, sums: NDArray[np.float32]
) -> None:
    """Scale a query's attention to sum to ``share``, the second sink's part first; add it to ``sums``, if not empty."""
    held = np.float32(0)
    if second >= 0:
        held = share * of_second
        answer[second] = np.float32(0)
    scale = (share - held) / row_sum(answer)
    if len(sums) > 0:
        for i in range(len(answer)):
            answer[i] *= scale
            sums[i] += answer[i]
        if second >= 0:
            sums[second] += held
    else:
        answer *= scale
    if second >= 0:
        answer[second] = held


@njit
def attend(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    length: NDArray[np.int64],
    back: int,
    newest: bool,
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    w: NDArray[np.float32],
    r: NDArray[np.float32],
    steps: NDArray[np.uint32],
    out: NDArray[np.float32],
    total: NDArray[np.float32],
) -> None:
    """Write the attention of each row's query; ``newest`` gives its newest token a weight first (see ``Synthetic``)."""
    add_up = len(total) > 0
    sink, exponent, row_sigma, offset, by_token, by_jump = r[0], r[1], r[2], r[3], r[8], r[9]
    for row in range(len(start)):
        first, end = start[row], start[row] + n[row]
        now = length[row] - 1 - back
        if newest:
            weight[end - 1] = token_weight(seed_of(key[row], FOR_WEIGHT), np.uint32(position[end - 1]), w)
        else:
            seen = first + np.searchsorted(position[first:end], now, side="right")
            out[seen:end] = np.float32(0)
            end = seen
        share = np.float32(1)
        if first < end and position[first] == 0:
            if end - first > 1:
                share -= sink
            out[first] = sink if end - first > 1 else np.float32(1)
            if add_up:
                total[first] += out[first]
            first += 1
        if first == end:
            continue
        # One draw for the row, one for all regions and one for all tokens: mixed with the positions below. Periods
        # begin at a query of the request's own; regions begin elsewhere in every period.
        query = np.uint32(now)
        seed = seed_of(key[row], FOR_REGION)
        region = mix(add(seed, shr(add(query, band(seed, np.uint32(0xFFFF))), steps[1])))
        shift = band(shr(region, np.uint32(8)), np.uint32(0xFFFF))
        seed = seed_of(key[row], FOR_TOKEN)
        token = mix(add(seed, shr(add(query, band(seed, np.uint32(0xFFFF))), steps[2])))
        of_row = seed_of(key[row], FOR_ROW)
        slope = exponent + row_sigma * normal(mix(add(of_row, query)))
        by_text = np.float32(1) + r[5] * normal(mix(xor(of_row, FOR_TEXT)))
        by_time = np.float32(1) + r[6] * normal(mix(add(region, FOR_STRENGTH)))
        by_region = r[4] * max(np.float32(0), by_text) * max(np.float32(0), by_time)
        middle = by_region * np.float32(HALVES_MEAN)
        floor = r[10] + middle
        base = slope * ONE - middle
        width = steps[0]
        if happens(mix(add(region, FOR_WIDTH)), r[7]):
            width = add(width, np.uint32(3))
        where, weights, answer = position[first:end], weight[first:end], out[first:end]
        # The hot loop: no branch, no call, nothing wider than 32 bits (bits.py), so it runs on whole vectors.
        for i in range(len(answer)):
            at = np.uint32(where[i])
            h = add(mul(shr(add(at, shift), width), SPREAD), region)
            h = mul(xor(h, shr(h, np.uint32(15))), np.uint32(0x85EBCA6B))
            h = xor(h, shr(h, np.uint32(13)))
            halves = signed(add(band(h, np.uint32(0xFFFF)), shr(h, np.uint32(16))))
            g = mul(xor(h, add(mul(at, np.uint32(0xC2B2AE35)), token)), np.uint32(0x27D4EB2F))
            own = signed(xor(g, shr(g, np.uint32(16))))
            noise = by_region * halves + (by_token + by_jump * own) * own
            noise = noise if noise > floor else floor
            distance = signed(bits_of(signed(sub(query, at)) + offset))
            answer[i] = truncated_float(weights[i] + noise - slope * distance + base)
        second = second_sink(of_row, where) if r[11] > 0 else -1
        share_out_row(answer, share, second, r[11], total[first:end] if add_up else total)
