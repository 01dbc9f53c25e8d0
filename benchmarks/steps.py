"""CPU of one step, in timeouts, by the difference of two run lengths."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.figures import Figure, best_and_median
from benchmarks.unit import timeout_s
from sim.serving.engine import Engine
from sim.study.config import SimConfig
from sim.study.run import build_engine
from sim.workload.trace import Trace

__all__ = ["BATCH", "LIVE", "LONG", "LONG_LIVE", "LONG_NAME", "Case", "by_live_token", "count_events", "measure"]

PART = "steps"
BATCH = 128
LIVE = 1024
LONG_LIVE = 32_768
LONG = (LONG_LIVE,) * 32 + (128,) * 200
"""Prompts of a batch in which few requests hold nearly all tokens."""
LONG_NAME = f"32 x {LONG_LIVE:,} and 200 short ones"
FULL_MOST = 40.0
EVICTING_MOST = 250.0
EVENTS_MOST = 4.0
PREFIX_MOST = 2.0
RAGGED_MOST = 2.0
"""Live tokens may cost that much more in a ragged batch than in an even one. By capacity it would be 7 times."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch that starts at once and decodes in step until it ends."""

    name: str
    settings: dict[str, Any]
    prompts: tuple[int, ...] = (LIVE,) * BATCH
    short: int = 40
    """Output tokens of the short run."""
    long: int = 400
    most: float | None = None

    def engine(self, output: int) -> Engine:
        """Return an engine about to serve the batch, with ``output`` tokens for each request."""
        n = len(self.prompts)
        trace = Trace(np.zeros(n, np.int64), np.array(self.prompts), np.full(n, output))
        return build_engine(SimConfig(max_num_batched_tokens=1 << 21, **self.settings), trace)

    def step_s(self) -> tuple[float, float]:
        """Return the CPU seconds of a step in steady state, and of a timeout meanwhile."""
        before = timeout_s()
        more_s = self._run_s(self.long) - self._run_s(self.short)
        return more_s / (self.long - self.short), (before + timeout_s()) / 2

    def _run_s(self, output: int) -> float:
        engine = self.engine(output)
        start_s = time.process_time()
        steps = engine.run().summary["steps"]
        cpu_s = time.process_time() - start_s
        if steps != output:
            # Some had to wait or to start again: this would be the cost of a smaller batch.
            raise RuntimeError(f"{self.name}: {steps} steps for {output} tokens each, not one batch all the time")
        return cpu_s


def _evicting(policy: str, reclaimer: str, **more: Any) -> dict[str, Any]:
    return {"policy": policy, "reclaimer": reclaimer, "budget_tokens": LIVE, "kv_blocks": 20_000, **more}


FULL = Case(
    "full retention",
    {"policy": "full", "reclaimer": "none", "kv_blocks": 40_000},
    short=200,
    long=2000,
    most=FULL_MOST,
)
PREFIX = Case("full retention, prefix caching", FULL.settings | {"prefix_caching": True}, short=200, long=2000)
EVICTING = Case("h2o, vtoken", _evicting("h2o", "vtoken"), most=EVICTING_MOST)
REPACKING = Case("h2o, vtoken, repacking all the time", _evicting("h2o", "vtoken", repack_when="always"))
RAGGED = Case(
    f"h2o, vtoken, {LONG_NAME}",
    {"policy": "h2o", "reclaimer": "vtoken", "budget_tokens": LONG_LIVE, "kv_blocks": 100_000},
    prompts=LONG,
)
OTHERS = tuple(
    Case(f"{policy}, {reclaimer}", _evicting(policy, reclaimer))
    for policy in ("random", "streaming_llm", "h2o", "scissorhands")
    for reclaimer in ("naive", "vtoken", "ideal")
    if (policy, reclaimer) != ("h2o", "vtoken")
)


def measure(*, quick: bool = False) -> list[Figure]:
    """Measure all cases, each as often as others, in turn."""
    cases = (FULL, PREFIX, EVICTING, REPACKING, RAGGED, *(() if quick else OTHERS))
    repeats = 3 if quick else 7
    for case in cases:
        case.engine(4).run()  # compile, or load what was compiled before
    taken: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            taken[case.name].append(case.step_s())
    units = [unit for all_ in taken.values() for _, unit in all_]
    best, median = best_and_median(units)
    figures = [Figure(PART, "one SimPy timeout (the unit)", median * 1e6, "us", best * 1e6)]
    for case in cases:
        best, median = best_and_median([step / unit for step, unit in taken[case.name]])
        step_us = best_and_median([step * 1e6 for step, _ in taken[case.name]])[1]
        name = case.name if len(case.prompts) != BATCH else f"{case.name}, batch {BATCH} x {LIVE:,}"
        figures.append(Figure(PART, name, median, "timeouts a step", best, most=case.most, note=f"{step_us:,.1f} us"))
    ratios = [a / b for (a, _), (b, _) in zip(taken[PREFIX.name], taken[FULL.name], strict=True)]
    best, median = best_and_median(ratios)
    figures.append(
        Figure(PART, "full retention, with prefix caching by without", median, "ratio", best, most=PREFIX_MOST)
    )
    figures += _by_live_tokens(taken)
    for name, case in (("h2o, vtoken", EVICTING), ("h2o, vtoken, repacking all the time", REPACKING)):
        figures.append(
            Figure(PART, f"SimPy events, {name}", count_events(case.engine(100)), "a step", most=EVENTS_MOST)
        )
    return figures


def _by_live_tokens(taken: dict[str, list[tuple[float, float]]]) -> list[Figure]:
    """Compare the cost of a live token in a batch of very different lengths with that in an even one."""
    ragged, even = by_live_token(RAGGED, taken[RAGGED.name]), by_live_token(EVICTING, taken[EVICTING.name])
    best, median = best_and_median([a / b for a, b in zip(ragged, even, strict=True)])
    best_ns, median_ns = best_and_median([a * 1e9 for a in ragged])
    even_best_ns, even_ns = best_and_median([b * 1e9 for b in even])
    return [
        Figure(PART, f"live token, {BATCH} x {LIVE:,}", even_ns, "ns", even_best_ns),
        Figure(PART, f"live token, {LONG_NAME}", median_ns, "ns", best_ns),
        Figure(PART, "the second by the first", median, "ratio", best, most=RAGGED_MOST),
    ]


def by_live_token(case: Case, rows: list[tuple[float, float]]) -> list[float]:
    """Return the seconds of each measured step of ``case`` by the tokens that live in it."""
    middle = (case.short + case.long) // 2
    live = sum(min(prompt + middle, case.settings["budget_tokens"]) for prompt in case.prompts)
    return [step_s / live for step_s, _ in rows]


def count_events(engine: Engine) -> float:
    """Run ``engine`` and return the SimPy events a step: whatever was put in the event queue, by whomever."""
    scheduled = 0
    schedule = engine.env.schedule

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal scheduled
        scheduled += 1
        schedule(*arguments, **options)

    setattr(engine.env, "schedule", counted)  # noqa: B010 - an assignment to a method, which type checkers refuse
    steps = int(engine.run().summary["steps"])
    return scheduled / steps
