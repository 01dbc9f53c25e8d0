"""The score at the end of the prompt under synthetic attention, which is drawn as such."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from sim.bits import add, mix, mul, normal, row_sum, truncated_float
from sim.jit import njit
from sim.serving.attention.draws import FOR_ROW, FOR_SCORE, FOR_SCORE_REGION, SPREAD, seed_of
from sim.serving.attention.weights import ONE, second_sink

__all__ = ["accumulate", "score_noises", "share_out_score", "trend_of"]


@functools.lru_cache(maxsize=64)
def trend_of(offset: float, exponent: float, size: int) -> NDArray[np.float32]:
    """Return how the score at the end of the prompt grows with age, for ages below ``size``."""
    trend: NDArray[np.float32] = (np.log(np.arange(size) + offset) ** exponent).astype(np.float32)
    # ln 1 is 0, and a token of no score at all could leave a row without anything to normalise.
    return np.maximum(trend, np.float32(1e-6))


@njit
def _score_noise(
    shared: np.uint32,
    own: np.uint32,
    where: NDArray[np.int32],
    weights: NDArray[np.float32],
    s: NDArray[np.float32],
    noise: NDArray[np.float32],
) -> None:
    """Write the logarithm of one prompt's scores, in units of a float's bits."""
    by_weight, by_region, by_token, memory = s[1], s[2], s[3], s[4]
    fresh = np.sqrt(np.float32(1) - memory * memory)
    # Three loops, because only the second has to go token by token.
    for i in range(len(where)):
        noise[i] = normal(mix(add(mul(np.uint32(where[i]), SPREAD), shared)))
    region = noise[0]
    for i in range(1, len(where)):
        region = memory * region + fresh * noise[i]
        noise[i] = region
    for i in range(len(where)):
        white = normal(mix(add(mul(np.uint32(where[i]), SPREAD), own)))
        noise[i] = by_weight * (weights[i] - ONE) + by_region * noise[i] + by_token * white


@njit
def score_noises(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    s: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Write the logarithm of each prompt's scores without their trend, in units of a float's bits."""
    for row in range(len(start)):
        first, past = start[row], start[row] + n[row]
        shared, own = seed_of(key[row], FOR_SCORE_REGION), seed_of(key[row], FOR_SCORE)
        _score_noise(shared, own, position[first:past], weight[first:past], s, out[first:past])


@njit
def share_out_score(
    score: NDArray[np.float32], where: NDArray[np.int32], sink: np.float32, second_more: np.float32, of_row: np.uint32
) -> None:
    """Scale one prompt's scores to sum to its length, with what the sink has of it on token 0."""
    length = np.float32(len(score))
    if where[0] != 0:
        scale = length / row_sum(score)
        score *= scale
    elif len(score) == 1:
        score[0] = length
    else:
        score[0] = sink * length
        others, left = score[1:], length - score[0]
        second = second_sink(of_row, where[1:])
        if second >= 0:
            others[second] *= second_more
        scale = left / row_sum(others)
        others *= scale


@njit
def accumulate(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    s: NDArray[np.float32],
    trend: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Write the score at the end of each prompt."""
    sink = s[0]
    for row in range(len(start)):
        size = n[row]
        of_row = seed_of(key[row], FOR_ROW)
        shared, own = seed_of(key[row], FOR_SCORE_REGION), seed_of(key[row], FOR_SCORE)
        where = position[start[row] : start[row] + size]
        weights = weight[start[row] : start[row] + size]
        score = out[start[row] : start[row] + size]
        _score_noise(shared, own, where, weights, s, score)
        for i in range(size):
            score[i] = truncated_float(score[i] + ONE) * trend[size - 1 - i]
        share_out_score(score, where, sink, s[5], of_row)
