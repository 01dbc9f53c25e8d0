"""KeyDiff: keys that are unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import NOBODY, ScorePolicy, policies
from sim.kv.view import View

__all__ = ["KeyDiff"]


@policies.register("keydiff")
@dataclass(frozen=True, slots=True)
class KeyDiff(ScorePolicy):
    """Keep the tokens whose keys are least like the mean key of the request.

    Source: Park et al., 2025 (arXiv 2504.15364); KeyDiffPress of NVIDIA/kvpress. A key's cosine with the mean of the
    unit keys has the order of its mean cosine with the other keys, which is what a view gives. The paper evicts after
    every block of the prompt, so that its cache is never larger than the budget; the press once, at the end of the
    prompt, which is when it is done here. In decode the scores change with every death: as a press in kvpress's
    DecodingPress they are taken anew every ``every`` tokens, and the excess dies then.

    Differences: one set of tokens for all layers and heads, on the mean over them. Reading the keys is free: once in
    ``every`` steps it is little beside what attention reads.

    Parameters
    ----------
    every
        Generated tokens from one eviction to the next. kvpress's default is 512; 128 as the paper's blocks.
    """

    needs: ClassVar[tuple[str, ...]] = ("similarity",)

    every: int = 128  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"keydiff: every: expected at least 1 token, got {self.every}")

    def score(self, view: View) -> NDArray[np.float32]:
        """Return how unlike the others each key is."""
        return np.negative(view.similarity())

    def select(self, view: View, excess: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take the lowest scores at the end of the prompt, and of the requests whose turn it is."""
        due = (view.length - view.prompt) % self.every == 0
        chosen = ScorePolicy.select(self, view.subset(due), excess[due])[0] if due.any() else NOBODY
        return chosen, np.where(due, excess, 0)
