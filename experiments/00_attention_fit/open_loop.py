"""Policies applied to a given attention matrix, open loop: what they leave of the blocks.

This is the measuring side of the fit, kept apart from the simulator on purpose: a few loops over one sequence, which
reproduce ``../shared/attention/fragmentation.parquet`` to the last digit when fed the attention that the captures were
made from. Budget ``k = ceil(ratio * length)``, in force from the end of the prompt on, one eviction a step, ties to the
older token.
"""

# ruff: noqa: ARG001 every policy takes the same arguments
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit

RATIOS = (0.2, 0.4, 0.6, 0.8)
BLOCK_SIZES = (8, 16, 32, 64)
MEASURES = ("dead", "partial", "reclaim")
EVERY = 32
"""Decode steps between two measurements."""
WINDOW = 400
"""Queries whose votes Scissorhands counts, and so the prompt queries that a matrix must hold."""


@njit
def measure(live: NDArray[np.uint8], length: int, out: NDArray[np.float64]) -> None:
    """Write, for each block size, the share of blocks dead, partly dead, and freed by nothing but a perfect repack."""
    for b in range(len(BLOCK_SIZES)):
        size = BLOCK_SIZES[b]
        blocks = (length + size - 1) // size
        dead = partial = tokens = 0
        for block in range(blocks):
            end = min(length, (block + 1) * size)
            left = 0
            for i in range(block * size, end):
                left += live[i]
            tokens += left
            if left == 0:
                dead += 1
            elif left < end - block * size:
                partial += 1
        out[b, 0] = dead / blocks
        out[b, 1] = partial / blocks
        out[b, 2] = (blocks - dead - (tokens + size - 1) // size) / blocks


@njit
def keep(ratio: float, length: int) -> int:
    """Return the budget in tokens; the small number undoes what binary fractions add to 0.2 * 1000."""
    return int(np.ceil(ratio * length - 1e-9))


@njit
def drop_lowest(live: NDArray[np.uint8], score: NDArray[np.float64], end: int, drop: int) -> None:
    """Kill the ``drop`` live tokens before ``end`` with the lowest scores, the older first among equals."""
    if drop == 1:
        victim = -1
        for i in range(end):
            if live[i] and (victim < 0 or score[i] < score[victim]):
                victim = i
        live[victim] = 0
    elif drop > 1:
        candidates = np.flatnonzero(live[:end])
        order = np.argsort(score[candidates], kind="mergesort")
        live[candidates[order[:drop]]] = 0


@njit
def h2o(
    attention: NDArray[np.float32],
    accumulated: NDArray[np.float32],
    prompt: int,
    ratio: float,
    out: NDArray[np.float64],
) -> None:
    """Half of the budget to the newest tokens, half to the largest accumulated attention."""
    history, total = len(attention), attention.shape[1]
    before = history - (total - prompt)
    score = np.zeros(total)
    score[:prompt] = accumulated
    live = np.zeros(total, np.uint8)
    live[:prompt] = 1
    count = prompt
    for step in range(total - prompt + 1):
        length = prompt + step
        if step:
            row = attention[before + step - 1]
            live[length - 1] = 1
            count += 1
            mass = 0.0
            for i in range(length):
                mass += row[i] * live[i]
            for i in range(length):
                score[i] += row[i] * live[i] / mass
        budget = keep(ratio, length)
        drop_lowest(live, score, length - budget // 2, count - budget)
        count = min(count, budget)
        if step % EVERY == 0:
            measure(live, length, out[step // EVERY])


@njit
def tova(
    attention: NDArray[np.float32],
    accumulated: NDArray[np.float32],
    prompt: int,
    ratio: float,
    out: NDArray[np.float64],
) -> None:
    """Only the newest query counts."""
    history, total = len(attention), attention.shape[1]
    before = history - (total - prompt)
    live = np.zeros(total, np.uint8)
    live[:prompt] = 1
    count = prompt
    score = np.zeros(total)
    for step in range(total - prompt + 1):
        length = prompt + step
        if step:
            live[length - 1] = 1
            count += 1
        score[:] = attention[before + step - 1]
        budget = keep(ratio, length)
        drop_lowest(live, score, length - 1, count - budget)
        count = min(count, budget)
        if step % EVERY == 0:
            measure(live, length, out[step // EVERY])


@njit
def scissor(
    attention: NDArray[np.float32],
    accumulated: NDArray[np.float32],
    prompt: int,
    ratio: float,
    out: NDArray[np.float64],
) -> None:
    """Votes of the last 400 queries that gave a token at least its even share; the 10 newest are safe."""
    history, total = len(attention), attention.shape[1]
    before = history - (total - prompt)
    live = np.zeros(total, np.uint8)
    live[:prompt] = 1
    ballots = np.zeros((history, total), np.uint8)
    votes = np.zeros(total)
    for q in range(before):
        length = prompt - before + q + 1
        for i in range(length):
            ballots[q, i] = attention[q, i] >= 1.0 / length
            votes[i] += ballots[q, i]
    count = prompt
    for step in range(total - prompt + 1):
        length = prompt + step
        q = before + step - 1
        if step:
            live[length - 1] = 1
            count += 1
            mass = 0.0
            for i in range(length):
                mass += attention[q, i] * live[i]
            for i in range(length):
                ballots[q, i] = live[i] and attention[q, i] >= mass / count
                votes[i] += ballots[q, i]
            if q >= WINDOW:
                for i in range(length):
                    votes[i] -= ballots[q - WINDOW, i]
        budget = keep(ratio, length)
        drop_lowest(live, votes, length - min(10, budget - 1), count - budget)
        count = min(count, budget)
        if step % EVERY == 0:
            measure(live, length, out[step // EVERY])


@njit
def random(
    attention: NDArray[np.float32],
    accumulated: NDArray[np.float32],
    prompt: int,
    ratio: float,
    out: NDArray[np.float64],
) -> None:
    """Any token but the newest; attention plays no part."""
    total = attention.shape[1]
    live = np.zeros(total, np.uint8)
    live[:prompt] = 1
    count = prompt
    np.random.seed(int(accumulated[1] * 1e6) % (1 << 31))
    for step in range(total - prompt + 1):
        length = prompt + step
        if step:
            live[length - 1] = 1
            count += 1
        budget = keep(ratio, length)
        drop_lowest(live, np.random.random(total), length - 1, count - budget)
        count = min(count, budget)
        if step % EVERY == 0:
            measure(live, length, out[step // EVERY])


@njit
def streaming(
    attention: NDArray[np.float32],
    accumulated: NDArray[np.float32],
    prompt: int,
    ratio: float,
    out: NDArray[np.float64],
) -> None:
    """Four sinks and the newest; attention plays no part."""
    total = attention.shape[1]
    live = np.zeros(total, np.uint8)
    for length in range(prompt, total + 1):
        live[:length] = 0
        live[:4] = 1
        live[length - (keep(ratio, length) - 4) : length] = 1
        if (length - prompt) % EVERY == 0:
            measure(live, length, out[(length - prompt) // EVERY])


POLICIES: dict[str, Callable[..., None]] = {
    "h2o": h2o,
    "scissor": scissor,
    "tova": tova,
    "random": random,
    "streaming": streaming,
}
ATTENDING = ("h2o", "scissor", "tova")
"""The policies that look at attention, and so the ones that a model can be fitted to."""


def run(
    attention: NDArray[np.float32],
    accumulated: NDArray[np.float32],
    prompt: int,
    policies: tuple[str, ...] = tuple(POLICIES),
) -> dict[str, NDArray[np.float64]]:
    """Apply policies to one sequence.

    Parameters
    ----------
    attention
        float32[H + G, P + G]: full-cache attention of the last H prompt queries and of the G decode steps.
    accumulated
        float32[P]: column sums of the prompt.
    prompt
        P.
    policies
        Names from :data:`POLICIES`.

    Returns
    -------
    dict
        For each policy float64[ratio, checkpoint, block size, measure]; checkpoint 0 is the end of the prompt.
    """
    checkpoints = (attention.shape[1] - prompt) // EVERY + 1
    found = {}
    for name in policies:
        out = np.zeros((len(RATIOS), checkpoints, len(BLOCK_SIZES), len(MEASURES)))
        for i, ratio in enumerate(RATIOS):
            POLICIES[name](attention, accumulated, prompt, ratio, out[i])
        found[name] = out
    return found
