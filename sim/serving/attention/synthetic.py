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

from sim.bits import BYTES_STD
from sim.errors import InputError
from sim.kv.policies.base import EvictionPolicy
from sim.kv.units import Units
from sim.kv.view import View
from sim.serving.attention.base import attention_models
from sim.serving.attention.keys import KeyStatistics
from sim.serving.attention.rows import HALVES_STD, attend
from sim.serving.attention.scores import accumulate, score_noises, trend_of
from sim.serving.attention.units import (
    Rows,
    UnitStatistics,
    accumulate_units,
    attend_units,
    differ,
    log_trend,
    mixture,
    score_noises_of_units,
    spreads,
    weigh_units,
)
from sim.serving.attention.weights import LOG2_E, OCTAVE, begin_rows

__all__ = ["KEYS", "UNITS", "Synthetic"]

KEYS = KeyStatistics()
UNITS = UnitStatistics()
_WEIGHT = "attention_weight"
_NOTHING = np.zeros(0, np.float32)
_REACH = 4 * 255 / 2 / BYTES_STD
"""How many standard deviations a sum of four bytes can be from its mean."""
_MOST = 85.0
_TOO_MUCH = "weights, noise and decay together exceed a float32 (e**85)"
_SECOND_SCORE = 8
"""How much more the second sink has at the end of the prompt than another token would in its place."""


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
        if self._reach() > _MOST:
            raise InputError(f"attention model 'synthetic': {_TOO_MUCH}")

    def check_units(self, policy: EvictionPolicy, units: Units) -> None:  # noqa: ARG002 all policies alike
        """Refuse parameters that would overflow where single layers vary more than their mean.

        Raises
        ------
        InputError
            If they do.
        """
        if self._reach(*spreads(UNITS, units.layers)) > _MOST:
            raise InputError(f"attention model 'synthetic', in {units.layers} layers: {_TOO_MUCH}")

    def _reach(
        self, weights: float = 1, regions: float = 1, tokens: float = 1, slopes: float = 1, scores: float = 1
    ) -> float:
        """Return the largest logarithm that can come up, with spreads so many times as wide."""
        z = _REACH * (math.sqrt(self.weight_cluster) + math.sqrt(1 - self.weight_cluster))
        weight = weights * self.weight_sigma * (z + self.weight_skew * z * z) + self.start_boost + self.heavy_weight
        region = regions * self.region_sigma * (1 + _REACH * self.region_text) * (1 + _REACH * self.region_time)
        noise = math.sqrt(6) * region + tokens * (math.sqrt(3) * self.token_sigma + self.token_jump)
        decay = 22 * (slopes * self.age_exponent + _REACH * self.row_sigma)
        return max(weight + noise + decay, _REACH * 3 * scores * self.score_sigma)

    @functools.cached_property
    def _weights(self) -> NDArray[np.float32]:
        """[8]: what :func:`_weight` takes."""
        sigma = self.weight_sigma / math.sqrt(1 + 2 * self.weight_skew**2)
        return np.array(
            [
                sigma * LOG2_E * OCTAVE,
                self.weight_skew,
                math.sqrt(self.weight_cluster),
                math.sqrt(1 - self.weight_cluster),
                self.start_boost * LOG2_E * OCTAVE,
                1 / self.start_tokens,
                self.heavy_share * 2**24,
                self.heavy_weight * LOG2_E * OCTAVE,
            ],
            np.float32,
        )

    @functools.cached_property
    def _rows(self) -> NDArray[np.float32]:
        """[12]: what :func:`_attend` takes; noise is scaled to the raw sums of halves and the raw hashes."""
        unit = LOG2_E * OCTAVE
        return np.array(
            [
                self.sink_share,
                self.age_exponent,
                self.row_sigma,
                self.age_offset,
                self.region_sigma * unit / HALVES_STD,
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
        sigma = self.score_sigma * LOG2_E * OCTAVE
        rest = sigma * math.sqrt(1 - self.score_weight**2)
        # The weight column is in octaves already; a weight that does not vary has nothing to say about the score.
        unit = self.weight_sigma * LOG2_E * OCTAVE
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
        if differ(view.units):
            u, m = Rows(view, UNITS), mixture(UNITS, view.units.heads)
            cells = u.profile, view.start, view.n, view.position, weight
            score_noises_of_units(view.key, u.common, u.depth, *cells, self._scores, m, out)
        else:
            score_noises(view.key, view.start, view.n, view.position, weight, self._scores, out)
        KEYS.expected(view, self.score_sigma, out)

    def _log_weights(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:
        """Write the weights, as logarithms; a policy that does not attend has none of what was generated."""
        start, n = (view.newest, np.ones_like(view.n)) if newest else (view.start, view.n)
        self._weigh(view, start, n, out)

    def begin(self, view: View) -> None:
        """Give every token its weight."""
        self._weigh(view, view.start, view.n, view.columns[_WEIGHT])

    def _weigh(self, view: View, start: NDArray[np.int64], n: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        if differ(view.units):
            u, m = Rows(view, UNITS), mixture(UNITS, view.units.heads)
            weigh_units(view.key, u.common, u.depth, start, n, view.position, out, self._weights, m)
        else:
            begin_rows(view.key, start, n, view.position, out, self._weights)

    def accumulated(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the score at the end of the prompt, drawn as such: it is not the sum of :meth:`query` over all rows."""
        size = 1 << int(view.n.max(initial=1)).bit_length()
        cells = view.start, view.n, view.position, view.columns[_WEIGHT], self._scores
        if differ(view.units):
            u, m = Rows(view, UNITS), mixture(UNITS, view.units.heads)
            trend = log_trend(self.score_offset, size)
            accumulate_units(view.key, u.common, u.depth, u.profile, *cells, m, self.score_exponent, trend, out)
        else:
            accumulate(view.key, *cells, trend_of(self.score_offset, self.score_exponent, size), out)

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
        weight, w, r = view.columns[_WEIGHT], self._weights, self._rows
        if differ(view.units):
            u, m = Rows(view, UNITS), mixture(UNITS, view.units.heads)
            attend_units(
                view.key,
                u.common,
                u.depth,
                u.profile,
                view.start,
                view.n,
                view.length,
                back,
                newest,
                view.position,
                weight,
                w,
                r,
                m,
                self._steps,
                out,
                total,
            )
        else:
            attend(
                view.key,
                view.start,
                view.n,
                view.length,
                back,
                newest,
                view.position,
                weight,
                w,
                r,
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
