"""Quest: read less, evict nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import EvictionPolicy, policies

__all__ = ["Quest"]


@policies.register("quest")
@dataclass(frozen=True, slots=True)
class Quest(EvictionPolicy):
    """Evict nothing, and have each decode step read only the pages that its query is likely to look at: a control.

    Source: Tang et al., ICML 2024 (arXiv 2406.10774); mit-han-lab/Quest, quest_attention.py. The budget says how many
    tokens a step reads, in whole pages, not how many stay. To choose them, a query looks at the least and the largest
    key of every page, which together are as large as one token's key and value. The first layers read everything, as
    does prefill. It shows what of eviction's gain is read traffic, and what is memory: that stays as it is.

    Differences: the pages' extremes take no memory here (1 / ``page`` of the cache), and the choice itself no time. The
    reference's kernels read pages of 16 tokens; its budget is a number of tokens.

    Parameters
    ----------
    page
        Tokens in a page.
    least
        Pages that are read whatever the budget.
    dense
        Share of the layers that read everything: 2 of Llama's 32.
    """

    evicts: ClassVar[bool] = False

    page: int = 16
    least: int = 3
    dense: float = 2 / 32

    def __post_init__(self) -> None:
        if self.page < 1 or self.least < 0 or not 0 <= self.dense <= 1:
            raise InputError(
                "quest: expected page >= 1, least >= 0 and dense in [0, 1], "
                f"got page={self.page}, least={self.least}, dense={self.dense}"
            )

    def reads(self, slots: NDArray[np.int64], keep: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what the dense layers and the others read, as slots of all layers."""
        pages = -(-slots // self.page)
        chosen = np.minimum(np.maximum(keep // self.page, self.least), pages) * self.page
        sparse = np.minimum(np.minimum(chosen, slots) + pages, slots)
        read: NDArray[np.int64] = np.rint(self.dense * slots + (1 - self.dense) * sparse).astype(np.int64)
        return read
