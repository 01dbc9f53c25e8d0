"""How full of live tokens the allocated blocks are, over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import PercentFormatter

from sim.study.plots.style import LIVENESS_COLOURS, axes_or_new, caption, legend_beside, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sim.study.result import RunResult

__all__ = ["liveness_over_time"]

CLASSES = {
    "empty": "no live slot",
    "q1": "up to 1/4 live",
    "q2": "1/4 to 1/2",
    "q3": "1/2 to 3/4",
    "q4": "3/4 and more",
    "full": "all live",
}


@styled
def liveness_over_time(result: RunResult, axes: Axes | None = None, *, legend: bool = True) -> Axes:
    """Draw the histogram of blocks by their share of live slots as a stacked area over time.

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
    counts = np.array([result.liveness[name] for name in CLASSES], np.float64)
    allocated = counts.sum(axis=0)
    shares = counts / np.maximum(allocated, 1)
    axes.stackplot(
        result.liveness["clock_s"], shares, labels=list(CLASSES.values()), colors=LIVENESS_COLOURS, linewidth=0
    )
    axes.set(xlabel="simulated time (s)", ylabel="allocated blocks", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.margins(x=0)
    total = allocated.sum()
    sparse = counts[:3].sum() / total if total else 0.0
    caption(axes, f"{result.config.label}: {sparse:.0%} of allocated blocks at most half live")
    if legend:
        legend_beside(axes, reverse=True, title="share of slots live")
    return axes
