"""Latency of requests: the distributions of a run, the percentiles of a sweep."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sim.errors import InputError, did_you_mean
from sim.study.plots.style import (
    axes_or_new,
    caption,
    figure_legend,
    legend_beside,
    log_axis,
    new_figure,
    policy_colour,
    reclaimer_line,
    reclaimer_marker,
    styled,
)
from sim.study.tables import Grid, comparison

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.study.result import RunResult

__all__ = ["latency_by_setting", "latency_cdf", "latency_distribution", "latency_ranges"]

KINDS = {
    "ttft_s": "time to first token (s)",
    "tpot_s": "time per output token (s)",
    "e2e_s": "end to end (s)",
}
MARKED = (50, 95)


@styled
def latency_cdf(result: RunResult) -> Figure:
    """Draw the distribution over requests of TTFT, TPOT and end-to-end latency, with the median and p95 marked."""
    figure = new_figure(9.0, 3.2)
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, name in zip(panels, KINDS, strict=True):
        _distribution(axes, result, name)
    panels[0].set_ylabel("requests")
    caption(figure, f"{result.config.label}: latency of {result.summary['finished']:,} finished requests")
    return figure


@styled
def latency_distribution(result: RunResult, latency: str = "e2e_s", axes: Axes | None = None) -> Axes:
    """Draw the distribution over requests of one latency, with the median and p95 marked.

    Parameters
    ----------
    result
        The run.
    latency
        ``ttft_s``, ``tpot_s`` or ``e2e_s``.
    axes
        Where to draw; a new figure if None.

    Raises
    ------
    InputError
        If there is no such latency.
    """
    axes = axes_or_new(axes)
    label = _label_of(latency)
    _distribution(axes, result, latency)
    axes.set_ylabel("requests")
    caption(axes, f"{result.config.label}: {label.partition(' (')[0]} of {result.summary['finished']:,} requests")
    return axes


def _distribution(axes: Axes, result: RunResult, latency: str) -> None:
    values = result.requests[latency]
    known = np.sort(values[np.isfinite(values)])
    axes.set_xlabel(KINDS[latency])
    if len(known):
        shares = np.arange(1, len(known) + 1) / len(known)
        axes.plot(known, shares, color=policy_colour(result.config.policy), drawstyle="steps-post")
        for percent in MARKED:
            at = float(np.percentile(known, percent))
            axes.plot([at, at], [0, percent / 100], color="#8C8C8C", linewidth=0.8, linestyle="--")
            axes.annotate(f" p{percent} {at:.3g} s", (at, 0.02), rotation=90, va="bottom", ha="right")
        if known[0] > 0:
            axes.set_xscale("log")
            log_axis(axes.xaxis)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _label_of(latency: str) -> str:
    if latency not in KINDS:
        raise InputError(f"latency {latency!r}: expected one of {', '.join(KINDS)}{did_you_mean(latency, KINDS)}")
    return KINDS[latency]


@styled
def latency_by_setting(table: pd.DataFrame) -> Figure:
    """Draw p50 to p95 of each latency for every setting and reclaimer of a sweep.

    Parameters
    ----------
    table
        One row a run, as :meth:`sim.study.store.Store.frame` gives it.
    """
    grids = {name: {p: comparison(table, f"{name}_p{p}") for p in MARKED} for name in KINDS}
    first = grids["ttft_s"][50]
    reclaimers = first.reclaimers
    figure = new_figure(10.0, _height(first))
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, name in zip(panels, KINDS, strict=True):
        handles = _ranges(axes, grids[name], name)
    figure_legend(figure, handles, reclaimers, title="p50 (open) to p95")
    caption(figure, "Latency by policy, budget and reclaimer")
    return figure


@styled
def latency_ranges(table: pd.DataFrame, latency: str = "e2e_s", axes: Axes | None = None) -> Axes:
    """Draw p50 to p95 of one latency for every setting and reclaimer of a sweep.

    Parameters
    ----------
    table
        One row a run, as :func:`sim.sweep` gives it.
    latency
        ``ttft_s``, ``tpot_s`` or ``e2e_s``.
    axes
        Where to draw; a new figure if None.

    Raises
    ------
    InputError
        If there is no such latency.
    """
    label = _label_of(latency)
    grids = {p: comparison(table, f"{latency}_p{p}") for p in MARKED}
    axes = axes_or_new(axes, height=_height(grids[MARKED[0]]))
    handles = _ranges(axes, grids, latency)
    legend_beside(axes, handles=handles, labels=grids[50].reclaimers, title="p50 (open) to p95")
    caption(axes, f"{label.partition(' (')[0].capitalize()} by policy, budget and reclaimer")
    return axes


def _height(grid: Grid) -> float:
    """Return the inches on a screen that a row a setting and a line a reclaimer take."""
    lines = max(len(grid.present(row)) for row in range(len(grid.keys))) + 1
    return max(2.2, 1.3 + 0.13 * len(grid.keys) * lines)


def _ranges(axes: Axes, grids: dict[int, Grid], latency: str) -> list[Any]:
    """Draw a row a setting; return a line a reclaimer for the legend."""
    first = grids[MARKED[0]]
    for row, key in enumerate(first.keys):
        present = first.present(row)
        for order, column in enumerate(present):
            low, high = (grids[p].cells[row][column].mean for p in MARKED)
            _range(axes, low, high, row + _offset(order, len(present)), str(key[0]), first.reclaimers[column])
    axes.set_xlabel(KINDS[latency])
    axes.set_xlim(0, None)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="x")
    axes.set_yticks(range(len(first.keys)), [_label(key) for key in first.keys])
    axes.set_ylim(len(first.keys) - 0.5, -0.5)
    return [_range(axes, math.nan, math.nan, 0, "full", reclaimer) for reclaimer in first.reclaimers]


def _offset(place: int, of: int) -> float:
    """Spread the reclaimers of a setting around its row."""
    return 0.72 * ((place + 0.5) / of - 0.5)


def _range(axes: Any, low: float, high: float, place: float, policy: str, reclaimer: str) -> Any:
    """Draw p50 (open) and p95 (filled), joined; return the line for a legend."""
    colour, marker = policy_colour(policy), reclaimer_marker(reclaimer)
    axes.plot(low, place, marker=marker, color=colour, markerfacecolor="white", linestyle="", clip_on=False, zorder=3)
    (line,) = axes.plot(
        [low, high],
        [place, place],
        color=colour,
        linestyle=reclaimer_line(reclaimer),
        marker=marker,
        markevery=[1],
        clip_on=False,
    )
    return line


def _label(key: tuple[Any, ...]) -> str:
    return " ".join(str(part) for part in key)
