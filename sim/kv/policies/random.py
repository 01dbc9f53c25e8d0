"""Random eviction: the control that every score must beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.policies.base import ScorePolicy, policies
from sim.kv.view import View

__all__ = ["Random"]


@policies.register("random")
@dataclass(frozen=True, slots=True)
class Random(ScorePolicy):
    """Every live token but the newest is as likely to die as every other.

    Compare random_press of NVIDIA/kvpress, which draws once at the end of the prompt. With a new draw each time a
    request is over budget (the default), a token alive at length L0 is still alive at length L with probability
    ``(L0 / L) ** ((1 - b) / b)`` under a budget share b: old tokens thin out. With one draw a token for good
    (``redraw=false``) they do not.

    Parameters
    ----------
    redraw
        Draw anew each time, or once a token.
    """

    redraw: bool = True

    def score(self, view: View) -> NDArray[np.float32]:
        """Return uniform draws that depend on (request, token) and, when redrawing, on the length."""
        out: NDArray[np.float32] = view.scratch[1]
        when = view.length if self.redraw else np.zeros_like(view.length)
        _uniform(view.key, view.start, view.n, when, view.position, out)
        return out


@njit
def _uniform(
    key: np.ndarray, start: np.ndarray, n: np.ndarray, when: np.ndarray, position: np.ndarray, out: np.ndarray
) -> None:
    """Fill the requests' cells with uniform numbers in [0, 1): a 32-bit mix of (key, when, position)."""
    for b in range(len(start)):
        mixed = (key[b] + np.uint64(when[b]) * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        salt = np.uint32((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(16))
        mine, tokens = out[start[b] : start[b] + n[b]], position[start[b] : start[b] + n[b]]
        for i in range(len(mine)):
            x = np.uint32(np.uint32(tokens[i]) * np.uint32(0x9E3779B1)) ^ salt
            x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
            x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
            x = np.uint32(x ^ (x >> np.uint32(16)))
            # Through int32: conversions of unsigned integers do not vectorise on AVX2.
            mine[i] = np.float32(np.int32(x >> np.uint32(8))) * np.float32(1.0 / (1 << 24))
