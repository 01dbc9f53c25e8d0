"""Run many configurations, wherever an executor makes them; resumable, whatever ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from sim.progress import Progress
from sim.study.check import check
from sim.study.executors import Executor, InProcess, LocalPool, Lost, Made, RunFunction, default_workers
from sim.study.export import write_atomically
from sim.study.spec import Plan, Run, SweepSpec
from sim.study.store import Aside, Store
from sim.study.tables import paired
from sim.study.versions import package_version

__all__ = ["Outcome", "SweepReport", "opened", "outcomes", "sweep", "timings", "working"]

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


def sweep(
    spec: SweepSpec,
    out: str | Path,
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    limit: int | None = None,
    run: RunFunction | None = None,
    progress: Progress | None = None,
) -> SweepReport:
    """Make every run of ``spec`` that ``out`` does not hold yet, and the tables of all.

    Each finished run is a file of its own in ``out/runs``. Stopping at any moment, by whatever means, loses at most the
    runs in flight: the same call goes on. Results do not depend on where runs are made, nor on how many at once.

    Parameters
    ----------
    spec
        What to run.
    out
        Directory of the sweep.
    workers
        Processes; one for each processor if None, 0 to run in this process. Workers import the calling program's main
        module, so a script must call this under ``if __name__ == "__main__":``.
    executor
        Where runs are made, in place of these processes.
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
    WorkersError
        If the executor has lost its workers. What was finished is kept.
    """
    plan = spec.expand()
    if run is None:
        check([each.config for each in plan.runs])
    progress = Progress(None, "runs") if progress is None else progress
    with opened(out, progress) as (store, finished, aside, cleaned):
        _write_spec(store.root / "sweep.json", spec, plan)
        todo = [each for each in plan.runs if each.config_hash not in finished]
        now = todo if limit is None else todo[:limit]
        made: list[Outcome] = []
        with working(executor, workers, now) as at_work:
            progress.start(len(now))
            for outcome in outcomes(deque(now), store, run, at_work, progress):
                made.append(outcome)
                if outcome.error is not None:
                    progress.message(f"failed: run {outcome.config_hash}: {outcome.error}")
                progress.update(len(made))
        progress.clear()
        store.write_tables(paired(store.frame()[0]))
    done_before = len(plan.runs) - len(todo)
    return SweepReport(plan, done_before, tuple(made), len(todo) - len(now), tuple(aside), cleaned)


@contextlib.contextmanager
def working(executor: Executor | None, workers: int | None, runs: Sequence[Run]) -> Iterator[Executor]:
    """Give the executor to use for these runs, once it was asked whether it can make them."""
    if executor is None:
        workers = default_workers() if workers is None else workers
        executor = LocalPool(workers) if workers else InProcess()
    with executor:
        if runs:
            executor.check(runs)
        yield executor


def _write_spec(path: Path, spec: SweepSpec, plan: Plan) -> None:
    content = {"format": 1, "spec": spec.to_dict(), "runs": [run.config_hash for run in plan.runs]}
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def timings(root: Path) -> dict[str, float]:
    """Return the wall time (s) of each finished run that timing.csv has; of several, the last."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for line in (root / "timing.csv").read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
            config_hash, *fields = line.split(",")
            with contextlib.suppress(ValueError):
                wall_s, ok = fields
                if ok == "1":
                    found[config_hash] = float(wall_s)
    return found


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
    waiting: deque[Run], store: Store, run: RunFunction | None, executor: Executor, progress: Progress
) -> Generator[Outcome]:
    """Make the runs that wait, keep what they give, and yield how each ended, as they end.

    Runs that the caller adds to ``waiting`` between two outcomes are made, too. Wall times go to timing.csv.

    Parameters
    ----------
    waiting
        What to run; it is emptied.
    store
        Where results go.
    run
        What makes a run; :func:`sim.study.run.simulate` if None.
    executor
        Where runs are made.
    progress
        Told that time passes.

    Raises
    ------
    WorkersError
        If there are no workers any more.
    """
    while waiting:
        suspects: list[Run] = []
        yield from _outcomes(waiting, store, run, executor, progress, suspects)
        culprits: list[Run] = []
        yield from _outcomes(deque(suspects), store, run, executor, progress, culprits, alone=True)
        for each in culprits:
            error = "its process died twice (killed, out of memory, or a crash in native code)"
            yield _keep(store, each, Made(each.config_hash, 0.0, error=error))


def _outcomes(
    waiting: deque[Run],
    store: Store,
    run: RunFunction | None,
    executor: Executor,
    progress: Progress,
    lost: list[Run],
    *,
    alone: bool = False,
) -> Generator[Outcome]:
    """Yield how each run ended; those that a worker had when it died are added to ``lost`` instead.

    With ``alone`` a worker has one run at a time, so that the run whose worker dies is the one to blame.
    """
    flying: dict[str, Run] = {}
    while waiting or flying:
        room = executor.room(alone=alone)
        while waiting and len(flying) < room:
            each = waiting.popleft()
            executor.submit(each, run)
            flying[each.config_hash] = each
        ended = executor.wait(TICK_S)
        died = [flying.pop(end.config_hash) for end in ended if isinstance(end, Lost)]
        if died:
            progress.message(f"a worker process died with {len(died)} runs in flight")
            lost.extend(died)
        for end in ended:
            if isinstance(end, Made):
                yield _keep(store, flying.pop(end.config_hash), end)
        progress.update(note=executor.note)


def _keep(store: Store, run: Run, made: Made) -> Outcome:
    """Store a run, or why it failed, and note what it took in timing.csv."""
    if made.packed is None:
        store.put_failure(run.config_hash, run.config, made.error, made.traceback)
    else:
        store.put(run.config_hash, made.packed)
    outcome = Outcome(run.config_hash, made.wall_s, made.error or None)
    _note(store, outcome)
    return outcome
