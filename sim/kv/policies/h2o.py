"""H2O: heavy hitters and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import NOBODY, ScorePolicy, policies
from sim.kv.view import View

__all__ = ["H2O"]


@policies.register("h2o")
@dataclass(frozen=True, slots=True)
class H2O(ScorePolicy):
    """Keep the newest tokens and, of the rest, those that have gathered most attention.

    Source: Zhang et al., NeurIPS 2023 (arXiv 2306.14048); FMInference/H2O. The reference keeps heavy : recent = 1 : 1
    for each head; here one set of tokens serves all layers and heads, because one block table does (scores are means
    over them). Without protected recent tokens the cache would freeze: a new token starts at 0 and would die at once.

    Parameters
    ----------
    recent
        Share of the budget that goes to the newest tokens.
    """

    attends: ClassVar[bool] = True
    pools: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("h2o_accumulated",)

    recent: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.recent <= 1:
            raise InputError(f"h2o: recent: expected a share in (0, 1], got {self.recent}")

    def begin(self, view: View) -> None:
        """Start from what each token got from all queries of the prompt."""
        view.set("h2o_accumulated", view.accumulated())

    def observe(self, view: View) -> None:
        """Add the attention of the newest query."""
        view.add_attention("h2o_accumulated")

    def score(self, view: View) -> NDArray[np.float32]:
        """Return the accumulated attention."""
        return view.columns["h2o_accumulated"]

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Protect the recent share of the budget."""
        return NOBODY, (self.recent * view.keep).astype(np.int64)
