"""What a run costs the process that drives a sweep of ten thousand short ones, and how its memory grows."""

from __future__ import annotations

import importlib
import resource
import tempfile
import time
from collections import deque
from pathlib import Path

from benchmarks.figures import Figure
from sim.progress import Progress
from sim.study.config import SimConfig
from sim.study.executors import DaskCluster, Executor, LocalPool
from sim.study.result import RunResult
from sim.study.run import simulate
from sim.study.spec import SweepSpec
from sim.study.store import Store
from sim.study.sweep import sweep

__all__ = ["measure"]

PART = "many"
MOST_MS = 5.0
TRACE = "poisson:rate=50,n=5,prompt=32,output=4"


def short(config: SimConfig) -> RunResult:
    """Give the one result that there is, under the name of this configuration."""
    return RunResult(**{**_one().__dict__, "config": config, "config_hash": config.hash()})


_made: deque[RunResult] = deque(maxlen=1)


def _one() -> RunResult:
    if not _made:
        _made.append(simulate(SimConfig(trace=TRACE, kv_blocks=64)))
    return _made[0]


def measure(*, quick: bool = False) -> list[Figure]:
    """Sweep over seeds of a run that is already made, in one worker: what is left is the driver's work, with tables."""
    runs = 500 if quick else 10_000
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="vtoken-bench-") as folder:
        figures += _driven("a process", LocalPool(1), Path(folder) / "pool", runs)
        figures += _on_dask(Path(folder) / "dask", runs)
        store = Store(Path(folder) / "pool")
        start_s = time.process_time()
        finished, _ = store.scan()
        figures.append(_figure("resuming: finding what is done", time.process_time() - start_s, len(finished)))
        store.index.path.unlink()
        start_s = time.process_time()
        store.scan()
        figures.append(_figure("resuming, without the index", time.process_time() - start_s, len(finished)))
    return figures


def _on_dask(out: Path, runs: int) -> list[Figure]:
    """Do the same on a cluster that was there before, and on one started for the sweep.

    Neither's scheduler is in this process: its work is not the driver's.
    """
    try:
        start = importlib.import_module("distributed.deploy.subprocess").SubprocessCluster
    except ImportError as error:
        return [Figure(PART, "driver, a Dask worker", None, "", note=str(error))]
    options = {"scheduler_kwargs": {"dashboard": False}, "worker_kwargs": {"nthreads": 1, "dashboard": False}}
    with start(n_workers=1, **options) as cluster:
        figures = _driven("a Dask worker", DaskCluster(cluster.scheduler_address), out / "there", runs)
    return figures + _driven("a Dask worker of its own", DaskCluster(local=1), out / "own", runs)


class _Watching(Progress):
    """Note how much memory this process held when a number of runs were done."""

    def __init__(self) -> None:
        super().__init__(None, "runs")
        self.rss_bytes: dict[int, int] = {}

    def update(self, done: int | None = None, note: str = "") -> None:
        super().update(done, note)
        if done is not None and done % 100 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.rss_bytes[done] = pages * resource.getpagesize()


def _driven(name: str, executor: Executor, out: Path, runs: int) -> list[Figure]:
    spec = SweepSpec(base={"trace": TRACE, "kv_blocks": 64}, seeds=list(range(runs)))
    watch = _Watching()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    report = sweep(spec, out, executor=executor, run=short, progress=watch)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - start_s
    if report.failures:
        raise RuntimeError(f"a run failed: {report.failures[0].error}")
    grown = watch.rss_bytes[runs] - watch.rss_bytes[runs // 5]
    return [
        _figure(f"driver, {name}", cpu_s, runs, note=f"{runs:,} runs, {wall_s / runs * 1e3:.1f} ms wall each"),
        Figure(PART, f"memory, {name}", grown / (runs - runs // 5), "bytes a run", note=f"{runs // 5:,} to {runs:,}"),
    ]


def _figure(name: str, cpu_s: float, runs: int, note: str = "") -> Figure:
    return Figure(PART, name, cpu_s / runs * 1e3, "CPU ms a run", most=MOST_MS, note=note)
