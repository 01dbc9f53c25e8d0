"""An executor that is used several times before it ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sim.study.executors.base import Executor, Lost, Made, RunFunction

if TYPE_CHECKING:
    from sim.study.spec import Run

__all__ = ["Kept"]


class Kept:
    """Stands for another executor, and leaves its workers alone when a block ends.

    Parameters
    ----------
    executor
        Whose end is up to whoever began it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def note(self) -> str:
        """As the other's."""
        return self._executor.note

    def check(self, runs: Sequence[Run]) -> None:
        """As the other's."""
        self._executor.check(runs)

    def room(self, *, alone: bool) -> int:
        """As the other's."""
        return self._executor.room(alone=alone)

    def submit(self, run: Run, function: RunFunction | None) -> None:
        """As the other's."""
        self._executor.submit(run, function)

    def wait(self, timeout_s: float) -> list[Made | Lost]:
        """As the other's."""
        return self._executor.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Nothing ends here."""
