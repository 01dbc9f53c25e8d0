"""Attention, keys and values as a test says, for the golden cases of policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from sim.kv.view import View


@dataclass
class Scripted:
    """Answers what it is told: by query position for attention, by token position for everything else."""

    prompt: dict[int, list[float]] = field(default_factory=dict)
    """Probability for each token, by query."""
    sums: list[float] = field(default_factory=list)
    """Column sums of the prompt."""
    like: list[float] = field(default_factory=list)
    """Mean cosine with other keys."""
    keys: list[float] = field(default_factory=list)
    """Norms of keys."""
    values: list[float] = field(default_factory=list)
    """Norms of values."""
    hopes: list[float] = field(default_factory=list)
    """Expected attention."""
    columns: ClassVar[tuple[str, ...]] = ()

    def begin(self, view: View) -> None:
        pass

    def accumulated(self, view: View, out: np.ndarray) -> None:
        for start, n in zip(view.start, view.n, strict=True):
            out[start : start + n] = self.sums

    def query(self, view: View, back: int, out: np.ndarray) -> None:
        for start, n, length in zip(view.start, view.n, view.length, strict=True):
            asked = self.prompt[int(length) - 1 - back]
            out[start : start + n] = asked + [0.0] * (int(n) - len(asked))

    def attend(self, view: View, out: np.ndarray) -> None:
        for start, n, length in zip(view.start, view.n, view.length, strict=True):
            whole = np.array(self.prompt[int(length) - 1])
            out[start : start + n] = whole[view.position[start : start + n]]

    def similarity(self, view: View, out: np.ndarray) -> None:
        self._tell(view, self.like, out)

    def key_norms(self, view: View, newest: bool, out: np.ndarray) -> None:
        self._tell(view, self.keys, out, newest)

    def value_norms(self, view: View, newest: bool, out: np.ndarray) -> None:
        self._tell(view, self.values, out, newest)

    def expected(self, view: View, out: np.ndarray) -> None:
        self._tell(view, self.hopes, out)

    @staticmethod
    def _tell(view: View, known: list[float], out: np.ndarray, newest: bool = False) -> None:
        for start, n in zip(
            view.newest if newest else view.start, np.ones_like(view.n) if newest else view.n, strict=True
        ):
            out[start : start + n] = np.array(known)[view.position[start : start + n]]
