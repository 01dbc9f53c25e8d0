"""The block pool: which blocks are free, in which order, and who refers to the others.

The free list is vLLM V1's: a doubly linked list whose front is handed out next. A freed block goes to the front (last
in, first out) unless the prefix cache knows its contents; then it goes to the back and is the last to be overwritten
(least recently used). Both orders are part of the result: they decide the layout.

A block that several tables list counts once, and returns to the pool when its last holder lets go. Holders are tables
and copies: a source whose request has left stays held until the fence, whoever else still reads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sim.jit import njit
from sim.kv.events import Kind
from sim.kv.state import H, State, Store

__all__ = ["BlockPool", "Why", "emit", "free_block", "take_block"]


class _Why(NamedTuple):
    """Why a block was freed: the ``b`` of a FREE event."""

    RELEASE: int = 0
    DEATH: int = 1
    REPACK: int = 2
    CANCEL: int = 3


Why = _Why()

# Kernels want plain integers; IntEnum members are not known to the compiler.
_FREE = int(Kind.FREE)
_DEFER = int(Kind.DEFER)


@njit(inline="always")
def emit(s: State, kind: int, req: int, a: int, b: int) -> None:
    """Write one event, if events are kept. The caller made room."""
    if s.header[H.LOGGING]:
        event = s.events[s.header[H.EVENTS]]
        event.time_ns = s.header[H.NOW]
        event.kind = kind
        event.req = req
        event.a = a
        event.b = b
        s.header[H.EVENTS] += 1


@njit
def unlink(s: State, block: int) -> None:
    """Take ``block`` out of the free list, wherever it is."""
    _unlink(s.blocks, s.header, block)


@njit(inline="always")
def _unlink(blocks: np.ndarray, header: np.ndarray, block: int) -> None:
    before, after = blocks[block].prev, blocks[block].next
    blocks[before].next = after
    blocks[after].prev = before
    header[H.FREE] -= 1


@njit
def take_block(s: State, row: int) -> int:
    """Pop the front of the free list for ``row``; the caller made sure that there is one."""
    blocks = s.blocks
    block: int = blocks[0].next
    _unlink(blocks, s.header, block)
    record = blocks[block]
    record.ref = 1
    record.tables = 0
    record.live = 0
    record.written = 0
    record.busy = 0
    record.owner = row
    if record.cached:
        record.cached = 0
        s.dropped[s.header[H.DROPPED]] = block
        s.header[H.DROPPED] += 1
    return block


@njit
def free_block(s: State, block: int) -> bool:
    """Drop one reference; return True if it was the last and the block went back to the free list."""
    return _put_back(s.blocks, s.header, block)


@njit
def _put_back(blocks: np.ndarray, header: np.ndarray, block: int) -> bool:
    """Do the work of :func:`free_block`, for a caller that has taken the arrays out of the tuple."""
    record = blocks[block]
    record.ref -= 1
    if record.ref > 0:
        return False
    # Between `before` and `after`: at the back if its contents may be wanted again, else at the front.
    before = blocks[0].prev if record.cached else 0
    after = 0 if record.cached else blocks[0].next
    record.prev = before
    record.next = after
    blocks[before].next = block
    blocks[after].prev = block
    header[H.FREE] += 1
    return True


@njit
def list_block(s: State, row: int, block: int) -> None:
    """Put ``block`` at the end of the row's table and count it."""
    record = s.rows[row]
    s.table[row, record.blocks] = block
    record.blocks += 1
    shared = s.blocks[block]
    shared.tables += 1
    if shared.tables == 1:
        _count(shared, s.header, 1)


@njit
def unlist_block(s: State, block: int) -> bool:
    """Note that one table fewer lists ``block`` (the caller takes it out); return True if it was the last."""
    return _unlist(s.blocks, s.header, block)


@njit
def _unlist(blocks: np.ndarray, header: np.ndarray, block: int) -> bool:
    record = blocks[block]
    record.tables -= 1
    if record.tables > 0:
        return False
    _count(record, header, -1)
    return True


@njit(inline="always")
def _count(record: Any, header: np.ndarray, sign: int) -> None:
    """Add a block to the counts of what tables list (``sign`` 1), or take it out of them (-1)."""
    header[H.IN_TABLES] += sign
    header[H.LIVE] += sign * record.live
    header[H.WRITTEN] += sign * record.written


@njit
def leave_slot(blocks: np.ndarray, readers: np.ndarray, block: int, slot: int) -> int:
    """Count one row less for which the token in a slot of a published block is alive; return 1 if it was the last."""
    readers[slot] -= 1
    if readers[slot] > 0:
        return 0
    blocks[block].live -= 1
    return 1


@njit
def release_row(s: State, row: int) -> int:
    """Free every block of the row and forget its tokens. Return how many went to the free list.

    As in vLLM the blocks go back last to first: cached ones one by one to the back of the free list, the others
    together to its front, so that the request's last block is handed out next.

    Source blocks of a repack in flight leave the table but keep their reference: a queued copy still reads them. The
    caller frees them behind the fence.
    """
    record = s.rows[row]
    # Taken out of the tuple once: each time costs a reference count.
    blocks, header, table = s.blocks, s.header, s.table[row]
    logging = header[H.LOGGING]
    freed = 0
    if len(s.readers) > 0:
        readers, slots = s.readers, s.slot
        for cell in range(record.start, record.start + record.live):
            block = slots[cell] // s.block_size
            if blocks[block].cached:
                header[H.LIVE] -= leave_slot(blocks, readers, block, slots[cell])
    for index in range(record.blocks - 1, -1, -1):
        block = table[index]
        _unlist(blocks, header, block)
        if record.busy_from <= index < record.busy_to or blocks[block].busy > 0:
            if logging:
                emit(s, _DEFER, record.ordinal, block, 0)
        elif blocks[block].cached:
            if logging:
                emit(s, _FREE, record.ordinal, block, Why.RELEASE)
            freed += _put_back(blocks, header, block)
    # The others go to the front as one batch, its last block foremost.
    for index in range(record.blocks):
        block = table[index]
        mine = record.busy_from <= index < record.busy_to or blocks[block].busy > 0
        if not blocks[block].cached and not mine:
            if logging:
                emit(s, _FREE, record.ordinal, block, Why.RELEASE)
            freed += _put_back(blocks, header, block)
    record.blocks = 0
    record.written = 0
    record.live = 0
    record.computed = 0
    record.busy_from = 0
    record.busy_to = 0
    record.plan = -1
    return freed


class BlockPool:
    """The pool seen from Python: for cold paths, tests and other packages.

    Parameters
    ----------
    store
        The arrays. Block 0 is never handed out, as in vLLM, so ``num_blocks - 1`` blocks are usable.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def usable_blocks(self) -> int:
        """Blocks that can be handed out at all."""
        return len(self._store.s.blocks) - 1

    @property
    def free_blocks(self) -> int:
        """Blocks in the free list."""
        return int(self._store.s.header[H.FREE])

    @property
    def used_blocks(self) -> int:
        """Blocks not in the free list."""
        return self.usable_blocks - self.free_blocks

    @property
    def available_blocks(self) -> int:
        """Free blocks that requests may take: those above the headroom kept for repacks."""
        header = self._store.s.header
        return int(header[H.FREE] - header[H.RESERVE])

    def free_order(self) -> list[int]:
        """Return the free blocks in the order in which they would be handed out."""
        order: list[int] = []
        blocks = self._store.s.blocks
        block = int(blocks[0]["next"])
        while block:
            order.append(block)
            block = int(blocks[block]["next"])
        return order

    def live_counts(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return int32[N]: live tokens in each block, 0 where it is free."""
        blocks = self._store.s.blocks
        return np.where(blocks["ref"] > 0, blocks["live"], 0).astype(np.int32)
