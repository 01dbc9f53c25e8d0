"""What happened to KV memory: the vocabulary and its columnar log.

Events are in effect order and decisions are already taken, so that a replay needs no policy, no reclaimer and no clock:
:mod:`sim.kv.replay` interprets them, in the tests as an oracle and beside a real block pool.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import numpy as np

from sim.errors import InputError

__all__ = ["EVENT", "EVENT_SCHEMA_VERSION", "KVEventLog", "Kind"]

EVENT_SCHEMA_VERSION = 2


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
    """The plan's destinations enter the table: a = plan number, b = index in the table of the first."""
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


EVENT = np.dtype(
    [("time_ns", "i8"), ("kind", "i4"), ("req", "i4"), ("a", "i4"), ("b", "i4")],
    align=True,
)


class KVEventLog:
    """The events of a run, one record each (24 bytes).

    Parameters
    ----------
    records
        Array of :data:`EVENT`.
    block_size, num_blocks
        Of the pool that the events happened to; block 0 is never handed out.
    """

    def __init__(self, records: np.ndarray, block_size: int, num_blocks: int) -> None:
        self.records = records
        self.block_size = block_size
        self.num_blocks = num_blocks

    def __len__(self) -> int:
        return len(self.records)

    def save(self, path: Path) -> None:
        """Write the log as Parquet, one column a field, with version and pool geometry in the file's metadata."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        meta = {
            "vtoken.kv_events": str(EVENT_SCHEMA_VERSION),
            "block_size": str(self.block_size),
            "num_blocks": str(self.num_blocks),
        }
        columns = {name: np.ascontiguousarray(self.records[name]) for name in EVENT.names or ()}
        columns["kind"] = columns["kind"].astype(np.int8)
        pq.write_table(pa.table(columns).replace_schema_metadata(meta), path, compression="zstd")

    @classmethod
    def load(cls, path: Path) -> KVEventLog:
        """Read a log written by :meth:`save`.

        Raises
        ------
        InputError
            If the file is not such a log, is truncated, or is of another version.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{path}: not a KV event log (Parquet): {error}") from None
        meta = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        version = meta.get("vtoken.kv_events")
        if version != str(EVENT_SCHEMA_VERSION):
            raise InputError(f"{path}: KV event log version {version}, expected {EVENT_SCHEMA_VERSION}")
        records = np.zeros(table.num_rows, EVENT)
        for name in EVENT.names or ():
            records[name] = table[name].to_numpy()
        return cls(records, int(meta["block_size"]), int(meta["num_blocks"]))
