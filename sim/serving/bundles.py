"""The loop over running requests where each has several rows (:mod:`sim.kv.units`).

The rows of a request go in lockstep: they are given the same tokens in the same steps, or none of them is given any.
What one row has to itself is blocks, cells and what is alive in them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.jit import njit
from sim.kv.arena import make_room
from sim.kv.holes import holes_of
from sim.kv.state import H, State
from sim.kv.tokens import append_one, append_tokens, drop_oldest, reuse_one, reuse_slot, tail_of
from sim.serving.work import NEEDS_BLOCKS, NEEDS_CELLS, W

__all__ = ["pairs_of", "serve_bundles"]


@njit
def pairs_of(before: int, tokens: int, written: int, window: int) -> int:
    """Return the query-key pairs of ``tokens`` new tokens behind ``before`` others, in one unit.

    Without a window a query sees every written slot before its own, dead ones too: ``written`` counts those, the new
    tokens included. With one it sees ``window`` tokens at most, itself included.
    """
    if window == 0:
        return tokens * (written - tokens) + tokens * (tokens + 1) // 2
    growing = max(0, min(before + tokens, window) - before)
    return growing * before + growing * (growing + 1) // 2 + (tokens - growing) * window


@njit
def serve_bundles(
    running: np.ndarray,
    count: int,
    at: int,
    windows: np.ndarray,
    weights: np.ndarray,
    in_flight: np.ndarray,
    max_model_len: int,
    threshold: int,
    late: bool,
    work: np.ndarray,
    *state: Any,
) -> tuple[int, int]:
    """Schedule running requests from index ``at`` on; stop at the first that cannot be served.

    A row with a window loses the tokens that no query to come will see, as vLLM's cache does it: when the request is
    about to be given tokens, whether it gets them or not.

    Parameters
    ----------
    windows, weights
        int64[U] of the units: see :class:`sim.kv.units.Units`.
    in_flight
        int64[rows], tokens of a row whose results are not known yet (asynchronous scheduling): a step on the device
        still sees what they see.
    state
        The fields of the cache's :class:`sim.kv.state.State`.

    Returns
    -------
    tuple of int
        The index it stopped at and why: 0 at the end, else what is missing.
    """
    s = State(*state)
    size, units = s.block_size, len(windows)
    # Taken out of the tuple once: each time costs a reference count.
    rows, header = s.rows, s.header
    tail = tail_of(s)
    logging = header[H.LOGGING] > 0
    reusing = len(s.holes) > 0
    stalls = header[H.STALLS] > 0
    missing = 0
    reused = 0
    scheduled, left, seqs, kv_read, pairs, listed, single = 0, work[W.TOKENS_LEFT], 0, 0, 0, 0, 0
    while at < count and left > 0:
        record = rows[running[at]]
        before = record.computed
        tokens = min(record.length - before, left, max_model_len - 1 - before)
        if 0 < threshold < tokens:
            tokens = threshold
        stalled = False
        if stalls:
            for unit in range(units):
                stalled |= rows[running[at + unit]].plan >= 0
        if tokens <= 0 or stalled or (late and record.produced >= record.target):
            at += units
            continue
        need = 0
        room = True
        for unit in range(units):
            row = running[at + unit]
            record = rows[row]
            if windows[unit] > 0:
                drop_oldest(s, row, before - in_flight[row] - windows[unit] + 1)
            again = reusing and tokens == 1 and holes_of(s, row) > 0
            short = 0 if again else record.written + tokens - record.blocks * size
            need += max(0, (short + size - 1) // size)
            room &= make_room(s, row, tokens)
        if need > 0 and need > header[H.FREE] - header[H.RESERVE]:
            missing = NEEDS_BLOCKS
            break
        if not room:
            missing = NEEDS_CELLS
            break
        for unit in range(units):
            row = running[at + unit]
            record = rows[row]
            again = reusing and tokens == 1 and holes_of(s, row) > 0
            if again and logging:
                reuse_slot(s, row)
            elif again:
                reuse_one(tail, s.holes, row, size)
                reused += 1
            elif tokens == 1 and 0 < record.blocks * size - record.written <= size and not logging:
                append_one(tail, row, size)
                single += 1
            else:
                append_tokens(s, row, tokens)
            record.sched = tokens
            # A window's kernel leaves out what is before it; others read all listed slots.
            kv_read += weights[unit] * (record.live if windows[unit] > 0 else record.written)
            pairs += weights[unit] * pairs_of(before, tokens, record.written, windows[unit])
            listed += record.blocks
        scheduled += tokens
        left -= tokens
        seqs += 1
        at += units
    header[H.LIVE] += single + reused
    header[H.WRITTEN] += single
    work[W.TOKENS] += scheduled
    work[W.TOKENS_LEFT] = left
    work[W.SEQS] += seqs
    work[W.KV_READ] += kv_read
    work[W.PAIRS] += pairs
    work[W.LISTED] += listed
    return at, missing
