"""The highest arrival rate at which a service-level agreement holds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError, did_you_mean
from sim.study.bisection import Axis
from sim.study.config import SimConfig
from sim.study.result import RunResult
from sim.study.search import Group, Verdict
from sim.study.tables import BASELINE, RECLAIM_FIELDS
from sim.workload.source import open_source

__all__ = ["PAPER", "TAKEN", "Bound", "SlaThroughput", "parse_bound"]

TAKEN = ("head",)
"""Fields that the search sets."""

LATENCIES = ("ttft", "tpot", "e2e", "queue_time")
PARTS = ("mean", "p50", "p90", "p95", "p99")

PAPER = "e2e_p95=1.05x"
"""The paper's agreement: 95th percentile of the end-to-end latency at most 1.05 times the baseline's."""

RANGE = 64.0
"""How far from the trace's own rate to look, as a factor in both directions, when no range is given."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """One latency that must not be exceeded: by itself, or in multiples of the baseline's.

    Parameters
    ----------
    latency, part
        Which figure of the summary: ``e2e`` and ``p95``, say.
    limit
        Seconds, or a factor.
    relative
        The limit is a factor.
    """

    latency: str
    part: str
    limit: float
    relative: bool = False

    @property
    def name(self) -> str:
        """As it is written: ``e2e_p95``."""
        return f"{self.latency}_{self.part}"

    def of(self, result: RunResult) -> float:
        """Return the figure of a run, in seconds; NaN if no request has one."""
        value = result.summary[f"{self.latency}_s"][self.part]
        return float("nan") if value is None else float(value)


def parse_bound(text: str) -> Bound:
    """Read ``e2e_p95=20`` (seconds), ``ttft_p99=1.5``, ``e2e_p95=1.05x`` (times the baseline's) or ``paper``.

    Raises
    ------
    InputError
        If it is none of these.
    """
    if text == "paper":
        return parse_bound(PAPER)
    name, equals, number = text.partition("=")
    latency, _, part = name.rpartition("_")
    known = [f"{each}_{part}" for each in LATENCIES for part in PARTS]
    if not equals or name not in known:
        raise InputError(
            f"sla {text!r}: expected 'paper', LATENCY_PART=SECONDS or LATENCY_PART=FACTORx, such as e2e_p95=20 or "
            f"e2e_p95=1.05x, with one of {', '.join(LATENCIES)} and one of {', '.join(PARTS)}"
            f"{did_you_mean(name, known)}"
        )
    relative = number.endswith("x")
    try:
        limit = float(number.removesuffix("x"))
    except ValueError:
        limit = float("nan")
    if not 0 < limit < float("inf"):
        raise InputError(f"sla {text!r}: expected a number above 0 behind '=', with an x if it is a factor")
    return Bound(latency, part, limit, relative)


@dataclasses.dataclass(frozen=True)
class SlaThroughput:
    """The highest rate at which every bound is met, found by offering the same requests faster or slower.

    A rate stands for the trace with every gap divided by one number, so that the trace's mean rate is that rate; each
    seed's own draw is scaled to it. Over several seeds a figure is their mean; a ratio to the baseline is taken seed by
    seed. A probe in which a run is ``overloaded`` does not hold, whatever its latencies: while a queue grows, these
    only say how long one watched.

    Parameters
    ----------
    group
        Configuration and seeds.
    bounds
        What must hold.
    low, high
        Range in requests a second; :data:`RANGE` times less and more than the configuration's own rate if None.
    tolerance
        Of the bracket, as a share.
    duration_s
        Use in each probe only the requests that arrive in this time; the whole trace if None.
    least_s
        Arrivals must last this long: rates at which the trace is shorter are out of the range.
    baseline
        Reclaimer of the runs that relative bounds are measured by; all else is the same.
    baseline_rate
        Requests a second that the baseline is offered, whatever rate is probed; the configuration's own if None (the
        trace's, times ``rate_scale``).
    """

    group: Group
    bounds: tuple[Bound, ...]
    low: float | None = None
    high: float | None = None
    tolerance: float = 0.02
    duration_s: float | None = None
    least_s: float = 60.0
    baseline: str = BASELINE
    baseline_rate: float | None = None

    name = "sla_throughput"
    unit = "requests/s"

    axis: Axis = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if not self.bounds:
            raise InputError("sla: expected at least one bound, such as e2e_p95=20, or 'paper'")
        if self.baseline_rate is not None and not 0 < self.baseline_rate < float("inf"):
            raise InputError(f"baseline rate: expected requests per second above 0, got {self.baseline_rate:g}")
        lasts_s = self.least_s if self.duration_s is None else self.duration_s
        if not 0 < lasts_s < float("inf"):
            raise InputError(f"duration: expected a time above 0 s, got {lasts_s:g}")
        # At this rate the shortest of the traces lasts just long enough.
        most = min(arrivals.rate * arrivals.span_s for arrivals in self._arrivals.values()) / lasts_s
        low = self.own_rate / RANGE if self.low is None else self.low
        high = self.own_rate * RANGE if self.high is None else self.high
        if min(high, most) < low:
            raise InputError(
                f"{self.group.config.trace}: lasts less than {lasts_s:g} s at any rate above {most:.4g} requests/s, "
                f"and the range begins at {low:.4g}: give a longer trace or another duration"
            )
        if self._relative and self.given_rate > most:
            raise InputError(
                f"{self.group.config.trace}: lasts less than {lasts_s:g} s at the baseline's rate of "
                f"{self.given_rate:.4g} requests/s: give a longer trace or another duration"
            )
        object.__setattr__(self, "axis", Axis(low, min(high, most), tolerance=self.tolerance))

    @functools.cached_property
    def _arrivals(self) -> dict[int, _Arrivals]:
        return {seed: _Arrivals.of(self.group.config.replace(seed=seed)) for seed in self.group.seeds}

    @property
    def own_rate(self) -> float:
        """The rate of the configuration, in requests a second (the first seed's draw)."""
        return self._arrivals[self.group.seeds[0]].rate * self.group.config.rate_scale

    @property
    def given_rate(self) -> float:
        """The rate that the baseline is offered."""
        return self.own_rate if self.baseline_rate is None else self.baseline_rate

    @property
    def start(self) -> float:
        """The first rate to probe."""
        return self.given_rate

    @property
    def _relative(self) -> bool:
        return any(bound.relative for bound in self.bounds)

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what the baseline is, if there is one."""
        if not self._relative:
            return ()
        return (
            f"the baseline is reclaimer {self.baseline} at {self.given_rate:.4g} requests/s, whatever the rate probed",
        )

    def configs(self, value: float) -> list[SimConfig]:
        """Return the runs at a rate, one for each seed, and behind them those of the baseline."""
        config = self.group.config
        runs = [self._at(config, seed, value) for seed in self.group.seeds]
        if self._relative:
            # What only other reclaimers read is set to its default: the baseline of all of them is one run.
            plain = {name: SimConfig.model_fields[name].default for name in RECLAIM_FIELDS}
            base = config.replace(**{**plain, "reclaimer": self.baseline})
            runs += [self._at(base, seed, self.given_rate) for seed in self.group.seeds]
        return runs

    def _at(self, config: SimConfig, seed: int, rate: float) -> SimConfig:
        arrivals = self._arrivals[seed]
        head = None if self.duration_s is None else arrivals.within(self.duration_s, rate)
        return config.replace(seed=seed, head=head, rate_scale=rate / arrivals.rate)

    def judge(self, value: float, results: list[RunResult]) -> Verdict:
        """Compare with the bounds."""
        count = len(self.group.seeds)
        own, base = results[:count], results[count:]
        states = sorted({result.summary["load_state"] for result in own})
        figures: dict[str, Any] = {
            "load_state": "/".join(states),
            "requests": sum(result.summary["requests"] for result in own),
            "refused": sum(result.summary["refused"] for result in own),
            "preemptions": sum(result.summary["preemptions"] for result in own),
            "requests_per_s": float(np.mean([result.summary["requests_per_s"] for result in own])),
        }
        broken: list[str] = []
        for bound in self.bounds:
            seen = np.array([bound.of(result) for result in own])
            if np.isnan(seen).any():
                raise InputError(f"sla {bound.name}: at {value:g} requests/s no request has a {bound.latency}")
            figures[f"{bound.name}_s"] = float(seen.mean())
            if bound.relative:
                reference = np.array([bound.of(result) for result in base])
                figures[f"{bound.name}_baseline_s"] = float(reference.mean())
                figures[f"{bound.name}_ratio"] = ratio = float((seen / reference).mean())
                if not ratio <= bound.limit:
                    broken.append(f"{bound.name} {ratio:.3f}x the baseline's > {bound.limit:g}x")
            elif not figures[f"{bound.name}_s"] <= bound.limit:
                broken.append(f"{bound.name} {figures[f'{bound.name}_s']:.4g} s > {bound.limit:g} s")
        if base:
            figures["baseline_load_state"] = "/".join(sorted({result.summary["load_state"] for result in base}))
        if "overloaded" in states:
            broken.insert(0, "overloaded")
        shown = ", ".join(f"{bound.name} {figures[f'{bound.name}_s']:.4g} s" for bound in self.bounds)
        return Verdict(not broken, ", ".join(broken) or shown, figures)

    def refused(self, error: str) -> Verdict | None:
        """End the search: a run that cannot be made has no latency."""
        del error
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class _Arrivals:
    """When the requests of a workload arrive at its own rate."""

    arrival_ns: NDArray[np.int64]

    @classmethod
    def of(cls, config: SimConfig) -> _Arrivals:
        source = open_source(config.trace, format=config.format, seed=config.seed, arrivals=config.arrivals)
        arrival_ns = np.concatenate([chunk.arrival_ns for chunk in source.chunks()] or [np.zeros(0, np.int64)])
        if len(arrival_ns) < 2 or arrival_ns[0] == arrival_ns[-1]:
            raise InputError(f"{config.trace}: expected requests at different times, it has no rate to change")
        return cls(arrival_ns - arrival_ns[0])

    @property
    def span_s(self) -> float:
        """First to last arrival."""
        return float(self.arrival_ns[-1]) / 1e9

    @property
    def rate(self) -> float:
        """Requests a second, on average."""
        return (len(self.arrival_ns) - 1) / self.span_s

    def within(self, duration_s: float, rate: float) -> int:
        """Return how many requests arrive in the first ``duration_s``, if they are offered at ``rate``."""
        last_ns = duration_s * 1e9 * rate / self.rate
        return int(np.searchsorted(self.arrival_ns, last_ns, side="right"))
