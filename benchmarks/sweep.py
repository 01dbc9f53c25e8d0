"""Runs a second in a warm sweep: results written, imports and kernels loaded."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figure, best_and_median
from benchmarks.unit import timeout_s
from sim.study.spec import SweepSpec
from sim.study.sweep import sweep

__all__ = ["measure"]

PART = "sweep"
LEAST = 1.0
POLICIES = ("random", "streaming_llm", "h2o", "scissorhands")
RECLAIMERS = ("naive", "vtoken", "ideal")
TRACE = "poisson:rate=16,n=300,prompt=1000,output=200"


def measure(*, quick: bool = False) -> list[Figure]:
    """Sweep policies and reclaimers over 300 requests of 1,000 + 200 tokens in this process, several times."""
    repeats = 2 if quick else 5
    grid = {"policy": list(POLICIES), "reclaimer": list(RECLAIMERS)}
    spec = SweepSpec(base={"trace": TRACE, "budget": 0.5}, grid=grid)
    rates: list[float] = []
    units: list[float] = []
    with tempfile.TemporaryDirectory(prefix="vtoken-bench-") as out:
        sweep(spec, Path(out) / "warm", workers=0)
        for number in range(repeats):
            before = timeout_s()
            start_s = time.process_time()
            report = sweep(spec, Path(out) / str(number), workers=0)
            cpu_s = time.process_time() - start_s
            if report.failures:
                raise RuntimeError(f"a run of the sweep failed: {report.failures[0].error}")
            rates.append(len(report.outcomes) / cpu_s)
            units.append(cpu_s / len(report.outcomes) / ((before + timeout_s()) / 2) / 1e3)
    best, median = best_and_median(units)
    kinds = f"{len(POLICIES)} policies x {len(RECLAIMERS)} reclaimers"
    name = "runs of 300 requests"
    return [
        Figure(PART, name, sorted(rates)[len(rates) // 2], "a CPU s", max(rates), least=LEAST, note=kinds),
        Figure(PART, "one of them", median, "k timeouts", best),
    ]
