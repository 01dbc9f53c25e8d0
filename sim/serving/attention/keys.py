"""Synthetic keys and values: their norms, how alike keys are, and what attention a prompt's queries let expect.

Every number comes from (request, position), and for norms from the token's weight, so it costs no memory and does not
depend on who else is alive, other than the mean cosine, which is a mean over the living. docs/attention.md says what
was measured, what was fitted, and what is not known.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.bits import add, mix, mul, normal, row_sum, shr, truncated_float, xor
from sim.jit import njit
from sim.kv.view import View
from sim.serving.attention.draws import SPREAD, seed_of

__all__ = ["KeyStatistics"]

_FOR_ALONG, _FOR_KEY, _FOR_VALUE = np.uint32(0x38D01377), np.uint32(0x9216D5D9), np.uint32(0x8979FB1B)
_FOR_EXPECTED = np.uint32(0xD1310BA6)
_OCTAVE = 2.0**23
_ONE = np.float32(127 * _OCTAVE)
_LN_2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """What synthetic attention knows of keys, values and queries, pooled over layers and heads as attention is.

    A key of unit length is ``along`` of a direction that all keys of a request have in common, and the rest its own.
    The common direction turns slowly with the position, as rotary embedding turns it. Own parts of two keys are at
    right angles on average, so they have no share in a mean cosine.

    Levels are those of SmolLM2-135M over seven captures; how draws are shared and correlated was fitted to the blocks
    that KNorm, KeyDiff and expected attention leave there (``experiments/00_attention_fit/fit_keys.py``).
    docs/attention.md says which is which, and how far off it is.
    """

    along: float = 0.795
    """Mean cosine of a key with the common direction."""
    along_sigma: float = 0.0204
    """Its standard deviation from token to token, relative."""
    along_skew: float = 0.0972
    """Of ``z + skew (z**2 - 1)``, downwards: a few keys are much less alike."""
    along_cluster: float = 0.758
    """Share of its variance that four neighbours have in common."""
    along_first: float = 0.1
    """The same cosine for token 0, the sink."""
    turns: tuple[tuple[float, float], ...] = ((0.025, 675.0), (0.127, 2847.0))
    """Shares of the common direction that turn, and in how many tokens they turn once."""
    key_norm: float = 17.5
    """Mean."""
    key_sigma: float = 0.053
    """Standard deviation, relative."""
    key_weight: float = 0.8
    """Correlation of short keys with heavy tokens."""
    key_cluster: float = 0.33
    """Share of the rest of the variance that 32 neighbours have in common."""
    key_first: float = 0.42
    """Norm of token 0's key, relative to the mean."""
    value_norm: float = 6.9
    """Mean."""
    value_sigma: float = 0.126
    """Standard deviation, relative."""
    value_weight: float = 0.7
    """Correlation of short values with heavy tokens."""
    value_first: float = 0.27
    """Norm of token 0's value, relative to the mean."""
    expected_sigma: float = 0.78
    """Of the logarithm of expected attention, its trend taken away."""
    expected_score: float = 0.79
    """Correlation of that with the score at the end of the prompt."""
    expected_cluster: float = 1.0
    """Share of the rest of its variance that eight neighbours have in common."""
    expected_offset: float = 304.0
    """Tokens; expected attention falls with (distance + offset) to the power of -exponent."""
    expected_exponent: float = 1.53

    def similarity(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the mean cosine of each live token's key with the request's other live keys; 0 for a token alone."""
        longest = 1 << int(view.length.max(initial=1)).bit_length()
        _similarity(view.key, view.start, view.n, view.position, _along(self), _directions(self.turns, longest), out)

    def key_norms(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:
        """Turn the logarithms of weights in ``out`` into norms of keys."""
        _norms(view.key, *_cells(view, newest), view.position, _FOR_KEY, _key_norms(self), out)

    def value_norms(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:
        """Turn the logarithms of weights in ``out`` into norms of values."""
        _norms(view.key, *_cells(view, newest), view.position, _FOR_VALUE, _value_norms(self), out)

    def expected(self, view: View, score_sigma: float, out: NDArray[np.float32]) -> None:
        """Turn the noise of the score at the end of the prompt in ``out`` into expected attention."""
        size = 1 << int(view.n.max(initial=1)).bit_length()
        scale = self.expected_sigma * self.expected_score / score_sigma if score_sigma else 0.0
        rest = self.expected_sigma * math.sqrt(1 - self.expected_score**2) / _LN_2 * _OCTAVE
        near, own = rest * math.sqrt(self.expected_cluster), rest * math.sqrt(1 - self.expected_cluster)
        trend = _fall(self.expected_offset, self.expected_exponent, size)
        noise = np.array([scale, near, own], np.float32)
        _expected(view.key, view.start, view.n, view.position, noise, trend, out)


def _cells(view: View, newest: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (view.newest, np.ones_like(view.n)) if newest else (view.start, view.n)


@functools.lru_cache
def _along(k: KeyStatistics) -> NDArray[np.float32]:
    sigma = k.along * k.along_sigma / math.sqrt(1 + 2 * k.along_skew**2)
    values = [k.along, sigma, k.along_skew, math.sqrt(k.along_cluster), math.sqrt(1 - k.along_cluster), k.along_first]
    return np.array(values, np.float32)


_WEIGHT_SIGMA = 0.5
"""Standard deviation of a weight's logarithm with the boost of early and of heavy tokens; its mean is close to 0."""


@functools.lru_cache
def _key_norms(k: KeyStatistics) -> NDArray[np.float32]:
    rest = k.key_sigma * math.sqrt(1 - k.key_weight**2)
    near, own = rest * math.sqrt(k.key_cluster), rest * math.sqrt(1 - k.key_cluster)
    by_weight = -k.key_sigma * k.key_weight / _WEIGHT_SIGMA * _LN_2 / _OCTAVE
    return np.array([k.key_norm, by_weight, near, own, k.key_first], np.float32)


@functools.lru_cache
def _value_norms(k: KeyStatistics) -> NDArray[np.float32]:
    rest = k.value_sigma * math.sqrt(1 - k.value_weight**2)
    by_weight = -k.value_sigma * k.value_weight / _WEIGHT_SIGMA * _LN_2 / _OCTAVE
    return np.array([k.value_norm, by_weight, 0, rest, k.value_first], np.float32)


@functools.lru_cache(maxsize=32)
def _directions(turns: tuple[tuple[float, float], ...], size: int) -> NDArray[np.float32]:
    """Return float32[size, 1 + 2 * turns]: the unit vector of the common direction at each position."""
    angle = 2 * np.pi * np.arange(size)[:, None] / np.array([length for _, length in turns])
    weight = np.sqrt([share for share, _ in turns])
    steady = np.full((size, 1), math.sqrt(1 - sum(share for share, _ in turns)))
    turning = [weight * np.cos(angle), weight * np.sin(angle)]
    vectors: NDArray[np.float32] = np.concatenate([steady, *turning], axis=1).astype(np.float32)
    return vectors


@functools.lru_cache(maxsize=32)
def _fall(offset: float, exponent: float, size: int) -> NDArray[np.float32]:
    fall: NDArray[np.float32] = ((np.arange(size) + offset) / offset) ** -exponent
    return fall.astype(np.float32)


@njit
def _drawn(seed: np.uint32, position: np.uint32, bits: np.uint32) -> np.float32:
    """Return a normal draw that 2**bits neighbours share; 0 bits are a token's own."""
    segment = shr(add(position, shr(seed, np.uint32(27))), bits)
    return normal(mix(xor(mul(segment, SPREAD), add(seed, bits))))


@njit
def _similarity(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    a: NDArray[np.float32],
    directions: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    width = directions.shape[1]
    one = np.float32(1)
    for row in range(len(start)):
        seed = seed_of(key[row], _FOR_ALONG)
        where = position[start[row] : start[row] + n[row]]
        along = out[start[row] : start[row] + n[row]]
        total = np.zeros(width, np.float32)
        for i in range(len(where)):
            at = np.uint32(where[i])
            z = a[3] * _drawn(seed, at, np.uint32(2)) + a[4] * _drawn(seed, at, np.uint32(0))
            along[i] = min(one, a[0] - a[1] * (z + a[2] * (z * z - one)))
        if where[0] == 0:
            along[0] = a[5]
        for i in range(len(where)):
            for d in range(width):
                total[d] += along[i] * directions[where[i], d]
        others = np.float32(max(len(where) - 1, 1))
        for i in range(len(where)):
            # Linear in the others: the mean of the cosines is the cosine with their sum, over their number.
            cosine = np.float32(0)
            for d in range(width):
                mine = along[i] * directions[where[i], d]
                cosine += mine * (total[d] - mine)
            along[i] = cosine / others


@njit
def _norms(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    purpose: np.uint32,
    p: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    one, half = np.float32(1), np.float32(0.5)
    for row in range(len(start)):
        seed = seed_of(key[row], purpose)
        where = position[start[row] : start[row] + n[row]]
        norm = out[start[row] : start[row] + n[row]]
        for i in range(len(where)):
            at = np.uint32(where[i])
            y = p[1] * (norm[i] - _ONE)
            y += p[2] * _drawn(seed, at, np.uint32(5)) + p[3] * _drawn(seed, at, np.uint32(0))
            norm[i] = p[0] * (one + y + half * y * y)
        if where[0] == 0:
            norm[0] = p[0] * p[4]


@njit
def _expected(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    position: NDArray[np.int32],
    noise: NDArray[np.float32],
    trend: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    for row in range(len(start)):
        seed = seed_of(key[row], _FOR_EXPECTED)
        where = position[start[row] : start[row] + n[row]]
        share = out[start[row] : start[row] + n[row]]
        for i in range(len(where)):
            at = np.uint32(where[i])
            logarithm = noise[0] * share[i]
            logarithm += noise[1] * _drawn(seed, at, np.uint32(3)) + noise[2] * _drawn(seed, at, np.uint32(0))
            share[i] = truncated_float(logarithm + _ONE) * trend[len(where) - 1 - i]
        total = np.float32(1) / row_sum(share)
        share *= total
