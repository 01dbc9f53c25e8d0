"""Which of a capture's tokens stands for one of a request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.bits import mix, row_sum, xor
from sim.jit import njit

__all__ = ["capture_of", "in_capture", "in_prompt", "mirrored", "scale_to"]


@njit
def capture_of(key: np.uint64, captures: int) -> int:
    """Return which capture a request replays."""
    mixed = mix(xor(np.uint32(key), mix(np.uint32(key >> np.uint64(32)))))
    return int(np.int64(mixed) % captures)


@njit
def mirrored(step: int, low: int, high: int) -> int:
    """Return ``step`` up to ``high``; beyond, the values between ``low`` and ``high``, back and forth."""
    if step <= high or high == low:
        return min(step, high)
    phase = (step - high) % (2 * (high - low))
    return high - phase if phase <= high - low else low + phase - (high - low)


@njit
def in_prompt(position: int, prompt: int, recorded: int) -> int:
    """Return which of the capture's prompt tokens stands for this one."""
    if position == 0 or recorded == 1:
        return 0
    return 1 + (position - 1) * (recorded - 1) // max(prompt - 1, 1)


@njit
def in_capture(position: int, prompt: int, recorded: int, steps: int) -> int:
    """Return which of the capture's tokens stands for this one, for ever; what was generated goes back and forth."""
    if position < prompt:
        return in_prompt(position, prompt, recorded)
    return recorded + mirrored(position - prompt, steps // 2, steps - 1)


@njit
def scale_to(row: NDArray[np.float32], total: np.float32) -> None:
    """Scale ``row`` to sum to ``total``; spread it evenly where all that the query looked at is gone."""
    found = row_sum(row)
    if found > 0:
        scale = total / found
        row *= scale
    else:
        row[:] = total / np.float32(len(row))
