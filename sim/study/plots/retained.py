"""How many KV blocks a request holds while it decodes: distributions, and pairs of the same request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import PercentFormatter

from sim.errors import InputError
from sim.study.plots.style import (
    axes_or_new,
    base_name,
    caption,
    legend_beside,
    log_axis,
    policy_colour,
    reclaimer_line,
    styled,
)
from sim.study.result import RunResult
from sim.study.tables import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sim.study.columns import Columns

__all__ = ["paired_reduction", "reduction_cdf", "retained_cdf"]


@styled
def retained_cdf(results: RunResult | Sequence[RunResult], axes: Axes | None = None, *, legend: bool = True) -> Axes:
    """Draw the distribution over requests of the blocks each holds (mean over its decode).

    Parameters
    ----------
    results
        One, which gets its peak and its count at the end as well, or a pair group: equal but for the reclaimer.
    axes
        Where to draw; a new figure if None.
    legend
        Whether to explain the lines beside the axes.
    """
    axes = axes_or_new(axes)
    results = [results] if isinstance(results, RunResult) else results
    if len(results) == 1:
        (result,) = results
        kinds = {"retained_blocks": "mean", "retained_blocks_peak": "peak", "retained_blocks_finish": "at its end"}
        lines = {label: _held(result.requests[name]) for name, label in kinds.items()}
        looks = dict(zip(lines, ("-", (0, (4, 1.5)), ":"), strict=True))
    else:
        lines = {result.config.reclaimer: _held(result.requests["retained_blocks"]) for result in results}
        looks = {reclaimer: reclaimer_line(reclaimer) for reclaimer in lines}
    colour = policy_colour(results[0].config.policy)
    for label, values in lines.items():
        _cdf(axes, values, label=label, color=colour, linestyle=looks[label])
    axes.set(xlabel="KV blocks a request holds", ylabel="requests", ylim=(0, 1))
    if any(map(len, lines.values())):
        axes.set_xscale("log")
        log_axis(axes.xaxis)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    caption(axes, f"{_setting(results[0])}: median {_medians(lines)}")
    if legend:
        legend_beside(axes)
    return axes


@styled
def reduction_cdf(results: Sequence[RunResult], axes: Axes | None = None, *, legend: bool = True) -> Axes:
    """Draw the distribution over requests of the change in blocks against the same request under naive reclamation.

    Parameters
    ----------
    results
        A pair group with a naive run in it.
    axes
        Where to draw; a new figure if None.
    legend
        Whether to explain the lines beside the axes.

    Raises
    ------
    InputError
        If there is no naive run.
    """
    axes = axes_or_new(axes)
    naive = next((result for result in results if base_name(result.config.reclaimer) == BASELINE), None)
    if naive is None:
        raise InputError(f"reduction_cdf: expected a run with reclaimer {BASELINE!r} among the results")
    colour = policy_colour(naive.config.policy)
    medians = {}
    for result in results:
        if result is naive:
            continue
        change = paired_reduction(result.requests, naive.requests)
        look = reclaimer_line(result.config.reclaimer)
        _cdf(axes, change, label=result.config.reclaimer, color=colour, linestyle=look)
        medians[result.config.reclaimer] = np.median(change) if len(change) else np.nan
    axes.axvline(0, color="#8C8C8C", linewidth=0.8)
    axes.set(xlabel="change in blocks held, against naive", ylabel="requests", ylim=(0, 1))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    told = ", ".join(f"{name} {value:+.0%}" for name, value in medians.items())
    caption(axes, f"{_setting(naive)}: median {told}")
    if legend:
        legend_beside(axes)
    return axes


def paired_reduction(requests: Columns, naive: Columns) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return ``retained / retained under naive - 1`` of each request that finished in both runs."""
    ours = {name: place for place, name in enumerate(requests["req_id"])}
    pairs = [(ours[name], place) for place, name in enumerate(naive["req_id"]) if name in ours]
    left, right = np.array(pairs, np.int64).reshape(-1, 2).T
    before, after = naive["retained_blocks"][right], requests["retained_blocks"][left]
    both = (before > 0) & (after > 0)
    change: np.ndarray[Any, np.dtype[np.float64]] = after[both] / before[both] - 1.0
    return change


def _cdf(axes: Axes, values: np.ndarray[Any, Any], **look: Any) -> None:
    """Draw the share of ``values`` up to x; NaN (never decoded) is left out."""
    known = np.sort(values[np.isfinite(values)])
    axes.plot(known, np.arange(1, len(known) + 1) / max(len(known), 1), drawstyle="steps-post", **look)


def _held(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the counts of requests that held any block."""
    return values[values > 0]


def _setting(result: RunResult) -> str:
    keeps = result.config.keeps
    return result.config.policy if keeps == "all" else f"{result.config.policy} keeping {keeps}"


def _medians(lines: dict[str, np.ndarray[Any, Any]]) -> str:
    parts = []
    for label, values in lines.items():
        known = values[np.isfinite(values)]
        parts.append(f"{np.median(known):.0f} ({label})" if len(known) else f"- ({label})")
    return ", ".join(parts)
