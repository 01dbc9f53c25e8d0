"""How long prompts and outputs are: distributions, and the text that names them.

The text is safe in a shell and in the comma-separated specification of a generator::

    200                                  every request the same
    uniform:100:2000                     whole numbers from 100 to 2000, both included; also uniform:100..2000
    lognormal:1000:0.8                   mean 1000, sigma 0.8 (standard deviation of the logarithm)
    lognormal:median=400:p95=3000        the same family by other figures; also mean= with p95=
    zipf:1.2:4096                        probability of k proportional to k ** -1.2, k = 1 .. 4096
    lognormal:1000:0.8:max=4096          values cut at min= and max= (1 and none unless said)
    uniform:1:50@0.3+lognormal:900:0.5@0.7   a mixture: parts joined by +, their weights after @
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.registry import Registry
from sim.workload.trace import MAX_TOKENS

__all__ = [
    "Fixed",
    "LengthDistribution",
    "LogNormal",
    "Mixture",
    "Uniform",
    "Zipf",
    "length_distributions",
    "parse_lengths",
]

_Z95 = 1.6448536269514722


class LengthDistribution(Protocol):
    """Draws lengths in tokens."""

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return ``n`` lengths, each at least 1 (int64[n])."""
        ...


length_distributions: Registry[LengthDistribution] = Registry("length distribution", "vtoken.length_distributions")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def _clip(values: NDArray[np.float64], low: int, high: int | None) -> NDArray[np.int64]:
    """Round to whole tokens inside the bounds."""
    return np.rint(np.clip(values, low, MAX_TOKENS if high is None else high)).astype(np.int64)


@length_distributions.register("fixed")
@dataclass(frozen=True)
class Fixed:
    """Every length the same."""

    tokens: int

    def __post_init__(self) -> None:
        _require(1 <= self.tokens <= MAX_TOKENS, f"fixed length: expected 1 .. {MAX_TOKENS}, got {self.tokens}")

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:  # noqa: ARG002 (the protocol's signature)
        """Return ``n`` copies of the length."""
        return np.full(n, self.tokens, np.int64)


@length_distributions.register("uniform")
@dataclass(frozen=True)
class Uniform:
    """Whole numbers from ``low`` to ``high``, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _require(
            1 <= self.low <= self.high <= MAX_TOKENS, f"uniform: expected 1 <= low <= high, got {self.low}, {self.high}"
        )

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return ``n`` lengths (int64[n])."""
        return rng.integers(self.low, self.high, size=n, dtype=np.int64, endpoint=True)


@length_distributions.register("lognormal")
@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal, rounded, then held inside ``min`` .. ``max``.

    Parameters
    ----------
    mean, median
        Exactly one of them, in tokens; of the distribution before rounding and cutting.
    sigma, p95
        Exactly one of them: the standard deviation of the logarithm, or the 95th percentile in tokens.
    min, max
        Values outside are moved to the bound.
    """

    mean: float | None = None
    sigma: float | None = None
    median: float | None = None
    p95: float | None = None
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        _require((self.mean is None) != (self.median is None), "lognormal: give one of mean and median")
        _require((self.sigma is None) != (self.p95 is None), "lognormal: give one of sigma and p95")
        centre = self.mean if self.mean is not None else self.median
        _require(
            centre is not None and 0 < centre <= MAX_TOKENS,
            f"lognormal: expected a positive mean or median, got {centre}",
        )
        _require(self.sigma is None or 0 <= self.sigma <= 20, f"lognormal: expected sigma in 0 .. 20, got {self.sigma}")
        _require(1 <= self.min <= (MAX_TOKENS if self.max is None else self.max), "lognormal: expected 1 <= min <= max")
        self.parameters  # noqa: B018 (refuses a 95th percentile that does not fit)

    @property
    def parameters(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm."""
        centre = self.mean if self.mean is not None else self.median
        assert centre is not None
        sigma = self.sigma
        if sigma is None:
            assert self.p95 is not None
            _require(self.p95 >= centre, f"lognormal: p95 {self.p95:g} is below {centre:g}")
            ratio = math.log(self.p95 / centre)
            if self.median is not None:
                sigma = ratio / _Z95
            else:
                # p95 / mean = exp(z sigma - sigma^2 / 2), which cannot exceed exp(z^2 / 2); take the smaller root.
                _require(
                    2 * ratio <= _Z95**2, f"lognormal: p95 can be at most {math.exp(_Z95**2 / 2):.2f} times the mean"
                )
                sigma = _Z95 - math.sqrt(_Z95**2 - 2 * ratio)
        location = math.log(centre) - (sigma**2 / 2 if self.mean is not None else 0.0)
        return location, sigma

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return ``n`` lengths (int64[n])."""
        location, sigma = self.parameters
        logarithm = location + sigma * rng.standard_normal(n)
        return _clip(np.exp(np.minimum(logarithm, 50.0)), self.min, self.max)


@length_distributions.register("zipf")
@dataclass(frozen=True)
class Zipf:
    """Lengths 1 .. ``max`` with probability proportional to ``k ** -exponent``."""

    exponent: float
    max: int

    def __post_init__(self) -> None:
        _require(0 <= self.exponent <= 100, f"zipf: expected an exponent in 0 .. 100, got {self.exponent}")
        _require(1 <= self.max <= 10_000_000, f"zipf: expected max in 1 .. 10,000,000, got {self.max}")

    @cached_property
    def _cumulative(self) -> NDArray[np.float64]:
        weights = np.cumsum(np.arange(1, self.max + 1, dtype=np.float64) ** -self.exponent)
        return np.asarray(weights / weights[-1])

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return ``n`` lengths (int64[n])."""
        return np.searchsorted(self._cumulative, rng.random(n), side="right").astype(np.int64) + 1


@dataclass(frozen=True)
class Mixture:
    """One of several distributions for each request, picked by weight."""

    parts: tuple[LengthDistribution, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _require(all(0 < w < math.inf for w in self.weights), f"mixture: expected positive weights, got {self.weights}")

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return ``n`` lengths (int64[n])."""
        cumulative = np.cumsum(self.weights)
        which = np.searchsorted(cumulative / cumulative[-1], rng.random(n), side="right")
        # Every part draws n values, so that what a request gets does not hang on what the others picked.
        drawn: NDArray[np.int64] = np.stack([part.draw(rng, n) for part in self.parts])[which, np.arange(n)]
        return drawn


def _build(text: str) -> LengthDistribution:
    """Make one distribution; positional arguments become fields in the order of their declaration."""
    name, *arguments = (part.strip() for part in text.split(":"))
    if not arguments and _is_number(name):
        name, arguments = "fixed", [name]
    fields = [field.name for field in dataclasses.fields(length_distributions.get(name)) if field.init]  # type: ignore[arg-type]
    if len(arguments) == 1 and ".." in arguments[0]:
        arguments = arguments[0].split("..")
    _require(len(arguments) <= len(fields), f"length distribution {text!r}: expected at most {len(fields)} arguments")
    named = [given if "=" in given else f"{field}={given}" for given, field in zip(arguments, fields, strict=False)]
    return length_distributions.build(f"{name}:{','.join(named)}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_lengths(text: str | int) -> LengthDistribution:
    """Return the distribution that ``text`` names; the module's docstring has the grammar.

    Raises
    ------
    InputError
        If the name, an argument or a weight cannot be used.
    """
    text = str(text)
    pieces = [piece.strip() for piece in text.split("+")]
    if len(pieces) == 1 and "@" not in text:
        return _build(text)
    parts, weights = [], []
    for piece in pieces:
        body, _, weight = piece.partition("@")
        _require(_is_number(weight), f"length distribution {text!r}: expected NAME:...@WEIGHT, got {piece!r}")
        parts.append(_build(body))
        weights.append(float(weight))
    return Mixture(tuple(parts), tuple(weights))
