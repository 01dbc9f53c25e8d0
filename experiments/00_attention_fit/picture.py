"""The picture: how far every simulated share of blocks is from the measured one."""

from __future__ import annotations

from pathlib import Path

import open_loop
import pandas as pd

from sim.study.plots.style import new_figure, policy_colour, save, styled

TITLES = {"h2o": "H2O", "scissor": "Scissorhands", "tova": "TOVA"}
NAMES = {"h2o": "h2o", "scissor": "scissorhands", "tova": "tova"}
MARKERS = {"dead": "o", "partial": "s", "reclaim": "^"}


@styled
def draw(table: pd.DataFrame, path: Path) -> None:
    """Write a panel for each policy and moment: difference against measured share, by measure and block size."""
    figure = new_figure(7.0, 7.0)
    panels = figure.subplots(len(TITLES), 2, sharex=True, sharey=True)
    sizes = dict(zip(open_loop.BLOCK_SIZES, (8, 16, 30, 52), strict=True))
    for row, (policy, title) in enumerate(TITLES.items()):
        for axes, when in zip(panels[row], ("prompt end", "decode"), strict=True):
            axes.axhspan(-3, 3, color="#595959", alpha=0.12, lw=0)
            axes.axhline(0, color="#595959", lw=0.8)
            cells = table[(table.policy == policy) & (table.when == when)]
            for (measure, size), some in cells.groupby(["measure", "block_size"]):
                axes.scatter(
                    some.measured_pct,
                    some.difference_points,
                    s=sizes[size],
                    marker=MARKERS[measure],
                    facecolors="none",
                    edgecolors=policy_colour(NAMES[policy]),
                    linewidths=0.9,
                )
            axes.set_title(f"{title}, {when} (largest {cells.difference_points.abs().max():.1f})")
            axes.set(xlim=(-2, 100), ylim=(-8, 8))
    for axes in panels[-1]:
        axes.set_xlabel("measured share, % of blocks")
    for axes in panels[:, 0]:
        axes.set_ylabel("synthetic - measured, points")
    first, empty = panels[0][0], {"facecolors": "none", "edgecolors": "#595959"}
    shapes = [first.scatter([], [], s=20, marker=shape, label=name, **empty) for name, shape in MARKERS.items()]
    shapes += [first.scatter([], [], s=area, label=f"blocks of {size}", **empty) for size, area in sizes.items()]
    figure.legend(handles=shapes, loc="outside lower center", ncols=len(shapes), columnspacing=1.0, handletextpad=0.2)
    save(figure, path)
