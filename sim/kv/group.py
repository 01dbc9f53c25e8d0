"""Which shared blocks all of their readers should copy their tokens out of (see :mod:`sim.kv.repack`)."""

from __future__ import annotations

import numpy as np

from sim.jit import njit
from sim.kv.state import State

__all__ = ["find_group", "index_of"]


@njit
def index_of(s: State, row: int, block: int) -> int:
    """Return where ``block`` stands in the row's table; -1 if it does not, or if the row cannot be repacked now."""
    record = s.rows[row]
    if record.plan < 0 and record.decode_from > 0:
        mine = s.table[row, : record.blocks]
        for index in range(len(mine)):
            if mine[index] == block:
                return index
    return -1


@njit
def find_group(s: State, rows: np.ndarray, most: int) -> tuple[int, int, int]:
    """Find the run of shared blocks whose readers, all together, free most blocks by copying their tokens out.

    Parameters
    ----------
    rows
        int64[B], the running requests.
    most
        Destination blocks to be had, by all readers together.

    Returns
    -------
    tuple of int
        A reader (row), and first and last table index of the run in its table; (-1, 0, 0) if none frees a block.

    Notes
    -----
    The run is read by the same rows from end to end, none of which has a repack in flight. Of such a run the part is
    taken whose blocks have most slots more than their readers have live tokens, from the first of equal ones on.
    """
    table, blocks = s.table, s.blocks
    readers, at = np.empty((2, len(rows)), np.int64)
    seen = np.zeros(len(blocks), np.bool_)
    best_gain, best_row, best_first, best_last = 0, -1, 0, 0
    for row in rows:
        begin = 0
        while begin < s.rows[row].blocks:
            block = table[row, begin]
            degree = blocks[block].tables
            end = begin + 1
            if degree > 1 and blocks[block].ref == degree and not seen[block]:
                count = 0
                for other in rows:
                    index = index_of(s, other, block)
                    if index >= 0:
                        readers[count], at[count] = other, index
                        count += 1
                seen[block] = True
                if count == degree:
                    while end < s.rows[row].blocks and _same(s, readers[:count], at[:count], end - begin):
                        seen[table[row, end]] = True
                        end += 1
                    gain, first, last = _best_part(s, readers[:count], at[:count], end - begin, most)
                    if gain > best_gain:
                        best_gain, best_row, best_first, best_last = gain, row, begin + first, begin + last
            begin = end
    return best_row, best_first, best_last


@njit
def _same(s: State, readers: np.ndarray, at: np.ndarray, offset: int) -> bool:
    """Say whether these rows, and nobody else, hold one block ``offset`` behind where they stand ``at``."""
    block = s.table[readers[0], at[0] + offset]
    if s.blocks[block].tables != len(readers) or s.blocks[block].ref != len(readers):
        return False
    for i in range(len(readers)):
        index = at[i] + offset
        if index >= s.rows[readers[i]].blocks or s.table[readers[i], index] != block:
            return False
    return True


@njit
def _best_part(s: State, readers: np.ndarray, at: np.ndarray, length: int, most: int) -> tuple[int, int, int]:
    """Find the part ``[first, last)`` of a shared run to copy out of; return its gain and the part."""
    size = s.block_size
    live = np.zeros((len(readers), length), np.int64)
    for i in range(len(readers)):
        mine = s.table[readers[i], at[i] : at[i] + length]
        cell = s.rows[readers[i]].start
        end = cell + s.rows[readers[i]].live
        for index in range(length):
            # The cells of shared blocks are in table order, with those of other blocks between them perhaps.
            while cell < end and s.slot[cell] // size != mine[index]:
                cell += 1
            while cell < end and s.slot[cell] // size == mine[index]:
                live[i, index] += 1
                cell += 1
    # The contiguous part with the largest sum of slots minus live tokens.
    total, start, best, first, last = 0, 0, 0, 0, 0
    for index in range(length):
        total += size - live[:, index].sum()
        if total > best:
            best, first, last = total, start, index + 1
        if total <= 0:
            total, start = 0, index + 1
    need = most + 1
    while last > first:
        need = 0
        for i in range(len(readers)):
            need += (live[i, first:last].sum() + size - 1) // size
        if need <= most:
            break
        last -= 1
    return last - first - need if last > first else 0, first, last
