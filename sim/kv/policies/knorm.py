"""KNorm: short keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.kv.policies.base import ScorePolicy, policies
from sim.kv.view import View

__all__ = ["KNorm"]


@policies.register("knorm")
@dataclass(frozen=True, slots=True)
class KNorm(ScorePolicy):
    """Keep the tokens with the shortest keys: those tend to be attended to most.

    Source: Devoto et al., 2024 (arXiv 2406.11430); KnormPress of NVIDIA/kvpress, which evicts at the end of the prompt.
    A score never changes once its token is written, so it costs one number a token, and no attention. Here tokens die
    in decode as well, whenever a request is over its budget.

    Differences: one set of tokens for all layers and heads, on the mean over them; the paper leaves out layers in which
    the rule does not hold.
    """

    needs: ClassVar[tuple[str, ...]] = ("key_norms",)
    columns: ClassVar[tuple[str, ...]] = ("knorm_score",)

    def begin(self, view: View) -> None:
        """Note the prompt's norms."""
        view.set("knorm_score", view.key_norms(), sign=-1)

    def observe(self, view: View) -> None:
        """Note the newest token's norm."""
        cells = view.newest
        view.columns["knorm_score"][cells] = -view.key_norms(newest=True)[cells]

    def score(self, view: View) -> NDArray[np.float32]:
        """Return the norms, negative."""
        return view.columns["knorm_score"]
