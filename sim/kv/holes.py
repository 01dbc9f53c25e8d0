"""Dead slots that new tokens may be written into, of each request the fullest block first.

A block's dead slots lie in a stack of its own, as long as ``written - live``. A request's blocks with dead slots are in
lists by how many they have, as a segregated free list keeps chunks by size: a death moves its block one list up, a
token written into a dead slot one down, and the block with fewest is found by looking at one head for each size. So
nothing here costs by tokens or blocks. The fullest first, because a block with few live tokens may yet die by itself.

Left out are blocks whose contents the prefix cache knows (another request may want them: they are never written to)
and blocks that a copy in flight reads or fills (what is written behind its back would be lost, or overwritten).

The lists are doubly linked by what links a block into the free list while it is free. All else is one array of
integers, empty unless slots are used again (:meth:`sim.kv.state.Store.find_holes`): N stacks of S, then for each row
S + 1 numbers: how many dead slots its lists hold, and the first block with 1, 2, ..., S of them (0 if there is none).
"""

from __future__ import annotations

import numpy as np

from sim.jit import njit
from sim.kv.state import State

__all__ = ["bury", "forget_holes", "holes_of", "list_dead", "offer_block", "take_hole", "withdraw_block"]


@njit(inline="always")
def _lists(blocks: np.ndarray, size: int, row: int) -> int:
    return len(blocks) * size + row * (size + 1)


@njit
def holes_of(s: State, row: int) -> int:
    """Return how many dead slots the row may write new tokens into."""
    return int(s.holes[_lists(s.blocks, s.block_size, row)]) if len(s.holes) > 0 else 0


# These take the arrays and not the tuple: each time an array is taken out of it costs a reference count.


@njit
def offer_block(blocks: np.ndarray, holes: np.ndarray, size: int, row: int, block: int) -> None:
    """Put a block into the list for as many dead slots as it has; into none if it has none or may not be written to."""
    record = blocks[block]
    dead = record.written - record.live
    if dead > 0 and record.cached == 0 and record.busy == 0:
        lists = _lists(blocks, size, row)
        first = holes[lists + dead]
        record.prev = 0
        record.next = first
        if first > 0:
            blocks[first].prev = block
        holes[lists + dead] = block
        holes[lists] += dead


@njit
def withdraw_block(blocks: np.ndarray, holes: np.ndarray, size: int, row: int, block: int) -> None:
    """Undo :func:`offer_block`, before anything about the block changes."""
    record = blocks[block]
    dead = record.written - record.live
    if dead > 0 and record.cached == 0 and record.busy == 0:
        lists = _lists(blocks, size, row)
        before, after = record.prev, record.next
        if before > 0:
            blocks[before].next = after
        else:
            holes[lists + dead] = after
        if after > 0:
            blocks[after].prev = before
        holes[lists] -= dead


@njit
def bury(blocks: np.ndarray, holes: np.ndarray, size: int, row: int, slot: int) -> None:
    """Note that the token in a slot of an uncached block has died, in place of lowering the block's live count."""
    block = slot // size
    withdraw_block(blocks, holes, size, row, block)
    blocks[block].live -= 1
    holes[block * size + blocks[block].written - blocks[block].live - 1] = slot
    offer_block(blocks, holes, size, row, block)


@njit
def take_hole(blocks: np.ndarray, holes: np.ndarray, size: int, row: int) -> int:
    """Return the dead slot to write the row's next token into, whose block now counts one live token more."""
    lists = _lists(blocks, size, row)
    dead = 1
    while holes[lists + dead] == 0:
        dead += 1
    block = holes[lists + dead]
    slot: int = holes[block * size + dead - 1]
    withdraw_block(blocks, holes, size, row, block)
    blocks[block].live += 1
    offer_block(blocks, holes, size, row, block)
    return slot


@njit
def list_dead(s: State, block: int, alive: np.ndarray) -> None:
    """Make the stack of a block new: its written slots that are not ``alive`` (bool, up to the last that was)."""
    size = s.block_size
    dead = 0
    for offset in range(s.blocks[block].written):
        if offset >= len(alive) or not alive[offset]:
            s.holes[block * size + dead] = block * size + offset
            dead += 1


@njit
def forget_holes(s: State, row: int) -> None:
    """Empty the row's lists: it has no blocks any more."""
    lists = _lists(s.blocks, s.block_size, row)
    s.holes[lists : lists + s.block_size + 1] = 0
