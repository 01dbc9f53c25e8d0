"""The arrays that hold the control plane, in one tuple that the compiled kernels take.

One record a block, one record a request ("row"), one block table a row, and flat columns with one *cell* a live token.
A row's cells lie side by side, oldest token first, without dead ones in between: what a policy looks at is contiguous,
and costs by live tokens, whatever the physical layout or the capacity (docs/adr/0001-ragged-live-columns.md).

With a prefix cache a block may lie in several tables (docs/adr/0006-shared-blocks.md). Which of its tokens are alive is
each row's own affair and stands in the row's cells. A *slot* is live as long as one row's token lives in it, so that a
block has one count of live slots and one of written ones however many read it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sim.jit import records
from sim.kv.events import EVENT

__all__ = ["BLOCK", "ROW", "YIELDS", "H", "State", "Store"]

BLOCK = np.dtype(
    [
        ("prev", "i4"),  # free list, doubly linked; block 0 is its sentinel (vLLM's null block, never handed out).
        ("next", "i4"),  # Of a block that is in use: a list of sim.kv.holes
        ("ref", "i4"),  # who holds the block: tables, a copy that fills it or reads it for nobody; 0 while it is free
        ("tables", "i4"),  # block tables that list it
        ("live", "i4"),  # slots that hold a token which is alive for at least one row
        ("written", "i4"),  # slots that hold a token, live or dead
        ("cached", "i2"),  # 1 while the prefix cache knows its contents
        ("busy", "i2"),  # 1 while a copy reads it or writes into it, unless the prefix cache knows its contents
        ("owner", "i4"),  # row that took it last
    ],
    align=True,
)

# 128 bytes, two cache lines: the loop over running requests takes a fifth longer with a third one.
ROW = np.dtype(
    [
        ("key", "u8"),  # where the request's random draws come from
        ("ordinal", "i4"),  # request number in arrival order
        ("target", "i4"),  # output tokens to produce
        ("length", "i4"),  # tokens known: prompt and generated (the logical length)
        ("computed", "i4"),  # of those, tokens whose K and V were written
        ("sched", "i4"),  # tokens scheduled in the step under way
        ("produced", "i4"),  # output tokens so far
        ("written", "i4"),  # slots up to the write position, dead ones included (the physical length)
        ("blocks", "i4"),  # blocks in its table
        ("live", "i4"),  # live tokens
        ("decode_from", "i4"),  # length when the prompt (or the recompute) was complete; 0 before
        ("tracked", "u1"),  # 1 if tokens have cells; without a policy that evicts nobody looks at single tokens
        ("flying", "u1"),  # its part in the oldest batch without results: 0 none, 1 computes, 2 and yields a token
        ("ahead", "u1"),  # the same for the batch after that one (asynchronous scheduling)
        ("mixed", "u1"),  # 1 once its tokens do not lie in logical order
        ("cap", "i4"),  # cells it was given, from `origin` on
        ("origin", "i8"),
        ("start", "i8"),  # its first cell in use; moves away from `origin` when an old token dies
        ("busy_from", "i4"),  # table indices [busy_from, busy_to) are sources of a repack in flight
        ("busy_to", "i4"),
        ("plan", "i4"),  # number of that repack, or -1
        ("peak", "i4"),  # most blocks held during decode
        ("evicted", "i4"),
        ("moved", "i4"),
        ("decode_ns", "i8"),
        ("first_token_ns", "i8"),
        ("block_ns", "f8"),  # integral of blocks over the decode
        ("over_ns", "f8"),  # integral of blocks / ceil(live / block size)
    ],
    align=True,
)


YIELDS = 2
"""A row's part in a batch (``flying``, ``ahead``): it computes, and a token comes of it."""


class _Header(NamedTuple):
    """Indices into the header: counts that have one owner each."""

    FREE: int = 0  # blocks in the free list
    RESERVE: int = 1  # of those, blocks that only a repack may take
    LIVE: int = 2  # sum of live over allocated blocks
    WRITTEN: int = 3  # sum of written over allocated blocks
    IN_TABLES: int = 4  # allocated blocks that a table lists (a shared one counts once)
    FREED_BY_DEATH: int = 5
    FREED_BY_REPACK: int = 6
    EVICTED: int = 7
    MOVED: int = 8
    EVENTS: int = 9  # events written
    LOGGING: int = 10  # 1 if events are kept
    NOW: int = 11  # time stamp for events, ns
    DROPPED: int = 12  # blocks in `dropped`
    KEPT: int = 13  # blocks that stay in a row's table although nothing lives in them
    STALLS: int = 14  # 1 if a request computes nothing while a repack of it is in flight
    SIZE: int = 15


H = _Header()  # a tuple, since compiled kernels take those as constants


class State(NamedTuple):
    """Everything a kernel may touch."""

    header: Any  # int64[H.SIZE]
    blocks: Any  # BLOCK[N]
    rows: Any  # ROW[R]
    table: Any  # int32[R, max blocks a request]
    position: Any  # int32[A], logical position of the cell's token
    slot: Any  # int32[A], block * block_size + offset
    columns: Any  # float32[K, A], per-token state of policies and attention models
    dropped: Any  # int32[N], blocks taken although the prefix cache knew their contents
    readers: Any  # int32[N * S], of published blocks: rows for which the slot's token is alive; empty without sharing
    holes: Any  # int32, dead slots to write into (sim.kv.holes); empty unless they are used again
    events: Any  # EVENT[E]
    block_size: int


class Store:
    """Owns a :class:`State` and makes its arrays larger when asked."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        columns: int = 0,
        tracked: bool = True,
        logging: bool = False,
        rows: int = 64,
    ) -> None:
        blocks = records(num_blocks, BLOCK)
        ids = np.arange(num_blocks)
        blocks["next"] = (ids + 1) % num_blocks
        blocks["prev"] = (ids - 1) % num_blocks
        blocks["owner"] = -1
        header = np.zeros(H.SIZE, np.int64)
        header[H.FREE] = num_blocks - 1
        header[H.LOGGING] = logging
        self.tracked = tracked
        self.logging = logging
        self.s = State(
            header=header,
            blocks=blocks,
            rows=records(rows, ROW),
            table=np.zeros((rows, 64), np.int32),
            position=np.zeros(1024, np.int32),
            slot=np.zeros(1024, np.int32),
            columns=np.zeros((columns, 1024), np.float32),
            dropped=np.zeros(num_blocks, np.int32),
            readers=np.zeros(0, np.int32),
            holes=np.zeros(0, np.int32),
            events=records(4096 if logging else 1, EVENT),
            block_size=block_size,
        )

    def grow_rows(self) -> None:
        """Double the number of rows."""
        s = self.s
        self.s = s._replace(rows=_widen(s.rows, 2 * len(s.rows)), table=_widen(s.table, 2 * len(s.table)))
        if len(s.holes):
            self.find_holes()

    def grow_table(self, blocks: int) -> None:
        """Make room for ``blocks`` blocks in every block table."""
        rows, width = self.s.table.shape
        if blocks > width:
            wider = np.zeros((rows, max(blocks, 2 * width)), np.int32)
            wider[:, :width] = self.s.table
            self.s = self.s._replace(table=wider)

    def grow_cells(self, cells: int) -> None:
        """Make room for ``cells`` cells."""
        s = self.s
        columns = np.zeros((len(s.columns), cells), np.float32)
        columns[:, : s.columns.shape[1]] = s.columns
        self.s = s._replace(position=_widen(s.position, cells), slot=_widen(s.slot, cells), columns=columns)

    def count_readers(self) -> None:
        """From now on blocks may be shared: count the rows that a slot lives for, where single tokens matter."""
        if self.tracked and not len(self.s.readers):
            self.s = self.s._replace(readers=np.zeros(len(self.s.blocks) * self.s.block_size, np.int32))

    def find_holes(self) -> None:
        """From now on keep account of dead slots, so that new tokens may be written into them."""
        if self.tracked:
            s = self.s
            # Of each block its dead slots, of each row the lists of its blocks by the number of them.
            cells = len(s.blocks) * s.block_size + len(s.rows) * (s.block_size + 1)
            self.s = s._replace(holes=_widen(s.holes, cells))

    def reserve_events(self, more: int) -> None:
        """Make room for ``more`` events behind those already written."""
        if not self.logging:
            return
        s = self.s
        if s.header[H.EVENTS] + more > len(s.events):
            self.s = s._replace(events=_widen(s.events, int(2 * (s.header[H.EVENTS] + more))))


def _widen(array: np.ndarray, length: int) -> np.ndarray:
    """Return a copy with ``length`` entries, the new ones zero."""
    fields = array.dtype.names is not None
    wider = records(length, array.dtype) if fields else np.zeros((length, *array.shape[1:]), array.dtype)
    wider[: len(array)] = array
    return wider
