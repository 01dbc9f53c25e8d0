"""Runs in this process, or in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_end
from types import TracebackType
from typing import Self

from sim.study.executors.base import Lost, Made, RunFunction, execute
from sim.study.spec import Run

__all__ = ["InProcess", "LocalPool", "default_workers"]


def default_workers() -> int:
    """Return the number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class InProcess:
    """Make runs in this process, one after the other."""

    note = ""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Run, RunFunction | None]] = deque()

    def check(self, runs: Sequence[Run]) -> None:
        """Accept all."""

    def room(self, *, alone: bool) -> int:  # noqa: ARG002 - always alone
        """Return 1."""
        return 1

    def submit(self, run: Run, function: RunFunction | None) -> None:
        """Put a run off until somebody waits for it."""
        self._waiting.append((run, function))

    def wait(self, timeout_s: float) -> list[Made | Lost]:  # noqa: ARG002 - a run takes what it takes
        """Make what was submitted."""
        made: list[Made | Lost] = []
        while self._waiting:
            made.append(execute(*self._waiting.popleft()))
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()


class LocalPool:
    """Make runs in processes of this machine.

    Parameters
    ----------
    workers
        How many. They import the calling program's main module, so a script must do its work under
        ``if __name__ == "__main__":``.
    """

    note = ""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self._flying: dict[Future[Made], str] = {}
        self._refused: list[str] = []
        self._before = set(multiprocessing.active_children())

    def check(self, runs: Sequence[Run]) -> None:
        """Accept all: the workers are this program on this machine."""

    def room(self, *, alone: bool) -> int:
        """Return two for each worker, or 1: a worker that dies takes all others of the pool with it."""
        return 1 if alone else 2 * self._workers

    def submit(self, run: Run, function: RunFunction | None) -> None:
        """Give a run to the pool."""
        if self._pool is None:
            # Spawned, not forked: native libraries with threads do not survive a fork.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=context, initializer=_start_worker)
        try:
            self._flying[self._pool.submit(execute, run, function)] = run.config_hash
        except BrokenProcessPool:
            self._refused.append(run.config_hash)

    def wait(self, timeout_s: float) -> list[Made | Lost]:
        """Return what ended; if a worker died, all that was in flight."""
        ended, _ = wait(self._flying, timeout=0 if self._refused else timeout_s, return_when=FIRST_COMPLETED)
        results = [self._take(future) for future in ended]
        if self._refused or any(isinstance(result, Lost) for result in results):
            results += [self._take(future) for future in tuple(self._flying)]
            results += map(Lost, self._refused)
            self._refused.clear()
            assert self._pool is not None
            self._pool.shutdown()
            self._pool = None
        return results

    def _take(self, future: Future[Made]) -> Made | Lost:
        config_hash = self._flying.pop(future)
        try:
            return future.result()
        except BrokenProcessPool:
            return Lost(config_hash)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._pool is None:
            return
        if kind is not None:
            for process in set(multiprocessing.active_children()) - self._before:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._flying.clear()


def _start_worker() -> None:
    """Prepare a worker: leave Ctrl-C to the driver, and end when the driver ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait_for_end([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
