"""Times the steps of a replay: on CUDA by events on its streams, on a CPU by the time that the thread has of it."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_validate.observer import StepObserver
from gpu_validate.program import Launch, StepWork

__all__ = ["StepTimes"]


class StepTimes(StepObserver):
    """Takes the time of every step, of every copy, and of the host's part.

    A step lasts from the first thing that is issued for it (copies and fences before it included) to the end of its
    last kernel. On CUDA both ends are events on the step's stream: where the host keeps ahead they lie one step apart,
    where it does not, the device's waiting for it counts.

    Parameters
    ----------
    cuda
        Whether there are streams.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._steps: list[int] = []
        self._marks: list[tuple[Any, Any]] = []
        self._copies: dict[tuple[int, ...], tuple[int, list[Any]]] = {}
        self._host: list[tuple[int, int]] = []
        self._begun: Any = None
        self._moved = 0
        self._uploaded = 0

    # -- what the replay tells -----------------------------------------------------------------------------------------

    def begin(self, work: StepWork) -> None:
        """Note that a step begins."""
        self._steps.append(work.step)
        self._begun = self._mark()

    def moved(self, work: StepWork) -> None:
        """Note that the copies before the step have been issued."""
        self._moved = time.perf_counter_ns()

    def uploaded(self, work: StepWork) -> None:
        """Note that the slots are on their way."""
        self._uploaded = time.perf_counter_ns()

    def planned(self, work: StepWork) -> None:
        """Note that attention has its plan."""
        self._host.append((self._uploaded - self._moved, time.perf_counter_ns() - self._uploaded))

    def end(self, work: StepWork) -> None:
        """Note that everything of the step has been issued."""
        self._marks.append((self._begun, self._mark()))

    def copy_begin(self, launch: Launch) -> None:
        """Note that a copy begins, on the stream or thread that copies."""
        self._copies[launch.plans] = len(launch.source), [self._mark()]

    def copy_end(self, launch: Launch) -> None:
        """Note that it is done."""
        self._copies[launch.plans][1].append(self._mark())

    # -- what came of it -----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> NDArray[np.int64]:
        """int64[n], numbers of the steps."""
        return np.array(self._steps, np.int64)

    def times_ns(self) -> NDArray[np.float64]:
        """Return float64[n]: nanoseconds of each step."""
        self._wait()
        return np.array([self._between(*pair) for pair in self._marks], np.float64)

    def copies(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return int64[m] tokens and float64[m] nanoseconds of each copy."""
        self._wait()
        done = [(tokens, marks) for tokens, marks in self._copies.values() if len(marks) == 2]
        tokens = np.array([count for count, _ in done], np.int64)
        return tokens, np.array([self._between(*marks) for _, marks in done], np.float64)

    def host_ns(self) -> tuple[float, float]:
        """Return the median time of the host for slots and chunks' tables, and for attention's plan."""
        tables, plan = np.median(np.array(self._host, np.float64).reshape(-1, 2), axis=0).tolist()
        return tables, plan

    def _mark(self) -> Any:
        if not self._cuda:
            return time.thread_time_ns()
        cuda: Any = importlib.import_module("torch").cuda
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(1e6 * start.elapsed_time(end)) if self._cuda else float(end - start)

    def _wait(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize()
