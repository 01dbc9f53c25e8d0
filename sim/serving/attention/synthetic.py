"""Synthetic attention: a handful of measured regularities of a real model, hashed from (request, position, query).

Nothing here is drawn in sequence and nothing is remembered but one number a token, so a request sees the same attention
whatever runs beside it, after a preemption too. Arithmetic is float32 and uint32 with the order of additions fixed: the
same bits on any machine.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.bits import BYTES_STD, add, band, bits_of, mix, mul, normal, row_sum, shr, signed, sub, truncated_float, xor
from sim.errors import InputError
from sim.jit import njit
from sim.kv.view import View
from sim.serving.attention.base import attention_models
from sim.serving.attention.draws import SPREAD, happens, seed_of
from sim.serving.attention.keys import KeyStatistics

__all__ = ["KEYS", "Synthetic"]

KEYS = KeyStatistics()
_WEIGHT = "attention_weight"
_NOTHING = np.zeros(0, np.float32)
_LOG2_E = 1.0 / math.log(2.0)
_OCTAVE = 2.0**23
"""A factor of two, as a step in the bit pattern of a float32: kernels add up logarithms in this unit."""
_ONE = np.float32(127 * _OCTAVE)
"""The bit pattern of 1.0, as a number."""
_REACH = 4 * 255 / 2 / BYTES_STD
"""How many standard deviations a sum of four bytes can be from its mean."""
_HALVES_MEAN = 65535.0
_HALVES_STD = math.sqrt(2 * (65536.0**2 - 1) / 12)
"""Of the sum of the two halves of a hash, which is drawn where a sum of four bytes would cost more."""
_SECOND_SCORE = 8
"""How much more the second sink has at the end of the prompt than another token would in its place."""

# What each draw is for: two draws for the same token and query must not be the same number.
_FOR_WEIGHT, _FOR_SCORE, _FOR_SCORE_REGION = np.uint32(0x243F6A88), np.uint32(0x13198A2E), np.uint32(0x03707344)
_FOR_REGION, _FOR_TOKEN, _FOR_ROW = np.uint32(0xA4093822), np.uint32(0x299F31D0), np.uint32(0x082EFA98)
_FOR_HEAVY, _FOR_TEXT, _FOR_STRENGTH = np.uint32(0xEC4E6C89), np.uint32(0x452821E6), np.uint32(0x38D01377)
_FOR_WIDTH = np.uint32(0xBE5466CF)


@attention_models.register("synthetic")
@dataclass(frozen=True)
class Synthetic:
    """Attention pooled over layers and heads, fitted to SmolLM2-135M (docs/attention.md has the fit and its misses).

    Token 0 is the sink, and a token among the next 4 to 235 a second one. The others share the rest in proportion to::

        exp(weight[i] + noise[i, t]) / (age + age_offset) ** slope[t]

    ``weight`` belongs to the token for ever: skewed, a little alike within segments of 8 tokens, larger near the start,
    and for a few tokens much larger. ``noise`` has a part that neighbouring tokens share for some queries (the passage
    the model is reading), stronger in some texts and at some times than in others, and a part of the token's own, which
    now and then jumps. What is below a floor is cut, because a token's attention jumps up more than it drops.
    ``slope`` varies from query to query. Powers of two and logarithms are taken with a straight line between
    neighbouring octaves: within 6 % of the exact value, less than the noise by a factor of five.

    The score at the end of the prompt is a distribution of its own (column sums are far smoother than rows)::

        exp(score_sigma * (weight, region and white noise)) * ln(age + score_offset) ** score_exponent

    All sigmas are on the natural logarithm. Every default but ``sink_share`` and ``score_offset``, which are measured
    in ``reference/attention.md``, was fitted by ``experiments/00_attention_fit``.

    Raises
    ------
    InputError
        If a parameter is not finite or out of range, or together they could overflow a float32.
    """

    sink_share: float = 0.31
    """Attention on token 0, as long as it lives."""
    second_share: float = 0.307
    """Of what is left, attention on the second sink, as long as it lives."""
    age_exponent: float = 1.02
    """Mean power of the decay with distance."""
    age_offset: float = 0.13
    """Tokens; above 0."""
    row_sigma: float = 0.113
    """Standard deviation of the power from query to query."""
    weight_sigma: float = 0.384
    """Of the tokens' own weight."""
    weight_skew: float = 0.0757
    """Of ``z + skew (z**2 - 1)``: 0 is symmetric."""
    weight_cluster: float = 0.453
    """Share of the variance of the weight that a segment of 8 tokens has in common."""
    heavy_share: float = 0.0366
    """Share of tokens that are heavy."""
    heavy_weight: float = 1.46
    """Logarithm of the factor by which they weigh more."""
    start_boost: float = 1.43
    """Logarithm of the factor by which the first tokens weigh more."""
    start_tokens: float = 199.0
    """Position at which half of that is left."""
    region_sigma: float = 0.893
    """Of the noise that a region shares."""
    region_text: float = 0.364
    """Of that sigma from request to request, relative: texts differ."""
    region_time: float = 0.518
    """The same from period to period."""
    region_bits: int = 2
    """Width of a region: 2**bits tokens; where regions begin changes with their noise."""
    region_wide: float = 0.511
    """Share of periods in which regions are eight times as wide."""
    region_steps_bits: int = 3
    """The region's noise holds for a period of 2**bits queries."""
    token_sigma: float = 0.0947
    """Of the noise of a token's own (uniform)."""
    token_jump: float = 1.52
    """The most that its square adds: the noise of a token's own is skewed."""
    token_steps_bits: int = 1
    """The token's noise holds for 2**bits queries."""
    noise_floor: float = 0.253
    """Lower bound of the sum of both."""
    score_sigma: float = 0.779
    """Of the score at the end of the prompt."""
    score_weight: float = 0.379
    """Correlation of the score's noise with the weight."""
    score_region: float = 0.311
    """Share of the rest of its variance that neighbours have in common."""
    score_region_memory: float = 0.857
    """Correlation of that share between neighbours (AR(1) along the prompt)."""
    score_offset: float = 1.7
    """Tokens; at least 1."""
    score_exponent: float = 1.29
    """Power of the logarithm of the age."""

    columns: ClassVar[tuple[str, ...]] = (_WEIGHT,)

    def __post_init__(self) -> None:
        """Refuse what the kernels could not compute."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value):
                raise InputError(f"attention model 'synthetic': {field.name} must be finite, got {value}")
            low, high = _LIMITS.get(field.name, (0.0, math.inf))
            if not low <= value <= high:
                raise InputError(
                    f"attention model 'synthetic': {field.name} must be between {low:g} and {high:g}, got {value:g}"
                )
        z = _REACH * (math.sqrt(self.weight_cluster) + math.sqrt(1 - self.weight_cluster))
        weight = self.weight_sigma * (z + self.weight_skew * z * z) + self.start_boost + self.heavy_weight
        region = self.region_sigma * (1 + _REACH * self.region_text) * (1 + _REACH * self.region_time)
        noise = math.sqrt(6) * region + math.sqrt(3) * self.token_sigma + self.token_jump
        decay = 22 * (self.age_exponent + _REACH * self.row_sigma)
        if max(weight + noise + decay, _REACH * 3 * self.score_sigma) > 85:
            raise InputError("attention model 'synthetic': weights, noise and decay together exceed a float32 (e**85)")

    @functools.cached_property
    def _weights(self) -> NDArray[np.float32]:
        """[8]: what :func:`_weight` takes."""
        sigma = self.weight_sigma / math.sqrt(1 + 2 * self.weight_skew**2)
        return np.array(
            [
                sigma * _LOG2_E * _OCTAVE,
                self.weight_skew,
                math.sqrt(self.weight_cluster),
                math.sqrt(1 - self.weight_cluster),
                self.start_boost * _LOG2_E * _OCTAVE,
                1 / self.start_tokens,
                self.heavy_share * 2**24,
                self.heavy_weight * _LOG2_E * _OCTAVE,
            ],
            np.float32,
        )

    @functools.cached_property
    def _rows(self) -> NDArray[np.float32]:
        """[12]: what :func:`_attend` takes; noise is scaled to the raw sums of halves and the raw hashes."""
        unit = _LOG2_E * _OCTAVE
        return np.array(
            [
                self.sink_share,
                self.age_exponent,
                self.row_sigma,
                self.age_offset,
                self.region_sigma * unit / _HALVES_STD,
                self.region_text,
                self.region_time,
                self.region_wide * 2**24,
                self.token_sigma * unit * math.sqrt(12) / 2**32,
                self.token_jump * unit / 2**62,
                self.noise_floor * unit,
                self.second_share,
            ],
            np.float32,
        )

    @functools.cached_property
    def _steps(self) -> NDArray[np.uint32]:
        """[3]: shifts that turn positions and queries into regions and periods."""
        return np.array([self.region_bits, self.region_steps_bits, self.token_steps_bits], np.uint32)

    @functools.cached_property
    def _scores(self) -> NDArray[np.float32]:
        """[6]: what :func:`_accumulate` takes."""
        sigma = self.score_sigma * _LOG2_E * _OCTAVE
        rest = sigma * math.sqrt(1 - self.score_weight**2)
        # The weight column is in octaves already; a weight that does not vary has nothing to say about the score.
        unit = self.weight_sigma * _LOG2_E * _OCTAVE
        return np.array(
            [
                self.sink_share,
                sigma * self.score_weight / unit if unit else 0.0,
                rest * math.sqrt(self.score_region),
                rest * math.sqrt(1 - self.score_region),
                self.score_region_memory,
                _SECOND_SCORE if self.second_share else 1,
            ],
            np.float32,
        )

    def similarity(self, view: View, out: NDArray[np.float32]) -> None:
        """Write how alike the keys are (:mod:`sim.serving.attention.keys`)."""
        KEYS.similarity(view, out)

    def key_norms(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:
        """Write the norms of the keys: the more a token weighs, the shorter its key."""
        self._log_weights(view, newest, out)
        KEYS.key_norms(view, newest, out)

    def value_norms(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:
        """Write the norms of the values."""
        self._log_weights(view, newest, out)
        KEYS.value_norms(view, newest, out)

    def expected(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the attention that prompt tokens can expect: like the score at the end of the prompt, but not it."""
        weight = view.columns[_WEIGHT]
        _score_noises(view.key, view.start, view.n, view.position, weight, self._scores, out)
        KEYS.expected(view, self.score_sigma, out)

    def _log_weights(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:
        """Write the weights, as logarithms; a policy that does not attend has none of what was generated."""
        start, n = (view.newest, np.ones_like(view.n)) if newest else (view.start, view.n)
        _begin(view.key, start, n, view.position, out, self._weights)

    def begin(self, view: View) -> None:
        """Give every token its weight."""
        _begin(view.key, view.start, view.n, view.position, view.columns[_WEIGHT], self._weights)

    def accumulated(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the score at the end of the prompt, drawn as such: it is not the sum of :meth:`query` over all rows."""
        size = 1 << int(view.n.max(initial=1)).bit_length()
        trend = _trend(self.score_offset, self.score_exponent, size)
        _accumulate(view.key, view.start, view.n, view.position, view.columns[_WEIGHT], self._scores, trend, out)

    def query(self, view: View, back: int, out: NDArray[np.float32]) -> None:
        """Write the attention of a prompt query: what :meth:`attend` would have given at that length."""
        self._attend(view, back, False, out)

    def attend(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the attention of the newest query, and give the newest token its weight."""
        self._attend(view, 0, True, out)

    def attend_and_add(self, view: View, out: NDArray[np.float32], total: NDArray[np.float32]) -> None:
        """Do what :meth:`attend` does and add it to ``total``, in one pass over memory."""
        self._attend(view, 0, True, out, total)

    def _attend(
        self,
        view: View,
        back: int,
        newest: bool,
        out: NDArray[np.float32],
        total: NDArray[np.float32] = _NOTHING,
    ) -> None:
        _attend(
            view.key,
            view.start,
            view.n,
            view.length,
            back,
            newest,
            view.position,
            view.columns[_WEIGHT],
            self._weights,
            self._rows,
            self._steps,
            out,
            total,
        )


_LIMITS = {
    "sink_share": (0.0, 0.999),
    "second_share": (0.0, 0.999),
    "age_offset": (1e-3, 1e6),
    "weight_cluster": (0.0, 1.0),
    "start_boost": (-20.0, 20.0),
    "start_tokens": (1e-3, 1e9),
    "region_bits": (0, 16),
    "region_steps_bits": (0, 16),
    "token_steps_bits": (0, 16),
    "noise_floor": (-100.0, 10.0),
    "heavy_share": (0.0, 1.0),
    "region_wide": (0.0, 1.0),
    "score_weight": (-1.0, 1.0),
    "score_region": (0.0, 1.0),
    "score_region_memory": (0.0, 0.999),
    "score_offset": (1.0, 1e6),
    "score_exponent": (0.0, 10.0),
}
"""Parameter -> least and largest value; every other one is at least 0."""


@functools.lru_cache(maxsize=64)
def _trend(offset: float, exponent: float, size: int) -> NDArray[np.float32]:
    """Return how the score at the end of the prompt grows with age, for ages below ``size``."""
    trend: NDArray[np.float32] = (np.log(np.arange(size) + offset) ** exponent).astype(np.float32)
    # ln 1 is 0, and a token of no score at all could leave a row without anything to normalise.
    return np.maximum(trend, np.float32(1e-6))


@njit
def _weight(seed: np.uint32, position: np.uint32, w: NDArray[np.float32]) -> np.float32:
    """Return a token's weight as the bit pattern of its value: a function of the request and the position alone."""
    # Segments begin at a place of the request's own, so that they are not blocks.
    segment = shr(add(position, band(seed, np.uint32(7))), np.uint32(3))
    shared = normal(mix(add(mul(segment, SPREAD), seed)))
    own = normal(mix(xor(mul(position, np.uint32(0x85EBCA6B)), seed)))
    z = w[2] * shared + w[3] * own
    boost = w[4] / (np.float32(1) + signed(position) * w[5])
    weight: np.float32 = w[0] * (z + w[1] * (z * z - np.float32(1))) + boost + _ONE
    if happens(mix(xor(mul(position, np.uint32(0x27D4EB2F)), add(seed, _FOR_HEAVY))), w[6]):
        weight += w[7]
    return weight


@njit
def _second(seed: np.uint32, where: NDArray[np.int32]) -> int:
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
def _begin(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    w: NDArray[np.float32],
) -> None:
    for row in range(len(start)):
        seed = seed_of(key[row], _FOR_WEIGHT)
        where = position[start[row] : start[row] + n[row]]
        answer = weight[start[row] : start[row] + n[row]]
        for i in range(len(where)):
            answer[i] = _weight(seed, np.uint32(where[i]), w)


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
        noise[i] = by_weight * (weights[i] - _ONE) + by_region * noise[i] + by_token * white


@njit
def _score_noises(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    s: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    for row in range(len(start)):
        first, past = start[row], start[row] + n[row]
        shared, own = seed_of(key[row], _FOR_SCORE_REGION), seed_of(key[row], _FOR_SCORE)
        _score_noise(shared, own, position[first:past], weight[first:past], s, out[first:past])


@njit
def _accumulate(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    weight: NDArray[np.float32],
    s: NDArray[np.float32],
    trend: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    sink = s[0]
    for row in range(len(start)):
        size = n[row]
        shared, own = seed_of(key[row], _FOR_SCORE_REGION), seed_of(key[row], _FOR_SCORE)
        where = position[start[row] : start[row] + size]
        weights = weight[start[row] : start[row] + size]
        score = out[start[row] : start[row] + size]
        _score_noise(shared, own, where, weights, s, score)
        for i in range(size):
            score[i] = truncated_float(score[i] + _ONE) * trend[size - 1 - i]
        length = np.float32(size)
        if where[0] != 0:
            scale = length / row_sum(score)
            score *= scale
        elif size == 1:
            score[0] = length
        else:
            score[0] = sink * length
            others, left = score[1:], length - score[0]
            second = _second(seed_of(key[row], _FOR_ROW), where[1:])
            if second >= 0:
                others[second] *= s[5]
            scale = left / row_sum(others)
            others *= scale


@njit
def _attend(
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
    add_up = len(total) > 0
    sink, exponent, row_sigma, offset, by_token, by_jump = r[0], r[1], r[2], r[3], r[8], r[9]
    for row in range(len(start)):
        first, end = start[row], start[row] + n[row]
        now = length[row] - 1 - back
        if newest:
            weight[end - 1] = _weight(seed_of(key[row], _FOR_WEIGHT), np.uint32(position[end - 1]), w)
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
        seed = seed_of(key[row], _FOR_REGION)
        region = mix(add(seed, shr(add(query, band(seed, np.uint32(0xFFFF))), steps[1])))
        shift = band(shr(region, np.uint32(8)), np.uint32(0xFFFF))
        seed = seed_of(key[row], _FOR_TOKEN)
        token = mix(add(seed, shr(add(query, band(seed, np.uint32(0xFFFF))), steps[2])))
        of_row = seed_of(key[row], _FOR_ROW)
        slope = exponent + row_sigma * normal(mix(add(of_row, query)))
        by_text = np.float32(1) + r[5] * normal(mix(xor(of_row, _FOR_TEXT)))
        by_time = np.float32(1) + r[6] * normal(mix(add(region, _FOR_STRENGTH)))
        by_region = r[4] * max(np.float32(0), by_text) * max(np.float32(0), by_time)
        middle = by_region * np.float32(_HALVES_MEAN)
        floor = r[10] + middle
        base = slope * _ONE - middle
        width = steps[0]
        if happens(mix(add(region, _FOR_WIDTH)), r[7]):
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
        second = _second(of_row, where) if r[11] > 0 else -1
        held = np.float32(0)
        if second >= 0:
            held = share * r[11]
            answer[second] = np.float32(0)
        scale = (share - held) / row_sum(answer)
        if add_up:
            sums = total[first:end]
            for i in range(len(answer)):
                answer[i] *= scale
                sums[i] += answer[i]
            if second >= 0:
                sums[second] += held
        else:
            answer *= scale
        if second >= 0:
            answer[second] = held
