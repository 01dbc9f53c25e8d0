"""Repack: copy a request's live tokens out of thinly used blocks into fewer dense ones.

Three steps. :mod:`sim.kv.window` or :mod:`sim.kv.scatter` chooses (pure, on a snapshot), the copy runs elsewhere for as
long as it takes, and :func:`commit` looks again: tokens that died meanwhile are not brought back, and the plan takes
effect only if it still frees strictly more blocks than it takes. Until then the sources are read and the destinations
are nobody's.

The paper takes "the least used blocks" as sources and keeps the logical order; both at once are possible only for a run
of neighbouring blocks (a *window*), which is what a plan is by default. Where order does not matter, the sources are
the least used blocks wherever they stand, and their tokens go into fresh blocks too (*scattered*), or into dead slots
of blocks that stay (*fill*: its *targets*, and no destination).

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
from sim.kv.holes import list_dead, offer_block, withdraw_block
from sim.kv.state import H, State

__all__ = [
    "Group",
    "RepackPlan",
    "blocks_kept",
    "commit",
    "fills_lawfully",
    "is_lawful",
    "set_aside",
    "set_idle",
]

_MOVE = int(Kind.MOVE)
_PLAN = int(Kind.PLAN)
_GROUP = int(Kind.GROUP)
_SOURCE = int(Kind.SOURCE)
_RESERVE = int(Kind.RESERVE)
_COMMIT = int(Kind.COMMIT)
_TARGET = int(Kind.TARGET)
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
    targets: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Blocks that stay in the table, into whose dead slots the copy writes."""
    cancelled: bool = False
    deferred: int = 0
    """Blocks of ``held`` that left a table while the copy ran, and are free behind the fence."""
    group: Group | None = None
    """The plans that empty the same sources, if those are shared."""

    @property
    def tokens(self) -> int:
        """Tokens that the copy moves."""
        return len(self.position)

    @property
    def held(self) -> NDArray[np.int32]:
        """Blocks of its table that the copy reads or fills."""
        return np.concatenate([self.sources, self.targets])

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
def _snapshot_moves(s: State, row: int, sources: np.ndarray, position: np.ndarray, from_slot: np.ndarray) -> int:
    """List the live tokens of the row in these blocks in logical order; return how many there are."""
    size = s.block_size
    record = s.rows[row]
    for block in sources:
        # Marked by a negative live count while we look for its tokens.
        s.blocks[block].live = -s.blocks[block].live - 1
    count = 0
    for cell in range(record.start, record.start + record.live):
        if s.blocks[s.slot[cell] // size].live < 0:
            position[count] = s.position[cell]
            from_slot[count] = s.slot[cell]
            count += 1
    for block in sources:
        s.blocks[block].live = -(s.blocks[block].live + 1)
    return count


@njit
def _set_busy(s: State, row: int, block: int) -> None:
    """Note that a copy reads a block of the row, or writes into it: no new token goes there until the fence."""
    if len(s.holes) > 0:
        withdraw_block(s.blocks, s.holes, s.block_size, row, block)
    s.blocks[block].busy = s.blocks[block].cached == 0


@njit
def set_idle(s: State, row: int, block: int) -> None:
    """Undo :func:`set_busy` for a block that the row keeps."""
    s.blocks[block].busy = 0
    if len(s.holes) > 0:
        offer_block(s.blocks, s.holes, s.block_size, row, block)


@njit
def set_aside(
    s: State,
    row: int,
    number: int,
    group: int,
    sources: np.ndarray,
    targets: np.ndarray,
    window: int,
    destinations: np.ndarray,
    position: np.ndarray,
    from_slot: np.ndarray,
    to_slot: np.ndarray,
) -> int:
    """Make plan ``number``: fill the arrays behind ``window``, take the destinations, mark the row and its blocks.

    Parameters
    ----------
    group
        The first plan of the group that it belongs to, or -1.
    sources
        Blocks to empty, in table order.
    targets
        Blocks into whose dead slots their tokens go; if there are none, they go into fresh blocks.
    window
        Index in the table of the first source if they stand side by side, or -1.

    Returns
    -------
    int
        Live tokens to move: so much of ``position``, ``from_slot`` and ``to_slot`` is filled.
    """
    size = s.block_size
    record = s.rows[row]
    count = _snapshot_moves(s, row, sources, position, from_slot)
    emit(s, _PLAN, record.ordinal, number, count)
    if group >= 0:
        emit(s, _GROUP, record.ordinal, number, group)
    for block in sources:
        emit(s, _SOURCE, record.ordinal, block, number)
        _set_busy(s, row, block)
    for block in targets:
        emit(s, _TARGET, record.ordinal, block, number)
        _set_busy(s, row, block)
    if len(targets) > 0:
        occupied = _occupied(s, row, targets)
        at = 0
        for k in range(count):
            while occupied[at]:
                at += 1
            to_slot[k] = targets[at // size] * size + at % size
            at += 1
    else:
        for d in range((count + size - 1) // size):
            destinations[d] = take_block(s, row)
            emit(s, _RESERVE, record.ordinal, destinations[d], number)
            for k in range(d * size, min(count, (d + 1) * size)):
                to_slot[k] = destinations[d] * size + k - d * size
    if window >= 0:
        record.busy_from = window
        record.busy_to = window + len(sources)
    record.plan = number
    return count


@njit
def _occupied(s: State, row: int, blocks: np.ndarray) -> np.ndarray:
    """Say of each slot of some of the row's busy blocks whether a token lives in it: bool[blocks * S].

    Leaves in ``prev`` of each of them its index: a busy block is in no list.
    """
    size = s.block_size
    out = np.zeros(len(blocks) * size, np.bool_)
    for i in range(len(blocks)):
        s.blocks[blocks[i]].prev = i
    for cell in range(s.rows[row].start, s.rows[row].start + s.rows[row].live):
        block = s.slot[cell] // size
        i = s.blocks[block].prev
        if s.blocks[block].busy > 0 and i < len(blocks) and blocks[i] == block:
            out[i * size + s.slot[cell] % size] = True
    return out


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
def fills_lawfully(s: State, row: int, targets: np.ndarray, position: np.ndarray, to_slot: np.ndarray) -> bool:
    """Say whether tokens move, one by one, into dead slots of blocks of the row that were marked for it."""
    size = s.block_size
    if len(to_slot) != len(position):
        return False
    for block in targets:
        if not 0 < block < len(s.blocks):
            return False
        record = s.blocks[block]
        if record.busy != 1 or record.tables != 1 or record.written != size or record.owner != row:
            return False
    taken = _occupied(s, row, targets)
    for k in range(len(position)):
        block = to_slot[k] // size
        if not 0 < block < len(s.blocks) or (k > 0 and position[k] <= position[k - 1]):
            return False
        i = s.blocks[block].prev
        if not 0 <= i < len(targets) or targets[i] != block or taken[i * size + to_slot[k] % size]:
            return False
        taken[i * size + to_slot[k] % size] = True
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
    sources: np.ndarray,
    targets: np.ndarray,
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
    moved = np.empty(len(position), np.int64)  # cells, in plan order; -1 if dead
    alive = np.zeros(len(position) // size + 1, np.int64)
    kept = _survivors(s, row, position, moved, alive)
    if len(targets) > 0:
        kept = 0
    # Sources whose last token died meanwhile would be free without the copy: they are no gain of it.
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
    # The table: sources out, destinations with life in, where the first source stood.
    before = s.table[row, : record.blocks].copy()
    at = 0
    while before[at] != sources[0]:
        at += 1
    emit(s, _COMMIT, record.ordinal, number, at)
    first = at
    tail = first + len(sources) == len(before)
    if len(targets) > 0 or before[first + len(sources) - 1] != sources[-1]:
        record.mixed = 1
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
            if len(s.holes) > 0:
                list_dead(s, block, moved[d * size : d * size + size] >= 0)
                offer_block(s.blocks, s.holes, s.block_size, row, block)
    i = 0
    for block in before[first:]:
        if i < len(sources) and block == sources[i]:
            i += 1
        else:
            s.table[row, at] = block
            at += 1
    record.blocks = at
    record.written -= (len(sources) - kept) * size
    if tail and kept > 0:
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
        blocks[sources[i]].busy = 0
        free_block(s, sources[i])
    if len(s.holes) > 0 and len(targets) > 0:
        occupied = _occupied(s, row, targets)
        for i in range(len(targets)):
            list_dead(s, targets[i], occupied[i * size : i * size + size])
    for d in range(len(destinations)):
        if alive[d] == 0:
            emit(s, _FREE, record.ordinal, destinations[d], Why.CANCEL)
            free_block(s, destinations[d])
    s.header[H.FREED_BY_REPACK] += freed
    return True, freed
