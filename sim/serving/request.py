"""A request while it is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["RequestState"]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from its arrival to its end. What changes every step is in its row of the cache."""

    ordinal: int
    req_id: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    key: int
    hashes: tuple[int, ...] = ()
    length: int = 0
    produced: int = 0
    row: int = -1
    admitted_ns: int = -1
    preemptions: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    identities: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    totals: dict[str, Any] = field(default_factory=dict)
    """Statistics of rows it has lost to preemption."""

    def keep_statistics(self, record: dict[str, Any]) -> None:
        """Add a row's statistics to those of the rows that the request had before."""
        totals = self.totals
        for name in ("decode_ns", "block_ns", "over_ns", "evicted", "moved"):
            totals[name] = totals.get(name, 0) + record[name]
        totals["peak"] = max(totals.get("peak", 0), record["peak"])
        totals["blocks"] = record["blocks"]
        totals["live"] = record["live"]
        if record["first_token_ns"]:
            totals["first_token_ns"] = record["first_token_ns"]
