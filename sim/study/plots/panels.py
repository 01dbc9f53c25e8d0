"""One small picture for each policy and reclaimer of a sweep, side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.lines import Line2D

from sim.study.plots.style import caption, caption_of, current_style, figure_legend, new_figure, styled

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
    figure = new_figure(max(6.5, 1.8 + 2.7 * columns), 0.9 + 2.1 * len(groups))
    panels = figure.subplots(len(groups), columns, sharex="row", sharey=True, squeeze=False)
    handles: list[Any] = []
    labels: list[str] = []
    for row, group in zip(panels, groups, strict=True):
        for axes, result in zip(row, group, strict=False):
            draw(result, axes, legend=False)
            _name_panel(axes, figure.get_figwidth() / columns)
            axes.set(xlabel="", ylabel="")
            # Not every run has every layer; the fullest legend explains all.
            handles, labels = max((handles, labels), axes.get_legend_handles_labels(), key=lambda pair: len(pair[1]))
        for axes in row[len(group) :]:
            axes.set_axis_off()
        row[0].set_ylabel(_label(draw))
    figure.supxlabel("simulated time (s)")
    figure_legend(figure, handles[::-1], labels[::-1], title=legend_title)
    caption(figure, title)
    return figure


def _name_panel(axes: Axes, width: float) -> None:
    """Write the setting above a panel, and the finding too where pictures have titles.

    Lines break where they would run into the next panel's: ``width`` is what a panel and its labels take, in inches.
    """
    style = current_style()
    setting, _, finding = caption_of(axes).partition(": ")
    parts = [setting, finding.partition(" (mean over")[0]] if style.titles else [setting]
    letters = int(0.85 * width / style.letter)
    axes.set_title("\n".join(textwrap.fill(part, letters) for part in parts), fontsize=mpl.rcParams["font.size"])


def _label(draw: Callable[..., Axes]) -> str:
    return "token slots" if draw.__name__ == "slots_over_time" else "allocated blocks"


@styled
def cdf_panels(groups: Sequence[Sequence[RunResult]], draw: Callable[..., Axes], title: str) -> Figure:
    """Draw one panel for each pair group, two in a row, with ``draw(group, axes, legend=False)``."""
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure = new_figure(5.0 * columns + 1.0, 0.5 + 2.7 * rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    looks: dict[str, Any] = {}
    for place, (axes, group) in enumerate(zip(panels, groups, strict=False)):
        draw(group, axes, legend=False)
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True):
            looks[name] = Line2D([], [], color="black", linestyle=line.get_linestyle())
        _name_panel(axes, figure.get_figwidth() / columns)
        if place % columns:
            axes.set_ylabel("")
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    figure_legend(figure, list(looks.values()), list(looks), title="reclaimer")
    caption(figure, title)
    return figure
