"""What happens to requests when a step ends, in one pass: produced tokens, held blocks, and who is done."""

from __future__ import annotations

import numpy as np

from sim.jit import njit
from sim.kv.state import YIELDS, H, State
from sim.serving.work import W

__all__ = ["complete", "histogram"]


@njit
def _spread(rows: np.ndarray, first: int, units: int) -> None:
    """Bring the other rows of a request to where its first one is."""
    record = rows[first]
    for row in range(first + 1, first + units):
        other = rows[row]
        other.flying = record.flying
        other.ahead = record.ahead
        other.sched = record.sched
        other.length = record.length
        other.produced = record.produced


@njit
def _widen(rows: np.ndarray, units: int) -> None:
    """Put all rows of each request in the place of its first one: these stand at the front of ``rows``."""
    for i in range(len(rows) - 1, -1, -1):
        rows[i] = rows[i // units] + i % units


@njit
def complete(
    rows: np.ndarray,
    header: np.ndarray,
    pool: tuple[int, int],
    running: np.ndarray,
    count: int,
    dt_ns: int,
    now_ns: int,
    max_model_len: int,
    lists: np.ndarray,
    levels: np.ndarray,
    work: np.ndarray,
    told: tuple[int, int, int, int],
    late: bool,
    units: int | None,
) -> tuple[int, int, int, int]:
    """Apply the results of a step: note levels and holdings, append produced tokens, sort requests by what happened.

    Parameters
    ----------
    pool
        Blocks that can be handed out, and slots a block. (A kernel that takes the whole state pays 2 us for it.)
    lists
        int64[3, max running]: first rows of requests that finished; all rows of those that ended their prompt, and of
        those that decoded.
    levels
        float64, a row of :data:`sim.serving.metrics.STEP_COLUMNS`, to be filled.
    told
        Number of the step, requests waiting, preemptions and nanoseconds of copies so far.
    late
        Whether the next step is scheduled already (asynchronous scheduling): tokens were counted as produced then.
    units
        Rows of a request; they are alike in everything but blocks and tokens. What belongs to a request as a whole is
        kept in the first. None where each has one: the compiler then leaves out what is about the others.

    Returns
    -------
    tuple of int
        How many rows run on (moved together in ``running``), how many requests finished, and how many rows are in the
        other two lists.
    """
    usable, size = pool
    used = usable - header[H.FREE]
    levels[0] = told[0]
    levels[1] = 1
    levels[2] = (now_ns - dt_ns) / 1e9
    levels[3] = dt_ns / 1e9
    levels[4] = count
    if units is not None:
        levels[4] = count // units
    levels[5] = told[1]
    levels[6] = used
    levels[7] = header[H.FREE]
    levels[8] = used - header[H.IN_TABLES]
    levels[9] = header[H.LIVE]
    levels[10] = header[H.WRITTEN] - header[H.LIVE]
    levels[11] = header[H.IN_TABLES] * size - header[H.WRITTEN]
    levels[12] = work[W.TOKENS]
    levels[13] = work[W.SEQS]
    levels[14] = told[2]
    levels[15] = header[H.FREED_BY_DEATH]
    levels[16] = header[H.FREED_BY_REPACK]
    levels[17] = header[H.EVICTED]
    levels[18] = header[H.MOVED]
    levels[19] = told[3] / 1e9
    finished, ended, decoded = lists[0], lists[1], lists[2]
    step = 1
    if units is not None:
        step = units
    on, done, prompts, decodes = 0, 0, 0, 0
    for i in range(0, count, step):
        row = running[i]
        record = rows[row]
        if record.decode_from > 0:
            held, dense = record.blocks, (record.live + size - 1) // size
            if units is not None:
                for unit in range(1, units):
                    held += rows[row + unit].blocks
                    dense += (rows[row + unit].live + size - 1) // size
            record.decode_ns += dt_ns
            record.block_ns += float(held) * dt_ns
            record.over_ns += held / dense * dt_ns
            record.peak = max(record.peak, held)
        ahead = 0
        if late:
            yields = record.flying == YIELDS
            if record.ahead == YIELDS:
                ahead = 1  # of these counts, one belongs to the batch after this one
            record.flying = record.ahead
            record.ahead = 0
        else:
            yields = record.sched > 0 and record.computed == record.length
            record.sched = 0
            if yields:
                record.length += 1
                record.produced += 1
        if units is not None:
            _spread(rows, row, units)
        if yields:
            produced, length = record.produced - ahead, record.length - ahead
            if produced == 1:
                record.first_token_ns = now_ns
            if produced >= record.target or length >= max_model_len:
                finished[done] = row
                done += 1
                continue
            if record.decode_from == 0:
                record.decode_from = length - 1
                ended[prompts] = row
                prompts += 1
            else:
                decoded[decodes] = row
                decodes += 1
        running[on] = row
        on += 1
    if units is not None:
        for unit in range(units):
            for i in range(prompts):
                rows[ended[i] + unit].decode_from = rows[ended[i]].decode_from
        for rows_of in (running[: on * units], ended[: prompts * units], decoded[: decodes * units]):
            _widen(rows_of, units)
        on, prompts, decodes = on * units, prompts * units, decodes * units
    return on, done, prompts, decodes


@njit
def histogram(s: State, running: np.ndarray, count: int, classes: np.ndarray, out: np.ndarray) -> None:
    """Count the blocks in tables by class; ``classes`` gives the class for each number of live slots."""
    out[:] = 0
    for i in range(count):
        for index in range(s.rows[running[i]].blocks):
            out[classes[s.blocks[s.table[running[i], index]].live]] += 1
