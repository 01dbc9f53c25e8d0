"""What a sweep will take, from earlier runs in its directory and from a short probe.

Runs of one policy and one reclaimer are taken to cost in proportion to their output tokens. Where earlier runs of the
same directory say what that is, they are believed; for the others some are made here, shortened to their first requests
and longer and longer, until the time for it is used up.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sim.errors import InputError, NoProgressError
from sim.study.config import SimConfig
from sim.study.result import RunResult
from sim.study.run_file import STEP_ROWS, pack
from sim.study.spec import Run
from sim.study.store import Store
from sim.study.sweep import timings

__all__ = ["Estimate", "Point", "estimate", "extrapolate"]

WARM = 4
FIRST = 32
GROWTH = 4
EITHER_WAY = 1.25
"""What machines that do other things as well are allowed for."""

READ_S = 2.0

Kind = tuple[str, str]
Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Point:
    """A run that was made: how much work it was, and what it cost.

    Attributes
    ----------
    requests, tokens
        Of the workload; tokens are output.
    wall_s
        Time (s).
    size
        Of its file (bytes), without its steps if ``steps`` says how many these are.
    steps, steps_size
        Rows of the file's steps, of which there are at most :data:`sim.study.run_file.STEP_ROWS`; and their bytes.
    """

    requests: int
    tokens: int
    wall_s: float
    size: int
    steps: int = 0
    steps_size: int = 0

    def steps_of(self, tokens: int) -> float:
        """Return the bytes of the steps that a run of more tokens has."""
        rows = min(STEP_ROWS, self.steps * tokens / self.tokens)
        return self.steps_size * rows / self.steps if self.steps else 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the runs take together.

    Attributes
    ----------
    wall_s
        Lowest and highest (s) in one process, or None if nothing is known.
    longest_s
        The same for the longest of them: more processes than runs do not help.
    size
        Lowest and highest of their files (bytes), or None.
    rests_on
        What was measured, in words.
    """

    wall_s: Range | None
    longest_s: Range | None
    size: Range | None
    rests_on: str

    def on(self, processes: int) -> Range:
        """Return the time (s) that as many processes take, each as fast as one."""
        assert self.wall_s is not None
        assert self.longest_s is not None
        low, high = (max(whole / processes, one) for whole, one in zip(self.wall_s, self.longest_s, strict=True))
        return low, high


def estimate(
    runs: Sequence[Run],
    store: Store,
    probe_s: float,
    *,
    simulate: Callable[..., RunResult] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Estimate:
    """Say what these runs will take.

    Parameters
    ----------
    runs
        Those still to be made.
    store
        Of their sweep; its earlier runs are used if they have a line in timing.csv.
    probe_s
        How long to try runs (s); 0 is not at all. Compiling kernels for the first time comes on top of it.
    simulate
        What makes a run; :func:`sim.study.run.simulate` if None.
    clock
        Seconds.
    """
    make = importlib.import_module("sim.study.run").simulate if simulate is None else simulate
    kinds: dict[Kind, list[Run]] = {}
    for run in runs:
        kinds.setdefault(_kind(run.config), []).append(run)
    points = _earlier(store)
    unknown = [kind for kind in kinds if kind not in points]
    words = [f"earlier runs here ({_share(len(kinds) - len(unknown), kinds)})"] if points else []
    work = _Work(clock)
    start_s, tried = clock(), 0
    for place, kind in enumerate(unknown):
        until_s = clock() + (probe_s - (clock() - start_s)) / (len(unknown) - place)
        config = kinds[kind][len(kinds[kind]) // 2].config
        found = _try(config, until_s, make, clock, work) if until_s > clock() else []
        if found:
            tried += 1
            points[kind] = found
    if tried:
        longest = [max(points[kind], key=lambda point: point.requests) for kind in unknown if kind in points]
        told = f"the first {_between(point.requests for point in longest)} requests"
        words.append(f"runs of {told} made now in {clock() - start_s:.1f} s ({_share(tried, kinds)})")
    if not points or not runs:
        return Estimate(None, None, None, "")
    if any(kind not in points for kind in kinds):
        words.append("the others are taken to cost what these do")
    return _sum(kinds, points, work, "; ".join(words))


def extrapolate(points: Sequence[tuple[float, float]], amount: float, *, proportional: bool = True) -> Range:
    """Return lowest and highest cost of an amount, given (amount, cost) of others.

    The costs of the largest amount are scaled up in proportion; where there are smaller ones, the line through the
    means of the two largest amounts is the other opinion, and without ``proportional`` the only one.
    """
    amounts = sorted({each for each, _ in points})
    largest = amounts[-1]
    costs = [cost for each, cost in points if each == largest]
    opinions = [cost * amount / largest for cost in costs]
    if len(amounts) > 1:
        before = [cost for each, cost in points if each == amounts[-2]]
        mean = sum(costs) / len(costs)
        slope = max(0.0, (mean - sum(before) / len(before)) / (largest - amounts[-2]))
        line = max(0.0, mean + slope * (amount - largest))
        opinions = [*opinions, line] if proportional else [line]
    return min(opinions), max(opinions)


def _sum(kinds: dict[Kind, list[Run]], points: dict[Kind, list[Point]], work: _Work, words: str) -> Estimate:
    """Add up what the runs cost."""
    cache: dict[tuple[Kind, tuple[int, int]], tuple[Range, Range]] = {}
    walls: list[Range] = []
    sizes: list[Range] = []
    for kind, members in kinds.items():
        alike = [points[kind]] if kind in points else list(points.values())
        for run in members:
            key = kind, work.of(run.config)
            if key not in cache:
                requests, tokens = key[1]
                cache[key] = (
                    _widest(_wall(known, tokens) for known in alike),
                    _widest(_size(known, requests, tokens) for known in alike),
                )
            walls.append(cache[key][0])
            sizes.append(cache[key][1])
    low, high = (sum(each) for each in zip(*walls, strict=True))
    shortest, longest = max(each[0] for each in walls), max(each[1] for each in walls)
    few, many = (sum(each) for each in zip(*sizes, strict=True))
    return Estimate(
        (low / EITHER_WAY, high * EITHER_WAY),
        (shortest / EITHER_WAY, longest * EITHER_WAY),
        (few / EITHER_WAY, many * EITHER_WAY),
        words,
    )


def _wall(points: Sequence[Point], tokens: int) -> Range:
    return extrapolate([(each.tokens, each.wall_s) for each in points], tokens)


def _size(points: Sequence[Point], requests: int, tokens: int) -> Range:
    low, high = extrapolate([(each.requests, each.size) for each in points], requests, proportional=False)
    steps = max(points, key=lambda point: point.requests).steps_of(tokens)
    return low + steps, high + steps


class _Work:
    """How many requests and output tokens runs have; seeds are taken to be alike."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[Any, tuple[int, int]] = {}

    def of(self, config: SimConfig) -> tuple[int, int]:
        """Return requests and output tokens; of a long trace, as far as it was read and scaled up."""
        key = (config.trace, config.format, config.arrivals, config.head)
        if key not in self._known:
            self._known[key] = self._count(config)
        return self._known[key]

    def _count(self, config: SimConfig) -> tuple[int, int]:
        from sim.workload.source import limit, open_source

        source = open_source(config.trace, format=config.format, seed=config.seed, arrivals=config.arrivals)
        if config.head is not None:
            source = limit(source, config.head)
        until_s = self._clock() + READ_S
        requests = tokens = 0
        for chunk in source.chunks():
            requests += len(chunk)
            tokens += int(chunk.output_tokens.sum())
            if self._clock() > until_s and source.total:
                return source.total, tokens * source.total // requests
        return requests, max(1, tokens)


def _try(
    config: SimConfig, until_s: float, simulate: Callable[..., RunResult], clock: Callable[[], float], work: _Work
) -> list[Point]:
    """Make a run of the first requests, then of more, as long as the time allows; the first of all warms up."""
    whole, _ = work.of(config)
    points: list[Point] = []
    head = min(WARM, whole)
    warm = whole <= WARM
    while True:
        start_s = clock()
        shorter = config if head == whole else config.replace(head=head)
        try:
            result = simulate(shorter, progress=_stop_at(until_s, clock))
        except (InputError, NoProgressError, _LateError):
            return points
        size = len(pack(result.config_hash, result).data)
        took_s = clock() - start_s
        if warm:
            points.append(_point(head, result, took_s, size))
        if head == whole and warm:
            return points
        longer = min(head * GROWTH, whole) if warm else min(FIRST, whole)
        if warm and clock() + took_s * longer / head > until_s:
            return points
        head, warm = longer, True


def _point(requests: int, result: RunResult, wall_s: float, size: int) -> Point:
    without = dataclasses.replace(result, steps={name: values[:0] for name, values in result.steps.items()})
    rest = len(pack(result.config_hash, without).data)
    steps = min(STEP_ROWS, len(result.steps["step"]))
    tokens = max(1, int(result.requests["output_tokens"].sum()))
    return Point(requests, tokens, wall_s, rest, steps, size - rest)


class _LateError(Exception):
    """The time for trying is over."""


def _stop_at(until_s: float, clock: Callable[[], float]) -> Callable[..., None]:
    """Return what ends a run when the time is over."""

    def look(*_: object) -> None:
        if clock() > until_s:
            raise _LateError

    return look


def _earlier(store: Store) -> dict[Kind, list[Point]]:
    """Return what runs in the store cost."""
    took = timings(store.root)
    points: dict[Kind, dict[str, Point]] = {}
    for entry in store.index:
        wall_s, tokens = took.get(entry.config_hash), entry.row["summary"].get("output_tokens")
        if wall_s and tokens and store.path(entry.config_hash).exists():
            kind = (entry.row["config"]["policy"], entry.row["config"]["reclaimer"])
            point = Point(entry.row["summary"]["requests"], tokens, wall_s, entry.size)
            points.setdefault(kind, {})[entry.config_hash] = point
    return {kind: list(known.values()) for kind, known in points.items()}


def _kind(config: SimConfig) -> Kind:
    return config.policy, config.reclaimer


def _widest(ranges: Iterable[Range]) -> Range:
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


def _share(some: int, kinds: dict[Kind, list[Run]]) -> str:
    return f"{some} of {len(kinds)} pairs of policy and reclaimer"


def _between(values: Iterable[int]) -> str:
    few, *_, many = [*sorted(values)] * 2
    return f"{few:,}" if few == many else f"{few:,} to {many:,}"
