"""The work of a step: what the scheduler counts for the cost model and the metrics."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NEEDS_BLOCKS", "NEEDS_CELLS", "W"]


class _Work(NamedTuple):
    """Indices into the work of a step."""

    TOKENS: int = 0  # scheduled tokens
    SEQS: int = 1  # scheduled requests
    KV_READ: int = 2  # slots that attention reads, dead ones in listed blocks included; by weight over units
    PAIRS: int = 3  # query-key pairs, by weight over units
    TOKENS_LEFT: int = 4  # of the step's token budget
    LISTED: int = 5  # blocks in the tables of scheduled requests, all units
    SIZE: int = 6


W = _Work()

NEEDS_BLOCKS = 1
"""Why a request cannot be served now: the pool has too few blocks."""
NEEDS_CELLS = 2
"""The token table has too few cells for it."""
