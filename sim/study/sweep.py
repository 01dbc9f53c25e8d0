"""Run many configurations on local processes; resumable, whatever ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_end
from pathlib import Path

from sim.errors import InputError, NoProgressError
from sim.progress import Progress
from sim.study.check import check
from sim.study.config import SimConfig
from sim.study.export import write_atomically
from sim.study.result import RunResult
from sim.study.spec import Plan, Run, SweepSpec
from sim.study.store import Aside, Store
from sim.study.tables import paired
from sim.study.versions import package_version

__all__ = ["Outcome", "RunFunction", "SweepReport", "default_workers", "opened", "outcomes", "sweep"]

RunFunction = Callable[[SimConfig], RunResult]
"""What a worker calls for each run; it must be importable by name."""

TICK_S = 0.5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one run ended; ``error`` is one line, or None if its result is in the store."""

    config_hash: str
    wall_s: float
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """How a sweep ended.

    Attributes
    ----------
    plan
        All its runs.
    already_done
        Runs whose results were there before.
    outcomes
        The runs made now, in the order they ended.
    left
        Runs that a limit kept from being made.
    set_aside
        Files in the store that could not be trusted.
    cleaned
        Temporary files of killed processes that were removed.
    """

    plan: Plan
    already_done: int
    outcomes: tuple[Outcome, ...]
    left: int
    set_aside: tuple[Aside, ...]
    cleaned: int

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The runs made now that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.error is not None)


def default_workers() -> int:
    """Return the number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    spec: SweepSpec,
    out: str | Path,
    *,
    workers: int | None = None,
    limit: int | None = None,
    run: RunFunction | None = None,
    progress: Progress | None = None,
) -> SweepReport:
    """Make every run of ``spec`` that ``out`` does not hold yet, and the tables of all.

    Each finished run is a file of its own in ``out/runs``. Stopping at any moment, by whatever means, loses at most the
    runs in flight: the same call goes on. Results do not depend on the number of workers.

    Parameters
    ----------
    spec
        What to run.
    out
        Directory of the sweep.
    workers
        Processes; one for each processor if None, 0 to run in this process. Workers import the calling program's main
        module, so a script must call this under ``if __name__ == "__main__":``.
    limit
        Make at most this many runs now.
    run
        What makes a run; :func:`sim.study.run.simulate` if None.
    progress
        Where to say how far it is.

    Raises
    ------
    InputError
        If the specification or the directory cannot be used.
    """
    plan = spec.expand()
    if run is None:
        check([each.config for each in plan.runs])
    progress = Progress(None, "runs") if progress is None else progress
    with opened(out, progress) as (store, finished, aside, cleaned):
        _write_spec(store.root / "sweep.json", spec, plan)
        todo = [each for each in plan.runs if each.config_hash not in finished]
        now = todo if limit is None else todo[:limit]
        workers = min(default_workers() if workers is None else workers, len(now))
        made: list[Outcome] = []
        progress.start(len(now))
        with contextlib.closing(outcomes(deque(now), store, run, workers, progress)) as ending:
            for outcome in ending:
                made.append(outcome)
                if outcome.error is not None:
                    progress.message(f"failed: run {outcome.config_hash}: {outcome.error}")
                progress.update(len(made))
        progress.clear()
        store.clean()  # of workers that died
        store.write_tables(paired(store.frame()[0]))
    done_before = len(plan.runs) - len(todo)
    return SweepReport(plan, done_before, tuple(made), len(todo) - len(now), tuple(aside), cleaned)


def _write_spec(path: Path, spec: SweepSpec, plan: Plan) -> None:
    content = {"format": 1, "spec": spec.to_dict(), "runs": [run.config_hash for run in plan.runs]}
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def _note(store: Store, outcome: Outcome) -> None:
    """Append a run's wall time to timing.csv, the one file that differs between equal sweeps."""
    path = store.root / "timing.csv"
    header = "" if path.exists() else "config_hash,wall_s,ok\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{header}{outcome.config_hash},{outcome.wall_s:.3f},{int(outcome.error is None)}\n")


@contextlib.contextmanager
def opened(out: str | Path, progress: Progress) -> Iterator[tuple[Store, set[str], list[Aside], int]]:
    """Open a store to write to, for this process alone: what killed processes left is removed, and files checked.

    Yields
    ------
    store, finished, aside, cleaned
        The store, the hashes of its finished runs, files set aside, and how many temporary files were removed.

    Raises
    ------
    InputError
        If the directory cannot be used, or another process writes there.
    """
    store = Store(out)
    store.create()
    with store.lock():
        cleaned = store.clean()
        finished, aside = store.scan(version=package_version())
        for moved in aside:
            progress.message(f"set aside: {moved}")
        yield store, finished, aside, cleaned


def outcomes(
    waiting: deque[Run], store: Store, run: RunFunction | None, workers: int, progress: Progress
) -> Generator[Outcome]:
    """Make the runs that wait, and yield how each ended, as they end.

    Runs that the caller adds to ``waiting`` between two outcomes are made, too. Wall times go to timing.csv.

    Parameters
    ----------
    waiting
        What to run; it is emptied.
    store
        Where results go.
    run
        What makes a run; :func:`sim.study.run.simulate` if None.
    workers
        Processes; 0 to run in this one.
    progress
        Told that time passes.
    """
    while waiting:
        ending = _outcomes(waiting, store, run, workers, progress)
        with contextlib.closing(ending):
            for outcome in ending:
                _note(store, outcome)
                yield outcome


def _outcomes(
    waiting: deque[Run], store: Store, run: RunFunction | None, workers: int, progress: Progress
) -> Generator[Outcome]:
    if workers == 0:
        while waiting:
            yield _execute(waiting.popleft(), store.root, run)
        return
    suspects: list[Run] = []
    yield from _pooled(waiting, store, run, workers, progress, suspects)
    unfinished = [each for each in suspects if not store.path(each.config_hash).exists()]
    yield from (Outcome(each.config_hash, 0.0) for each in suspects if each not in unfinished)
    # One at a time, so that a run whose process dies again is the one to blame.
    culprits: list[Run] = []
    yield from _pooled(deque(unfinished), store, run, 1, progress, culprits, queued=0)
    for each in culprits:
        error = "its process died twice (killed, out of memory, or a crash in native code)"
        store.put_failure(each.config_hash, each.config, error)
        yield Outcome(each.config_hash, 0.0, error)


def _pooled(
    waiting: deque[Run],
    store: Store,
    run: RunFunction | None,
    workers: int,
    progress: Progress,
    suspects: list[Run],
    *,
    queued: int = 1,
) -> Generator[Outcome]:
    """Yield how each run ended; those in flight when a worker died are added to ``suspects`` instead.

    Runs in flight are one for each worker and ``queued`` more for each: enough to keep workers busy, and few enough to
    keep the driver's memory flat.
    """
    flying: dict[Future[Outcome], Run] = {}
    while waiting:
        with _pool(workers) as pool:
            try:
                while waiting or flying:
                    while waiting and len(flying) < (1 + queued) * workers:
                        future = pool.submit(_execute, waiting[0], store.root, run)
                        flying[future] = waiting.popleft()
                    ended, _ = wait(flying, timeout=TICK_S, return_when=FIRST_COMPLETED)
                    for future in ended:
                        outcome = future.result()
                        del flying[future]
                        yield outcome
                    progress.update()
            except BrokenProcessPool:
                progress.message(f"a worker process died with {len(flying)} runs in flight")
                suspects.extend(flying.values())
                flying.clear()


class _pool:  # noqa: N801 - used like a function
    """A process pool whose workers end with it, at once if the block is left by an exception."""

    def __init__(self, workers: int) -> None:
        # Spawned, not forked: native libraries with threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._before = set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)

    def __enter__(self) -> ProcessPoolExecutor:
        return self._pool

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Results are renamed into place when complete, so a worker can be stopped at any moment.
            for process in set(multiprocessing.active_children()) - self._before:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Prepare a worker: leave Ctrl-C to the driver, end when the driver ends, import once what every run needs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait_for_end([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _execute(run: Run, root: Path, function: RunFunction | None) -> Outcome:
    """Make one run and store it, or record why it failed."""
    start_s = time.perf_counter()
    store = Store(root)
    try:
        if function is None:
            function = importlib.import_module("sim.study.run").simulate
        store.put(run.config_hash, function(run.config))
    except Exception as error:
        line = _describe(error)
        store.put_failure(run.config_hash, run.config, line, traceback.format_exc())
        return Outcome(run.config_hash, time.perf_counter() - start_s, line)
    return Outcome(run.config_hash, time.perf_counter() - start_s)


def _describe(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, InputError | NoProgressError) else f"{type(error).__name__}: {text}"
