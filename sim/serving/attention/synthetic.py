"""Synthetic attention: a handful of measured regularities of a real model, hashed from (request, position, query)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.view import View
from sim.serving.attention.base import attention_models
from sim.serving.attention.bits import add, band, bits_of, mix, mul, row_sum, shr, signed, sub, truncated_float, xor

__all__ = ["Synthetic"]

_WEIGHT = "attention_weight"
_LOG2_E = 1.0 / math.log(2.0)
_ULPS = np.float32(2.0**23)
_BIAS = np.float32(127 * 2.0**23)
_BYTES_MEAN = 510.0
_BYTES_STD = math.sqrt(4 * (256**2 - 1) / 12)


@attention_models.register("synthetic")
@dataclass(frozen=True)
class Synthetic:
    sink_share: float = 0.31
    age_exponent: float = 0.85
    age_offset: float = 0.6
    noise_floor: float = -9.0
    row_sigma: float = 0.05
    weight_sigma: float = 0.75
    weight_skew: float = 0.35
    weight_cluster: float = 0.1
    start_boost: float = 0.5
    start_tokens: float = 100.0
    region_sigma: float = 0.45
    region_bits: int = 3
    region_steps_bits: int = 3
    token_sigma: float = 0.35
    token_steps_bits: int = 1
    score_sigma: float = 0.45
    score_weight: float = 0.6
    score_region: float = 0.4
    score_region_memory: float = 0.9
    score_offset: float = 1.7
    score_exponent: float = 1.8

    columns: ClassVar[tuple[str, ...]] = (_WEIGHT,)

    @functools.cached_property
    def _parameters(self) -> NDArray[np.float32]:
        w = self.weight_sigma * _LOG2_E / math.sqrt(1 + 2 * self.weight_skew**2)
        return np.array([self.sink_share, self.age_exponent, self.age_offset, self.row_sigma,
            w, self.weight_skew, math.sqrt(self.weight_cluster), math.sqrt(1 - self.weight_cluster),
            self.region_sigma * _LOG2_E / _BYTES_STD * 2.0**23, self.token_sigma * _LOG2_E * math.sqrt(12) / 2.0**32 * 2.0**23,
            self.start_boost * _LOG2_E, 1/self.start_tokens, self.noise_floor*_LOG2_E*2.0**23 + self.region_sigma * _LOG2_E / _BYTES_STD * 2.0**23*_BYTES_MEAN], np.float32)

    @functools.cached_property
    def _bits(self):
        return np.array([self.region_bits, self.region_steps_bits, self.token_steps_bits], np.int64)

    def begin(self, view: View) -> None:
        _begin(view.key, view.start, view.n, view.position, view.columns[_WEIGHT], self._parameters)

    def accumulated(self, view: View, out: NDArray[np.float32]) -> None:
        size = 1 << int(view.n.max(initial=1)).bit_length()
        trend = _trend(self.score_offset, self.score_exponent, size)
        s = self.score_sigma * _LOG2_E
        rest = s*math.sqrt(1 - self.score_weight**2)
        p = np.array([self.sink_share, s*self.score_weight / (self.weight_sigma*_LOG2_E), rest*math.sqrt(self.score_region), rest*math.sqrt(1-self.score_region), self.score_region_memory], np.float32)
        _accumulated(view.key, view.start, view.n, view.position, view.columns[_WEIGHT], trend, out, p)

    def query(self, view: View, back: int, out: NDArray[np.float32]) -> None:
        _attend(view.key, view.start, view.n, view.length - (1 + back), view.position, view.columns[_WEIGHT], out, self._parameters, self._bits, False)

    def attend(self, view: View, out: NDArray[np.float32]) -> None:
        _attend(view.key, view.start, view.n, view.length - 1, view.position, view.columns[_WEIGHT], out, self._parameters, self._bits, True)


@functools.lru_cache(maxsize=64)
def _trend(offset: float, exponent: float, size: int) -> NDArray[np.float32]:
    return (np.log(np.arange(size) + offset) ** exponent).astype(np.float32)


@njit(inline="always")
def _normal(h):
    """Sum of the four bytes of a hash, standardised: nearly normal, within 3.5."""
    pairs = add(band(h, np.uint32(0x00FF00FF)), band(shr(h, np.uint32(8)), np.uint32(0x00FF00FF)))
    total = shr(mul(pairs, np.uint32(0x00010001)), np.uint32(16))
    return (signed(total) - np.float32(_BYTES_MEAN)) * np.float32(1 / _BYTES_STD)


@njit(inline="always")
def _weight(seed, position, sigma, skew, cluster, white, boost, shrink):
    segment = mix(add(mul(shr(add(position, band(seed, np.uint32(7))), np.uint32(3)), np.uint32(0x9E3779B1)), seed))
    own = mix(xor(mul(position, np.uint32(0x85EBCA6B)), seed))
    z = cluster * _normal(segment) + white * _normal(own)
    return (sigma * (z + skew * (z * z - np.float32(1))) + boost / (np.float32(1) + signed(position) * shrink)) * _ULPS + _BIAS


@njit(inline="always")
def _seed(key, purpose):
    return mix(xor(np.uint32(key), mix(add(np.uint32(key >> np.uint64(32)), np.uint32(purpose)))))


@njit
def _begin(key, start, n, position, weight, p):
    for row in range(len(start)):
        seed = _seed(key[row], 0x243F6A88)
        where = position[start[row] : start[row] + n[row]]
        out = weight[start[row] : start[row] + n[row]]
        for i in range(len(where)):
            out[i] = _weight(seed, np.uint32(where[i]), p[4], p[5], p[6], p[7], p[10], p[11])


@njit
def _accumulated(key, start, n, position, weight, trend, out, p):
    by_weight = p[1]; by_region = p[2]; by_token = p[3]; memory = p[4]
    fresh = np.float32(math.sqrt(1 - memory * memory))
    for row in range(len(start)):
        size = n[row]
        seed = _seed(key[row], 0x13198A2E)
        other = _seed(key[row], 0x03707344)
        score = out[start[row] : start[row] + size]
        w = weight[start[row] : start[row] + size]
        where = position[start[row] : start[row] + size]
        for i in range(size):
            score[i] = _normal(mix(add(mul(np.uint32(where[i]), np.uint32(0x9E3779B1)), seed)))
        region = score[0]
        for i in range(1, size):
            region = memory * region + fresh * score[i]
            score[i] = region
        for i in range(size):
            e = _normal(mix(add(mul(np.uint32(where[i]), np.uint32(0x9E3779B1)), other)))
            score[i] = truncated_float((by_weight * (w[i] - _BIAS) / _ULPS + by_region * score[i] + by_token * e) * _ULPS + _BIAS) * trend[size - 1 - i]
        length = np.float32(size)
        if where[0] == 0:
            if size == 1:
                score[0] = length
                continue
            score[0] = p[0] * length
            rest = score[1:]
            rest *= (np.float32(1) - p[0]) * length / row_sum(rest)
        else:
            score *= length / row_sum(score)


@njit
def _attend(key, start, n, query, position, weight, out, p, bits, fresh):
    sink = p[0]; exponent = p[1]; offset = p[2]; by_region = p[8]; by_token = p[9]
    region_bits = np.uint32(bits[0]); 
    for row in range(len(start)):
        begin = start[row]
        end = begin + n[row]
        q = query[row]
        if fresh:
            weight[end - 1] = _weight(_seed(key[row], 0x243F6A88), np.uint32(position[end - 1]), p[4], p[5], p[6], p[7], p[10], p[11])
        else:
            seen = begin + np.searchsorted(position[begin:end], q, side="right")
            out[seen:end] = np.float32(0)
            end = seen
            if end == begin:
                continue
        first = begin
        if position[begin] == 0:
            out[begin] = np.float32(1)
            first += 1
            if first == end:
                continue
            out[begin] = sink
        steps = np.uint32(q)
        s0 = _seed(key[row], 0xA4093822)
        region = mix(add(s0, shr(add(steps, band(s0, np.uint32(31))), np.uint32(bits[1]))))
        phase = band(shr(region, np.uint32(8)), np.uint32(31))
        s1 = _seed(key[row], 0x299F31D0)
        token = mix(add(s1, shr(add(steps, band(s1, np.uint32(31))), np.uint32(bits[2]))))
        s2 = _seed(key[row], 0x082EFA98)
        slope = exponent + p[3] * _normal(mix(add(s2, steps)))
        base = slope * _BIAS - by_region * np.float32(_BYTES_MEAN)
        floor = p[12]
        where = position[first:end]
        w = weight[first:end]
        a = out[first:end]
        for i in range(len(a)):
            at = np.uint32(where[i])
            h = add(mul(shr(add(at, phase), region_bits), np.uint32(0x9E3779B1)), region)
            h = mul(xor(h, shr(h, np.uint32(15))), np.uint32(0x85EBCA6B))
            h = xor(h, shr(h, np.uint32(13)))
            pairs = add(band(h, np.uint32(0x00FF00FF)), band(shr(h, np.uint32(8)), np.uint32(0x00FF00FF)))
            total = shr(mul(pairs, np.uint32(0x00010001)), np.uint32(16))
            g = mul(xor(h, add(mul(at, np.uint32(0xC2B2AE35)), token)), np.uint32(0x27D4EB2F))
            g = xor(g, shr(g, np.uint32(16)))
            noise = by_region * signed(total) + by_token * signed(g)
            noise = noise if noise > floor else floor
            age = signed(bits_of(signed(sub(steps, at)) + offset))
            a[i] = truncated_float(w[i] + noise - slope * age + base)
        share = np.float32(1) - sink if first > begin else np.float32(1)
        a *= share / row_sum(a)
