"""How fast a device is now, against when its profile was made: its matrices are timed again."""

from __future__ import annotations

from functools import partial

import numpy as np

from gpu_validate.device import Device
from gpu_validate.matrices import Matrices
from gpu_validate.timing import Case, Op, clock_for, measure, usual_quantile
from sim.serving.models import Model
from sim.serving.profile import CostProfile

__all__ = ["slower_now"]

MOST_TOKENS = 64
ROUNDS = 9


def slower_now(profile: CostProfile, model: Model, device: Device) -> float:
    """Return by which factor the matrices take longer than the profile says: 1 if nothing has changed.

    Parameters
    ----------
    profile
        Made on this device.
    model
        Its model.
    device
        The device.
    """
    weights = Matrices(model, MOST_TOKENS, device=device.spec, dtype=profile.kv_dtype)
    clock = clock_for(device.spec, quick=True)

    def prepare(tokens: int) -> Op:
        return lambda _: weights.all_layers(tokens)

    counts, times = np.array(profile.gemm_ns.points).T
    cases = [Case("matrices", {"tokens": n}, clock, partial(prepare, n)) for n in (1, 4, 16, MOST_TOKENS)]
    measured = measure(cases, rounds=ROUNDS, quantile=usual_quantile(device.spec))
    return float(np.median([one.ns / np.interp(one.point["tokens"], counts, times) for one in measured]))
