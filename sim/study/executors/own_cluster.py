"""A Dask cluster of this machine's own, in processes beside the one that drives a sweep.

Its scheduler has a process of its own, so that neither its work nor its memory is the driver's.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

from sim.study.executors.base import WorkersError

__all__ = ["QUIET", "OwnCluster"]

QUIET = logging.CRITICAL + 1
CLOSE_S = 5.0


class OwnCluster:
    """A scheduler and workers, one run at a time each, that end when they are closed or this process ends.

    Parameters
    ----------
    workers
        How many.

    Attributes
    ----------
    address
        Of the scheduler.

    Raises
    ------
    WorkersError
        If they cannot be started.
    """

    def __init__(self, workers: int) -> None:
        # Spawned, not forked: this process may have threads.
        context = multiprocessing.get_context("spawn")
        self._line, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, workers))
        with _control_c_not_for_children():
            self._process.start()
        end.close()
        try:
            self.address: str = self._line.recv()
        except EOFError:
            self.close()
            raise WorkersError("a Dask cluster could not be started here") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End them."""
        self._line.close()
        self._process.join(2 * CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(line: Connection, workers: int) -> None:
    """Run a cluster until the other end of the line is closed, as it is when its process ends, however that does."""
    logging.disable(QUIET)
    cluster = importlib.import_module("distributed").LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=QUIET
    )
    with contextlib.suppress(OSError):
        line.send(cluster.scheduler_address)
    with contextlib.suppress(EOFError, OSError):
        line.recv()
    cluster.close(timeout=CLOSE_S)


@contextlib.contextmanager
def _control_c_not_for_children() -> Iterator[None]:
    """Start processes that leave Ctrl-C to this one: what is ignored when a process starts, Python leaves ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
