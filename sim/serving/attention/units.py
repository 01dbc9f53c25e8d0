"""Synthetic attention of single layers and heads: what they have in common, and what is their own.

Every draw of the pooled model becomes a mixture of up to three: one that all units of a request see alike, one that
layers near each other share, and one of the unit's own. So each unit looks like the pooled model, with numbers of its
layer, and any two of them agree as much as they were measured to.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.bits import add, band, bits_of, mix, mul, normal, shr, signed, sub, truncated_float, xor
from sim.jit import njit
from sim.kv.units import Units
from sim.kv.view import View
from sim.serving.attention.draws import (
    FOR_HEAVY,
    FOR_REGION,
    FOR_ROW,
    FOR_SCORE,
    FOR_SCORE_REGION,
    FOR_STRENGTH,
    FOR_TEXT,
    FOR_TOKEN,
    FOR_WEIGHT,
    FOR_WIDTH,
    SPREAD,
    happens,
    seed_of,
)
from sim.serving.attention.rows import HALVES_MEAN, share_out_row
from sim.serving.attention.scores import share_out_score
from sim.serving.attention.weights import LOG2_E, OCTAVE, ONE, second_sink

__all__ = [
    "Rows",
    "UnitStatistics",
    "accumulate_units",
    "attend_units",
    "differ",
    "log_trend",
    "mixture",
    "score_noises_of_units",
    "spreads",
    "weigh_units",
]

_COMMON = np.uint32(0x6C62272E)
"""Added to a purpose: draws that units have in common are not those of unit 0, whose key is the request's."""
_LAYERS = 30
# fmt: off
_SINK = (
    0.02, 0.01, 0.04, 0.14, 0.10, 0.11, 0.10, 0.11, 0.11, 0.11, 0.02, 0.02, 0.35, 0.39, 0.50,
    0.48, 0.28, 0.48, 0.57, 0.40, 0.49, 0.44, 0.49, 0.62, 0.61, 0.70, 0.65, 0.51, 0.49, 0.39,
)
"""What the first four tokens hold of the prompt's attention, by layer of SmolLM2-135M; median over seven captures."""
_SLOPE = (
    0.62, 1.08, 1.19, 1.06, 0.85, 1.05, 1.01, 0.62, 1.39, 1.46, 1.32, 1.02, 1.48, 1.44, 1.27,
    1.45, 1.58, 1.23, 1.27, 1.27, 1.17, 1.15, 1.27, 0.94, 0.95, 1.51, 1.09, 1.41, 1.25, 1.09,
)
"""Power by which the attention of the prompt's last 32 queries falls with distance, likewise."""
_SCORE = (
    0.36, 0.67, 0.64, 0.75, 0.78, 0.69, 0.71, 0.84, 0.81, 0.59, 0.67, 0.47, 0.57, 0.70, 0.79,
    0.87, 0.61, 0.61, 0.72, 0.46, 0.69, 0.77, 0.70, 1.05, 0.89, 0.78, 0.95, 0.75, 0.76, 0.45,
)
"""Standard deviation of the logarithm of the score at the end of the prompt, its trend taken away, likewise."""
_TREND = (
    3.69, 1.21, 1.30, 1.26, 1.39, 1.43, 1.49, 2.43, 1.83, 0.57, 0.56, 0.64, 0.71, 0.27, 1.31,
    1.21, 0.39, 1.16, 0.49, 0.70, 1.82, 1.86, 1.04, 2.27, 2.32, 0.53, 1.10, 0.51, 1.40, 1.07,
)
"""Power of the logarithm of the age by which that score grows, likewise."""
# fmt: on
_PROFILES = np.array([_SINK, _SLOPE, _SCORE, _TREND])


@dataclass(frozen=True, slots=True)
class UnitStatistics:
    """How units of a model differ (docs/attention.md: what is measured, what is fitted, and how far off it is).

    ``common``, ``near`` and ``reach`` follow from how the layers' scores at the end of the prompt correlate: by 0.7
    next to each other, falling to 0.1 at twenty of thirty layers. The rest was fitted by
    ``experiments/00_attention_fit/fit_units.py`` to what policies keep, by layer and by head.
    """

    common: float = 0.1
    """Share of the variance of weights and scores that all layers have in common."""
    near: float = 0.6
    """Share that layers have in common if they are near; it falls with the distance between them."""
    reach: float = 0.67
    """Distance at which nothing is left of ``near``, as a share of the model's depth."""
    alike: float = 0.539
    """Of both shares, and of ``row_common``, what is left between heads: a head has more of its own than a layer."""
    row_common: float = 0.653
    """Share of the variance of a query's noise that all units have in common: they read the same passage."""
    weight_cluster: float = 0.161
    """What is left of the share of the weights' variance that neighbouring tokens have in common."""
    score_cluster: float = 0.586
    """The same for scores."""
    weight_spread: float = 1.326
    """Spread of the weights, to that of the pooled model."""
    score_spread: float = 0.926
    """Spread of the scores at the end of the prompt, to that of the pooled model."""
    row_spread: float = 1.321
    """Spread of a query's noise that neighbouring tokens share, to that of the pooled model."""
    token_spread: float = 1.168
    """Spread of the noise of a token's own, to that of the pooled model."""


def differ(units: Units) -> bool:
    """Return whether rows are layers or heads, with attention of their own."""
    return units.layers * units.heads > 1


@functools.lru_cache
def mixture(u: UnitStatistics, heads: int) -> NDArray[np.float32]:
    """Return float32[11]: factors of common, near and own draws; of a row's common and own; spreads; of clusters."""
    alike = u.alike if heads > 1 else 1.0
    common, near, row = alike * u.common, alike * u.near, alike * u.row_common
    shares = [common, near, 1 - common - near, row, 1 - row]
    spreads = [u.weight_spread, u.score_spread, u.row_spread, u.token_spread]
    return np.array(
        [*(math.sqrt(share) for share in shares), *spreads, math.sqrt(u.weight_cluster), math.sqrt(u.score_cluster)],
        np.float32,
    )


@functools.lru_cache
def _profiles(layers: int) -> NDArray[np.float32]:
    """Return float32[4, layers]: sink, slope, spread and power of the trend, relative to their means.

    Of a model with another number of layers, each is the mean over its share of the depth.
    """
    sums = np.concatenate([np.zeros((4, 1)), np.cumsum(_PROFILES, axis=1)], axis=1)
    at = np.arange(layers + 1) * (_LAYERS / layers)
    edges = np.stack([np.interp(at, np.arange(_LAYERS + 1), row) for row in sums])
    mean = np.diff(edges, axis=1) * (layers / _LAYERS)
    relative: NDArray[np.float32] = (mean / _PROFILES.mean(axis=1, keepdims=True)).astype(np.float32)
    return relative


def spreads(u: UnitStatistics, layers: int) -> tuple[float, float, float, float, float]:
    """Return how much wider than the pooled model's a unit can be: weights, regions, tokens, slopes, scores."""
    _, slope, score, _ = _profiles(layers).max(axis=1).tolist()
    # Two uniform parts of a row's noise, each at its end.
    return u.weight_spread, math.sqrt(2) * u.row_spread, u.token_spread, slope, u.score_spread * score


@functools.lru_cache(maxsize=64)
def log_trend(offset: float, size: int) -> NDArray[np.float32]:
    """Return ln ln(age + offset) for ages below ``size``, in units of a float's bits."""
    logarithm = np.log(np.maximum(np.log(np.arange(size) + offset), 1e-3))
    trend: NDArray[np.float32] = (logarithm * (LOG2_E * OCTAVE)).astype(np.float32)
    return trend


class Rows:
    """What kernels need to know of a view's rows: whose they are, how deep, and the numbers of their layer.

    Attributes
    ----------
    common
        uint64[B], the keys of their requests.
    depth
        uint32[B], depth of the layer in units of 2**-16 of ``reach``.
    profile
        float32[4, B]: sink, slope, spread, trend.
    """

    __slots__ = ("common", "depth", "profile")

    def __init__(self, view: View, statistics: UnitStatistics) -> None:
        layers = view.units.layers
        layer = view.unit // view.units.heads
        self.common = view.request_key
        self.depth = ((2 * layer + 1) * 2**16 / (2 * layers * statistics.reach)).astype(np.uint32)
        self.profile = np.ascontiguousarray(_profiles(layers)[:, layer])


@njit
def _common_seed(key: np.uint64, purpose: np.uint32) -> np.uint32:
    return seed_of(key, add(purpose, _COMMON))


@njit
def _near(common: np.uint32, depth: np.uint32, at: np.uint32) -> np.uint32:
    """Return a hash of (request, place) that units share if no border lies between their depths; there is one a reach.

    Borders are elsewhere for every place, so that two units share more of their draws the nearer they are.
    """
    border = shr(add(mul(at, SPREAD), common), np.uint32(16))
    which = shr(add(depth, border), np.uint32(16))
    return mix(xor(mul(at, np.uint32(0x85EBCA6B)), add(common, mul(add(which, np.uint32(1)), np.uint32(0x27D4EB2F)))))


@njit
def _mixed(common: np.uint32, own: np.uint32, depth: np.uint32, at: np.uint32, m: NDArray[np.float32]) -> np.float32:
    """Return a normal draw for a place, part of which all units share, and part of which near ones do."""
    spread = mul(at, SPREAD)
    shared = m[0] * normal(mix(add(spread, common))) + m[1] * normal(_near(common, depth, at))
    drawn: np.float32 = shared + m[2] * normal(mix(add(spread, own)))
    return drawn


@njit
def _weight(
    common: np.uint32,
    own: np.uint32,
    depth: np.uint32,
    position: np.uint32,
    w: NDArray[np.float32],
    m: NDArray[np.float32],
) -> np.float32:
    """Return what :func:`sim.serving.attention.weights.token_weight` does, for a unit."""
    segment = shr(add(position, band(common, np.uint32(7))), np.uint32(3))
    shared = _mixed(add(common, np.uint32(1)), add(own, np.uint32(1)), depth, segment, m)
    cluster = m[9] * w[2]
    z = cluster * shared + np.sqrt(np.float32(1) - cluster * cluster) * _mixed(common, own, depth, position, m)
    boost = w[4] / (np.float32(1) + signed(position) * w[5])
    weight: np.float32 = m[5] * w[0] * (z + w[1] * (z * z - np.float32(1))) + boost + ONE
    # As many tokens are heavy as in the pooled model; those of near units are in part the same.
    alike = m[0] * m[0] + m[1] * m[1]
    of_near = _near(add(common, FOR_HEAVY), depth, position)
    of_own = mix(xor(mul(position, np.uint32(0x27D4EB2F)), add(own, FOR_HEAVY)))
    if happens(of_near, alike * w[6]) or happens(of_own, (np.float32(1) - alike) * w[6]):
        weight += w[7]
    return weight


@njit
def weigh_units(
    key: NDArray[np.uint64],
    request: NDArray[np.uint64],
    depth: NDArray[np.uint32],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    w: NDArray[np.float32],
    m: NDArray[np.float32],
) -> None:
    """Write the weight of each row's tokens."""
    for row in range(len(start)):
        common, own = _common_seed(request[row], FOR_WEIGHT), seed_of(key[row], FOR_WEIGHT)
        where = position[start[row] : start[row] + n[row]]
        answer = weight[start[row] : start[row] + n[row]]
        for i in range(len(where)):
            answer[i] = _weight(common, own, depth[row], np.uint32(where[i]), w, m)


@njit
def _score_noise(
    key: np.uint64,
    request: np.uint64,
    depth: np.uint32,
    where: NDArray[np.int32],
    weights: NDArray[np.float32],
    s: NDArray[np.float32],
    m: NDArray[np.float32],
    spread: np.float32,
    noise: NDArray[np.float32],
) -> None:
    by_weight, by_region, memory = spread * s[1], spread * m[10] * s[2], s[4]
    by_token = np.sqrt(spread * spread * (s[2] * s[2] + s[3] * s[3]) - by_region * by_region)
    fresh = np.sqrt(np.float32(1) - memory * memory)
    common, own = _common_seed(request, FOR_SCORE_REGION), seed_of(key, FOR_SCORE_REGION)
    for i in range(len(where)):
        noise[i] = _mixed(common, own, depth, np.uint32(where[i]), m)
    region = noise[0]
    for i in range(1, len(where)):
        region = memory * region + fresh * noise[i]
        noise[i] = region
    common, own = _common_seed(request, FOR_SCORE), seed_of(key, FOR_SCORE)
    for i in range(len(where)):
        white = _mixed(common, own, depth, np.uint32(where[i]), m)
        noise[i] = by_weight * (weights[i] - ONE) + by_region * noise[i] + by_token * white


@njit
def score_noises_of_units(
    key: NDArray[np.uint64],
    request: NDArray[np.uint64],
    depth: NDArray[np.uint32],
    profile: NDArray[np.float32],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    s: NDArray[np.float32],
    m: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Write the logarithm of each prompt's scores without their trend, in units of a float's bits."""
    for row in range(len(start)):
        first, past = start[row], start[row] + n[row]
        spread = m[6] * profile[2, row]
        where, weights = position[first:past], weight[first:past]
        _score_noise(key[row], request[row], depth[row], where, weights, s, m, spread, out[first:past])


@njit
def accumulate_units(
    key: NDArray[np.uint64],
    request: NDArray[np.uint64],
    depth: NDArray[np.uint32],
    profile: NDArray[np.float32],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    s: NDArray[np.float32],
    m: NDArray[np.float32],
    exponent: float,
    trend: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Write the score at the end of each prompt."""
    for row in range(len(start)):
        first, past = start[row], start[row] + n[row]
        where, weights, score = position[first:past], weight[first:past], out[first:past]
        _score_noise(key[row], request[row], depth[row], where, weights, s, m, m[6] * profile[2, row], score)
        power = np.float32(exponent) * profile[3, row]
        for i in range(len(score)):
            score[i] = truncated_float(score[i] + power * trend[len(score) - 1 - i] + ONE)
        sink = min(np.float32(0.99), s[0] * profile[0, row])
        share_out_score(score, where, sink, s[5], _common_seed(request[row], FOR_ROW))


@njit
def attend_units(
    key: NDArray[np.uint64],
    request: NDArray[np.uint64],
    depth: NDArray[np.uint32],
    profile: NDArray[np.float32],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    length: NDArray[np.int64],
    back: int,
    newest: bool,
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    w: NDArray[np.float32],
    r: NDArray[np.float32],
    m: NDArray[np.float32],
    steps: NDArray[np.uint32],
    out: NDArray[np.float32],
    total: NDArray[np.float32],
) -> None:
    """Write what :func:`sim.serving.attention.rows.attend` does, for units."""
    add_up = len(total) > 0
    row_sigma, offset, by_token, by_jump = r[2], r[3], m[8] * r[8], m[8] * r[9]
    for row in range(len(start)):
        first, end = start[row], start[row] + n[row]
        now = length[row] - 1 - back
        if newest:
            ours, mine = _common_seed(request[row], FOR_WEIGHT), seed_of(key[row], FOR_WEIGHT)
            weight[end - 1] = _weight(ours, mine, depth[row], np.uint32(position[end - 1]), w, m)
        else:
            seen = first + np.searchsorted(position[first:end], now, side="right")
            out[seen:end] = np.float32(0)
            end = seen
        share = np.float32(1)
        if first < end and position[first] == 0:
            sink = min(np.float32(0.99), r[0] * profile[0, row])
            if end - first > 1:
                share -= sink
            out[first] = sink if end - first > 1 else np.float32(1)
            if add_up:
                total[first] += out[first]
            first += 1
        if first == end:
            continue
        # Periods, regions and their strength are the request's: units read the same passages, each its own way.
        query = np.uint32(now)
        seed = _common_seed(request[row], FOR_REGION)
        period = shr(add(query, band(seed, np.uint32(0xFFFF))), steps[1])
        region = mix(add(seed, period))
        shift = band(shr(region, np.uint32(8)), np.uint32(0xFFFF))
        alone = mix(add(seed_of(key[row], FOR_REGION), period))
        seed = seed_of(key[row], FOR_TOKEN)
        token = mix(add(seed, shr(add(query, band(seed, np.uint32(0xFFFF))), steps[2])))
        of_request, of_row = _common_seed(request[row], FOR_ROW), seed_of(key[row], FOR_ROW)
        slope = r[1] * profile[1, row] + row_sigma * normal(mix(add(of_row, query)))
        by_text = np.float32(1) + r[5] * normal(mix(xor(of_request, FOR_TEXT)))
        by_time = np.float32(1) + r[6] * normal(mix(add(region, FOR_STRENGTH)))
        strength = m[7] * r[4] * max(np.float32(0), by_text) * max(np.float32(0), by_time)
        by_common, by_own = m[3] * strength, m[4] * strength
        middle = (by_common + by_own) * np.float32(HALVES_MEAN)
        floor = r[10] + middle
        base = slope * ONE - middle
        width = steps[0]
        if happens(mix(add(region, FOR_WIDTH)), r[7]):
            width = add(width, np.uint32(3))
        where, weights, answer = position[first:end], weight[first:end], out[first:end]
        for i in range(len(answer)):
            at = np.uint32(where[i])
            spread = mul(shr(add(at, shift), width), SPREAD)
            h = add(spread, region)
            h = mul(xor(h, shr(h, np.uint32(15))), np.uint32(0x85EBCA6B))
            h = xor(h, shr(h, np.uint32(13)))
            common = signed(add(band(h, np.uint32(0xFFFF)), shr(h, np.uint32(16))))
            h = add(spread, alone)
            h = mul(xor(h, shr(h, np.uint32(15))), np.uint32(0x85EBCA6B))
            h = xor(h, shr(h, np.uint32(13)))
            halves = signed(add(band(h, np.uint32(0xFFFF)), shr(h, np.uint32(16))))
            g = mul(xor(h, add(mul(at, np.uint32(0xC2B2AE35)), token)), np.uint32(0x27D4EB2F))
            own = signed(xor(g, shr(g, np.uint32(16))))
            noise = by_common * common + by_own * halves + (by_token + by_jump * own) * own
            noise = noise if noise > floor else floor
            distance = signed(bits_of(signed(sub(query, at)) + offset))
            answer[i] = truncated_float(weights[i] + noise - slope * distance + base)
        second = second_sink(of_request, where) if r[11] > 0 else -1
        share_out_row(answer, share, second, r[11], total[first:end] if add_up else total)
