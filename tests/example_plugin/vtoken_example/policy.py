"""A policy: what each token is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim import InputError
from sim.kv.policies import ScorePolicy
from sim.kv.view import View


@dataclass(frozen=True, slots=True)
class EveryOther(ScorePolicy):
    """Keep the tokens that got most attention since the prompt; at odd positions it counts half."""

    attends: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("every_other_attention",)

    recent: int = 8

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise InputError(f"every_other: recent: expected 0 or more, got {self.recent}")

    def begin(self, view: View) -> None:
        """Start from the last query of the prompt."""
        view.set("every_other_attention", view.query(0))

    def observe(self, view: View) -> None:
        """Add the newest query's attention."""
        view.add("every_other_attention", view.attention())

    def score(self, view: View) -> NDArray[np.float32]:
        """Return the attention, half of it at odd positions."""
        return view.columns["every_other_attention"] * (1 - 0.5 * (view.position % 2)).astype(np.float32)

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Never let one of the newest die."""
        return np.zeros(len(view), np.int64), np.full(len(view), self.recent, np.int64)
