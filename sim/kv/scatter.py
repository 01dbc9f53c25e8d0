"""Which blocks to empty where the order of tokens in memory does not matter: the least used ones, wherever they stand.

To free g blocks of a request, the tokens of g blocks have to go elsewhere; no g blocks have fewer than the g least
used. So ``fill`` (into dead slots of the others) is optimal: nothing frees as many blocks by fewer copies.
"""

from __future__ import annotations

import numpy as np

from sim.jit import njit
from sim.kv.state import State

__all__ = ["choose_least_used", "choose_targets", "most_to_win", "share_out", "steps_of"]


@njit
def _candidates(s: State, row: int) -> np.ndarray:
    """Return the table indices of the row's blocks that may be emptied or filled, least used first.

    Those that are completely written, that nobody else holds and whose contents the prefix cache does not know.
    """
    size = s.block_size
    record = s.rows[row]
    mine = s.table[row, : record.written // size]
    index = np.empty(len(mine), np.int64)
    key = np.empty(len(mine), np.int64)
    count = 0
    for i in range(len(mine)):
        block = s.blocks[mine[i]]
        if block.ref == 1 and block.cached == 0 and block.busy == 0:
            index[count] = i
            key[count] = block.live * len(mine) + i
            count += 1
    return index[:count][np.argsort(key[:count])]


@njit
def steps_of(s: State, row: int, fill: bool, gain: np.ndarray, tokens: np.ndarray, sources: np.ndarray) -> int:
    """List what can be won: each further block, and the tokens that have to be copied in all for it.

    Parameters
    ----------
    fill
        Into dead slots of the other blocks; if not, into fresh ones.
    gain, tokens, sources
        int64, one place for each block of the table. Filled with the blocks won, 1, 2, ..., the tokens copied for that
        many, and how many of the least used blocks are emptied.

    Returns
    -------
    int
        How many steps there are.
    """
    size = s.block_size
    order = _candidates(s, row)
    room = 0  # dead slots of those that stay
    for i in range(len(order)):
        room += size - s.blocks[s.table[row, order[i]]].live
    total, steps = 0, 0
    for k in range(len(order)):
        live = s.blocks[s.table[row, order[k]]].live
        total += live
        room -= size - live
        won = k + 1 if fill else k + 1 - (total + size - 1) // size
        if fill and total > room:
            break
        if won > steps:
            gain[steps], tokens[steps], sources[steps] = won, total, k + 1
            steps += 1
    return steps


@njit
def choose_least_used(
    s: State, row: int, fill: bool, most_destinations: int, most_gain: int, most_tokens: int
) -> np.ndarray:
    """Return the blocks (int32, in table order) whose emptying wins most within these limits, by the fewest tokens."""
    size = s.block_size
    order = _candidates(s, row)
    gain, tokens, sources = np.empty((3, len(order)), np.int64)
    best = 0
    for k in range(steps_of(s, row, fill, gain, tokens, sources)):
        fits = fill or (tokens[k] + size - 1) // size <= most_destinations
        if gain[k] <= most_gain and tokens[k] <= most_tokens and fits:
            best = sources[k]
    chosen: np.ndarray = s.table[row][np.sort(order[:best])]
    return chosen


@njit
def choose_targets(s: State, row: int, sources: np.ndarray) -> np.ndarray:
    """Return the fullest of the row's other blocks (int32) whose dead slots hold what lives in ``sources``."""
    size = s.block_size
    left = 0
    for block in sources:
        left += s.blocks[block].live
    order = _candidates(s, row)
    chosen = np.empty(len(order), np.int32)
    count = 0
    for i in order[len(sources) :][::-1]:
        block = s.table[row, i]
        if left > 0 and s.blocks[block].live < size:
            chosen[count] = block
            count += 1
            left -= size - s.blocks[block].live
    return chosen[:count]


@njit
def most_to_win(s: State, rows: np.ndarray, gain: np.ndarray) -> int:
    """Fill ``gain`` with the most blocks that can be won from each row, and return the sum: dense blocks are left.

    Rows with a repack in flight, or whose prompt is not complete, get 0.
    """
    size = s.block_size
    total = 0
    for b in range(len(rows)):
        record = s.rows[rows[b]]
        gain[b] = 0
        if record.plan >= 0 or record.decode_from == 0:
            continue
        full = record.written // size
        blocks, live = full, record.live
        if len(s.readers) > 0:
            blocks, live = 0, 0
            for index in range(full):
                block = s.blocks[s.table[rows[b], index]]
                if block.ref == 1 and block.cached == 0:
                    blocks += 1
                    live += block.live
        elif full < record.blocks:
            live -= s.blocks[s.table[rows[b], full]].live
        gain[b] = max(0, blocks - (live + size - 1) // size)
        total += gain[b]
    return total


@njit
def share_out(s: State, rows: np.ndarray, fill: bool, wanted: int, most_tokens: int, gain: np.ndarray) -> None:
    """Fill ``gain`` with the blocks to win from each row, so that ``wanted`` are won by as few copies as can be.

    The steps of a row (:func:`steps_of`) are joined to stretches that cost more and more copies a block (the lower hull
    of its cost); all rows' stretches are taken cheapest first, as long as ``most_tokens`` allow. With ``fill`` a
    stretch is a block, and the choice is the best there is.
    """
    most = 0
    for row in rows:
        most += s.rows[row].blocks
    price = np.empty(most, np.float64)
    whose, reaches, copies = np.empty((3, most), np.int64)
    count = 0
    for b in range(len(rows)):
        won, tokens, sources = np.empty((3, s.rows[rows[b]].blocks), np.int64)
        able = s.rows[rows[b]].plan < 0 and s.rows[rows[b]].decode_from > 0
        steps = steps_of(s, rows[b], fill, won, tokens, sources) if able else 0
        begin = count
        for k in range(steps):
            # A stretch that is cheaper than the one before it is one with it.
            reaches[count], copies[count] = won[k], tokens[k]
            while True:
                base_won = reaches[count - 1] if count > begin else 0
                base_copies = copies[count - 1] if count > begin else 0
                price[count] = (copies[count] - base_copies) / (reaches[count] - base_won)
                if count == begin or price[count] >= price[count - 1]:
                    break
                count -= 1
                reaches[count], copies[count] = won[k], tokens[k]
            whose[count] = b
            count += 1
    taken, spent = np.zeros((2, len(rows)), np.int64)
    stopped = np.zeros(len(rows), np.bool_)
    gain[:] = 0
    left = most_tokens
    for i in np.argsort(price[:count], kind="mergesort"):
        b = whose[i]
        if wanted <= 0:
            break
        if stopped[b] or copies[i] - spent[b] > left:
            stopped[b] = True
            continue
        gain[b] = min(reaches[i], taken[b] + wanted)
        left -= copies[i] - spent[b]
        wanted -= reaches[i] - taken[b]
        taken[b], spent[b] = reaches[i], copies[i]
