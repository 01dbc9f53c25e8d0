"""What happened to KV memory: the vocabulary and its columnar log.

Events are in effect order and decisions are already taken, so that a replay needs no policy, no reclaimer and no clock:
:mod:`sim.kv.replay` interprets them, in the tests as an oracle and beside a real block pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np

__all__ = ["CHUNK", "EVENT", "EVENT_SCHEMA_VERSION", "Events", "KVEventLog", "Kind"]

EVENT_SCHEMA_VERSION = 3

CHUNK = 1 << 16
"""Events that a reader holds at a time."""


class Kind(IntEnum):
    """What an event says; ``req`` is the ordinal of the request in arrival order, ``a`` and ``b`` as listed."""

    STEP = 1
    """A step was scheduled and now runs: a = its number, b = its tokens; req is -1. What it was given comes before."""
    ADMIT = 2
    """The request gets a block table: a = tokens found in the prefix cache, b = tokens to compute."""
    SHARE = 3
    """A cached block is put at the end of the table: a = block."""
    ALLOC = 4
    """A fresh block is put at the end of the table: a = block."""
    APPEND = 5
    """Tokens are written behind the last written slot: a = first logical position, b = how many."""
    EVICT = 6
    """A token dies: a = its logical position, b = its slot."""
    FREE = 7
    """A block leaves the table, and returns to the pool unless somebody shares it: a = block, b = :class:`Why`."""
    PLAN = 8
    """A repack is planned: a = plan number, b = tokens it will copy."""
    SOURCE = 9
    """One of its source blocks: a = block, b = plan number."""
    RESERVE = 10
    """One of its destination blocks, taken from the pool: a = block, b = plan number."""
    COPIED = 11
    """The plan's copy is complete (a fence was passed): a = plan number."""
    MOVE = 12
    """A live token changes its slot: a = from, b = to."""
    COMMIT = 13
    """The plan's sources leave the table and its destinations enter it, at b = index of its first source; a = plan."""
    CANCEL = 14
    """The plan is dropped: a = plan number. Its blocks come back with FREE when the copy is complete."""
    DEFER = 15
    """A block leaves the table but a copy still uses it: a = block; a FREE follows after the fence."""
    PREEMPT = 16
    """The request loses its table and waits again: a = tokens to be computed again."""
    FINISH = 17
    """The request is done: a = logical length."""
    PACK = 18
    """The moves before it closed the request's gaps in place: a = slots up to the write position now."""
    GROUP = 19
    """The plan before it is one of those that empty shared blocks together: a = plan, b = the first of these plans."""
    REUSE = 20
    """A new token is written into a slot whose token has died: a = its logical position, b = the slot."""
    TARGET = 21
    """A block of the request that stays, into whose dead slots the copy writes: a = block, b = plan number."""


EVENT = np.dtype(
    [("time_ns", "i8"), ("kind", "i4"), ("req", "i4"), ("a", "i4"), ("b", "i4")],
    align=True,
)


class Events(Protocol):
    """Events of one pool from first to last: a log in memory, or a file of them."""

    @property
    def block_size(self) -> int:
        """Token slots a block."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; block 0 is never handed out."""

    def __len__(self) -> int:
        """Return how many events there are."""

    def chunks(self, events: int = CHUNK) -> Iterator[np.ndarray]:
        """Yield arrays of :data:`EVENT`, none longer than ``events``."""


class KVEventLog:
    """The events of a run, one record each (24 bytes).

    Parameters
    ----------
    records
        Array of :data:`EVENT`.
    block_size, num_blocks
        Of the pool that the events happened to; block 0 is never handed out.
    model, kv_dtype
        Whose keys and values the pool held: the name of a preset and a type ("bf16"); empty if nobody said. A replay on
        a real pool needs them, the events do not.
    units
        Sequences that a request is in the log, side by side: each layer, head or group of layers that has block tables
        of its own. A block then holds tokens of one of them.
    """

    def __init__(
        self,
        records: np.ndarray,
        block_size: int,
        num_blocks: int,
        *,
        model: str = "",
        kv_dtype: str = "",
        units: int = 1,
    ) -> None:
        self.records = records
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.model = model
        self.kv_dtype = kv_dtype
        self.units = units

    def __len__(self) -> int:
        return len(self.records)

    def chunks(self, events: int = CHUNK) -> Iterator[np.ndarray]:
        """Yield the records, so many at a time."""
        for first in range(0, len(self.records), events):
            yield self.records[first : first + events]

    def save(self, path: Path) -> None:
        """Write the log as a file: Parquet or, if the name ends in ``.npz``, NumPy arrays."""
        from sim.kv.event_file import write_events

        write_events(self, path)

    @classmethod
    def load(cls, path: Path) -> KVEventLog:
        """Read a log written by :meth:`save`.

        Raises
        ------
        InputError
            If the file is not such a log, is truncated, or is of another version.
        """
        from sim.kv.event_file import EventFile

        file = EventFile(path)
        records = np.concatenate([np.zeros(0, EVENT), *file.chunks()])
        log = cls(records, file.block_size, file.num_blocks, model=file.model, kv_dtype=file.kv_dtype)
        log.units = file.units
        return log
