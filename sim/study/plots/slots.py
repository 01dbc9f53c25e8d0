"""What the slots of the pool hold over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.study.plots.style import SLOT_COLOURS, SLOT_HATCHES, axes_or_new, caption, count_axis, legend_beside, styled
from sim.study.thin import thin_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sim.study.result import RunResult

__all__ = ["slots_over_time"]

ROWS = 1200

MOSTLY_FREE = 0.4
"""Below this share of the pool in use, the axis ends above what is used, or nothing could be seen."""


@styled
def slots_over_time(result: RunResult, axes: Axes | None = None, *, legend: bool = True) -> Axes:
    """Draw live, dead, tail and free slots as a stacked area; together they are the pool.

    Parameters
    ----------
    result
        The run.
    axes
        Where to draw; a new figure if None.
    legend
        Whether to explain the colours beside the axes.
    """
    axes = axes_or_new(axes)
    steps = thin_steps(result.steps, ROWS)
    size = result.config.block_size
    layers = {
        "live": steps["live_slots"],
        "dead": steps["dead_slots"],
        "tail, not yet written": steps["tail_slots"],
        "copy destination": steps["reserved_blocks"] * size,
        "free": steps["free_blocks"] * size,
    }
    layers = {name: values for name, values in layers.items() if name != "copy destination" or np.any(values)}
    axes.stackplot(
        steps["clock_s"],
        *layers.values(),
        labels=list(layers),
        colors=[SLOT_COLOURS[name] for name in layers],
        hatch=[SLOT_HATCHES.get(name, "") for name in layers],
        edgecolor="white",  # of the hatch; there is no line
        linewidth=0,
    )
    axes.set(xlabel="simulated time (s)", ylabel="token slots of the KV pool")
    axes.margins(0)
    count_axis(axes.yaxis)
    taken = steps["used_blocks"] * size
    pool = float((taken + steps["free_blocks"] * size).max())
    if taken.max() < MOSTLY_FREE * pool:
        axes.set_ylim(0, max(1.3 * taken.max(), 1))
        axes.set_ylabel(f"token slots (the pool has {pool:,.0f})")
    dead = result.summary["dead_fraction_mean"]
    caption(axes, f"{result.config.label}: {dead or 0:.0%} of allocated slots dead (mean over time)")
    if legend:
        legend_beside(axes, reverse=True)
    return axes
