"""Pictures of the paper's claims beside what was simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.study.paper.claims import RETAINED, THROUGHPUT
from sim.study.paper.evidence import Cell, Evidence, Limit, cells, figure
from sim.study.paper.reproduce import Reproduction
from sim.study.paper.setups import ALWAYS, BASE, MODELS, POLICIES, RATIOS, SYSTEMS, VTOKEN
from sim.study.plots.medium import styled
from sim.study.plots.style import (
    figure_legend,
    legend_beside,
    new_figure,
    policy_colour,
    reclaimer_hatch,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "frontier", "gains", "sensitivity"]

BAND = "#D9D9D9"
MARKERS = dict(zip(RATIOS, ("o", "s", "^"), strict=True))
SPAN = 0.27


def draw(found: Reproduction, out: Path) -> list[Path]:
    """Write ``retained.png``, ``throughput.png``, ``sensitivity.png``, and ``frontier.png`` if that was searched."""
    evidence = found.evidence
    figures = {
        "retained": gains(
            evidence, RETAINED, "KV blocks a request, change against naive (%)", (-0.723, -0.272), bound=True
        ),
        "throughput": gains(
            evidence, THROUGHPUT, "requests/s, change against naive (%)", (0.099, 0.373), model=MODELS[1]
        ),
        "sensitivity": sensitivity(evidence),
    }
    if evidence.frontier:
        figures["frontier"] = frontier(evidence)
    for name, picture in figures.items():
        save(picture, out / f"{name}.png")
    return [out / f"{name}.png" for name in figures]


@styled
def gains(
    evidence: Evidence,
    column: str,
    label: str,
    paper: tuple[float, float],
    *,
    model: str | None = None,
    bound: bool = False,
) -> Figure:
    """Draw a change against naive eviction, world by world: a mark a set-up, and the paper's range as a band.

    Left the paper's reclaimer under memory pressure, in the middle at work always, right ours.
    """
    table = evidence.part("main")
    table = table[(table["policy"] != "full") & (table["model"] == model if model else True)]
    found: dict[tuple[str, float, float | str], list[Cell]] = {}
    for cell in cells(table, column):
        found.setdefault((cell.lengths, cell.memory, cell.load), []).append(cell)
    keys = sorted(found, key=lambda key: key[:2])
    picture = new_figure(11.0, 0.36 * len(keys) + 1.6)
    panels = picture.subplots(1, 3, sharex=True, sharey=True)
    for axes, reclaimer in zip(panels, SYSTEMS[1:], strict=True):
        axes.axvspan(100 * paper[0], 100 * paper[1], color=BAND, zorder=0)
        axes.axvline(0, color="#595959", linewidth=0.8)
        for place, key in enumerate(keys):
            if bound:
                _bound(axes, [cell.figure.mean for cell in found[key] if cell.reclaimer == "ideal"], place)
            _marks(axes, [cell for cell in found[key] if cell.reclaimer == reclaimer], place)
        axes.set_title(f"{_called(reclaimer)}, {model or 'all models'}")
    panels[1].set_xlabel(label)
    panels[0].set_yticks(
        range(len(keys)), [f"{lengths}, memory {memory:g}, load {load}" for lengths, memory, load in keys]
    )
    panels[0].invert_yaxis()
    handles = _handles(bound)
    figure_legend(picture, handles, [each.get_label() for each in handles], below=True)
    return picture


def _marks(axes: Axes, mine: Sequence[Cell], place: int) -> None:
    for cell in mine:
        value, offset = cell.figure, SPAN * (POLICIES.index(cell.policy) - 1)
        spread = [[100 * (value.mean - value.low)], [100 * (value.high - value.mean)]]
        axes.errorbar(
            [100 * value.mean], [place + offset], xerr=spread, fmt=MARKERS[cell.ratio], markersize=4, elinewidth=0.8,
            color=policy_colour(cell.policy), markerfacecolor="none", markeredgewidth=0.9,
        )  # fmt: skip


def _bound(axes: Axes, values: Sequence[float], place: int) -> None:
    """Mark how far a cache without holes gets at the most."""
    if values:
        axes.plot([100 * min(values)] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.2)


def _handles(bound: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    out: list[Any] = [
        Line2D([], [], color=policy_colour(name), marker="o", linestyle="", label=name) for name in POLICIES
    ]
    out += [
        Line2D([], [], color="black", marker=marker, linestyle="", markerfacecolor="none", label=f"{ratio:g} evicted")
        for ratio, marker in MARKERS.items()
    ]
    out.append(Patch(color=BAND, label="the paper's range"))
    if bound:
        out.append(Line2D([], [], color="black", linewidth=1.2, label="most of ideal"))
    return out


@styled
def frontier(evidence: Evidence) -> Figure:
    """Draw how many requests fit: the paper's figures, and ours by reclaimer, for H2O with half of the tokens kept."""
    rows = list(dict.fromkeys(row for row, _ in evidence.frontier))
    systems = (*SYSTEMS, "ideal")
    picture = new_figure(7.0, 3.4)
    axes = picture.subplots()
    width = 0.8 / (len(systems) + 1)
    at = np.arange(len(rows), dtype=float)
    found = {(row, limit.reclaimer): limit.value for row, limit in evidence.frontier if _is_half(limit)}
    found |= {(row, "native"): limit.value for row, limit in evidence.frontier if limit.policy == "full"}
    colour = policy_colour("h2o")
    for place, name in enumerate(("native", *systems)):
        heights = [found[row, name] for row in rows]
        look: dict[str, Any] = {"color": policy_colour("full") if name == "native" else "white"}
        look |= {} if name == "native" else {"edgecolor": colour, "hatch": reclaimer_hatch(name.partition(":")[0])}
        if name == ALWAYS:
            look["facecolor"] = "#CFE3F1"
        bars = axes.bar(at + (place - 2.5) * width, heights, 0.92 * width, label=_called(name), **look)
        axes.bar_label(bars, fmt="%d", padding=1, fontsize=8)
    for place, row in enumerate(rows):
        left, right = place - 0.42, place + 0.42
        for value, text in ((row.native, "paper, native"), (row.vtoken, "paper, vToken")):
            axes.hlines(value, left, right, color="#D55E00", linewidth=1.2, linestyle="--" if "native" in text else "-",
                        label=text if place == 0 else "_")  # fmt: skip
    axes.set_xticks(at, [f"{row.server.model}\n{row.server.memory:g} of the memory" for row in rows])
    axes.set_ylabel("requests that decode together")
    axes.margins(y=0.1)
    legend_beside(axes)
    return picture


def _is_half(limit: Limit) -> bool:
    return bool(limit.policy == "h2o" and limit.ratio == 0.5)


def _called(name: str) -> str:
    return {VTOKEN: "vtoken, under pressure", ALWAYS: "vtoken, always"}.get(name, name)


@styled
def sensitivity(evidence: Evidence) -> Figure:
    """Draw how blocks and throughput of vtoken change with what the paper does not tell, one thing at a time."""
    table = evidence.part("variant")
    mine = table[table["reclaimer"].str.startswith(VTOKEN)]
    names = list(dict.fromkeys(mine["variant"]))
    order = sorted(names, key=lambda name: (name != BASE, names.index(name)))
    lengths = list(dict.fromkeys(mine["lengths"]))
    picture = new_figure(8.0, 0.26 * len(order) + 1.4)
    both = picture.subplots(1, 2, sharey=True)
    panels: Sequence[tuple[str, str]] = (
        (RETAINED, "KV blocks a request (%)"),
        (THROUGHPUT, "requests/s (%)"),
    )
    for axes, (column, label) in zip(both, panels, strict=True):
        axes.axvline(0, color="#595959", linewidth=0.8)
        for which, each in enumerate(lengths):
            for place, name in enumerate(order):
                found = figure(mine[(mine["variant"] == name) & (mine["lengths"] == each)], column)
                spread = [[100 * (found.mean - found.low)], [100 * (found.high - found.mean)]]
                axes.errorbar(
                    [100 * found.mean], [place + 0.2 * (which - 0.5)], xerr=spread, fmt="os"[which], markersize=4,
                    color=("#0072B2", "#D55E00")[which], elinewidth=0.8, label=each if place == 0 else None,
                )  # fmt: skip
        axes.set_xlabel(f"{label}, change against naive")
    both[0].set_yticks(range(len(order)), order)
    both[0].invert_yaxis()
    figure_legend(picture, *both[0].get_legend_handles_labels(), below=True)
    return picture
