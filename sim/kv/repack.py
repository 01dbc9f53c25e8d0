"""Repack: copy a request's live tokens out of thinly used blocks into fewer dense ones.

Three steps. :func:`find_window` chooses (pure, on a snapshot), the copy runs elsewhere for as long as it takes, and
:func:`commit` looks again: tokens that died meanwhile are not brought back, and the plan takes effect only if it still
frees strictly more blocks than it takes. Until then the sources are read and the destinations are nobody's.

The paper takes "the least used blocks" as sources and keeps the logical order; both at once are possible only for a run
of neighbouring blocks, so a plan here is the run of blocks that frees most with the destinations to be had.

A block that several tables list is not a source (the paper leaves shared prefixes alone), unless all of its readers
copy their tokens out of it together: a *group* of plans, one a reader, over the same run of blocks. A reader alone wins
the pool nothing: it would take destinations while the others keep the sources. A group is planned if all of its copies
together take fewer blocks than the run has, and takes effect as a whole or not at all. Sources are only read, so a
request may begin to share one while the copy runs; it keeps it, and the plan is weighed again without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.blocks import Why, emit, free_block, leave_slot, take_block, unlist_block
from sim.kv.events import Kind
from sim.kv.state import H, State
from sim.kv.tokens import next_private

__all__ = [
    "Group",
    "RepackPlan",
    "blocks_kept",
    "commit",
    "find_window",
    "is_lawful",
    "possible_gain",
    "set_aside",
    "snapshot_moves",
]

_MOVE = int(Kind.MOVE)
_PLAN = int(Kind.PLAN)
_GROUP = int(Kind.GROUP)
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
    group: Group | None = None
    """The plans that empty the same sources, if those are shared."""

    @property
    def tokens(self) -> int:
        """Tokens that the copy moves."""
        return len(self.position)

    @property
    def gain(self) -> int:
        """Blocks that the pool wins if nothing changes meanwhile; of a group, the first plan has all of the sources."""
        if self.group is not None and self.group.plans[0] is not self:
            return -len(self.destinations)
        return len(self.sources) - len(self.destinations)


@dataclass(slots=True, eq=False)
class Group:
    """The plans of all readers of a run of shared blocks: they take effect together or not at all."""

    plans: Sequence[RepackPlan]
    worth: bool | None = None
    """Whether they still free more blocks than they take: settled once, behind the fence."""
    died: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """[sources] Settled with it: those in which no reader's token lived any more."""


@njit
def possible_gain(s: State, rows: np.ndarray, gain: np.ndarray) -> int:
    """Fill ``gain`` with the blocks that repacking all completely written, private blocks of each row would free.

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
        if len(s.readers) == 0:
            live = record.live
            if full < record.blocks:
                live -= s.blocks[s.table[rows[i], full]].live
            gain[i] = max(0, full - (live + size - 1) // size)
        else:
            first, last = next_private(s, rows[i], 0)
            while first < min(last, full):
                live = 0
                for index in range(first, min(last, full)):
                    live += s.blocks[s.table[rows[i], index]].live
                gain[i] += min(last, full) - first - (live + size - 1) // size
                first, last = next_private(s, rows[i], last)
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
        (0, 0) if none frees a block. Only completely written blocks that nobody else holds are in it: the tail goes on
        being appended to, and shared blocks would not be free.
    """
    full = s.rows[row].written // s.block_size
    best_gain, best_live, best_first, best_last = 0, 0, 0, 0
    first, last = next_private(s, row, 0)
    while first < min(last, full):
        gain, live, at, end = _best_run(s, row, first, min(last, full), most)
        if gain > best_gain or (gain == best_gain and live < best_live):
            best_gain, best_live, best_first, best_last = gain, live, at, end
        first, last = next_private(s, row, last)
    return best_first, best_last


@njit
def _best_run(s: State, row: int, begin: int, end: int, most: int) -> tuple[int, int, int, int]:
    """Find the best run inside ``[begin, end)``; return its gain, its live tokens, its first block and its last.

    Widening a run by one block never loses: it adds one block to free and at most one to fill. So for each first block
    the longest run whose tokens fit ``most`` blocks frees most, and of the runs that free as many the shortest copies
    least. Both ends only ever move on: two passes of two pointers, O(blocks).
    """
    size = s.block_size
    room = most * size
    gain = 0
    live = 0
    last = begin
    for first in range(begin, end):
        if last < first:
            last = first
            live = 0
        while last < end and live + s.blocks[s.table[row, last]].live <= room:
            live += s.blocks[s.table[row, last]].live
            last += 1
        gain = max(gain, last - first - (live + size - 1) // size)
        if last > first:
            live -= s.blocks[s.table[row, first]].live
    if gain == 0:
        return 0, 0, 0, 0
    best_live, best_first, best_last = room + 1, 0, 0
    live = 0
    last = begin
    for first in range(begin, end):
        while last < end and last - first - (live + size - 1) // size < gain:
            live += s.blocks[s.table[row, last]].live
            last += 1
        if last - first - (live + size - 1) // size < gain:
            break
        if live < best_live:
            best_live, best_first, best_last = live, first, last
        live -= s.blocks[s.table[row, first]].live
    return gain, best_live, best_first, best_last


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
    group: int,
    first: int,
    last: int,
    sources: np.ndarray,
    destinations: np.ndarray,
    position: np.ndarray,
    from_slot: np.ndarray,
    to_slot: np.ndarray,
) -> int:
    """Make plan ``number`` of the run ``[first, last)``: fill the arrays, take the destinations, mark the row.

    ``group`` is the first plan of the group that it belongs to, or -1.

    Returns
    -------
    int
        Live tokens to move: so much of ``position``, ``from_slot`` and ``to_slot`` is filled.
    """
    size = s.block_size
    record = s.rows[row]
    count = snapshot_moves(s, row, first, last, position, from_slot)
    emit(s, _PLAN, record.ordinal, number, count)
    if group >= 0:
        emit(s, _GROUP, record.ordinal, number, group)
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
def _survivors(s: State, row: int, position: np.ndarray, moved: np.ndarray, alive: np.ndarray) -> int:
    """Find the plan's tokens again: their cells, -1 where dead, and the living of each destination.

    Returns
    -------
    int
        Destinations in which something lives.
    """
    size, now = s.block_size, s.position
    cell = s.rows[row].start
    end = cell + s.rows[row].live
    for k in range(len(position)):
        while cell < end and now[cell] < position[k]:
            cell += 1
        if cell < end and now[cell] == position[k]:
            moved[k] = cell
            alive[k // size] += 1
        else:
            moved[k] = -1
    return int((alive > 0).sum())


@njit
def blocks_kept(s: State, row: int, position: np.ndarray) -> int:
    """Return how many destinations a plan of these tokens would fill if it took effect now."""
    alive = np.zeros(len(position) // s.block_size + 1, np.int64)
    return _survivors(s, row, position, np.empty(len(position), np.int64), alive)


@njit
def commit(
    s: State,
    row: int,
    number: int,
    destinations: np.ndarray,
    position: np.ndarray,
    to_slot: np.ndarray,
    died: np.ndarray,
) -> tuple[bool, int]:
    """Put a copied plan into effect if it still frees more blocks than it takes, or if its group does.

    What a group does was settled before its first plan changed anything: ``died`` says then in which sources nothing
    lived any more. Of a plan by itself it is empty.

    Tokens that died since the plan are skipped: their place in the destination stays a dead slot. A destination in
    which nothing lives goes straight back. A source that others read stays theirs.

    Returns
    -------
    tuple
        Whether it took effect (if not, nothing has changed), and the blocks that the pool won: a plan of a group may
        have taken some, and another one of the group wins them back.
    """
    size = s.block_size
    # Taken out of the tuple once: each time costs a reference count.
    header, blocks, readers, slot = s.header, s.blocks, s.readers, s.slot
    record = s.rows[row]
    first, last = record.busy_from, record.busy_to
    moved = np.empty(len(position), np.int64)  # cells, in plan order; -1 if dead
    alive = np.zeros(len(destinations), np.int64)
    kept = _survivors(s, row, position, moved, alive)
    # Sources whose last token died meanwhile would be free without the copy: they are no gain of it.
    sources = s.table[row, first:last].copy()
    if len(died) == 0:
        died = np.empty(len(sources), np.bool_)
        won = 0
        for i in range(len(sources)):
            died[i] = blocks[sources[i]].live == 0
            won += not died[i] and blocks[sources[i]].tables == 1
        if won <= kept:
            return False, 0
    for k in range(len(position)):
        if moved[k] >= 0:
            source = slot[moved[k]]
            emit(s, _MOVE, record.ordinal, source, to_slot[k])
            if blocks[source // size].cached:
                header[H.LIVE] += 1 - leave_slot(blocks, readers, source // size, source)
            else:
                blocks[source // size].live -= 1
            blocks[to_slot[k] // size].live += 1
            slot[moved[k]] = to_slot[k]
            record.moved += 1
            header[H.MOVED] += 1
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
            s.blocks[block].tables = 1
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
    freed = -kept
    for i in range(len(sources)):
        if unlist_block(s, sources[i]):
            freed += not died[i]
            s.header[H.FREED_BY_DEATH] += died[i]
        emit(s, _FREE, record.ordinal, sources[i], Why.DEATH if died[i] else Why.REPACK)
        free_block(s, sources[i])
    for d in range(len(destinations)):
        if alive[d] == 0:
            emit(s, _FREE, record.ordinal, destinations[d], Why.CANCEL)
            free_block(s, destinations[d])
    s.header[H.FREED_BY_REPACK] += freed
    return True, freed
