"""The fewest tokens that must be copied to free some blocks of a request: what no planner can beat.

From the live tokens of its blocks alone, in table order. For tests and experiments: exact, in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = ["Bound", "fewest_copies"]

Bound = Literal["any", "fresh", "ordered"]


def fewest_copies(live: Sequence[int], size: int, bound: Bound) -> list[int]:
    """Return, for 0, 1, 2, ... blocks won, the fewest tokens to copy; as far as blocks can be won at all.

    Parameters
    ----------
    live
        Live tokens of each block, in table order.
    size
        Slots a block.
    bound
        What a copy may do. ``any``: put a token into any dead slot. The tokens of each freed block have to go
        elsewhere, and no g blocks have fewer than the g emptiest: nothing beats it. ``fresh``: into fresh blocks only,
        which count against the blocks won. ``ordered``: into fresh blocks, one after the other in the place of
        neighbouring ones, so that logical order is kept; any number of such runs.
    """
    if bound == "ordered":
        return _ordered(live, size)
    copies = [0]
    total = 0
    room = len(live) * size - sum(live)
    for k, tokens in enumerate(sorted(live), 1):
        total += tokens
        room -= size - tokens
        won = k if bound == "any" else k - -(-total // size)
        if bound == "any" and total > room:
            break
        if won == len(copies):
            copies.append(total)
    return copies


def _ordered(live: Sequence[int], size: int) -> list[int]:
    """Go through the blocks; ``best[g]`` is the fewest copies among those so far that win g."""
    best: list[list[float]] = [[0.0]]
    for end in range(1, len(live) + 1):
        now = [*best[end - 1], float("inf")]
        total = 0
        for first in range(end - 1, -1, -1):  # a run that ends here
            total += live[first]
            won = end - first - -(-total // size)
            for g, copied in enumerate(best[first]):
                if won > 0 and copied + total < now[g + won]:
                    now[g + won] = copied + total
        best.append(now)
    # Who may win more may win less: of a run's blocks leave some where they are.
    copies = best[-1]
    for g in range(len(copies) - 2, -1, -1):
        copies[g] = min(copies[g], copies[g + 1])
    return [int(c) for c in copies if c < float("inf")]
