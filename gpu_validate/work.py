"""One engine step as a device is given it: NumPy arrays, and what has to be copied before it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Action", "Fence", "InPlace", "Launch", "Numbers", "StepWork", "Tokens"]

Numbers: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class Launch:
    """Copies of one or more plans, which begin together."""

    plans: tuple[int, ...]
    counts: tuple[int, ...]
    """Tokens of each plan."""
    source: Numbers
    """Slots, plan by plan."""
    target: Numbers
    listed: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    """Blocks that stay in tables while the copy writes into their dead slots. Until the fence nobody knows what those
    hold, and kernels that read every listed slot read them."""


@dataclass(slots=True)
class Fence:
    """What follows may read where these plans copied to, and write where they copied from."""

    plans: tuple[int, ...]


@dataclass(slots=True)
class InPlace:
    """Tokens that change their slots at once; a slot may be left by one and taken by another."""

    source: Numbers
    target: Numbers


Action: TypeAlias = Launch | Fence | InPlace


@dataclass(slots=True)
class Tokens:
    """Tokens by where they are."""

    slots: Numbers
    writers: Numbers
    """The request that wrote each of them; where a prefix is shared not the one that reads it."""
    positions: Numbers
    rows: Numbers
    """Row of the batch that each of them is alive for; empty where none is meant."""


@dataclass(slots=True)
class StepWork:
    """One step: B requests, T tokens to write.

    Attributes
    ----------
    step
        Its number in the log.
    reqs
        int64[B], requests in the order in which they were scheduled.
    query_tokens
        int32[B], tokens that each of them computes.
    lengths
        int32[B], slots up to the write position with this step's tokens, dead ones included.
    block_table
        int32[B, M]; zeros behind a row's last block.
    slots, positions, writers
        int64[T], of each token that is written: slot, logical position, request; row after row.
    before
        What happens to the pool since the step before, in order.
    live
        Tokens alive for a row of the batch, those written now included; None unless asked for.
    audit
        All tokens alive in the pool; None unless asked for, and due.
    time_ns
        Simulated time at which the step begins, or is scheduled if another one is on the device.
    """

    step: int
    reqs: Numbers
    query_tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    block_table: NDArray[np.int32]
    slots: Numbers
    positions: Numbers
    writers: Numbers
    before: list[Action] = field(default_factory=list)
    live: Tokens | None = None
    audit: Tokens | None = None
    time_ns: int = 0

    @property
    def tokens(self) -> int:
        """Tokens to write: T."""
        return len(self.slots)

    @property
    def seqs(self) -> int:
        """Requests: B."""
        return len(self.reqs)

    @property
    def decode(self) -> NDArray[np.bool_]:
        """bool[B], rows of one query token."""
        one: NDArray[np.bool_] = self.query_tokens == 1
        return one

    @property
    def kv_read_tokens(self) -> int:
        """Slots that attention reads, as the engine counts them for a step's cost."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def attention_pairs(self) -> int:
        """Query-key pairs, as the engine counts them for a step's cost."""
        tokens = self.query_tokens.astype(np.int64)
        return int((tokens * (self.lengths - tokens) + tokens * (tokens + 1) // 2).sum())

    def live_mask(self, block_size: int) -> NDArray[np.bool_]:
        """Return bool[B, max(lengths)]: which slots of each row, in table order, hold a token alive for it."""
        if self.live is None:
            raise ValueError("the program was made without live tokens")
        mask = np.zeros((self.seqs, int(self.lengths.max(initial=0))), np.bool_)
        index = np.zeros(int(self.block_table.max(initial=0)) + 1, np.int64)
        ends = np.searchsorted(self.live.rows, np.arange(self.seqs + 1))
        for row, (first, last) in enumerate(itertools.pairwise(ends)):
            index[self.block_table[row]] = np.arange(self.block_table.shape[1])
            blocks, offsets = np.divmod(self.live.slots[first:last], block_size)
            mask[row, index[blocks] * block_size + offsets] = True
        return mask
