"""What a policy is, the two tiers to write one in, and the registry.

Simple tier (:class:`ScorePolicy`): say how much each token is worth; the base finds the victims. Full tier
(:class:`EvictionPolicy`): name the victims yourself. Either way a policy is a frozen dataclass whose fields are its
parameters; what it remembers of a token is a named float32 column that the token table allocates, moves and clears.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.jit import njit
from sim.kv.units import Units
from sim.kv.view import View
from sim.registry import Registry

__all__ = ["NOBODY", "EvictionPolicy", "ScorePolicy", "check_granularity", "lowest", "policies", "sortable"]


NOBODY: NDArray[np.int64] = np.zeros(0, np.int64)
"""No request protects any token."""


class EvictionPolicy:
    """Decides which tokens die when a request holds more than its budget.

    The engine calls :meth:`begin` once when a prompt is complete, :meth:`observe` after each decode step, and after
    either :meth:`select` for the requests over budget; with :attr:`prompt_only` it stays with the prompt. What a policy
    decides for a request may depend on that request alone, so that different reclaimers see the same deaths.
    """

    name: ClassVar[str] = ""
    evicts: ClassVar[bool] = True
    """False for a policy under which nothing ever dies."""
    attends: ClassVar[bool] = False
    """True if it looks at attention."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What else it asks a view for that not every attention model knows: ``similarity``, ``key_norms``,
    ``value_norms``, ``expected``."""
    compares: ClassVar[bool] = False
    """True if scoring compares each key with each other, and so costs by pairs."""
    every: ClassVar[int] = 1
    """Decode steps from one eviction to the next; a request may hold more than its budget in between."""
    prompt_only: ClassVar[bool] = False
    """True if tokens die at the end of the prompt alone: what is generated stays."""
    splits: ClassVar[str] = ""
    """What has a budget of its own under the policy: each ``layer``, each ``head``, or nothing in particular."""
    granule: ClassVar[int] = 1
    """Tokens that may die together: a request can end up with fewer than its budget by one less than that, and is left
    with one granule whatever its budget."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Names of its per-token columns; 0 for a token just written."""

    def begin(self, view: View) -> None:
        """Fill the columns of requests whose prompt has just been computed."""

    def observe(self, view: View) -> None:
        """Update the columns after a decode step of these requests."""

    def allot(self, view: View) -> NDArray[np.int64]:
        """Say how many tokens each unit of a request may keep, where that is not the same for all of them.

        A policy that overrides it is asked before :meth:`select`, with all units of the requests, those of a request
        side by side.

        Returns
        -------
        int64[B]
            In place of ``view.keep``, with the same sum over the units of a request.
        """
        keep: NDArray[np.int64] = view.keep
        return keep

    def select(self, view: View, excess: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Name the victims.

        Parameters
        ----------
        view
            The requests over budget.
        excess
            int64[B], at least 1: live tokens beyond the budget (``view.n - view.keep``).

        Returns
        -------
        victims : int64[V]
            Cells, request by request, ascending inside one.
        counts : int64[B]
            How many of them belong to each request; for one whose turn has not come (:attr:`every`) none.
        """
        raise NotImplementedError

    def reads(self, slots: NDArray[np.int64], keep: NDArray[np.int64]) -> NDArray[np.int64]:
        """Say how much of the KV cache a decode step reads, where that is not all; a policy that overrides it is asked.

        Parameters
        ----------
        slots
            int64[B], slots in the blocks that each decoding request holds.
        keep
            int64[B], tokens that the budget allows.

        Returns
        -------
        int64[B]
            Slots whose keys and values are read.
        """
        return slots


def check_granularity(policy: EvictionPolicy, units: Units) -> None:
    """Refuse a policy whose budgets differ from layer to layer or head to head where these decide together.

    Raises
    ------
    InputError
        That says which granularity it needs.
    """
    if (policy.splits == "layer" and units.layers * units.heads == 1) or (policy.splits == "head" and units.heads == 1):
        fits = "per_layer or per_head" if policy.splits == "layer" else "per_head and a model with several KV heads"
        raise InputError(
            f"policy {policy.name!r} gives each {policy.splits} a budget of its own: use granularity {fits}"
        )


class ScorePolicy(EvictionPolicy):
    """A policy that is a score: the tokens with the lowest die, the older first among equals."""

    pools: ClassVar[bool] = False
    """True if a token's share of the sum of its request's scores says what it is worth in any request, and after every
    step: scores are not negative, and attention or like it. Then requests can have one budget together."""

    def score(self, view: View) -> NDArray[np.float32]:
        """Return float32[A], the worth of each cell's token; only cells of the view's requests are looked at."""
        raise NotImplementedError

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return int64[B] twice: how many of a request's oldest and newest live tokens never die.

        The budget comes first: where both together exceed it, fewer of the oldest are protected, then of the newest;
        the newest token always is. An empty array stands for none.
        """
        return NOBODY, NOBODY

    def select(self, view: View, excess: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take the ``excess`` lowest scores outside what is protected."""
        oldest, newest = self.protect(view)
        return lowest(self.score(view), view.start, view.n, view.keep, oldest, newest, excess), excess


@njit
def lowest(
    score: np.ndarray,
    start: np.ndarray,
    n: np.ndarray,
    keep: np.ndarray,
    oldest: np.ndarray,
    newest: np.ndarray,
    excess: np.ndarray,
) -> np.ndarray:
    """Find each request's ``excess`` cells of lowest score, leaving out its ``oldest`` first and ``newest`` last ones.

    Scores are float32 and not NaN. Of a request that keeps ``keep`` tokens at most that many are left out, the newest
    before the oldest, and the newest one always.

    Returns
    -------
    ndarray
        int64[sum(excess)], ascending inside a request; equal scores go oldest first.
    """
    victims = np.empty(excess.sum(), np.int64)
    bits = score.view(np.int32)
    at = 0
    for b in range(len(start)):
        spared = max(1, min(newest[b], keep[b])) if len(newest) > 0 else 1
        first, last = start[b], start[b] + n[b] - spared
        if len(oldest) > 0:
            first += max(0, min(oldest[b], keep[b] - spared))
        mine = bits[first:last]
        if excess[b] == 1:
            victims[at] = first + _argmin(mine)
            at += 1
            continue
        keys = np.empty(len(mine), np.int32)
        for i in range(len(mine)):
            keys[i] = sortable(mine[i])
        bound = np.partition(keys, excess[b] - 1)[excess[b] - 1]
        ties = excess[b]
        for i in range(len(keys)):
            ties -= keys[i] < bound
        for i in range(len(keys)):
            if keys[i] < bound:
                victims[at] = first + i
                at += 1
            elif keys[i] == bound and ties > 0:
                ties -= 1
                victims[at] = first + i
                at += 1
    return victims


@njit(inline="always")
def sortable(bits: np.int32) -> np.int32:
    """Map the bits of a float32 to an integer that sorts as the float does, so that minima are taken in integers.

    Minima of floats do not vectorise, because of NaN; those of integers do. Takes -0.0 for less than 0.0.
    """
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit
def _argmin(bits: np.ndarray) -> int:
    """Return the index of the smallest float32, given as bits; the first among equals."""
    low, where = np.int32(0x7FFFFFFF), 0
    step = 128
    for first in range(0, len(bits), step):
        run = bits[first : first + step]
        least = np.int32(0x7FFFFFFF)
        for i in range(len(run)):
            least = min(least, sortable(run[i]))
        if least < low:
            low, where = least, first
    for i in range(where, min(where + step, len(bits))):
        if sortable(bits[i]) == low:
            return i
    return 0


policies: Registry[EvictionPolicy] = Registry(
    "policy",
    "vtoken.policies",
    tuple(
        f"sim.kv.policies.{name}"
        for name in (
            "full",
            "random",
            "streaming_llm",
            "h2o",
            "scissorhands",
            "tova",
            "snapkv",
            "pyramidkv",
            "ada_kv",
            "r_kv",
            "keydiff",
            "knorm",
            "expected_attention",
            "keyformer",
            "paged_eviction",
            "quest",
        )
    ),
)
