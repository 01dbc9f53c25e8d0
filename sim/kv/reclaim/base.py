"""What a reclaimer is, and the registry."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.policies.base import EvictionPolicy
from sim.kv.repack import RepackPlan
from sim.kv.view import View
from sim.registry import Registry

__all__ = ["Pressure", "Reclaimer", "reclaimers", "refuse_windows"]


class Pressure(NamedTuple):
    """How short of blocks the scheduler is after a step."""

    running: int
    """Requests that hold blocks; each may take one more in the next step."""
    wanted_blocks: int
    """Blocks by which the last allocation that failed fell short; 0 if none failed."""
    step_tokens: float = math.inf
    """Tokens whose copy, with the memory to itself, takes as long as the shortest step of late."""


class Reclaimer:
    """Decides when and whose slots are won back. Blocks whose last token died are freed before it is asked.

    A reclaimer is a frozen dataclass; what it plans is copied beside the next steps and takes effect at a fence.
    """

    name: ClassVar[str] = ""
    evicts: ClassVar[bool] = True
    """False for a reclaimer under which nothing may die."""
    needs_headroom: ClassVar[bool] = False
    """True if it needs free destination blocks that nobody else may take."""
    shares_headroom: ClassVar[bool] = False
    """True if it needs them where blocks may be shared, at least."""
    reuses: ClassVar[bool] = False
    """True if new tokens are written into dead slots of their own request."""
    stalls: ClassVar[bool] = False
    """True if a request computes nothing while a repack of it is in flight."""
    attention_factor: float = 1.0
    """By how much attention is slower than with the blocks of the step cost."""
    keep_blocks: int = 0
    """Blocks that a request does not give back while it runs, though nothing lives in them."""

    def check(self, cache: KVCache, policy: EvictionPolicy) -> None:
        """Refuse what it cannot serve.

        Raises
        ------
        InputError
            If it cannot work on this cache, or with this policy.
        """

    def choose(
        self, cache: KVCache, policy: EvictionPolicy, view: View, excess: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Let the policy name the victims (:meth:`EvictionPolicy.select`); to be overridden by who has a say in it."""
        return policy.select(view, excess)

    def after_step(self, cache: KVCache, rows: NDArray[np.int64], pressure: Pressure, busy: bool) -> list[RepackPlan]:
        """Look at the cache after the deaths of a step, and plan repacks.

        Parameters
        ----------
        cache
            The cache; plans come from :meth:`KVCache.plan_repack`.
        rows
            int64[B], running requests in the scheduler's order.
        pressure
            How short of blocks the scheduler is.
        busy
            A copy is in flight.

        Returns
        -------
        list of RepackPlan
            To be copied in one launch.
        """
        return []

    def repack_now(self, cache: KVCache, rows: NDArray[np.int64]) -> tuple[int, int]:
        """Repack in place, while nothing runs; asked after the deaths of a step, before :meth:`after_step`.

        Returns
        -------
        tuple of int
            Requests that were repacked, and tokens that moved. The next step waits for their copy.
        """
        return 0, 0


def refuse_windows(cache: KVCache, reclaimer: str) -> None:
    """Refuse a model with a sliding window, for who loses the order of tokens.

    Raises
    ------
    InputError
        If a group of the model's layers has a window.
    """
    if any(cache.units.windows):
        raise InputError(
            f"{reclaimer} writes tokens out of order in memory, and the model has layers with a sliding window, which "
            "go by it: use a reclaimer that keeps the order, such as vtoken"
        )


reclaimers: Registry[Reclaimer] = Registry(
    "reclaimer",
    "vtoken.reclaimers",
    tuple(
        f"sim.kv.reclaim.{name}"
        for name in ("none", "naive", "page", "sync", "stall", "vtoken", "reuse", "token", "ideal")
    ),
)
