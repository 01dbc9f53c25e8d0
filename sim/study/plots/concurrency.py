"""How many requests run at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.study.plots.style import axes_or_new, caption, legend_beside, policy_colour, styled
from sim.study.thin import thin_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sim.study.result import RunResult

__all__ = ["concurrency_over_time"]

ROWS = 1200


@styled
def concurrency_over_time(result: RunResult, axes: Axes | None = None) -> Axes:
    """Draw running and waiting requests over time, and mark steps that preempted."""
    axes = axes_or_new(axes)
    steps = thin_steps(result.steps, ROWS)
    clock_s = steps["clock_s"]
    axes.plot(clock_s, steps["running"], color=policy_colour(result.config.policy), label="running")
    axes.plot(clock_s, steps["waiting"], color="#8C8C8C", linestyle="--", label="waiting")
    preempting = steps["preemptions"] > 0
    if preempting.any():
        axes.plot(
            clock_s[preempting],
            steps["running"][preempting],
            linestyle="",
            marker="x",
            color="#D55E00",
            label="preemption",
        )
    axes.set(xlabel="simulated time (s)", ylabel="requests", ylim=(0, None))
    axes.margins(x=0)
    summary = result.summary
    caption(
        axes,
        f"{result.config.label}: {summary['mean_running'] or 0:.1f} running on average, {summary['peak_running']} at "
        f"most, {summary['preemptions']:,} preemptions",
    )
    legend_beside(axes)
    return axes
