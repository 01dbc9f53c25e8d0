"""Shorten the step columns of a long run without losing totals or time averages."""

from __future__ import annotations

import numpy as np

from sim.study.columns import Columns

__all__ = ["COUNTS", "thin_steps"]

FIRST = frozenset({"step", "clock_s"})
COUNTS = frozenset(
    {
        "n_steps",
        "dt_s",
        "sched_tokens",
        "sched_reqs",
        "preemptions",
        "freed_by_death",
        "freed_by_repack",
        "evicted",
        "moved",
        "copy_s",
    }
)
"""Columns that add up over steps; those not here or in ``FIRST`` are levels."""


def thin_steps(steps: Columns, rows: int) -> Columns:
    """Merge neighbouring rows until at most ``rows`` are left.

    Times and counts are summed, levels become means weighted by the time of their steps, ``step`` and ``clock_s`` are
    the first of each group. Levels are ``float64`` afterwards, whether or not anything was merged.
    """
    n = len(steps["step"])
    group = -(-n // rows) if n > rows else 1
    edges = np.arange(0, n, group)
    dt_s = steps["dt_s"].astype(np.float64)
    # Groups of zero-length steps would divide by zero: weigh their rows alike.
    weight = dt_s if group == 1 or np.all(np.add.reduceat(dt_s, edges) > 0) else dt_s + np.finfo(np.float64).tiny
    thinned: Columns = {}
    for name, values in steps.items():
        if name in FIRST:
            thinned[name] = values[edges]
        elif name in COUNTS:
            thinned[name] = values if group == 1 else np.add.reduceat(values, edges)
        elif group == 1:
            thinned[name] = values.astype(np.float64)
        else:
            thinned[name] = np.add.reduceat(values * weight, edges) / np.add.reduceat(weight, edges)
    return thinned
