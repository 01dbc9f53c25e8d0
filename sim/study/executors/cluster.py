"""Runs on the workers of a Dask cluster.

Results come back over the network as bytes, and the client alone writes them: a worker needs no file system in common
with it, but for the files that configurations name.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sim.errors import InputError
from sim.progress import Progress
from sim.study.check import files_named
from sim.study.executors.base import Lost, Made, RunFunction, WorkersError, execute
from sim.study.executors.own_cluster import CLOSE_S, QUIET, OwnCluster
from sim.study.spec import Run
from sim.study.versions import package_version

__all__ = ["DaskCluster"]

CONNECT_S = 10.0
COUNT_S = 1.0
IDLE_S = 0.2
LINGER_S = 0.02
"""How long to wait for more to end once something has: a message to the scheduler costs about as much for one run as
for many."""
FEWEST = 16
"""Runs submitted to a cluster without workers: an adaptive one starts workers for what waits."""

_process_is_free = threading.Lock()


class DaskCluster:
    """Make runs on a Dask cluster; one at a time in each worker process.

    Parameters
    ----------
    address
        Of the scheduler, as ``tcp://host:8786``, or the path of its scheduler file.
    progress
        Told what one has to know about the workers.
    local
        Start a scheduler and this many workers here instead, which end with the block.

    Raises
    ------
    InputError
        If Dask is not installed, or there is no scheduler at the address.
    """

    def __init__(self, address: str = "", progress: Progress | None = None, *, local: int = 0) -> None:
        self._say = Progress(None, "runs") if progress is None else progress
        self._levels: dict[str, int] = {}
        self._cluster: OwnCluster | None = None
        self._client: Any = None
        self._address = address
        self._given: list[tuple[Run, RunFunction | None]] = []
        self._flying: dict[str, Any] = {}
        self._news: queue.SimpleQueue[tuple[Any, tuple[str, ...]]] = queue.SimpleQueue()
        self._counted: dict[str, int] = {}
        self._count_again_s = 0.0
        self._idle: tuple[str, ...] = ()
        self._connect(local)

    def _connect(self, local: int) -> None:
        distributed = _distributed()
        # What matters about a cluster is said here, in a line. Dask gives some of its loggers levels of their own.
        for name in [*logging.root.manager.loggerDict, "distributed", "tornado"]:
            if name.split(".")[0] in ("distributed", "tornado"):
                self._levels[name] = logging.getLogger(name).level
                logging.getLogger(name).setLevel(QUIET)
        try:
            if local:
                self._cluster = OwnCluster(local)
                self._address = self._cluster.address
            known = {"scheduler_file": self._address}
            if not Path(self._address).is_file():
                known = {"address": distributed.comm.resolve_address(self._address)}
            self._client = distributed.Client(**known, timeout=CONNECT_S, set_as_default=False, name="vtoken-sim")
        except (OSError, ValueError) as error:
            self._close(hurry=True)
            why = f": {' '.join(str(error).split())}" if isinstance(error, ValueError) else ""
            raise InputError(
                f"no Dask scheduler at {self._address!r}{why}; expected an address such as tcp://host:8786, or a "
                "scheduler file"
            ) from None
        except BaseException:
            self._close(hurry=True)
            raise
        self._client.subscribe_topic("all", self._hear)

    @property
    def note(self) -> str:
        """How many workers there are, if none."""
        return "" if self._counted else "no worker is there, waiting for one"

    def check(self, runs: Sequence[Run]) -> None:
        """Wait for a worker; refuse those of another version, and those that do not see the files that runs name.

        Workers that come later are held to the same by the first run they get.
        """
        while not self._workers():
            self._say.update(note=self.note)
            time.sleep(COUNT_S / 2)
        specimens = {tuple(files_named(run.config)): run for run in runs}
        with self._reaching():
            answers = self._client.run(
                _look,
                [(run, names) for names, run in specimens.items()],
                package_version(),
                on_error="return",
            )
        for address, answer in answers.items():
            if isinstance(answer, Exception):
                raise InputError(f"worker {address} cannot run vtoken-sim: {' '.join(str(answer).split())}")
            if answer is not None:
                raise InputError(f"worker {address}: {answer}")
        wide = [f"{address} has {threads} threads" for address, threads in self._workers().items() if threads > 1]
        if wide:
            self._say.message(
                f"worker {wide[0]}: a worker makes one run at a time, give each a process of its own "
                "(dask worker ADDRESS --nworkers auto --nthreads 1)"
            )

    def room(self, *, alone: bool) -> int:
        """Return two for each worker; alone one in all, and for that a worker which is idle."""
        if alone and not self._flying:
            self._idle = self._find_idle()
        elif not alone:
            self._idle = ()
        return 1 if alone else max(FEWEST, 2 * len(self._workers()))

    def _find_idle(self) -> tuple[str, ...]:
        """Wait until no worker makes a run, and return the first one.

        A run whose worker dies is given to another one by the scheduler at once, and goes on there when it is cancelled
        here: it may end that worker too, with whatever run came to it in between.
        """
        while True:
            with self._reaching():
                answers = self._client.run(_until_idle, on_error="return")
            for address, answer in answers.items():
                if not isinstance(answer, Exception):
                    return (address,)
            self._count_again_s = 0.0
            self._workers()
            self._say.update(note=self.note)
            time.sleep(COUNT_S / 2)

    def submit(self, run: Run, function: RunFunction | None) -> None:
        """Note a run; it goes to the scheduler with the next wait, and what else was submitted until then."""
        self._given.append((run, function))

    def _hand_over(self) -> None:
        """Give to the scheduler what was submitted."""
        if not self._given:
            return
        runs, functions = zip(*self._given, strict=True)
        self._given.clear()
        # The key is the run's: what a client that was killed left running is waited for, not begun again.
        keys = [f"vtoken-run-{run.config_hash}" for run in runs]
        # On one worker alone, or the scheduler would give it to the next when that one dies.
        where = {"workers": list(self._idle), "allow_other_workers": False} if self._idle else {}
        with self._reaching():
            futures = self._client.map(
                _make, runs, functions, version=package_version(), key=keys, pure=False, batch_size=None, **where
            )
            for run, future in zip(runs, futures, strict=True):
                self._flying[run.config_hash] = future
                future.add_done_callback(partial(self._ended, run.config_hash))

    def _ended(self, config_hash: str, future: Any) -> None:
        """Note that a run ended; it is called in a thread of Dask's."""
        self._news.put((future, (config_hash,)))

    def wait(self, timeout_s: float) -> list[Made | Lost]:
        """Return what ended, with what was in flight on workers that died."""
        self._hand_over()
        done: dict[str, Any] = {}
        lost: dict[str, Any] = {}
        for future, hashes in self._heard(timeout_s):
            for each in hashes:
                # By identity: one that was cancelled and its successor have the same key, and compare equal.
                if each in self._flying and (future is None or future is self._flying[each]):
                    (lost if future is None else done)[each] = self._flying.pop(each)
        self._workers()
        with self._reaching():
            for future in lost.values():
                future.cancel()
            results = self._client.gather(done, errors="skip") if done else {}
        made = [self._judged(each, results[each], future) for each, future in done.items()]
        return [*made, *map(Lost, lost)]

    def _heard(self, timeout_s: float) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Yield what was reported, once something is: a future that ended, or None; and the runs that it is about.

        It waits a moment for more, while no less than half of the runs are under way: workers must not run dry.
        """
        enough = len(self._flying) // 2
        with contextlib.suppress(queue.Empty):
            yield self._news.get(timeout=timeout_s)
            until_s = time.monotonic() + LINGER_S
            for _ in range(1, enough):
                yield self._news.get(timeout=max(until_s - time.monotonic(), 0.0))
            while True:
                yield self._news.get_nowait()

    def _judged(self, config_hash: str, result: Made | str | None, future: Any) -> Made | Lost:
        """Return how a run ended, given its result, or a line from a worker that must not make it, or None."""
        distributed = _distributed()
        if isinstance(result, Made):
            return result
        if result is None:
            with self._reaching():
                error = future.exception(timeout=CONNECT_S)
            if isinstance(error, distributed.KilledWorker):
                return Lost(config_hash)
            result = f"a worker cannot run vtoken-sim: {' '.join(str(error).split())}"
        raise WorkersError(result)

    def _hear(self, event: tuple[float, Any]) -> None:
        """Note which runs a worker had when it was lost; it is called in Dask's own thread."""
        _, what = event
        if isinstance(what, dict) and what.get("action") == "remove-worker" and not what.get("expected"):
            runs = (key.removeprefix("vtoken-run-") for key in what["processing-tasks"] if isinstance(key, str))
            self._news.put((None, tuple(runs)))

    def _workers(self) -> dict[str, int]:
        """Return the threads of each worker by its address, as of a moment ago."""
        if time.monotonic() >= self._count_again_s:
            with self._reaching():
                self._counted = dict(self._client.nthreads())
            self._count_again_s = time.monotonic() + COUNT_S
        return self._counted

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn what Dask raises without a scheduler into one error."""
        distributed = _distributed()
        with contextlib.suppress(OSError, distributed.CancelledError, distributed.TimeoutError):
            yield
            if self._client.status == "running":
                return
        raise WorkersError(f"the scheduler at {self._address} is out of reach")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._close(hurry=kind is not None)

    def _close(self, *, hurry: bool) -> None:
        # A client that has lost its scheduler goes on for a while to look for it, and to complain.
        lost = self._client is not None and self._client.status != "running"
        with contextlib.suppress(Exception):
            if self._client is not None:
                if hurry and not lost:
                    self._client.cancel(list(self._flying.values()))
                self._flying.clear()
                self._client.unsubscribe_topic("all")
                self._client.close(timeout=CLOSE_S)
        if self._cluster is not None:
            self._cluster.close()
        self._client = self._cluster = None
        for name, level in () if lost else self._levels.items():
            logging.getLogger(name).setLevel(level)


def _distributed() -> Any:
    """Import Dask's package once it is needed."""
    try:
        return importlib.import_module("distributed")
    except ImportError:
        raise InputError("Dask is not installed: pip install 'vtoken-sim[cluster]'") from None


def _make(run: Run, function: RunFunction | None, version: str) -> Made | str:
    """Make one run in a worker, or say why this worker must not."""
    refusal = _look([(run, ())], version)
    if refusal is not None:
        return f"worker on {socket.gethostname()}: {refusal}"
    with _process_is_free:
        return execute(run, function)


async def _until_idle() -> None:
    """Wait in a worker until it makes no run; it goes on with what else it does meanwhile."""
    free = 0
    while free < 2:  # twice: a run that was given out a moment ago begins
        await asyncio.sleep(IDLE_S)
        free = 0 if _process_is_free.locked() else free + 1


def _look(specimens: Sequence[tuple[Run, Sequence[str]]], version: str) -> str | None:
    """Say in a worker why it must not make these runs, which name these files; None if it may."""
    if package_version() != version:
        return f"it has vtoken-sim {package_version()}, this is {version}"
    for run, names in specimens:
        for name in names:
            if not os.path.exists(name):
                hint = "" if os.path.isabs(name) else f" from {os.getcwd()}; give the whole path"
                return f"it does not see {name}{hint}"
        if run.config.hash() != run.config_hash:
            return f"it sees other files than this machine{': ' * bool(names)}{', '.join(names)}"
    return None
