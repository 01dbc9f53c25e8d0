"""Repack: copy a request's live tokens out of thinly used blocks into fewer dense ones.

Three steps. :func:`find_window` chooses (pure, on a snapshot), the copy runs elsewhere for as long as it takes, and
:func:`commit` looks again: tokens that died meanwhile are not brought back, and the plan takes effect only if it still
frees strictly more blocks than it takes. Until then the sources are read and the destinations are nobody's.

The paper takes "the least used blocks" as sources and keeps the logical order; both at once are possible only for a run
of neighbouring blocks, so a plan here is the run of blocks that frees most with the destinations to be had.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.blocks import Why, emit, free_block, take_block, unlist_block
from sim.kv.events import Kind
from sim.kv.state import H, State

__all__ = ["RepackPlan", "commit", "find_window", "is_lawful", "possible_gain", "set_aside", "snapshot_moves"]

_MOVE = int(Kind.MOVE)
_PLAN = int(Kind.PLAN)
_SOURCE = int(Kind.SOURCE)
_RESERVE = int(Kind.RESERVE)
_COMMIT = int(Kind.COMMIT)
_FREE = int(Kind.FREE)


@dataclass(slots=True)
class RepackPlan:
    """One request's repack, from the snapshot to the fence."""

    number: int
    row: int
    ordinal: int
    sources: NDArray[np.int32]
    """Blocks to empty, in table order."""
    destinations: NDArray[np.int32]
    """Blocks to fill, in table order; taken from the pool, in no table yet."""
    position: NDArray[np.int32]
    """[T] logical position of each token to move, ascending."""
    from_slot: NDArray[np.int32]
    """[T]"""
    to_slot: NDArray[np.int32]
    """[T]"""
    cancelled: bool = False
    deferred: int = 0
    """Sources that left a table while the copy ran, and are free behind the fence."""

    @property
    def tokens(self) -> int:
        """Tokens that the copy moves."""
        return len(self.position)

    @property
    def gain(self) -> int:
        """Blocks that it frees if nothing changes meanwhile."""
        return len(self.sources) - len(self.destinations)


@njit
def possible_gain(s: State, rows: np.ndarray, gain: np.ndarray) -> int:
    """Fill ``gain`` with the blocks that repacking all completely written blocks of each row would free.

    Rows with a repack in flight, or whose prompt is not complete, get 0. Returns the sum.
    """
    size = s.block_size
    total = 0
    for i in range(len(rows)):
        record = s.rows[rows[i]]
        gain[i] = 0
        if record.plan >= 0 or record.decode_from == 0:
            continue
        full = record.written // size
        live = record.live
        if full < record.blocks:
            live -= s.blocks[s.table[rows[i], full]].live
        gain[i] = max(0, full - (live + size - 1) // size)
        total += gain[i]
    return total


@njit
def find_window(s: State, row: int, most: int) -> tuple[int, int]:
    """Find the run of blocks ``[first, last)`` of the row's table that is best to repack.

    Parameters
    ----------
    most
        Destination blocks to be had.

    Returns
    -------
    tuple of int
        The run that frees most blocks; among those the one with the fewest live tokens to copy, then the first. Empty
        (0, 0) if none frees a block. Only completely written blocks are in it: the tail goes on being appended to.

    Notes
    -----
    Widening a run by one block never loses: it adds one block to free and at most one to fill. So for each first block
    the longest run whose tokens fit ``most`` blocks frees most, and of the runs that free as many the shortest copies
    least. Both ends only ever move on: two passes of two pointers, O(blocks).
    """
    size = s.block_size
    record = s.rows[row]
    full = record.written // size
    room = most * size
    gain = 0
    live = 0
    last = 0
    for first in range(full):
        if last < first:
            last = first
            live = 0
        while last < full and live + s.blocks[s.table[row, last]].live <= room:
            live += s.blocks[s.table[row, last]].live
            last += 1
        gain = max(gain, last - first - (live + size - 1) // size)
        if last > first:
            live -= s.blocks[s.table[row, first]].live
    if gain == 0:
        return 0, 0
    best_live, best_first, best_last = room + 1, 0, 0
    live = 0
    last = 0
    for first in range(full):
        while last < full and last - first - (live + size - 1) // size < gain:
            live += s.blocks[s.table[row, last]].live
            last += 1
        if last - first - (live + size - 1) // size < gain:
            break
        if live < best_live:
            best_live, best_first, best_last = live, first, last
        live -= s.blocks[s.table[row, first]].live
    return best_first, best_last


@njit
def snapshot_moves(s: State, row: int, first: int, last: int, position: np.ndarray, from_slot: np.ndarray) -> int:
    """List the live tokens in table blocks ``[first, last)`` in logical order; return how many there are."""
    size = s.block_size
    record = s.rows[row]
    for index in range(first, last):
        # Marked by a negative live count while we look for its tokens.
        s.blocks[s.table[row, index]].live = -s.blocks[s.table[row, index]].live - 1
    count = 0
    for cell in range(record.start, record.start + record.live):
        if s.blocks[s.slot[cell] // size].live < 0:
            position[count] = s.position[cell]
            from_slot[count] = s.slot[cell]
            count += 1
    for index in range(first, last):
        s.blocks[s.table[row, index]].live = -(s.blocks[s.table[row, index]].live + 1)
    return count


@njit
def set_aside(
    s: State,
    row: int,
    number: int,
    first: int,
    last: int,
    sources: np.ndarray,
    destinations: np.ndarray,
    position: np.ndarray,
    from_slot: np.ndarray,
    to_slot: np.ndarray,
) -> int:
    """Make plan ``number`` of the run ``[first, last)``: fill the arrays, take the destinations, mark the row.

    Returns
    -------
    int
        Live tokens to move: so much of ``position``, ``from_slot`` and ``to_slot`` is filled.
    """
    size = s.block_size
    record = s.rows[row]
    count = snapshot_moves(s, row, first, last, position, from_slot)
    emit(s, _PLAN, record.ordinal, number, count)
    for index in range(first, last):
        sources[index - first] = s.table[row, index]
        emit(s, _SOURCE, record.ordinal, s.table[row, index], number)
    for d in range((count + size - 1) // size):
        destinations[d] = take_block(s, row)
        emit(s, _RESERVE, record.ordinal, destinations[d], number)
        for k in range(d * size, min(count, (d + 1) * size)):
            to_slot[k] = destinations[d] * size + k - d * size
    record.busy_from = first
    record.busy_to = last
    record.plan = number
    return count


@njit
def is_lawful(s: State, row: int, destinations: np.ndarray, position: np.ndarray, to_slot: np.ndarray) -> bool:
    """Say whether tokens move, in order and one by one, into empty blocks that were set aside for the row.

    Looked at before anything changes (trap 19: unique, in range, not null).
    """
    size = s.block_size
    if len(to_slot) != len(position) or len(destinations) != (len(position) + size - 1) // size:
        return False
    for d in range(len(destinations)):
        block = destinations[d]
        if not 0 < block < len(s.blocks):
            return False
        record = s.blocks[block]
        if record.ref != 1 or record.written != 0 or record.owner != row:
            return False
        for other in range(d):
            if destinations[other] == block:
                return False
    for k in range(len(position)):
        if to_slot[k] != destinations[k // size] * size + k % size or (k > 0 and position[k] <= position[k - 1]):
            return False
    return True


@njit
def commit(
    s: State,
    row: int,
    number: int,
    destinations: np.ndarray,
    position: np.ndarray,
    to_slot: np.ndarray,
) -> int:
    """Put a copied plan into effect; return the blocks it freed, or 0 if it is not worth it any more (nothing changed).

    Tokens that died since the plan are skipped: their place in the destination stays a dead slot. A destination in
    which nothing lives goes straight back.
    """
    size = s.block_size
    record = s.rows[row]
    first, last = record.busy_from, record.busy_to
    moved = np.empty(len(position), np.int64)  # cells, in plan order; -1 if dead
    alive = np.zeros(len(destinations), np.int64)
    cell = record.start
    end = record.start + record.live
    for k in range(len(position)):
        while cell < end and s.position[cell] < position[k]:
            cell += 1
        if cell < end and s.position[cell] == position[k]:
            moved[k] = cell
            alive[k // size] += 1
        else:
            moved[k] = -1
    kept = 0
    for d in range(len(destinations)):
        kept += alive[d] > 0
    # Sources whose last token died meanwhile would be free without the copy: they are no gain of it.
    sources = s.table[row, first:last].copy()
    died = np.empty(len(sources), np.bool_)
    dead = 0
    for i in range(len(sources)):
        died[i] = s.blocks[sources[i]].live == 0
        dead += died[i]
    if len(sources) - dead <= kept:
        return 0
    for k in range(len(position)):
        if moved[k] >= 0:
            emit(s, _MOVE, record.ordinal, s.slot[moved[k]], to_slot[k])
            s.blocks[s.slot[moved[k]] // size].live -= 1
            s.blocks[to_slot[k] // size].live += 1
            s.slot[moved[k]] = to_slot[k]
            record.moved += 1
            s.header[H.MOVED] += 1
    emit(s, _COMMIT, record.ordinal, number, first)
    # The table: sources out, destinations with life in.
    tail = last == record.blocks
    gone: int = last - first - kept
    at = first
    fill = size
    for d in range(len(destinations)):
        if alive[d] > 0:
            block = destinations[d]
            # Slots behind the last token of a destination count as written: nothing will ever be appended there,
            # unless it is the table's tail.
            fill = min(size, len(position) - d * size) if tail else size
            s.blocks[block].written = fill
            s.header[H.WRITTEN] += fill
            s.header[H.IN_TABLES] += 1
            s.table[row, at] = block
            at += 1
    for index in range(last, record.blocks):
        s.table[row, index - gone] = s.table[row, index]
    record.blocks -= gone
    record.written -= gone * size
    if tail:
        record.written = (record.blocks - 1) * size + fill
    record.busy_from = 0
    record.busy_to = 0
    record.plan = -1
    for i in range(len(sources)):
        unlist_block(s, sources[i])
        emit(s, _FREE, record.ordinal, sources[i], Why.DEATH if died[i] else Why.REPACK)
        free_block(s, sources[i])
    for d in range(len(destinations)):
        if alive[d] == 0:
            emit(s, _FREE, record.ordinal, destinations[d], Why.CANCEL)
            free_block(s, destinations[d])
    s.header[H.FREED_BY_DEATH] += dead
    s.header[H.FREED_BY_REPACK] += gone - dead
    return gone - dead
