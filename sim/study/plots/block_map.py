"""The slots of the pool just before and just behind a repack, drawn from the KV events of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle

from sim.errors import InputError
from sim.kv.block_states import Role, frames
from sim.kv.events import Kind, KVEventLog
from sim.study.plots.pool import window
from sim.study.plots.style import SLOT_COLOURS, caption, figure_legend, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["block_map_around_repack", "has_repack"]

MOST_BLOCKS = 480
"""Of a larger pool the part is drawn in which most changed: more blocks would have no visible slots."""

COLUMNS = 24

SLOTS = {
    "free": "free block",
    "live": "live slot",
    "dead": "dead slot",
    "tail, not yet written": "not yet written",
    "copy destination": "destination of the copy",
}
"""What is drawn, by the name of its colour."""

MARKS = {"moved out": "#CC79A7", "moved in": "#009E73"}
LINES: Any = {"moved out": (0, (2, 1.2)), "moved in": "-"}


class _Pool(NamedTuple):
    """Every block at one moment: role [N], and what each slot holds [N, S]: a place in ``SLOTS``."""

    role: np.ndarray
    slots: np.ndarray


def has_repack(log: KVEventLog) -> bool:
    """Tell whether a repack took effect."""
    return bool(np.isin(log.records["kind"], (Kind.COMMIT, Kind.PACK)).any())


@styled
def block_map_around_repack(log: KVEventLog, label: str = "") -> Figure:
    """Draw the pool slot by slot around the repack that moved tokens out of most blocks.

    Repacks that take effect at the end of the same step count as one. Of a large pool, the part with most changed
    blocks is shown.

    Parameters
    ----------
    log
        The events of a run.
    label
        What to call the run in the title.

    Raises
    ------
    InputError
        If no repack took effect.
    """
    first, last = _largest_repack(log)
    before, after = frames(log, [first, last])
    pools = [_Pool(np.zeros(log.num_blocks, np.uint8), np.zeros((log.num_blocks, log.block_size), np.uint8))]
    for frame in (before, after):
        pool = _Pool(pools[-1].role.copy(), pools[-1].slots.copy())
        pool.role[frame.blocks] = frame.role
        live = np.unpackbits(frame.live, axis=1, count=log.block_size, bitorder="little").astype(bool)
        written = np.arange(log.block_size) < frame.written[:, None]
        slots = np.where(live, 1, np.where(written, 2, 3))
        slots[np.isin(frame.role, (Role.DESTINATION, Role.LEFT))] = 4
        slots[frame.role == Role.FREE] = 0
        pool.slots[frame.blocks] = slots
        pools.append(pool)
    marks = {"moved out": after.moved_from, "moved in": after.moved_to}
    changed = np.zeros(log.num_blocks, bool)
    changed[np.concatenate(list(marks.values()))] = True
    shown = window(changed, MOST_BLOCKS)
    figure = new_figure(10.0, 1.1 + 4.9 * math.ceil(len(shown) / COLUMNS) / COLUMNS)
    panels = figure.subplots(1, 2)
    for axes, name, pool in zip(panels, ("before", "after"), pools[1:], strict=True):
        used = int((pool.role != Role.FREE).sum())
        alive, dead = int((pool.slots == 1).sum()), int((pool.slots == 2).sum())
        axes.set_title(f"{name}: {used:,} blocks in use, {alive:,} live slots, {dead:,} dead")
        _draw(axes, pool, shown, marks)
    handles = {text: Patch(facecolor=SLOT_COLOURS[name]) for name, text in SLOTS.items()}
    outline = mpl.rcParams["lines.linewidth"]
    for name, colour in MARKS.items():
        handles[f"tokens {name}"] = Patch(facecolor="none", edgecolor=colour, linewidth=outline, linestyle=LINES[name])
    figure_legend(figure, list(handles.values()), list(handles), below=True)
    part = "" if len(shown) == log.num_blocks else f" ({len(shown):,} of {log.num_blocks:,} blocks shown)"
    time_s = after.time_ns / 1e9
    freed = int((pools[1].role != Role.FREE).sum() - (pools[2].role != Role.FREE).sum())
    caption(figure, f"{label}: a repack at {time_s:.2f} s frees {freed:,} blocks{part}".lstrip(": "))
    return figure


def _largest_repack(log: KVEventLog) -> tuple[int, int]:
    """Return how many events had happened before the first and behind the last one of the repack to show."""
    kinds = log.records["kind"]
    if not has_repack(log):
        raise InputError("no repack took effect in these KV events: there is nothing to draw")
    of_step = np.cumsum(kinds == Kind.STEP)
    freed = (kinds == Kind.FREE) & (log.records["b"] == 2)
    repack = np.isin(kinds, (Kind.MOVE, Kind.COMMIT, Kind.PACK)) | freed
    best = int(np.argmax(np.bincount(of_step[freed], minlength=1)))
    places = np.flatnonzero(repack & (of_step == best))
    return int(places[0]), int(places[-1]) + 1


def _draw(axes: Axes, pool: _Pool, shown: np.ndarray, marks: dict[str, np.ndarray]) -> None:
    """Draw blocks as squares of slots, row by row; a dead slot is a bar, so that it needs no colour."""
    size = pool.slots.shape[1]
    side = math.ceil(math.sqrt(size))
    cell, ink = 7, 6  # pixels a slot, of which one stays white; one more between blocks
    pitch = side * cell + 4
    rows = math.ceil(len(shown) / COLUMNS)
    image = np.ones((rows * pitch, COLUMNS * pitch, 3))
    colours = [np.array(to_rgb(SLOT_COLOURS[name])) for name in SLOTS]
    for place, block in enumerate(shown.tolist()):
        top, left = place // COLUMNS * pitch, place % COLUMNS * pitch
        if block == 0:  # never handed out
            continue
        if pool.role[block] == Role.FREE:
            image[top : top + side * cell - 1, left : left + side * cell - 1] = colours[0]
            continue
        for slot, what in enumerate(pool.slots[block].tolist()):
            y, x = top + slot // side * cell, left + slot % side * cell
            inset = 2 if what in (2, 3) else 0
            image[y + inset : y + ink - inset, x : x + ink] = colours[what]
    axes.imshow(image, interpolation="nearest", aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    where = {block: place for place, block in enumerate(shown.tolist())}
    for name, blocks in marks.items():
        for block in blocks.tolist():
            if block in where:
                corner = where[block] % COLUMNS * pitch - 2.5, where[block] // COLUMNS * pitch - 2.5
                axes.add_patch(
                    Rectangle(
                        corner,
                        pitch,
                        pitch,
                        fill=False,
                        clip_on=False,
                        edgecolor=MARKS[name],
                        linewidth=mpl.rcParams["lines.linewidth"],
                        linestyle=LINES[name],
                    )
                )
