"""Expected attention: what the queries to come are likely to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import NOBODY, ScorePolicy, policies
from sim.kv.view import View

__all__ = ["ExpectedAttention"]


@policies.register("expected_attention")
@dataclass(frozen=True, slots=True)
class ExpectedAttention(ScorePolicy):
    """At the end of the prompt, keep what future queries can be expected to attend to, by the length of its values.

    Source: Devoto et al., 2025 (arXiv 2510.00636); ExpectedAttentionPress of NVIDIA/kvpress. Queries to come are taken
    to be normal with mean and covariance of the prompt's, turned to the mean of the next 512 positions; a token is
    worth the attention that this gives it times the norm of its value. That attention comes from the attention model
    (docs/attention.md). The first ``sinks`` tokens stay, and what is generated: the budget is of the prompt.

    Differences: one set of tokens for all layers and heads, by the mean attention over them times the mean norm, there
    each head's product (``experiments/00_attention_fit/assumptions.py``: rank correlations of 0.96 to 0.98); after a
    preemption the recomputed sequence is the prompt.

    Parameters
    ----------
    sinks
        Oldest tokens that stay.
    """

    needs: ClassVar[tuple[str, ...]] = ("expected", "value_norms")
    prompt_only: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("expected_attention",)

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise InputError(f"expected_attention: sinks: expected 0 or more, got {self.sinks}")

    def begin(self, view: View) -> None:
        """Work out the prompt's scores."""
        view.set("expected_attention", view.expected())
        view.multiply("expected_attention", view.value_norms())

    def score(self, view: View) -> NDArray[np.float32]:
        """Return them."""
        return view.columns["expected_attention"]

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Protect the sinks."""
        return np.full(len(view), self.sinks), NOBODY
