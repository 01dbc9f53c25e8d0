"""PagedEviction: whole pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import EvictionPolicy, policies
from sim.kv.policies.kernels import worst_pages
from sim.kv.view import View

__all__ = ["PagedEviction"]

_SCORE = "paged_eviction"


@policies.register("paged_eviction")
@dataclass(frozen=True, slots=True)
class PagedEviction(EvictionPolicy):
    """When the newest page is full, drop the pages whose values are shortest by their keys, until the budget is met.

    Source: Chitty-Venkata et al., 2025 (arXiv 2509.04377). A token is worth the norm of its value over that of its key,
    a page the mean of its tokens. A page is ``block_size`` consecutive positions; without a repack that is a block, so
    that every death frees one and naive reclamation has nothing left to win. The newest page, full or not, never dies:
    a request holds up to a page more than its budget, and one page at least.

    Differences: the paper drops single tokens of the prompt before they are put into pages; here they lie in blocks
    when the prompt is complete, so whole pages die then as well. One set of pages for all layers and heads, by the
    quotient of mean norms (``experiments/00_attention_fit/assumptions.py``: rank correlations of 0.98 to 1.00 with the
    mean of the heads' quotients).

    Parameters
    ----------
    block_size
        Tokens in a page; that of the KV cache unless said otherwise.
    """

    needs: ClassVar[tuple[str, ...]] = ("key_norms", "value_norms")
    columns: ClassVar[tuple[str, ...]] = (_SCORE,)

    block_size: int = 16

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InputError(f"paged_eviction: block_size: expected at least 1 token, got {self.block_size}")

    @property
    def every(self) -> int:  # type: ignore[override]
        """A page."""
        return self.block_size

    @property
    def granule(self) -> int:  # type: ignore[override]
        """A page."""
        return self.block_size

    def begin(self, view: View) -> None:
        """Work out the prompt's scores."""
        view.set(_SCORE, view.value_norms())
        view.divide(_SCORE, view.key_norms())

    def observe(self, view: View) -> None:
        """Work out the newest token's."""
        cells = view.newest
        values = view.value_norms(newest=True)[cells]
        view.columns[_SCORE][cells] = values / view.key_norms(newest=True)[cells]

    def select(self, view: View, excess: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take the pages of least mean score."""
        due = (view.length == view.prompt) | (view.length % self.block_size == 0)
        counts = np.zeros(len(view), np.int64)
        cells = np.empty(int(view.n[due].sum()), np.int64)
        score = view.columns[_SCORE]
        over = np.where(due, excess, 0)
        found = worst_pages(view.start, view.n, view.position, score, over, self.block_size, cells, counts)
        return cells[:found], counts
