"""What captures know of single layers: their scores at the end of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.view import View
from sim.serving.attention.capture import Capture
from sim.serving.attention.mapping import capture_of, in_prompt, scale_to

__all__ = ["LayerScores"]


@dataclass(frozen=True)
class LayerScores:
    """Scores of each layer, of all captures.

    Attributes
    ----------
    scores, rows
        float32[layers, prompt tokens of all captures]: column sums of the prompt, and of its last queries.
    """

    scores: NDArray[np.float32]
    rows: NDArray[np.float32]

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.scores)

    @classmethod
    def of(cls, captures: tuple[Capture, ...]) -> LayerScores | None:
        """Return what all captures know of equally many layers; None if some do not."""
        if len({len(capture.layer_scores) for capture in captures}) > 1 or not len(captures[0].layer_scores):
            return None
        return cls(
            *(np.concatenate([getattr(c, name) for c in captures], 1) for name in ("layer_scores", "layer_rows"))
        )

    def accumulated(self, view: View, sizes: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Write the recorded column sums of each row's layer, scaled to sum to the request's length."""
        _of_layer(*_of(view), 0, view.length, view.position, sizes, self.scores, out)

    def query(self, view: View, back: int, sizes: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Write the mean of the last queries of each row's layer, to the tokens that the query ``back`` could see."""
        _of_layer(*_of(view), back, np.ones_like(view.n), view.position, sizes, self.rows, out)


def _of(
    view: View,
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    return view.request_key, view.unit, view.start, view.n, view.length


@njit
def _of_layer(
    key: NDArray[np.uint64],
    layer: NDArray[np.int64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    length: NDArray[np.int64],
    back: int,
    total: NDArray[np.int64],
    position: NDArray[np.int32],
    sizes: NDArray[np.int64],
    known: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Write what is known of all positions but the last ``back``, scaled to sum to ``total``."""
    for i in range(len(start)):
        size = sizes[capture_of(key[i], len(sizes))]
        where = position[start[i] : start[i] + n[i]]
        answer = out[start[i] : start[i] + n[i]]
        visible = np.searchsorted(where, length[i] - back)
        answer[visible:] = np.float32(0)
        for j in range(visible):
            answer[j] = known[layer[i], size[5] + in_prompt(where[j], length[i], size[0])]
        if visible > 0:
            scale_to(answer[:visible], np.float32(total[i]))
