"""Bars by policy, budget and reclaimer: fragmentation, blocks a request holds, concurrency, throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from sim.errors import InputError, did_you_mean
from sim.study.plots.style import axes_or_new, legend_beside, new_figure, policy_colour, reclaimer_hatch, styled
from sim.study.tables import Grid, Spread, comparison

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "bars_by_setting",
    "concurrency_by_setting",
    "fragmentation_by_setting",
    "retained_by_setting",
    "setting_bars",
    "throughput_by_setting",
]


def fragmentation_by_setting(table: pd.DataFrame) -> Figure:
    """Draw fragmentation (mean over time); the pale foot of a bar is tail slack, which no reclaimer can win."""
    title = "Fragmentation by policy, budget and reclaimer; pale: its part in tails"
    return bars_by_setting(
        table, "fragmentation_mean", "fragmentation F (mean over time)", title, foot="tail_slack_mean"
    )


def retained_by_setting(table: pd.DataFrame) -> Figure:
    """Draw how many blocks a request holds on average."""
    return bars_by_setting(
        table,
        "retained_blocks_mean",
        "KV blocks a request holds (mean)",
        "Blocks held while decoding, by policy, budget and reclaimer",
    )


def concurrency_by_setting(table: pd.DataFrame) -> Figure:
    """Draw how many requests run at once on average."""
    return bars_by_setting(
        table, "mean_running", "requests running (mean over time)", "Concurrency by policy, budget and reclaimer"
    )


def throughput_by_setting(table: pd.DataFrame) -> Figure:
    """Draw how many requests finish in a second."""
    return bars_by_setting(
        table, "requests_per_s", "finished requests per second", "Throughput by policy, budget and reclaimer"
    )


@styled
def bars_by_setting(table: pd.DataFrame, column: str, label: str, title: str, *, foot: str | None = None) -> Figure:
    """Draw a figure of the summary as bars: a panel a policy, a group a budget, a bar a reclaimer.

    Parameters
    ----------
    table
        One row a run, as :meth:`sim.study.store.Store.frame` gives it. Bars are means over seeds; with several seeds a
        whisker shows the 95 % bootstrap interval.
    column
        The figure.
    label, title
        Of the axis and of the picture.
    foot
        A figure that is part of ``column``, shown pale at the foot of each bar.
    """
    grid = comparison(table, column)
    feet = None if foot is None else comparison(table, foot)
    policies = list(dict.fromkeys(key[0] for key in grid.keys))
    rows = {policy: [row for row, key in enumerate(grid.keys) if key[0] == policy] for policy in policies}
    widths = [len(rows[policy]) + 0.5 for policy in policies]
    bars = max(len(grid.present(row)) for row in range(len(grid.keys)))
    longest = max(len(str(part)) for key in grid.keys for part in key[1:])
    figure = new_figure(max(6.5, 2.4 + max(0.2 * bars, 0.08 * longest) * sum(widths)), 3.4)
    panels = figure.subplots(1, len(policies), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, policy in zip(panels, policies, strict=True):
        _groups(axes, grid, feet, rows[policy])
        axes.set_xticks(range(len(rows[policy])), [_keeps(grid.keys[row]) for row in rows[policy]])
        axes.set_title(policy, color=policy_colour(policy))
    panels[0].set_ylabel(label)
    figure.supxlabel("budget: share of the tokens kept" + "".join(f", {name}" for name in grid.names[2:]), fontsize=9)
    figure.legend(_handles(grid), list(grid.reclaimers), loc="outside right upper", title="reclaimer", alignment="left")
    figure.suptitle(title, fontsize=10)
    return figure


@styled
def setting_bars(table: pd.DataFrame, column: str = "retained_blocks_mean", axes: Axes | None = None) -> Axes:
    """Draw a figure of the summary as bars in one panel: a group for each policy and budget, a bar a reclaimer.

    Parameters
    ----------
    table
        One row a run, as :func:`sim.sweep` gives it. Bars are means over seeds, with their 95 % bootstrap interval.
    column
        The figure; docs/metrics.md says what there is.
    axes
        Where to draw; a new figure if None.

    Raises
    ------
    InputError
        If the table has no such figure.
    """
    if column not in table:
        raise InputError(f"column {column!r}: the table has none of that name{did_you_mean(column, table.columns)}")
    grid = comparison(table, column)
    axes = axes_or_new(axes)
    _groups(axes, grid, None, range(len(grid.keys)))
    axes.set_xticks(range(len(grid.keys)), ["\n".join(str(part) for part in key) for key in grid.keys])
    axes.set(xlabel=", ".join(["policy", "budget", *grid.names[2:]]), ylabel=column)
    axes.set_title(f"{column} by policy, budget and reclaimer")
    legend_beside(axes, handles=_handles(grid), labels=list(grid.reclaimers), title="reclaimer", alignment="left")
    return axes


def _groups(axes: Axes, grid: Grid, feet: Grid | None, rows: Sequence[int]) -> None:
    """Draw a group of bars for each of these rows, side by side from 0."""
    for group, row in enumerate(rows):
        present = grid.present(row)
        for order, column_at in enumerate(present):
            below = 0.0 if feet is None else feet.cells[row][column_at].mean
            at = group + 0.84 * ((order + 0.5) / len(present) - 0.5)
            width = 0.8 / max(len(present), 2)
            policy, reclaimer = str(grid.keys[row][0]), grid.reclaimers[column_at]
            _bar(axes, at, width, grid.cells[row][column_at], below, policy, reclaimer)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", linewidth=0.4, color="#D9D9D9")


def _handles(grid: Grid) -> list[Patch]:
    """Return what a legend shows for each reclaimer."""
    return [
        Patch(facecolor="#BFBFBF", edgecolor="black", linewidth=0.6, hatch=reclaimer_hatch(name))
        for name in grid.reclaimers
    ]


def _bar(axes: Axes, at: float, width: float, value: Spread, foot: float, policy: str, reclaimer: str) -> None:
    mean, half = value
    look: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.6, "hatch": reclaimer_hatch(reclaimer)}
    axes.bar(at, mean - foot, width, bottom=foot, facecolor=policy_colour(policy), **look)
    if foot:
        axes.bar(at, foot, width, facecolor=(*_pale(policy_colour(policy)),), **look)
    if half:
        axes.errorbar(at, mean, yerr=half, color="black", linewidth=0.9, capsize=2)


def _pale(colour: str) -> tuple[float, ...]:
    """Mix a colour with three parts of white."""
    from matplotlib.colors import to_rgb

    return tuple(0.25 * part + 0.75 for part in to_rgb(colour))


def _keeps(key: tuple[Any, ...]) -> str:
    return "\n".join(str(part) for part in key[1:])
