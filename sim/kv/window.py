"""Which run of neighbouring blocks a repack that keeps the order is to empty."""

from __future__ import annotations

import numpy as np

from sim.jit import njit
from sim.kv.state import State
from sim.kv.tokens import next_private

__all__ = ["find_window", "possible_gain", "prices"]


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
def prices(s: State, rows: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Return float64[B]: tokens that the best run of each row copies for each block that it frees; infinity without.

    ``gain`` says which rows may free any (:func:`possible_gain`).
    """
    out = np.full(len(rows), np.inf)
    for i in range(len(rows)):
        if gain[i] > 0:
            first, last = find_window(s, rows[i], len(s.blocks))
            live = 0
            for index in range(first, last):
                live += s.blocks[s.table[rows[i], index]].live
            if last > first:
                out[i] = live / (last - first - (live + s.block_size - 1) // s.block_size)
    return out
