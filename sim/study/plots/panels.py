"""One small picture for each policy and reclaimer of a sweep, side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sim.study.plots.style import new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.study.result import RunResult

__all__ = ["cdf_panels", "time_panels"]


@styled
def time_panels(
    groups: Sequence[Sequence[RunResult]], draw: Callable[..., Axes], title: str, legend_title: str | None = None
) -> Figure:
    """Draw runs over time: a row for each pair group, a column for each reclaimer, one scale in a row.

    Parameters
    ----------
    groups
        Runs that are equal but for the reclaimer, group by group.
    draw
        Draws one run into axes, as :func:`sim.study.plots.slots.slots_over_time` does.
    title, legend_title
        Of the picture and of its legend.
    """
    columns = max(len(group) for group in groups)
    figure = new_figure(1.8 + 2.7 * columns, 0.9 + 2.1 * len(groups))
    panels = figure.subplots(len(groups), columns, sharex="row", sharey=True, squeeze=False)
    handles: list[Any] = []
    labels: list[str] = []
    for row, group in zip(panels, groups, strict=True):
        for axes, result in zip(row, group, strict=False):
            draw(result, axes, legend=False)
            setting, _, finding = axes.get_title("left").partition(": ")
            _set_title(axes, setting, finding.partition(" (")[0], width=38)
            axes.set(xlabel="", ylabel="")
            # Not every run has every layer; the fullest legend explains all.
            handles, labels = max((handles, labels), axes.get_legend_handles_labels(), key=lambda pair: len(pair[1]))
        for axes in row[len(group) :]:
            axes.set_axis_off()
        row[0].set_ylabel(_label(draw))
    figure.supxlabel("simulated time (s)", fontsize=9)
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", title=legend_title, alignment="left")
    figure.suptitle(title, fontsize=10)
    return figure


def _set_title(axes: Axes, setting: str, finding: str, width: int) -> None:
    """Set a title in lines of at most ``width`` characters, or it would run into the next panel's."""
    axes.set_title("\n".join(textwrap.fill(part, width) for part in (setting, finding)), fontsize=8)


def _label(draw: Callable[..., Axes]) -> str:
    return "token slots" if draw.__name__ == "slots_over_time" else "allocated blocks"


@styled
def cdf_panels(groups: Sequence[Sequence[RunResult]], draw: Callable[..., Axes], title: str) -> Figure:
    """Draw one panel for each pair group, two in a row, with ``draw(group, axes)``."""
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure = new_figure(5.6 * columns, 0.5 + 2.7 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, group in zip(panels, groups, strict=False):
        draw(group, axes)
        setting, _, finding = axes.get_title("left").partition(": ")
        _set_title(axes, setting, finding, width=60)
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    return figure
