"""An attention model: who looks at whom, and how hard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim import InputError
from sim.kv.view import View


@dataclass(frozen=True)
class SinkAndRecent:
    """A share of each query's attention goes to the oldest live token, the rest fades with distance."""

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]] = ()

    sink: float = 0.3
    half_life: float = 64.0

    def __post_init__(self) -> None:
        if not 0 <= self.sink < 1 or self.half_life <= 0:
            raise InputError("sink_and_recent: expected sink in [0, 1) and half_life above 0")

    def begin(self, view: View) -> None:
        """Do nothing: there is no state."""

    def accumulated(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the sum over all queries of the prompt."""
        for cells, positions in self._rows(view):
            total = np.zeros(len(positions))
            for query in range(len(positions)):
                total[: query + 1] += self._of(positions[: query + 1], positions[query])
            out[cells] = total

    def query(self, view: View, back: int, out: NDArray[np.float32]) -> None:
        """Write the attention of one query of the prompt."""
        for (cells, positions), length in zip(self._rows(view), view.length, strict=True):
            asked = int(length) - 1 - back
            seen = int(np.searchsorted(positions, asked, side="right"))
            weights = np.zeros(len(positions), np.float32)
            if asked >= 0:
                weights[:seen] = self._of(positions[:seen], asked)
            out[cells] = weights

    def attend(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the attention of the newest query over the live tokens."""
        for cells, positions in self._rows(view):
            out[cells] = self._of(positions, positions[-1])

    def _rows(self, view: View) -> list[tuple[slice, NDArray[np.int64]]]:
        """Return the cells and the positions of each request's live tokens."""
        spans = [slice(start, start + n) for start, n in zip(view.start.tolist(), view.n.tolist(), strict=True)]
        return [(span, view.position[span].astype(np.int64)) for span in spans]

    def _of(self, positions: NDArray[np.int64], query: int) -> NDArray[np.float64]:
        fading: NDArray[np.float64] = 0.5 ** ((query - positions) / self.half_life)
        weights = (1 - self.sink) * fading / fading.sum()
        weights[0] += self.sink
        return weights
