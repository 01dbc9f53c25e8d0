"""The most requests that decode together without a preemption, under a KV budget."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.serving.hardware import get_hardware
from sim.serving.memory import kv_blocks
from sim.serving.models import get_model
from sim.study.bisection import Axis
from sim.study.columns import Columns
from sim.study.config import SimConfig
from sim.study.result import RunResult
from sim.study.run import NOBODY_SERVED
from sim.study.search import Group, Verdict
from sim.study.tables import BASELINE
from sim.workload.source import Source, open_source

__all__ = ["AT_ONCE", "TAKEN", "Concurrency", "decoding_together", "in_service"]

TAKEN = ("head", "max_num_seqs", "rate_scale")
"""Fields that the search sets."""

AT_ONCE = 1e19
"""A rate scale that brings every arrival time a trace can hold (below 2 ** 62 ns) to 0."""

SUSTAINED = 0.99
"""Share of N that must be in service on average for N clients to count as served all the time. A client's next prompt
may have to wait for the token budget of a step or two; it must not have to wait for memory."""


@dataclasses.dataclass(frozen=True)
class Concurrency:
    """How many requests fit, found with the trace's first requests, all of them there at time 0.

    Parameters
    ----------
    group
        Configuration and seeds.
    load
        ``burst``: N requests at once. It holds if nothing is preempted or refused and at some moment all N have their
        first token and none its last. A request that waits for admission meanwhile is no failure in itself; only if
        it starts so late that another has ended before. ``sustained``: N clients, each of which sends a new request as
        soon as its last one is answered, ``rounds`` times: N * rounds requests at once, and at most N in service. In
        addition N must be in service all the time (:data:`SUSTAINED`) until the last request has begun.
    rounds
        Requests a client sends one after the other, if the load is sustained.
    low, high
        Range of N; ``high`` is what the trace holds if None.
    guess
        First number to probe; what the pool holds of the first request at its end if None.
    """

    group: Group
    load: Literal["burst", "sustained"] = "burst"
    rounds: int = 3
    low: int = 1
    high: int | None = None
    guess: int | None = None

    name = "max_concurrency"
    unit = "requests"
    notes = ()

    def __post_init__(self) -> None:
        if self.load not in ("burst", "sustained"):
            raise InputError(f"load: expected 'burst' or 'sustained', got {self.load!r}")
        if self.rounds < 1:
            raise InputError(f"rounds: expected at least 1, got {self.rounds}")
        config, each = self.group.config, self._each
        most = min(_requests(config.replace(seed=seed)) for seed in self.group.seeds) // each
        if most < self.low:
            raise InputError(
                f"{config.trace}: expected at least {self.low * each} requests to put {self.low} in service, "
                f"it has {most * each}"
            )
        high = most if self.high is None else min(self.high, most)
        object.__setattr__(self, "axis", Axis(self.low, high, whole=True))

    axis: Axis = dataclasses.field(init=False)

    @property
    def start(self) -> int:
        """The first number to probe."""
        return _guess(self.group.config) if self.guess is None else self.guess

    @property
    def _each(self) -> int:
        return self.rounds if self.load == "sustained" else 1

    def configs(self, value: float) -> list[SimConfig]:
        """Return one run for each seed."""
        count = int(value)
        return [
            self.group.config.replace(seed=seed, head=count * self._each, max_num_seqs=count, rate_scale=AT_ONCE)
            for seed in self.group.seeds
        ]

    def judge(self, value: float, results: list[RunResult]) -> Verdict:
        """Look at who was there together; the worst seed decides."""
        count = int(value)
        verdicts = [self._judge(count, result) for result in results]
        return next((each for each in verdicts if not each.holds), verdicts[0])

    def _judge(self, count: int, result: RunResult) -> Verdict:
        rows, summary = result.requests, result.summary
        together = decoding_together(rows)
        figures: dict[str, Any] = {
            "decoding_together": together,
            "preemptions": summary["preemptions"],
            "refused": summary["refused"],
            "used_blocks_peak": summary["used_blocks_peak"],
            "retained_blocks_peak_mean": summary["retained_blocks_peak_mean"],
            "makespan_s": summary["makespan_s"],
        }
        if self.load == "sustained":
            figures["in_service_mean"] = in_service(rows, count)
        if summary["refused"]:
            return Verdict(False, f"{summary['refused']} refused, {summary['first_refusal']}", figures)
        if summary["preemptions"]:
            return Verdict(False, f"{summary['preemptions']} preemptions", figures)
        if together < count:
            return Verdict(False, f"never more than {together} decode together, the others wait", figures)
        if self.load == "sustained" and figures["in_service_mean"] < SUSTAINED * count:
            return Verdict(False, f"only {figures['in_service_mean']:.2f} in service on average", figures)
        return Verdict(True, "all decode together, no preemption", figures)

    def refused(self, error: str) -> Verdict | None:
        """Take it that nothing holds if not a single request can be served."""
        return Verdict(False, error) if error.startswith(NOBODY_SERVED) else None


def decoding_together(requests: Columns) -> int:
    """Return the most requests that had their first token and not yet their last at one moment.

    Parameters
    ----------
    requests
        Rows of requests, as in :class:`sim.study.result.RunResult`.
    """
    done = np.isfinite(requests["finish_s"])
    first = requests["arrival_s"][done] + requests["ttft_s"][done]
    return int(_level(first, requests["finish_s"][done]).max(initial=0))


def in_service(requests: Columns, count: int) -> float:
    """Return the mean number in service, by time, from the ``count``-th admission to the last one.

    Requests are in service from admission to their end. ``nan`` if fewer than ``count`` were admitted; ``count`` if
    there were no more than that.
    """
    admitted = np.sort(requests["arrival_s"] + requests["queue_s"])
    admitted = admitted[np.isfinite(admitted)]
    if len(admitted) < count:
        return float("nan")
    begin, end = admitted[count - 1], admitted[-1]
    if begin == end:
        return float(count)
    start = requests["arrival_s"] + requests["queue_s"]
    inside = np.clip(np.nan_to_num(requests["finish_s"], nan=end), begin, end) - np.clip(start, begin, end)
    return float(np.nansum(inside) / (end - begin))


def _level(start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many of the intervals [start, end) are open at each start."""
    at = np.sort(start)
    opened: NDArray[np.int64] = np.searchsorted(at, at, side="right")
    return opened - np.searchsorted(np.sort(end), at, side="right")


def _open(config: SimConfig) -> Source:
    return open_source(config.trace, format=config.format, seed=config.seed, arrivals=config.arrivals)


def _guess(config: SimConfig) -> int:
    """Return how many requests like the first would fit, if each held only what it keeps at its end."""
    first = next((chunk for chunk in _open(config).chunks() if len(chunk)), None)
    if first is None:
        return 1
    length = int(first.prompt_tokens[0] + first.output_tokens[0])
    kept = length if config.budget is None else config.budget * length
    tokens = config.tokens_kept(get_model(config.model, config.kv_dtype).kv_bytes_per_token)
    if tokens is not None:
        kept = min(kept, tokens)
    if config.reclaimer.partition(":")[0] == BASELINE:
        kept = length
    blocks = config.kv_blocks
    if blocks is None:
        model, hardware = get_model(config.model, config.kv_dtype), get_hardware(config.hardware)
        blocks = kv_blocks(model, hardware, config.block_size, config.gpu_memory_utilization)
    return max(1, int(blocks * config.block_size / max(kept, 1)))


def _requests(config: SimConfig) -> int:
    source = _open(config)
    return sum(len(chunk) for chunk in source.chunks()) if source.total is None else source.total
