"""Packing in place: live tokens move forward into the first of their own request's blocks, at once.

For reclaimers under which nobody reads the cache meanwhile (``sync``), or that stand for a bound (``ideal``).
"""

from __future__ import annotations

import numpy as np

from sim.jit import njit
from sim.kv.blocks import Why, emit
from sim.kv.events import Kind
from sim.kv.state import H, State
from sim.kv.tokens import drop_block, next_private

__all__ = ["find_published", "pack_rows", "packs_into_fewer"]

_MOVE = int(Kind.MOVE)
_PACK = int(Kind.PACK)


@njit
def find_published(s: State, row: int) -> tuple[int, int]:
    """Return a run of private blocks, some of them known to the prefix cache, that packs into fewer; or (0, 0).

    It begins with the first block that has a dead slot. Known contents are not to be written over while there are free
    blocks to pack into.
    """
    size = s.block_size
    blocks, mine = s.blocks, s.table[row]
    first, last = next_private(s, row, 0)
    while first < last:
        while first < last and blocks[mine[first]].live == size:
            first += 1
        live = 0
        known = 0
        for index in range(first, last):
            live += blocks[mine[index]].live
            known += blocks[mine[index]].cached
        if known and (live + size - 1) // size < last - first:
            return first, last
        first, last = next_private(s, row, last)
    return 0, 0


@njit
def packs_into_fewer(s: State, rows: np.ndarray, out: np.ndarray) -> None:
    """Say of each row whether packing its private blocks, run by run, would free one."""
    size = s.block_size
    for i in range(len(rows)):
        out[i] = False
        first, last = next_private(s, rows[i], 0)
        while first < last:
            live = 0
            for index in range(first, last):
                live += s.blocks[s.table[rows[i], index]].live
            out[i] |= (live + size - 1) // size < last - first
            first, last = next_private(s, rows[i], last)


@njit
def _pack_between_shared(s: State, row: int, counted: bool) -> int:
    """Do the work of :func:`pack_rows` for a row that may share blocks; return how many tokens moved."""
    size = s.block_size
    header, blocks, slots, mine, readers = s.header, s.blocks, s.slot, s.table[row], s.readers
    record = s.rows[row]
    moved = 0
    packed = False
    first, last = next_private(s, row, 0)
    while first < last:
        live = 0
        known = 0
        for index in range(first, last):
            live += blocks[mine[index]].live
            known += blocks[mine[index]].cached
        keep = (live + size - 1) // size
        tail = last == record.blocks
        dense = live == (record.written if tail else last * size) - first * size
        if dense or (keep == last - first and (known or counted or not tail)):
            first, last = next_private(s, row, last)
            continue
        packed = True
        cell = record.start
        while cell < record.start + record.live and slots[cell] // size != mine[first]:
            cell += 1
        for index in range(first, last):
            block = mine[index]
            count = max(0, min(size, live - (index - first) * size))
            written = blocks[block].written if index >= first + keep else count if tail else size
            for i in range(count):
                if slots[cell] != block * size + i:
                    moved += 1
                    if header[H.LOGGING]:
                        emit(s, _MOVE, record.ordinal, slots[cell], block * size + i)
                    slots[cell] = block * size + i
                    if blocks[block].cached:
                        # There was no free block to pack into: its contents are lost to the prefix cache.
                        blocks[block].cached = 0
                        s.dropped[header[H.DROPPED]] = block
                        header[H.DROPPED] += 1
                cell += 1
            for slot in range(block * size, block * size + size):
                readers[slot] = blocks[block].cached and slot < block * size + count
            header[H.WRITTEN] += written - blocks[block].written
            header[H.LIVE] += count - blocks[block].live
            blocks[block].live = count
            blocks[block].written = written
        for index in range(last - 1, first + keep - 1, -1):
            header[H.FREED_BY_REPACK] += drop_block(s, row, index, Why.REPACK)
        if tail and keep > 0:
            record.written = (record.blocks - 1) * size + live - (keep - 1) * size
        first, last = next_private(s, row, first + keep)
    if counted:
        record.moved += moved
        header[H.MOVED] += moved
    if packed and header[H.LOGGING]:
        emit(s, _PACK, record.ordinal, record.written, 0)
    return moved


@njit
def pack_rows(s: State, rows: np.ndarray, counted: bool) -> int:
    """Put each row's live tokens into the first ``ceil(live / block size)`` blocks of its table and free the others.

    Instantly and in place: the caller waits for the copy (``counted``), or takes it for the bound that no hardware
    reaches. Tokens move forward, in order. Rows without a dead slot stay as they are. Returns the tokens that moved.
    A row gives no block back that would leave it with fewer than it is to keep.

    Where blocks may be shared, those that are stay as they are, and what lies between two of them is packed by itself.
    """
    size = s.block_size
    header, blocks, slots, table = s.header, s.blocks, s.slot, s.table
    logging = header[H.LOGGING]
    total = 0
    for row in rows:
        record = s.rows[row]
        live = record.live
        moved = 0
        if live == record.written:
            continue
        if len(s.readers) > 0:
            total += _pack_between_shared(s, row, counted)
            continue
        mine = slots[record.start : record.start + live]
        for index in range(record.blocks):
            block = table[row, index]
            first = index * size
            count = max(0, min(size, live - first))
            for i in range(count):
                if mine[first + i] != block * size + i:
                    moved += 1
                    if logging:
                        emit(s, _MOVE, record.ordinal, mine[first + i], block * size + i)
                    mine[first + i] = block * size + i
            header[H.WRITTEN] += count - blocks[block].written
            blocks[block].live = count
            blocks[block].written = count
        record.written = live
        while record.blocks > max((live + size - 1) // size, header[H.KEPT]):
            drop_block(s, row, record.blocks - 1, Why.REPACK)
            header[H.FREED_BY_REPACK] += 1
        total += moved
        if counted:
            record.moved += moved
            header[H.MOVED] += moved
        if logging:
            emit(s, _PACK, record.ordinal, live, 0)
    return total
