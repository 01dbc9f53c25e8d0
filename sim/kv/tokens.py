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
from sim.kv.state import H, State, Store

__all__ = ["CellArena", "append_one", "append_tokens", "evict_tokens", "make_room", "pack_rows", "tail_of"]

_ALLOC = int(Kind.ALLOC)
_APPEND = int(Kind.APPEND)
_EVICT = int(Kind.EVICT)
_FREE = int(Kind.FREE)
_MOVE = int(Kind.MOVE)
_PACK = int(Kind.PACK)


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
def _table_index(s: State, row: int, block: int) -> int:
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
def _drop_block(s: State, row: int, index: int, why: int) -> bool:
    """Take the block at ``index`` out of the row's table; return True if no table lists it now."""
    size = s.block_size
    record = s.rows[row]
    block = s.table[row, index]
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
def _close_gaps(
    position: np.ndarray, slot: np.ndarray, columns: np.ndarray, victims: np.ndarray, start: int, end: int
) -> bool:
    """Move the cells ``[start, end)`` of a row together over those in ``victims`` (ascending).

    Returns
    -------
    bool
        True if it was shorter to move the front up: the row starts one cell later now.
    """
    first = victims[0]
    if len(victims) == 1 and first - start < end - 1 - first:
        _drop_last(position[start : first + 1])
        _drop_last(slot[start : first + 1])
        for c in range(len(columns)):
            _drop_last(columns[c, start : first + 1])
        return True
    if len(victims) == 1:
        _drop_first(position[first:end])
        _drop_first(slot[first:end])
        for c in range(len(columns)):
            _drop_first(columns[c, first:end])
        return False
    for k in range(len(victims)):
        first = victims[k] + 1
        last = victims[k + 1] if k + 1 < len(victims) else end
        to = victims[k] - k
        for i in range(last - first):
            position[to + i] = position[first + i]
            slot[to + i] = slot[first + i]
            for c in range(len(columns)):
                columns[c, to + i] = columns[c, first + i]
    return False


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
                index = _table_index(s, row, block)
                if not record.busy_from <= index < record.busy_to:
                    header[H.FREED_BY_DEATH] += _drop_block(s, row, index, Why.DEATH)
        if _close_gaps(position, slot, columns, mine, record.start, record.start + record.live):
            record.start += 1
        record.live -= len(mine)
        record.evicted += len(mine)
        header[H.EVICTED] += len(mine)


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
            header[H.FREED_BY_REPACK] += _drop_block(s, row, index, Why.REPACK)
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
            _drop_block(s, row, record.blocks - 1, Why.REPACK)
            header[H.FREED_BY_REPACK] += 1
        total += moved
        if counted:
            record.moved += moved
            header[H.MOVED] += moved
        if logging:
            emit(s, _PACK, record.ordinal, live, 0)
    return total


@njit
def _slide_row(s: State, row: int, to: int) -> None:
    """Move the row's cells down to ``to``."""
    record = s.rows[row]
    start = record.start
    if start != to:
        for i in range(record.live):
            s.position[to + i] = s.position[start + i]
        for i in range(record.live):
            s.slot[to + i] = s.slot[start + i]
        for c in range(len(s.columns)):
            column = s.columns[c]
            for i in range(record.live):
                column[to + i] = column[start + i]
    record.start = to


@njit
def make_room(s: State, row: int, count: int) -> bool:
    """Say whether the row has cells for ``count`` more tokens, after moving back to its first cell if that helps."""
    record = s.rows[row]
    if record.tracked and record.start + record.live + count > record.origin + record.cap:
        if record.live + count > record.cap:
            return False
        _slide_row(s, row, record.origin)
    return True


@njit
def _slide(s: State, rows: np.ndarray) -> int:
    """Move the cells of ``rows`` (ascending by start) to the front of the arena; return the cells in use."""
    top = 0
    for row in rows:
        _slide_row(s, row, top)
        s.rows[row].origin = top
        top += s.rows[row].cap
    return top


class CellArena:
    """Hands out runs of cells to rows, and slides them together when they have come to lie too far apart.

    The used part of the arena stays within twice what the running requests have asked for, so that an operation over a
    whole column costs by live tokens and not by what once was there.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: dict[int, int] = {}
        self._total = 0
        self.top = 0

    def open(self, row: int, cells: int) -> None:
        """Give ``row``, which has no tokens yet, room for ``cells`` tokens."""
        start = self._place(cells)
        record = self._store.s.rows[row]
        record["origin"], record["start"], record["cap"] = start, start, cells
        self._ask(row, cells)

    def resize(self, row: int, cells: int) -> None:
        """Give ``row`` room for ``cells`` tokens in all, keeping those it has."""
        record = self._store.s.rows[row]
        if cells > record["cap"]:
            s = self._store.s
            mine = slice(int(record["start"]), int(record["start"] + record["live"]))
            # Making a place may slide the other rows over these cells.
            position, slot, columns = s.position[mine].copy(), s.slot[mine].copy(), s.columns[:, mine].copy()
            self._forget(row)
            start = self._place(cells)
            s = self._store.s
            mine = slice(start, start + len(position))
            s.position[mine], s.slot[mine], s.columns[:, mine] = position, slot, columns
            record["origin"] = record["start"] = start
        else:
            _slide_row(self._store.s, row, int(record["origin"]))
            self._forget(row)
        record["cap"] = cells
        self._ask(row, cells)
        self._tidy()

    def close(self, row: int) -> None:
        """Take the cells of ``row`` back."""
        self._forget(row)
        self._tidy()

    def _ask(self, row: int, cells: int) -> None:
        self._asked[row] = cells
        self._total += cells

    def _forget(self, row: int) -> None:
        self._total -= self._asked.pop(row)

    def _place(self, cells: int) -> int:
        if self.top + cells > len(self._store.s.position):
            # Sliding together must win much, or it would be done again and again.
            if 2 * (self._total + cells) > len(self._store.s.position):
                self._store.grow_cells(2 * (self.top + cells))
            else:
                self._compact()
        start = self.top
        self.top += cells
        return start

    def _tidy(self) -> None:
        if self.top > 4096 and self.top > 2 * self._total:
            self._compact()

    def _compact(self) -> None:
        s = self._store.s
        rows = np.fromiter(self._asked, np.int64, len(self._asked))
        rows = rows[np.argsort(s.rows["start"][rows], kind="stable")]
        self.top = int(_slide(s, rows))
