"""What an executor is, and what it does with a run, wherever that is."""

from __future__ import annotations

import dataclasses
import importlib
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from sim.errors import InputError, NoProgressError
from sim.study.config import SimConfig
from sim.study.result import RunResult
from sim.study.run_file import Packed, pack
from sim.study.spec import Run

__all__ = ["Executor", "Lost", "Made", "RunFunction", "WorkersError", "execute"]

RunFunction = Callable[[SimConfig], RunResult]
"""What makes a run; workers import it by its name."""


@dataclasses.dataclass(frozen=True)
class Made:
    """How a run ended: with its file's content, or with one line that says why not."""

    config_hash: str
    wall_s: float
    packed: Packed | None = None
    error: str = ""
    traceback: str = ""


@dataclasses.dataclass(frozen=True)
class Lost:
    """A run whose worker died while it had it; whether the run is to blame is not known."""

    config_hash: str


class WorkersError(RuntimeError):
    """Nothing can be made any more: there are no workers to be reached, or none that may be used.

    What was finished is kept; the message is one line.
    """


class Executor(Protocol):
    """Makes runs. Workers write nothing: what they made comes back, and whoever asked for it keeps it."""

    @property
    def note(self) -> str:
        """What to add to a progress line; empty if all is as expected."""
        ...

    def check(self, runs: Sequence[Run]) -> None:
        """Refuse runs that the workers cannot make.

        Raises
        ------
        InputError
            If a worker has another version of this package, or does not see a file that a run names.
        """
        ...

    def room(self, *, alone: bool) -> int:
        """Return how many runs to have submitted at once: enough to keep workers busy, few enough to keep memory flat.

        Parameters
        ----------
        alone
            So few that a worker which dies had only the run that is to blame.
        """
        ...

    def submit(self, run: Run, function: RunFunction | None) -> None:
        """Begin a run; ``function`` makes it, :func:`sim.study.run.simulate` if None."""
        ...

    def wait(self, timeout_s: float) -> list[Made | Lost]:
        """Wait until something submitted has ended, but not longer than this, and return what has.

        Raises
        ------
        WorkersError
            If the workers are out of reach, or must not be used.
        """
        ...

    def __enter__(self) -> Self:
        """Begin; processes start with the first run."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End the workers that were started, at once if the block was left by an exception."""
        ...


def execute(run: Run, function: RunFunction | None) -> Made:
    """Make one run, in a worker."""
    start_s = time.perf_counter()
    try:
        if run.config.hash() != run.config_hash:
            raise InputError("a file that it names is not the one that the sweep began with")
        if function is None:
            function = importlib.import_module("sim.study.run").simulate
        packed = pack(run.config_hash, function(run.config))
    except Exception as error:
        line, trace = _describe(error), traceback.format_exc()
        return Made(run.config_hash, time.perf_counter() - start_s, error=line, traceback=trace)
    return Made(run.config_hash, time.perf_counter() - start_s, packed)


def _describe(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, InputError | NoProgressError) else f"{type(error).__name__}: {text}"
