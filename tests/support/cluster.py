"""A real Dask cluster on this machine: a scheduler and workers, each a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["LONG_S", "ROOT", "Cluster", "end", "python", "wait_until"]

ROOT = Path(__file__).parents[2]
LONG_S = 300.0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for a condition; fail if ``process`` ends before, or if it takes too long on any machine."""
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def python(*arguments: str, cwd: Path = ROOT, to: int = subprocess.PIPE, **environment: str) -> subprocess.Popen[str]:
    """Start Python in a session of its own, with this checkout importable."""
    path = environment.pop("PYTHONPATH", str(ROOT))
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=to,
        stderr=to,
        text=True,
        start_new_session=True,
    )


class Cluster:
    """A scheduler and its workers; all end with the block.

    Parameters
    ----------
    folder
        For the scheduler file, and where processes start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "scheduler.json"
        self.workers: list[subprocess.Popen[str]] = []
        options = ["--port", "0", "--no-dashboard", "--scheduler-file", str(self.file)]
        self.scheduler = self._start("scheduler", *options, cwd=folder)
        wait_until(self.file.exists, self.scheduler)

    def add_worker(self, *options: str, cwd: Path | None = None, **environment: str) -> None:
        """Start a worker of one thread."""
        common = ["--nthreads", "1", "--no-dashboard", "--scheduler-file", str(self.file)]
        here = self._folder if cwd is None else cwd
        self.workers.append(self._start("worker", *common, *options, cwd=here, **environment))

    def _start(self, what: str, *options: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
        # Nobody reads what they say, and a full pipe would stop them.
        return python("-m", f"distributed.cli.dask_{what}", *options, cwd=cwd, to=subprocess.DEVNULL, **environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for process in (self.scheduler, *self.workers):
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process with all of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
