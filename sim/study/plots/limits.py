"""What a search tried, and what held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

from sim.study.plots.style import axes_or_new, caption, legend_beside, policy_colour, reclaimer_marker, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sim.study.library import SearchResult

__all__ = ["search_probes"]


@styled
def search_probes(found: SearchResult, axes: Axes | None = None) -> Axes:
    """Draw every value that was tried: filled where it holds, open where it fails; a line a search.

    Parameters
    ----------
    found
        What a search gave back.
    axes
        Where to draw; a new figure if None.
    """
    rows = found.answers
    axes = axes_or_new(axes, height=max(2.4, 1.0 + 0.45 * len(rows)))
    for place, (policy, reclaimer, answer) in enumerate(
        zip(rows["policy"], rows["reclaimer"], rows[found.metric], strict=True)
    ):
        probes = found.probes[found.probes["search"] == place]
        colour, marker = policy_colour(policy), reclaimer_marker(reclaimer)
        axes.axhline(place, color="#D9D9D9", linewidth=mpl.rcParams["grid.linewidth"], zorder=1)
        for holds, fill in ((True, colour), (False, "white")):
            values = probes.loc[probes["holds"] == holds, "value"]
            axes.plot(
                values, [place] * len(values), linestyle="", marker=marker, color=colour, markerfacecolor=fill, zorder=2
            )
        if answer is not None and answer == answer:
            text = f"{answer:.0f}" if answer == int(answer) else f"{answer:.4g}"
            axes.annotate(text, (answer, place), (0, 4), textcoords="offset points", ha="center")
    axes.set_yticks(range(len(rows)), list(rows["label"]))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"{found.metric} ({found.unit})")
    for name, fill in (("holds", "black"), ("fails", "white")):
        axes.plot([], [], linestyle="", marker="o", color="black", markerfacecolor=fill, label=name)
    caption(axes, "Probes of each search")
    legend_beside(axes)
    return axes
