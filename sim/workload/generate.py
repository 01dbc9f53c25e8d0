"""Generated workloads: an arrival process, lengths, shared prefixes; seeded, lazy, in constant memory.

A generator is a frozen dataclass with a name; ``poisson:rate=16,n=10000,prompt=1000,output=200`` builds one. What the
processes have in common is in :class:`Generator`; each adds how the next arrivals are drawn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.registry import Registry
from sim.rng import stream
from sim.workload.lengths import parse_lengths
from sim.workload.trace import MAX_TIME_NS, Trace

if TYPE_CHECKING:
    from sim.workload.source import Lengths

__all__ = [
    "BATCH",
    "DEFAULT_REQUESTS",
    "Gamma",
    "GeneratedSource",
    "Generator",
    "OnOff",
    "Poisson",
    "Weibull",
    "generators",
]

BATCH = 8192
"""Requests drawn at a time. Fixed, so that what is drawn does not depend on how it is read."""

DEFAULT_REQUESTS = 1000
"""How many requests a generator makes when neither ``n`` nor ``duration_s`` is given."""

generators: Registry[Generator] = Registry("generator", "vtoken.generators")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


@dataclass(frozen=True, kw_only=True)
class Generator(ABC):
    """A workload to be drawn.

    Parameters
    ----------
    n
        Number of requests; without ``n`` and ``duration_s`` it is 1000.
    duration_s
        Requests arrive in ``start_s`` .. ``start_s + duration_s`` only. With ``n`` as well, whichever ends first.
    start_s
        Time at which the process starts; the first request comes one gap later.
    prompt, output
        Lengths in the grammar of :mod:`sim.workload.lengths`, drawn independently of one another.
    lengths
        A file in any trace format instead of ``prompt`` and ``output``: pairs are drawn from it, with replacement.
    shared_prefix
        Tokens that the requests of a group have in common; they come on top of ``prompt``.
    groups
        Number of groups; each request belongs to one, picked with equal probability.
    degree
        In place of ``groups``: so many requests, one after the other, make a group, and the next ones another.
    hash_tokens
        Prompt tokens per prefix hash; whole blocks of the shared prefix are hashed.
    """

    n: int | None = None
    duration_s: float | None = None
    start_s: float = 0.0
    prompt: str | int = 1000
    output: str | int = 200
    lengths: str | None = None
    shared_prefix: int = 0
    groups: int = 1
    degree: int | None = None
    hash_tokens: int = 16

    def __post_init__(self) -> None:
        _require(self.n is None or self.n >= 1, f"n: expected at least 1 request, got {self.n}")
        _require(
            self.duration_s is None or 0 < self.duration_s < math.inf,
            f"duration_s: expected a positive time, got {self.duration_s}",
        )
        _require(0 <= self.start_s < MAX_TIME_NS / 1e9, f"start_s: expected a time of at least 0, got {self.start_s}")
        _require(self.shared_prefix >= 0, f"shared_prefix: expected at least 0 tokens, got {self.shared_prefix}")
        _require(self.groups >= 1, f"groups: expected at least 1, got {self.groups}")
        _require(self.degree is None or self.degree >= 1, f"degree: expected at least 1 request, got {self.degree}")
        _require(self.degree is None or self.groups == 1, "groups and degree: give one, both say who shares a prefix")
        _require(self.degree is None or self.shared_prefix > 0, "degree: there is no shared_prefix to share")
        _require(self.hash_tokens >= 1, f"hash_tokens: expected at least 1, got {self.hash_tokens}")
        parse_lengths(self.prompt)
        parse_lengths(self.output)

    @abstractmethod
    def arrivals(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield arrival times in ns from 0 on, not decreasing, in arrays of any size, without end."""

    @property
    def limit(self) -> int | None:
        """The most requests there can be, or None if only time ends them."""
        return DEFAULT_REQUESTS if self.n is None and self.duration_s is None else self.n

    def times(self, seed: int, n: int) -> NDArray[np.int64]:
        """Return the first ``n`` arrival times in ns, ``start_s`` included (int64[n])."""
        pieces: list[NDArray[np.int64]] = []
        missing = n
        for batch in self.batches(seed):
            if missing <= 0:
                break
            pieces.append(batch[:missing])
            missing -= len(batch)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def batches(self, seed: int) -> Iterator[NDArray[np.int64]]:
        """Yield arrival times in ns in arrays of :data:`BATCH`, without end."""
        start = round(self.start_s * 1e9)
        held: list[NDArray[np.int64]] = []
        size = 0
        for piece in self.arrivals(stream(seed, "workload", "arrivals")):
            held.append(piece)
            size += len(piece)
            if size < BATCH:
                continue
            joined = np.concatenate(held)
            whole = size - size % BATCH
            yield from joined[:whole].reshape(-1, BATCH) + start
            held, size = [joined[whole:]], size - whole


class GeneratedSource:
    """A generator with a seed: yields the same requests each time it is read, whatever the chunk size.

    Parameters
    ----------
    generator
        What to draw.
    seed
        Seed; arrivals, prompts, outputs and groups have streams of their own.
    name
        What to call it in results, normally the specification.
    """

    def __init__(self, generator: Generator, seed: int = 0, name: str = "generated") -> None:
        self.generator = generator
        self.seed = seed
        self.name = name
        self.hash_tokens = generator.hash_tokens
        self.notes: tuple[str, ...] = ()
        self._pairs: Lengths | Trace | None = None
        if generator.lengths is not None:
            from sim.workload.source import read_lengths

            self._pairs = read_lengths(generator.lengths, seed=seed)
            _require(len(self._pairs) > 0, f"{generator.lengths}: no request to take lengths from")
            self.notes = self._pairs.notes

    @property
    def total(self) -> int | None:
        """Number of requests, or None if a duration bounds them."""
        return self.generator.limit if self.generator.duration_s is None else None

    def chunks(self, size: int = BATCH) -> Iterator[Trace]:
        """Yield the requests in pieces of at most ``size``."""
        for batch in self._drawn():
            yield from batch.chunks(size)

    def _drawn(self) -> Iterator[Trace]:
        g = self.generator
        end = MAX_TIME_NS if g.duration_s is None else round((g.start_s + g.duration_s) * 1e9)
        draw = self._lengths()
        groups = stream(self.seed, "workload", "groups")
        for first, times in zip(count(0, BATCH), g.batches(self.seed), strict=False):
            keep = int(np.searchsorted(times, end, side="left"))
            if g.limit is not None:
                keep = min(keep, g.limit - first)
            prompt, output = next(draw)
            hashes = None
            if g.shared_prefix:
                group = groups.integers(0, g.groups, size=BATCH, dtype=np.int64)
                if g.degree is not None:
                    group = (first + np.arange(BATCH)) // g.degree
                blocks = g.shared_prefix // g.hash_tokens
                ids = np.arange(blocks, dtype=np.int64)
                hashes = [i * blocks + ids for i in group[:keep]]
                prompt = prompt + g.shared_prefix
            if keep:
                yield Trace(
                    times[:keep],
                    prompt[:keep],
                    output[:keep],
                    prefix_hashes=hashes,
                    hash_tokens=g.hash_tokens,
                    name=self.name,
                    notes=self.notes,
                    first=first,
                )
            if keep < BATCH:
                return

    def _lengths(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield prompt and output lengths, a batch at a time, without end."""
        if self._pairs is not None:
            rng = stream(self.seed, "workload", "pairs")
            while True:
                rows = rng.integers(0, len(self._pairs), size=BATCH)
                yield self._pairs.prompt_tokens[rows], self._pairs.output_tokens[rows]
        prompt, output = parse_lengths(self.generator.prompt), parse_lengths(self.generator.output)
        prompts, outputs = stream(self.seed, "workload", "prompt"), stream(self.seed, "workload", "output")
        while True:
            yield prompt.draw(prompts, BATCH), output.draw(outputs, BATCH)


def _check_rate(rate: float, what: str = "rate") -> None:
    _require(0 < rate <= 1e9, f"{what}: expected requests per second above 0, got {rate:g}")


def _accumulate(gaps_s: Iterator[NDArray[np.float64]]) -> Iterator[NDArray[np.int64]]:
    """Turn gaps in seconds into times in whole nanoseconds; sums are exact, so no piece depends on the one before."""
    now = 0
    for gaps in gaps_s:
        span = float(gaps.sum()) * 1e9
        _require(now + span < MAX_TIME_NS, "arrivals run past 146 years: raise the rate or ask for fewer requests")
        times = now + np.cumsum(np.rint(gaps * 1e9).astype(np.int64))
        yield times
        now = int(times[-1])


@generators.register("poisson")
@dataclass(frozen=True, kw_only=True)
class Poisson(Generator):
    """Independent arrivals: exponential gaps, coefficient of variation 1.

    Parameters
    ----------
    rate
        Requests per second.
    """

    rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate(self.rate)

    def arrivals(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield arrival times in ns."""
        return _accumulate(rng.standard_exponential(BATCH) / self.rate for _ in count())


@generators.register("gamma")
@dataclass(frozen=True, kw_only=True)
class Gamma(Generator):
    """Gamma-distributed gaps: burstier than Poisson for ``cv`` above 1, more regular below.

    Parameters
    ----------
    rate
        Requests per second.
    cv
        Coefficient of variation of the gaps.
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate(self.rate)
        _require(0.01 <= self.cv <= 100, f"cv: expected 0.01 .. 100, got {self.cv:g}")

    def arrivals(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield arrival times in ns."""
        shape = 1 / self.cv**2
        return _accumulate(rng.standard_gamma(shape, BATCH) / (shape * self.rate) for _ in count())


@generators.register("weibull")
@dataclass(frozen=True, kw_only=True)
class Weibull(Generator):
    """Weibull-distributed gaps: heavy-tailed for ``shape`` below 1, Poisson at 1.

    Parameters
    ----------
    rate
        Requests per second.
    shape
        Shape parameter of the gaps.
    """

    rate: float
    shape: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate(self.rate)
        _require(0.1 <= self.shape <= 100, f"shape: expected 0.1 .. 100, got {self.shape:g}")

    def arrivals(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield arrival times in ns."""
        scale = 1 / (self.rate * math.gamma(1 + 1 / self.shape))
        return _accumulate(rng.weibull(self.shape, BATCH) * scale for _ in count())


@generators.register("onoff")
@dataclass(frozen=True, kw_only=True)
class OnOff(Generator):
    """Bursts: Poisson arrivals whose rate switches between two values after exponentially distributed times.

    The mean rate is ``(rate_on * on_s + rate_off * off_s) / (on_s + off_s)``. It starts switched on.

    Parameters
    ----------
    rate_on, rate_off
        Requests per second while on and while off.
    on_s, off_s
        Mean time in each state, in seconds.
    """

    rate_on: float
    rate_off: float = 0.0
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate(self.rate_on, "rate_on")
        _require(0 <= self.rate_off <= 1e9, f"rate_off: expected at least 0 requests per second, got {self.rate_off:g}")
        for what in ("on_s", "off_s"):
            _require(1e-6 <= getattr(self, what) <= 1e9, f"{what}: expected 1e-6 .. 1e9 s, got {getattr(self, what):g}")
        cycle = self.rate_on * self.on_s + self.rate_off * self.off_s
        _require(cycle >= 1e-3, f"onoff: {cycle:g} requests a cycle on average, expected at least 0.001")

    def arrivals(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield arrival times in ns."""
        now = 0.0
        while True:
            for rate, mean in ((self.rate_on, self.on_s), (self.rate_off, self.off_s)):
                stay = float(rng.standard_exponential()) * mean
                _require((now + stay) * 1e9 < MAX_TIME_NS, "arrivals run past 146 years: raise a rate or shorten off_s")
                # A long stay is cut into slabs, so that memory does not grow with it; Poisson arrivals do not notice.
                slabs = max(1, math.ceil(stay * rate / BATCH))
                for slab in range(slabs):
                    number = int(rng.poisson(rate * stay / slabs))
                    offset = np.sort(rng.random(number)) + slab
                    if number:
                        yield np.rint((now + offset * (stay / slabs)) * 1e9).astype(np.int64)
                now += stay
