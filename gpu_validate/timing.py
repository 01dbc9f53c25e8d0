"""How long an operation takes: on a CUDA device, on a CPU, or on a virtual clock that the operations move themselves.

Whatever the clock, a measurement is made the same way (:func:`measure`): every case is warmed up, timed some times, and
the whole series is gone through twice in different orders, so that each case is measured at two times far apart. Both
samples are kept; how far they lie apart says what the machine itself adds. On a CPU, whose speed may change from one
second to the next, more and shorter rounds say more than two.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Case",
    "Clock",
    "CpuClock",
    "CudaClock",
    "Measured",
    "Op",
    "Rotation",
    "Sample",
    "VirtualClock",
    "clock_for",
    "measure",
    "usual_quantile",
]

Op = Callable[[int], object]
"""An operation that is repeated: it is given the number of the repetition, so that it can rotate over layers or
placements and never finds in a cache what it has just read there."""

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Rotation:
    """An operation that comes round again after some repetitions: an interval covers whole rounds.

    Parameters
    ----------
    op
        The operation.
    period
        Repetitions of a round.
    """

    op: Op
    period: int

    def __call__(self, i: int) -> object:
        """Run repetition number ``i``."""
        return self.op(i)


@dataclass(frozen=True, slots=True)
class Sample:
    """What some repetitions took.

    Attributes
    ----------
    median, p20, p80
        Nanoseconds of one repetition.
    n
        Timed intervals; each may cover several repetitions.
    """

    median: float
    p20: float
    p80: float
    n: int

    @classmethod
    def of(cls, times_ns: Times) -> Sample:
        """Summarise float64[n] nanoseconds."""
        p20, median, p80 = np.percentile(times_ns, (20, 50, 80)).tolist()
        return cls(median, p20, p80, len(times_ns))


class Clock(Protocol):
    """Times operations."""

    name: str

    def times_ns(self, op: Op) -> Times:
        """Return float64[n]: nanoseconds of one repetition, after a warm-up, in n timed intervals."""
        ...

    def together_ns(self, first: Op, second: Op) -> tuple[Times, Times]:
        """Start both at once, on streams of their own, some times over.

        Returns
        -------
        tuple of float64[n]
            From the common start to the end of each, in nanoseconds.
        """
        ...


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Parameters
    ----------
    name
        The series it belongs to.
    point
        Where in the series: what the fit reads.
    clock
        What to time it with.
    prepare
        Brings everything into place and returns the operation; called anew each time, untimed.
    beside
        Gives a second operation to start together with the first, if both are to be timed beside each other.
    """

    name: str
    point: Mapping[str, float]
    clock: Clock
    prepare: Callable[[], Op]
    beside: Callable[[], Op] | None = None


@dataclass
class Measured:
    """A case's place and its samples, one for each time that the series was gone through."""

    name: str
    point: Mapping[str, float]
    samples: list[Sample] = field(default_factory=list)
    beside: list[Sample] = field(default_factory=list)
    """Of the second operation."""
    quantile: float = 0.5
    """Which of the samples' medians stands for all: see :func:`usual_quantile`."""

    @property
    def ns(self) -> float:
        """The time that stands for all samples."""
        return float(np.quantile([sample.median for sample in self.samples], self.quantile))

    @property
    def beside_ns(self) -> float:
        """The same of the second operation."""
        return float(np.quantile([sample.median for sample in self.beside], self.quantile))

    @property
    def n(self) -> int:
        """Timed intervals in all."""
        return sum(sample.n for sample in self.samples)

    @property
    def drift(self) -> float:
        """The difference of the samples' extreme medians, as a share of the one between."""
        medians = [sample.median for sample in self.samples]
        return (max(medians) - min(medians)) / self.ns if self.ns > 0 else 0.0

    @property
    def spread(self) -> float:
        """The mean distance from p20 to p80, as a share of the median."""
        return float(np.mean([(s.p80 - s.p20) / s.median if s.median > 0 else 0.0 for s in self.samples]))


def usual_quantile(spec: str) -> float:
    """Return which of several times of one thing stands for all: the median, or on a CPU the 20th percentile.

    What disturbs a CPU (other programs, their use of its caches, a host that lends its threads to others) makes it
    slower by a half for seconds, and never faster.
    """
    return 0.2 if spec == "cpu" else 0.5


def measure(
    cases: Sequence[Case],
    *,
    rounds: int = 2,
    quantile: float = 0.5,
    seed: int = 0,
    tell: Callable[[int, int, Case], None] = lambda *_: None,
) -> list[Measured]:
    """Time every case ``rounds`` times, each round in another random order.

    Parameters
    ----------
    cases
        What to time.
    rounds
        Times that the series is gone through.
    quantile
        See :attr:`Measured.quantile`.
    seed
        Of the orders.
    tell
        Called before each case with how many are done, how many there are, and the case.

    Returns
    -------
    list of Measured
        In the order of ``cases``.
    """
    measured = [Measured(case.name, case.point, quantile=quantile) for case in cases]
    total, done = rounds * len(cases), 0
    with without_gc():
        for number in range(rounds):
            order = list(range(len(cases)))
            random.Random(f"{seed} {number}").shuffle(order)
            for index in order:
                case, one = cases[index], measured[index]
                tell(done, total, case)
                op = case.prepare()
                if case.beside is None:
                    one.samples.append(Sample.of(case.clock.times_ns(op)))
                else:
                    first, second = case.clock.together_ns(op, case.beside())
                    one.samples.append(Sample.of(first))
                    one.beside.append(Sample.of(second))
                done += 1
    return measured


def repetitions(
    one_ns: float, budget_ns: float, least_ns: float, most: int = 30, *, period: int = 1
) -> tuple[int, int]:
    """Return how many repetitions an interval should cover, and how many intervals to time.

    Parameters
    ----------
    one_ns
        What one repetition takes, roughly.
    budget_ns
        What all of them may take.
    least_ns
        What an interval should take at least, so that the clock's own cost does not count.
    most
        Most intervals.
    period
        Repetitions come in multiples of it.
    """
    inner = max(1, math.ceil(least_ns / max(one_ns, 1.0) / period)) * period
    return inner, int(min(most, max(3, budget_ns / max(inner * one_ns, 1.0))))


@contextmanager
def without_gc() -> Iterator[None]:
    """Keep Python from collecting garbage meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class CpuClock:
    """Times on the CPU: what the calling thread has of it, so that it does not matter who else wants the machine.

    On a quiet machine that is the time on the wall. On a shared one the wall shows how the kernel divides a processor
    among programs, in slices longer than most operations.

    Parameters
    ----------
    budget_ns
        What a case may take in one round.
    least_ns
        Shortest interval to time.
    """

    name = "thread time"

    def __init__(self, budget_ns: float = 5e6, least_ns: float = 50e3) -> None:
        self._budget_ns = budget_ns
        self._least_ns = least_ns

    def times_ns(self, op: Op) -> Times:
        """Return float64[n]: nanoseconds of one repetition, after a warm-up, in n timed intervals."""
        now = time.thread_time_ns
        op(0)
        start = now()
        op(1)
        inner, intervals = repetitions(now() - start, self._budget_ns, self._least_ns)
        times = np.empty(intervals)
        number = 2
        for i in range(intervals):
            start = now()
            for _ in range(inner):
                op(number)
                number += 1
            times[i] = (now() - start) / inner
        return times

    def together_ns(self, first: Op, second: Op) -> tuple[Times, Times]:
        """Start both at once, the second on a thread of its own; see :meth:`Clock.together_ns`."""
        from concurrent.futures import ThreadPoolExecutor
        from threading import Barrier

        now = time.thread_time_ns
        first(0), second(0)
        start = now()
        first(1), second(1)
        _, intervals = repetitions(now() - start, self._budget_ns, 0.0)
        times = np.empty((2, intervals))
        barrier = Barrier(2)

        def run(op: Op, i: int) -> int:
            barrier.wait()
            begun = now()
            op(i)
            return now() - begun

        with ThreadPoolExecutor(1) as worker:
            for i in range(intervals):
                other = worker.submit(run, second, i + 2)
                times[0, i] = run(first, i + 2)
                times[1, i] = other.result()
        return times[0], times[1]


class CudaClock:
    """Times on a CUDA device, by events on its streams.

    The repetitions of an interval are captured into one CUDA graph, which is replayed between a pair of events: the
    host's launches are then no part of the time. With ``graph=False`` they are launched one by one, as eager code does.

    Parameters
    ----------
    device
        The device.
    graph
        Whether to capture.
    budget_ns
        What a case may take in one round.
    least_ns
        Shortest interval to time: an event costs around a microsecond.
    """

    def __init__(self, device: Any, *, graph: bool = True, budget_ns: float = 30e6, least_ns: float = 500e3) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)
        self._stream = self._torch.cuda.Stream(self._device)
        self._beside = self._torch.cuda.Stream(self._device)
        self._graph = graph
        self._budget_ns = budget_ns
        self._least_ns = least_ns
        self.name = "CUDA events, " + ("graph" if graph else "eager")

    def times_ns(self, op: Op) -> Times:
        """Return float64[n]: nanoseconds of one repetition, after a warm-up, in n timed intervals."""
        torch = self._torch
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            for i in range(3):
                op(i)
            one_ns = self._interval_ns(lambda: [op(i) for i in range(4)]) / 4
            # Launches of a small operation take the host longer than the device: more of them than needed is no harm.
            inner, intervals = repetitions(one_ns, self._budget_ns, self._least_ns, period=getattr(op, "period", 1))
            run = self._captured(op, inner) if self._graph else lambda: [op(i) for i in range(inner)]
            run()
            return np.array([self._interval_ns(run) / inner for _ in range(intervals)])

    def together_ns(self, first: Op, second: Op) -> tuple[Times, Times]:
        """Start both at once on two streams; see :meth:`Clock.together_ns`."""
        torch = self._torch
        torch.cuda.synchronize(self._device)
        streams = self._stream, self._beside
        runs = []
        for stream, op in zip(streams, (first, second), strict=True):
            with torch.cuda.stream(stream):
                for i in range(3):
                    op(i)
                runs.append(self._captured(op, 1) if self._graph else (lambda op=op: op(0)))
        torch.cuda.synchronize(self._device)
        start, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        gate = torch.cuda.Event()
        cycles = 4_000_000  # about 2 ms
        times: list[list[float]] = []
        began = time.perf_counter_ns()
        while len(times) < 5 or (len(times) < 30 and time.perf_counter_ns() - began < self._budget_ns):
            issued = time.perf_counter_ns()
            with torch.cuda.stream(self._stream):
                # Both are in their queues before the device comes to the start: neither waits for the host.
                torch.cuda._sleep(cycles)
                start.record(self._stream)
                gate.record(self._stream)
            with torch.cuda.stream(self._beside):
                self._beside.wait_event(gate)
                runs[1]()
                ends[1].record(self._beside)
            with torch.cuda.stream(self._stream):
                runs[0]()
                ends[0].record(self._stream)
            took_ns = time.perf_counter_ns() - issued
            torch.cuda.synchronize(self._device)
            if took_ns > cycles / 2.5:  # cycles of 2.5 GHz: no GPU is faster
                cycles = int(5 * took_ns)
                continue
            times.append([1e6 * start.elapsed_time(end) for end in ends])
        both = np.array(times)
        return both[:, 0], both[:, 1]

    def _interval_ns(self, run: Callable[[], object]) -> float:
        """Return the time between two events around what ``run`` puts on the current stream."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(1e6 * start.elapsed_time(end))

    def _captured(self, op: Op, inner: int) -> Callable[[], object]:
        """Capture ``inner`` repetitions into a graph on the current stream's device, and return its replay."""
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(inner):
                op(i)
        replay: Callable[[], object] = graph.replay
        return replay


class VirtualClock:
    """A clock that moves only when an operation says how long it takes: for tests of everything around it.

    Parameters
    ----------
    noise
        Standard deviation of each repetition's time, as a share of it.
    seed
        Of the noise.
    contend
        ``contend(first_ns, second_ns)``: from what both take alone to what they take beside each other; as alone if
        None.
    intervals
        Intervals to time.
    """

    name = "virtual"

    def __init__(
        self,
        noise: float = 0.0,
        seed: int = 0,
        contend: Callable[[float, float], tuple[float, float]] | None = None,
        intervals: int = 7,
    ) -> None:
        self.now_ns = 0.0
        self._noise = noise
        self._random = np.random.default_rng(seed)
        self.contend = contend or (lambda first, second: (first, second))
        self._intervals = intervals

    def advance(self, ns: float) -> None:
        """Let ``ns`` nanoseconds pass, more or less."""
        if self._noise:
            ns *= max(0.0, 1 + self._noise * self._random.standard_normal())
        self.now_ns += ns

    def times_ns(self, op: Op) -> Times:
        """Return float64[n]: nanoseconds of one repetition, after a warm-up, in n timed intervals."""
        op(0)
        return np.array([self._time_ns(op, i + 1) for i in range(self._intervals)])

    def together_ns(self, first: Op, second: Op) -> tuple[Times, Times]:
        """Start both at once; see :meth:`Clock.together_ns`."""
        alone: Iterable[tuple[float, float]] = (
            (self._time_ns(first, i), self._time_ns(second, i)) for i in range(self._intervals)
        )
        both = np.array([self.contend(*pair) for pair in alone])
        return both[:, 0], both[:, 1]

    def _time_ns(self, op: Op, i: int) -> float:
        start = self.now_ns
        op(i)
        return self.now_ns - start


def clock_for(device: str, *, graph: bool = True, quick: bool = False) -> Clock:
    """Return the clock for a device: events on CUDA, the thread's time on a CPU.

    Parameters
    ----------
    device
        As torch names it.
    graph
        On CUDA: replay a graph of the operation instead of launching it.
    quick
        Spend a third of the time.
    """
    share = 1 / 3 if quick else 1.0
    if device.partition(":")[0] == "cuda":
        return CudaClock(device, graph=graph, budget_ns=30e6 * share)
    return CpuClock(budget_ns=5e6 * share)
