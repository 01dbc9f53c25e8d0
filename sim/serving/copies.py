"""The copy stream: repacks on their way, beside the steps."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from sim.kv.repack import RepackPlan
from sim.kv.state import H
from sim.serving.copy import Beside, CopyCost
from sim.serving.scheduler import Scheduler

__all__ = ["CopyStream"]


@dataclass(slots=True)
class _Launch:
    """What is in flight."""

    plans: list[RepackPlan]
    work: Beside
    start_ns: int
    end_ns: int
    """When it is complete."""


class CopyStream:
    """Runs one launch at a time, each as a SimPy process, and puts it into effect at the first fence after its end.

    Parameters
    ----------
    env
        The clock.
    scheduler
        Told which plans are in flight; its cache is what they change.
    cost
        What a copy takes.
    """

    def __init__(self, env: simpy.Environment, scheduler: Scheduler, cost: CopyCost) -> None:
        self._env = env
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._cost = cost
        self._token_share = self._cache.units.token_share
        self._launch: _Launch | None = None
        self._ended: simpy.Event | None = None
        self._before: tuple[float, NDArray[np.int32], NDArray[np.int32]] | None = None
        self._best_gain = 0
        self.snapshot: dict[str, Any] | None = None
        """The pool around the launch that freed most (see :class:`sim.serving.engine.Outcome`)."""
        self.launches = 0
        self.stops = 0
        """Copies that everybody waited for, each in one launch too."""
        self.committed = 0
        self.cancelled = 0
        self.tokens_copied = 0
        self.busy_ns = 0
        """Wall time of all launches."""
        self.delay_ns = 0
        """By how much they made steps longer."""

    @property
    def busy(self) -> bool:
        """Whether a launch is in flight."""
        return self._launch is not None

    def launch(self, plans: list[RepackPlan], after_ns: int = 0) -> None:
        """Start to copy; at most one launch may be in flight.

        Parameters
        ----------
        after_ns
            What is left of a step that may still write a source or read a destination: the copy waits for its end.
        """
        if self._launch is not None:
            raise RuntimeError("a repack was launched while another is in flight")
        gain = sum(plan.gain for plan in plans)
        if gain > self._best_gain:
            owners = self._owners()
            for plan in plans:
                owners[plan.destinations] = -1  # set aside just now: still free in the picture of before
            self._before = (self._now_ns / 1e9, self._cache.pool.live_counts(), owners)
        tokens = sum(plan.tokens for plan in plans)
        work = Beside(self._cost, self._whole(tokens))
        start = self._now_ns + after_ns
        self._launch = _Launch(plans, work, start, start + work.wall_ns)
        self._scheduler.plans = plans
        self.busy_ns += work.wall_ns
        self.tokens_copied += tokens
        self.launches += 1
        self._env.process(self._run(self._launch))

    def stop_ns(self, requests: int, tokens: int) -> int:
        """Return how long all wait while ``tokens`` tokens of ``requests`` requests are copied, and count that."""
        if not requests:
            return 0
        wall_ns = self._cost.alone_ns(self._whole(tokens))
        self.stops += 1
        self.committed += requests
        self.tokens_copied += tokens
        self.busy_ns += wall_ns
        self.delay_ns += wall_ns
        return wall_ns

    def _whole(self, tokens: int) -> int:
        """Return how many tokens of the whole model are as many bytes as so many of a unit."""
        part, whole = self._token_share
        return tokens if part == whole else -(-tokens * part // whole)

    def ended(self) -> simpy.Event:
        """Return an event that happens when the launch in flight is complete."""
        self._ended = self._env.event()
        return self._ended

    def stretch_ns(self, step_ns: int, memory_ns: int) -> int:
        """Return how much longer a step gets because of the launch beside it, and count that as paid.

        Parameters
        ----------
        step_ns, memory_ns
            The step alone, and the part of it that memory bandwidth bounds.
        """
        launch = self._launch
        if launch is None or self._now_ns < launch.start_ns:
            return 0
        longer = launch.work.stretch_ns(step_ns, memory_ns)
        self.delay_ns += longer
        return longer

    def pass_fence(self) -> None:
        """Put a launch that is complete into effect: what runs next reads the new layout."""
        launch = self._launch
        # By the clock, not by whether its process has run: at equal times that would depend on who began first.
        if launch is None or self._now_ns < launch.end_ns:
            return
        self._cache.store.s.header[H.NOW] = self._now_ns
        freed = 0
        for plan in launch.plans:
            freed += self._cache.apply_moves(plan)
            self.committed += not plan.cancelled
            self.cancelled += plan.cancelled
        if self._before is not None and freed > self._best_gain:
            clock_s, live, owner = self._before
            self.snapshot = {
                "clock_s": clock_s,
                "live_before": live,
                "owner_before": owner,
                "live_after": self._cache.pool.live_counts(),
                "owner_after": self._owners(),
            }
            self._best_gain = freed
        self._before = None
        self._launch = None
        self._ended = None
        self._scheduler.plans = []

    @property
    def _now_ns(self) -> int:
        return int(self._env.now)

    def _run(self, launch: _Launch) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(launch.end_ns - self._now_ns)
        if self._launch is launch and self._ended is not None:
            self._ended.succeed()

    def _owners(self) -> NDArray[np.int32]:
        """Return int32[N]: the request that holds each block, -1 where nobody does."""
        s = self._cache.store.s
        owners = np.full(len(s.blocks), -1, np.int32)
        for first, state in self._scheduler.states.items():
            for row in self._cache.bundle(first):
                owners[s.table[row, : s.rows[row]["blocks"]]] = state.ordinal
        return owners
