"""The pool's blocks before and after a repack."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap

from sim.errors import InputError
from sim.study.plots.style import LIVENESS_COLOURS, SLOT_COLOURS, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.study.result import RunResult

__all__ = ["pool_before_after", "window"]

MOST_BLOCKS = 4096


@styled
def pool_before_after(result: RunResult) -> Figure:
    """Draw the pool as a grid of blocks, coloured by their share of live slots, around the repack that freed most.

    Of a large pool, the blocks around those that the repack touched are shown. A block that it changed has a mark.

    Raises
    ------
    InputError
        If the run committed no repack.
    """
    snapshot = result.pool_snapshot
    if snapshot is None:
        raise InputError(f"run {result.config_hash}: no repack was committed, there is no pool to draw")
    changed = (snapshot["live_before"] != snapshot["live_after"]) | (
        snapshot["owner_before"] != snapshot["owner_after"]
    )
    shown = window(changed)
    columns = max(16, math.ceil(math.sqrt(2 * len(shown))))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(10.0, 1.6 + 4.2 * rows / columns)
    panels = figure.subplots(1, 2)
    colours = ListedColormap([SLOT_COLOURS["free"], *LIVENESS_COLOURS])
    norm = BoundaryNorm(np.arange(-0.5, 7), 7)
    used = {}
    for axes, when in zip(panels, ("before", "after"), strict=True):
        live, owner = snapshot[f"live_{when}"], snapshot[f"owner_{when}"]
        used[when] = int((owner >= 0).sum())
        grid = np.full(rows * columns, np.nan)
        grid[: len(shown)] = _classes(live, owner, result.config.block_size)[shown]
        image = axes.imshow(grid.reshape(rows, columns), cmap=colours, norm=norm, interpolation="nearest")
        marks = np.flatnonzero(changed[shown])
        size = (120 / columns) ** 2
        axes.scatter(marks % columns, marks // columns, s=size, color="#D55E00", marker=".", linewidth=0)
        axes.set(xticks=[], yticks=[], title=f"{when}: {used[when]:,} blocks in use")
        axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=panels, ticks=range(7), shrink=0.9, aspect=25)
    bar.ax.set_yticklabels(["free", "none", "≤ 1/4", "≤ 1/2", "≤ 3/4", "< 1", "all"])
    bar.set_label("share of the block's slots live")
    part = "" if len(shown) == len(changed) else f" ({len(shown):,} of {len(changed):,} blocks shown)"
    figure.suptitle(
        f"{result.config.label}: a repack at {snapshot['clock_s']:.2f} s frees {used['before'] - used['after']} blocks"
        f"{part}; dots: blocks it changed",
        fontsize=10,
    )
    return figure


def window(
    changed: np.ndarray[Any, np.dtype[np.bool_]], most: int = MOST_BLOCKS
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the ids of the blocks to show, at most ``most`` in a row, with as many changed ones as can be."""
    if len(changed) <= most:
        return np.arange(len(changed))
    inside = np.concatenate(([0], np.cumsum(changed)))
    counts = inside[most:] - inside[:-most]
    first = int(np.argmax(counts))
    return np.arange(first, first + most)


def _classes(
    live: np.ndarray[Any, Any], owner: np.ndarray[Any, Any], block_size: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return 0 for a free block, 1 for one without a live slot, 2 to 5 by quarter, 6 for one all live."""
    quarter = np.ceil(4 * live / block_size).astype(np.int64)
    classes = np.where(live == block_size, 6, np.where(live == 0, 1, 1 + quarter))
    return np.where(owner < 0, 0, classes)
