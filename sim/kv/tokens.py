"""The token table: every live token has a logical position that never changes and a slot that may.

The kernels here are the only places where a token is born, dies or forgets its request. They keep a row's cells dense
and in logical order, so that the physical layout (block table, slots) and the logical one are independent.

A row that shares a block has cells of its own for the block's tokens: evicting one of them makes it dead for this row
alone. The row lets go of the block when all of its own tokens in it are dead; the block goes back to the pool with the
last reader.
"""

from __future__ import annotations

import numpy as np

from sim.jit import njit
from sim.kv.blocks import Why, emit, free_block, leave_slot, list_block, take_block, unlist_block
from sim.kv.events import Kind
from sim.kv.holes import bury, take_hole, withdraw_block
from sim.kv.state import H, State

__all__ = [
    "append_one",
    "append_tokens",
    "close_gaps",
    "drop_block",
    "drop_oldest",
    "evict_tokens",
    "lives_in",
    "next_private",
    "reuse_one",
    "reuse_slot",
    "table_index",
    "tail_of",
]

_ALLOC = int(Kind.ALLOC)
_APPEND = int(Kind.APPEND)
_EVICT = int(Kind.EVICT)
_FREE = int(Kind.FREE)
_REUSE = int(Kind.REUSE)
_FEW = 6
"""Victims of a row that are dropped one by one."""


@njit
def append_tokens(s: State, row: int, count: int) -> None:
    """Write ``count`` tokens behind the row's last written slot, taking blocks as needed.

    The caller checked that the pool has the blocks and the row has the cells.
    """
    size = s.block_size
    # Taken out of the tuple once: each time costs a reference count.
    table, blocks, position, slots, columns = s.table[row], s.blocks, s.position, s.slot, s.columns
    record = s.rows[row]
    room = record.blocks * size - record.written
    while room < count:
        block = take_block(s, row)
        list_block(s, row, block)
        emit(s, _ALLOC, record.ordinal, block, 0)
        room += size
    emit(s, _APPEND, record.ordinal, record.computed, count)
    # Index and offset of the write position, without a division: its block is `room` slots from the table's end.
    index = record.blocks - 1
    while room > size:
        room -= size
        index -= 1
    left = count
    while left > 0:
        if room == 0:
            index += 1
            room = size
        block = table[index]
        run = min(left, room)
        blocks[block].live += run
        blocks[block].written += run
        if record.tracked:
            slot = block * size + size - room
            cell = record.start + record.live
            for i in range(run):
                position[cell + i] = record.computed + i
                slots[cell + i] = slot + i
                for c in range(len(columns)):
                    columns[c, cell + i] = 0.0
        record.live += run
        record.written += run
        record.computed += run
        room -= run
        left -= run
    s.header[H.LIVE] += count
    s.header[H.WRITTEN] += count


@njit(inline="always")
def tail_of(s: State) -> tuple[np.ndarray, ...]:
    """Return the arrays that :func:`append_one` wants."""
    return s.rows, s.table, s.blocks, s.position, s.slot, s.columns


@njit(inline="always")
def append_one(arrays: tuple[np.ndarray, ...], row: int, size: int) -> None:
    """Write one token into the row's tail block, which has room: :func:`append_tokens` where it is called most.

    The caller adds it to the header's ``LIVE`` and ``WRITTEN``.
    """
    rows, table, blocks, position, slot, columns = arrays
    record = rows[row]
    block = table[row, record.blocks - 1]
    blocks[block].live += 1
    blocks[block].written += 1
    if record.tracked:
        cell = record.start + record.live
        position[cell] = record.computed
        slot[cell] = (block - record.blocks + 1) * size + record.written
        for c in range(len(columns)):
            columns[c, cell] = 0.0
    record.live += 1
    record.written += 1
    record.computed += 1


@njit
def reuse_one(arrays: tuple[np.ndarray, ...], holes: np.ndarray, row: int, size: int) -> int:
    """Write the row's next token into one of its dead slots, which the caller made sure it has; return the slot.

    The caller adds the token to the header's ``LIVE``, and writes the event.
    """
    rows, _, blocks, position, slot, columns = arrays
    record = rows[row]
    cell = record.start + record.live
    position[cell] = record.computed
    hole = take_hole(blocks, holes, size, row)
    slot[cell] = hole
    for c in range(len(columns)):
        columns[c, cell] = 0.0
    record.live += 1
    record.computed += 1
    record.mixed = 1
    return hole


@njit
def reuse_slot(s: State, row: int) -> None:
    """Write the row's next token into one of its dead slots (:func:`reuse_one`), and say so."""
    hole = reuse_one(tail_of(s), s.holes, row, s.block_size)
    s.header[H.LIVE] += 1
    emit(s, _REUSE, s.rows[row].ordinal, s.rows[row].computed - 1, hole)


@njit
def table_index(s: State, row: int, block: int) -> int:
    """Where ``block`` stands in the row's table."""
    mine = s.table[row, : s.rows[row].blocks]
    for index in range(len(mine)):
        if mine[index] == block:
            return index
    return -1


@njit(inline="always")
def _drop_first(values: np.ndarray) -> None:
    """Overwrite the first value by shifting the others down; a fixed distance lets the compiler vectorise."""
    for i in range(len(values) - 1):
        values[i] = values[i + 1]


@njit
def lives_in(s: State, row: int, block: int) -> bool:
    """Say whether a token of the row is alive in ``block``, which its table lists."""
    if s.blocks[block].tables == 1:
        return bool(s.blocks[block].live > 0)
    cell = s.rows[row].start
    end = cell + s.rows[row].live
    while cell < end and s.slot[cell] // s.block_size != block:
        cell += 1
    return bool(cell < end)


@njit
def drop_block(s: State, row: int, index: int, why: int) -> bool:
    """Take the block at ``index`` out of the row's table; return True if no table lists it now."""
    size = s.block_size
    record = s.rows[row]
    block = s.table[row, index]
    if len(s.holes) > 0:
        withdraw_block(s.blocks, s.holes, size, row, block)
    # A tail that is not full has fewer written slots to take away than a whole block; a block kept behind it has none.
    record.written -= max(0, min(size, record.written - index * size))
    _drop_first(s.table[row, index : record.blocks])
    record.blocks -= 1
    if index < record.busy_from:
        record.busy_from -= 1
        record.busy_to -= 1
    last = unlist_block(s, block)
    emit(s, _FREE, record.ordinal, block, why)
    free_block(s, block)
    return last


@njit
def _share_of(slot: np.ndarray, cell: int, start: int, end: int, size: int) -> int:
    """Return how many of the cells ``[start, end)``, in table order, lie in the same block as ``cell``."""
    block = slot[cell] // size
    first = cell
    while first > start and slot[first - 1] // size == block:
        first -= 1
    last = cell + 1
    while last < end and slot[last] // size == block:
        last += 1
    return last - first


@njit(inline="always")
def _drop_last(values: np.ndarray) -> None:
    """Overwrite the last value by shifting the others up; from the front, since no loop from the end is vectorised."""
    held = values[0]
    for i in range(len(values)):
        value = values[i]
        values[i] = held
        held = value


@njit
def close_gaps(
    position: np.ndarray, slot: np.ndarray, columns: np.ndarray, victims: np.ndarray, start: int, end: int
) -> int:
    """Move the cells ``[start, end)`` of a row together over those in ``victims`` (ascending).

    Returns
    -------
    int
        How many cells later the row starts now: for victims near its front it is shorter to move the front up.
    """
    if len(victims) <= _FEW:
        # One by one: shifting by one is vectorised, shifting by some is not.
        ahead = 0
        while ahead < len(victims) and victims[ahead] - start < end - 1 - victims[ahead]:
            last = victims[ahead] + 1
            _drop_last(position[start + ahead : last])
            _drop_last(slot[start + ahead : last])
            for c in range(len(columns)):
                _drop_last(columns[c, start + ahead : last])
            ahead += 1
        for k in range(len(victims) - ahead):
            first, last = victims[len(victims) - 1 - k], end - k
            _drop_first(position[first:last])
            _drop_first(slot[first:last])
            for c in range(len(columns)):
                _drop_first(columns[c, first:last])
        return ahead
    for k in range(len(victims)):
        first = victims[k] + 1
        last = victims[k + 1] if k + 1 < len(victims) else end
        to = victims[k] - k
        for i in range(last - first):
            position[to + i] = position[first + i]
            slot[to + i] = slot[first + i]
            for c in range(len(columns)):
                columns[c, to + i] = columns[c, first + i]
    return 0


@njit
def evict_tokens(s: State, rows: np.ndarray, victims: np.ndarray, counts: np.ndarray) -> None:
    """Kill tokens, and let go of each block in which the row's last live token died.

    Parameters
    ----------
    rows
        int64[B], the rows that lose tokens.
    victims
        int64[sum(counts)], cells, row by row, ascending inside a row.
    counts
        int64[B], how many of them belong to each row.

    Notes
    -----
    A block that a copy is reading stays listed, even without a live token, until the fence.
    """
    size = s.block_size
    # Taken out of the tuple once: each time costs a reference count.
    header, blocks, records, position, slot, columns = s.header, s.blocks, s.rows, s.position, s.slot, s.columns
    readers = s.readers
    logging = header[H.LOGGING]
    holes = s.holes
    reusing = len(holes) > 0
    first = 0
    for b in range(len(rows)):
        if counts[b] == 0:
            continue
        row = rows[b]
        record = records[row]
        mine = victims[first : first + counts[b]]
        first += counts[b]
        killed = 0  # in a block that others read too
        for k in range(len(mine)):
            cell = mine[k]
            block = slot[cell] // size
            if logging:
                emit(s, _EVICT, record.ordinal, position[cell], slot[cell])
            if blocks[block].cached:
                header[H.LIVE] -= leave_slot(blocks, readers, block, slot[cell])
            elif reusing:
                bury(blocks, holes, size, row, slot[cell])
                header[H.LIVE] -= 1
            else:
                blocks[block].live -= 1
                header[H.LIVE] -= 1
            emptied = blocks[block].live == 0
            if blocks[block].tables > 1:
                killed += 1
                if k + 1 < len(mine) and slot[mine[k + 1]] // size == block:
                    continue
                emptied = killed == _share_of(slot, cell, record.start, record.start + record.live, size)
                killed = 0
            if emptied and record.blocks > header[H.KEPT]:
                index = table_index(s, row, block)
                if not record.busy_from <= index < record.busy_to and blocks[block].busy == 0:
                    header[H.FREED_BY_DEATH] += drop_block(s, row, index, Why.DEATH)
        record.start += close_gaps(position, slot, columns, mine, record.start, record.start + record.live)
        record.live -= len(mine)
        record.evicted += len(mine)
        header[H.EVICTED] += len(mine)


@njit
def drop_oldest(s: State, row: int, position: int) -> None:
    """Kill the tokens before a logical position, of a row that is not tracked and loses its oldest only.

    A block is let go of when every slot of it is dead, so that the tail stays whatever the position. (What a row may
    lose at once depends on what was written at once: twice that many events have to be reserved.)
    """
    size = s.block_size
    header, blocks, record = s.header, s.blocks, s.rows[row]
    count = min(position, record.computed) - (record.computed - record.live)
    if count <= 0:
        return
    header[H.LIVE] -= count
    header[H.EVICTED] += count
    record.evicted += count
    at = record.written - record.live  # the table's first block has the row's only dead slots
    record.live -= count
    while count > 0:
        block = s.table[row, 0]
        run = min(count, size - at)
        if header[H.LOGGING]:
            first = record.computed - record.written + at
            for i in range(run):
                emit(s, _EVICT, record.ordinal, first + i, block * size + at + i)
        blocks[block].live -= run
        at += run
        count -= run
        if at == size:
            header[H.FREED_BY_DEATH] += drop_block(s, row, 0, Why.DEATH)
            at = 0


@njit
def next_private(s: State, row: int, index: int) -> tuple[int, int]:
    """Return the next run ``[first, last)``, from ``index`` on, of blocks that nobody else holds; empty at the end."""
    blocks, mine = s.blocks, s.table[row, : s.rows[row].blocks]
    first = index
    while first < len(mine) and blocks[mine[first]].ref > 1:
        first += 1
    last = first
    while last < len(mine) and blocks[mine[last]].ref == 1:
        last += 1
    return first, last
