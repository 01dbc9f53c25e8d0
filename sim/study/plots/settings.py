"""Bars by policy, budget and reclaimer: fragmentation, blocks a request holds, concurrency, throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from sim.errors import InputError, did_you_mean
from sim.study.plots.style import (
    axes_or_new,
    caption,
    current_style,
    edge_colour,
    figure_legend,
    legend_beside,
    new_figure,
    policy_colour,
    reclaimer_hatch,
    styled,
)
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

WIDEST = 12.6
"""Inches on a screen; more policies go into another line of panels."""

GREY = "#BFBFBF"

MARGINS = 2.4
"""What labels and legend take of that."""


def fragmentation_by_setting(table: pd.DataFrame) -> Figure:
    """Draw fragmentation (mean over time); the pale foot of a bar is tail slack, which no reclaimer can win."""
    label, title = "fragmentation F (mean over time)", "Fragmentation by policy, budget and reclaimer"
    return bars_by_setting(table, "fragmentation_mean", label, title, foot={"tail_slack_mean": "in tails"})


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
def bars_by_setting(
    table: pd.DataFrame, column: str, label: str, title: str, *, foot: dict[str, str] | None = None
) -> Figure:
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
        A figure that is part of ``column``, shown pale at the foot of each bar, with its name in the legend.
    """
    grid = comparison(table, column)
    feet = None
    handles = dict(zip(grid.reclaimers, _handles(grid), strict=True))
    if foot is not None:
        ((part, name),) = foot.items()
        feet = comparison(table, part)
        handles[name] = Patch(facecolor=_pale(GREY), edgecolor="black")
    policies = list(dict.fromkeys(key[0] for key in grid.keys))
    rows = {policy: [row for row, key in enumerate(grid.keys) if key[0] == policy] for policy in policies}
    per_group = _group_width(grid)
    widths = {policy: per_group * (len(rows[policy]) + 0.5) for policy in policies}
    lines = _lines(widths, WIDEST - MARGINS)
    widest = max(sum(widths[policy] for policy in line) for line in lines)
    figure = new_figure(max(6.5, MARGINS + widest), 0.8 + 2.6 * len(lines))
    first: Axes | None = None
    places = figure.add_gridspec(len(lines), 1)
    for at, line in enumerate(lines):
        taken = [widths[policy] for policy in line]
        rest = [widest - sum(taken)] if widest > 1.001 * sum(taken) else []
        cells = places[at].subgridspec(1, len(taken + rest), width_ratios=taken + rest)
        for panel, policy in enumerate(line):
            axes = figure.add_subplot(cells[panel], sharey=first)
            first = first or axes
            _groups(axes, grid, feet, rows[policy])
            axes.set_xticks(range(len(rows[policy])), [_keeps(grid.keys[row]) for row in rows[policy]])
            axes.set_title(policy, color=policy_colour(policy))
            axes.tick_params(labelleft=panel == 0)
    fits = len(label) <= int(0.62 * figure.get_figheight() / current_style().letter)
    figure.supylabel(label if fits else label.replace(" (", "\n("))
    figure.supxlabel("budget: share of the tokens kept" + "".join(f", {name}" for name in grid.names[2:]))
    figure_legend(figure, list(handles.values()), list(handles), title="reclaimer")
    caption(figure, title)
    return figure


def _group_width(grid: Grid) -> float:
    """Return the inches on a screen that a group of bars and what is written under it take."""
    bars = max(len(grid.present(row)) for row in range(len(grid.keys)))
    return max(0.2 * bars, max(_written(str(part)) for key in grid.keys for part in key[1:]))


def _written(text: str) -> float:
    """Return the inches on a screen that make room for a text."""
    style = current_style()
    return (len(text) + 1) * style.letter / style.shrink


def _lines(widths: dict[str, float], widest: float) -> list[list[str]]:
    """Break a line of panels where it would get wider than ``widest``."""
    lines: list[list[str]] = [[]]
    left = widest
    for policy, width in widths.items():
        if lines[-1] and width > left:
            lines.append([])
            left = widest
        lines[-1].append(policy)
        left -= width
    return lines


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
    policies = [str(key[0]) for key in grid.keys]
    labels = [_keeps(key) for key in grid.keys]
    per_group, width = _group_width(grid), 1.5
    for policy in dict.fromkeys(policies):
        rows = [row for row, name in enumerate(policies) if name == policy]
        for row in rows:  # once for all its budgets; the others get an empty line, to stay on one height with it
            labels[row] += f"\n{policy if row == rows[(len(rows) - 1) // 2] else ' '}"
        width += max(per_group * len(rows), _written(policy))
    axes = axes_or_new(axes, max(7.0, width))
    _groups(axes, grid, None, range(len(grid.keys)))
    axes.set_xticks(range(len(grid.keys)), labels)
    axes.set(xlabel=", ".join(["budget", *grid.names[2:], "policy"]), ylabel=column)
    caption(axes, f"{column} by policy, budget and reclaimer")
    legend_beside(axes, handles=_handles(grid), labels=list(grid.reclaimers), title="reclaimer")
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
    axes.grid(axis="y")


def _handles(grid: Grid) -> list[Patch]:
    """Return what a legend shows for each reclaimer."""
    return [Patch(facecolor=GREY, edgecolor="black", hatch=reclaimer_hatch(name)) for name in grid.reclaimers]


def _bar(axes: Axes, at: float, width: float, value: Spread, foot: float, policy: str, reclaimer: str) -> None:
    mean, half = value
    look: dict[str, Any] = {"edgecolor": edge_colour(policy_colour(policy)), "hatch": reclaimer_hatch(reclaimer)}
    axes.bar(at, mean - foot, width, bottom=foot, facecolor=policy_colour(policy), **look)
    if foot:
        axes.bar(at, foot, width, facecolor=_pale(policy_colour(policy)), **look)
    if half:
        axes.errorbar(at, mean, yerr=half, color="black")


def _pale(colour: str) -> tuple[float, float, float]:
    """Mix a colour with three parts of white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (0.25 * part + 0.75 for part in to_rgb(colour))
    return red, green, blue


def _keeps(key: tuple[Any, ...]) -> str:
    return "\n".join(str(part) for part in key[1:])
