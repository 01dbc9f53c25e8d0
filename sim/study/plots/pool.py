"""The pool's blocks before and after a repack."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.lines import Line2D

from sim.errors import InputError
from sim.study.plots.style import (
    LIVENESS_COLOURS,
    SLOT_COLOURS,
    axes_or_new,
    caption,
    figure_legend,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.study.result import RunResult

__all__ = ["pool_before_after", "pool_blocks", "window"]

MOST_BLOCKS = 4096

CHANGED = "#D55E00"


@styled
def pool_before_after(result: RunResult) -> Figure:
    """Draw the pool as a grid of blocks, coloured by their share of live slots, around the repack that freed most.

    Of a large pool, the blocks around those that the repack touched are shown. A block that it changed has a mark.

    Raises
    ------
    InputError
        If the run committed no repack.
    """
    snapshot, changed = _snapshot(result)
    shown = window(changed)
    columns = _columns(shown)
    figure = new_figure(10.0, max(2.8, 1.2 + 4.3 * math.ceil(len(shown) / columns) / columns))
    panels = figure.subplots(1, 2)
    images = [_draw(axes, result, when) for axes, when in zip(panels, ("before", "after"), strict=True)]
    _explain(figure.colorbar(images[-1], ax=panels, ticks=range(7), shrink=0.9, aspect=25))
    dot = Line2D([], [], linestyle="", marker=".", color=CHANGED)
    figure_legend(figure, [dot], ["block that the repack changed"], below=True)
    used = {when: int((snapshot[f"owner_{when}"] >= 0).sum()) for when in ("before", "after")}
    part = "" if len(shown) == len(changed) else f" ({len(shown):,} of {len(changed):,} blocks shown)"
    caption(
        figure,
        f"{result.config.label}: a repack at {snapshot['clock_s']:.2f} s frees {used['before'] - used['after']} blocks"
        f"{part}",
    )
    return figure


@styled
def pool_blocks(result: RunResult, when: Literal["before", "after"] = "before", axes: Axes | None = None) -> Axes:
    """Draw the pool's blocks by their share of live slots, before or after the repack that freed most.

    Parameters
    ----------
    result
        The run.
    when
        ``before`` or ``after``.
    axes
        Where to draw; a new figure if None.

    Raises
    ------
    InputError
        If the run committed no repack, or ``when`` is neither.
    """
    if when not in ("before", "after"):
        raise InputError(f"when: expected 'before' or 'after', got {when!r}")
    _snapshot(result)
    axes = axes_or_new(axes)
    image = _draw(axes, result, when)
    figure = axes.get_figure()
    assert figure is not None
    _explain(figure.colorbar(image, ax=axes, ticks=range(7), shrink=0.9, aspect=25))
    return axes


def _snapshot(result: RunResult) -> tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return the pool around the repack that freed most, and which of its blocks that changed."""
    snapshot = result.pool_snapshot
    if snapshot is None:
        raise InputError(f"run {result.config_hash}: no repack was committed, there is no pool to draw")
    changed = (snapshot["live_before"] != snapshot["live_after"]) | (
        snapshot["owner_before"] != snapshot["owner_after"]
    )
    return snapshot, changed


def _columns(shown: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    return max(16, math.ceil(math.sqrt(2 * len(shown))))


def _draw(axes: Axes, result: RunResult, when: str) -> Any:
    """Draw the blocks at one time as a grid; return the image, for a colour bar."""
    snapshot, changed = _snapshot(result)
    shown = window(changed)
    columns = _columns(shown)
    rows = math.ceil(len(shown) / columns)
    live, owner = snapshot[f"live_{when}"], snapshot[f"owner_{when}"]
    grid = np.full(rows * columns, np.nan)
    grid[: len(shown)] = _classes(live, owner, result.config.block_size)[shown]
    colours = ListedColormap([SLOT_COLOURS["free"], *LIVENESS_COLOURS])
    norm = BoundaryNorm(np.arange(-0.5, 7), 7)
    image = axes.imshow(grid.reshape(rows, columns), cmap=colours, norm=norm, interpolation="nearest")
    width = axes.figure.bbox.width / axes.figure.dpi
    marks = np.flatnonzero(changed[shown])
    axes.scatter(
        marks % columns, marks // columns, s=(12 * width / columns) ** 2, color=CHANGED, marker=".", linewidth=0
    )
    axes.set(xticks=[], yticks=[], title=f"{when}: {int((owner >= 0).sum()):,} blocks in use")
    axes.spines[:].set_visible(False)
    return image


def _explain(bar: Any) -> None:
    bar.ax.set_yticklabels(["free", "none", "≤ 1/4", "≤ 1/2", "≤ 3/4", "< 1", "all"])
    bar.set_label("share of the block's slots live")


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
