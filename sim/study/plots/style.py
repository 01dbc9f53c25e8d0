"""One look for all: colour and marker for a policy, line and hatch for a reclaimer; the same bytes each time.

A picture is drawn for a screen or for a two-column paper. What differs is in
:class:`sim.study.plots.medium.Style`; the modules that draw ask for a size, a legend or a caption and do not know what
they draw for.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import EngFormatter, LogLocator

from sim.errors import InputError, did_you_mean
from sim.study.plots.medium import current_style, settings, styled, use_style

__all__ = [
    "FORMATS",
    "LIVENESS_COLOURS",
    "RAMP_COLOURS",
    "SLOT_COLOURS",
    "SLOT_HATCHES",
    "axes_or_new",
    "base_name",
    "caption",
    "caption_of",
    "count_axis",
    "current_style",
    "edge_colour",
    "figure_legend",
    "legend_beside",
    "log_axis",
    "new_figure",
    "policy_colour",
    "policy_marker",
    "reclaimer_hatch",
    "reclaimer_line",
    "reclaimer_marker",
    "save",
    "styled",
    "use_style",
    "write",
]

FORMATS = ("png", "svg", "pdf")

BESIDE: Any = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "alignment": "left"}

WIDER = 1.06
"""Letters that are fitted to pixels take more than their outlines, by about this."""

DARK = 0.25
"""Lightness of a colour, 0 to 1, below which black does not show on it."""

# Okabe and Ito's palette and eight colours as far from it, for the common kinds of colour vision, as a search found. No
# sixteen colours are safe: where many policies meet, use the marker too, or write the name beside it.
POLICY_LOOKS = {
    "h2o": ("#0072B2", "o"),
    "random": ("#E69F00", "X"),
    "scissorhands": ("#009E73", "s"),
    "r_kv": ("#882255", "P"),
    "streaming_llm": ("#CC79A7", ">"),
    "full": ("#595959", "_"),
    "tova": ("#56B4E9", "^"),
    "snapkv": ("#D55E00", "D"),
    "keyformer": ("#1A1AFF", "v"),
    "knorm": ("#5C2E00", "<"),
    "expected_attention": ("#8C66FF", "d"),
    "keydiff": ("#00008F", "p"),
    "paged_eviction": ("#66D98A", "h"),
    "quest": ("#000000", "+"),
    "pyramidkv": ("#8FCFE6", "*"),
    "ada_kv": ("#0E0E4E", "8"),
}
OTHER_POLICIES = (("#DDCC77", "1"), ("#6699CC", "2"), ("#994455", "3"), ("#997700", "4"))

# Line, hatch, marker.
RECLAIMER_LOOKS = {
    "none": (":", "..", "s"),
    "naive": ((0, (4, 1.5)), "", "o"),
    "vtoken": ("-", "///", "D"),
    "sync": ((0, (6, 1, 1, 1, 1, 1)), "++", "P"),
    "ideal": ("-.", "xxx", "^"),
    "stall": ((0, (8, 2)), "--", "X"),
    "page": ((0, (1, 1)), "oo", "h"),
    "reuse": ((0, (3, 1, 1, 1)), "\\\\", "<"),
    "reuse+vtoken": ((0, (10, 1)), "**", "*"),
    "token": ((0, (2, 4)), "OO", "p"),
}
OTHER_LOOKS = (
    ((0, (1, 1)), "\\\\\\", "v"),
    ((0, (8, 3)), "oo", "X"),
    ((0, (2, 1)), "**", "<"),
)

SLOT_COLOURS = {
    "live": "#0072B2",
    "dead": "#D55E00",
    "tail, not yet written": "#F0C75E",
    "copy destination": "#009E73",
    "free": "#E4E4E4",
}

SLOT_HATCHES = {"dead": "/////", "copy destination": "....."}
"""Live and dead slots are about equally dark: without colour, the hatch tells them apart."""

RAMP_COLOURS = ("#F28C3C", "#CA8A61", "#A28779", "#7A818D", "#517BA0", "#0072B2")
"""Share of a block's slots that is live: none, four quarters, all. From orange to blue, and darker all the way."""

# Dark is dead, light is full: cividis, which keeps its order in greyscale.
LIVENESS_COLOURS = ("#00224E", "#35456C", "#666970", "#948E77", "#C8B866", "#FEE838")

_captions: WeakKeyDictionary[Axes | Figure, str] = WeakKeyDictionary()

# Dates and versions would make equal pictures differ.
METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def new_figure(width: float = 7.0, height: float = 3.6) -> Figure:
    """Return an empty figure (size in inches on a screen) that makes room for what is put in it."""
    return Figure(figsize=current_style().size(width, height), layout="constrained")


def axes_or_new(axes: Axes | None, width: float = 7.0, height: float = 3.6) -> Axes:
    """Return ``axes``, or the axes of a new figure."""
    return new_figure(width, height).subplots() if axes is None else axes


def caption(drawn: Axes | Figure, text: str) -> None:
    """Say what a picture shows: above it, or in the file alone where the style has no titles."""
    _captions[drawn] = text
    if current_style().titles:
        if isinstance(drawn, Figure):
            drawn.suptitle(text)
        else:
            drawn.set_title(text)


def caption_of(drawn: Axes | Figure) -> str:
    """Return what a picture shows, or nothing if nobody said."""
    if isinstance(drawn, Figure) and drawn not in _captions:
        return next((_captions[axes] for axes in drawn.axes if axes in _captions), "")
    return _captions.get(drawn, "")


def save(drawn: Axes | Figure, path: str | Path) -> None:
    """Write a picture to a file; equal pictures give equal bytes.

    Parameters
    ----------
    drawn
        A figure, or axes of it.
    path
        The file; its name ends with ``.png``, ``.svg`` or ``.pdf``.

    Raises
    ------
    InputError
        If its name ends with something else, or it cannot be written.
    """
    path = Path(path)
    if path.suffix[1:] not in FORMATS:
        hint = did_you_mean(path.suffix[1:], FORMATS)
        raise InputError(f"{path}: expected a name that ends with one of {', '.join(FORMATS)}{hint}")
    figure = drawn if isinstance(drawn, Figure) else drawn.figure.figure
    assert isinstance(figure, Figure)
    try:
        write(figure, path, path.suffix[1:])
    except OSError as error:
        raise InputError(f"{path}: cannot write there: {error.strerror}") from None


def write(figure: Figure, to: Path | BinaryIO, file_format: str) -> None:
    """Write a figure to a file of any name, or one that is open."""
    text = caption_of(figure)
    title = {"Title": text} if text and not current_style().titles else {}
    with settings():
        figure.savefig(to, format=file_format, metadata=METADATA[file_format] | title)


def base_name(spec: str) -> str:
    """Return the name in ``name:key=value``."""
    return spec.partition(":")[0]


def policy_colour(policy: str) -> str:
    """Return the colour of a policy."""
    return _policy_look(policy)[0]


def policy_marker(policy: str) -> str:
    """Return the marker of a policy, where a picture does not need markers for reclaimers."""
    return _policy_look(policy)[1]


def _policy_look(policy: str) -> tuple[str, str]:
    name = base_name(policy)
    return POLICY_LOOKS.get(name) or OTHER_POLICIES[zlib.crc32(name.encode()) % len(OTHER_POLICIES)]


def _look(reclaimer: str) -> tuple[Any, str, str]:
    """Return line, hatch and marker; with other parameters than the default ones a reclaimer looks different."""
    return RECLAIMER_LOOKS.get(reclaimer) or OTHER_LOOKS[zlib.crc32(reclaimer.encode()) % len(OTHER_LOOKS)]


def reclaimer_line(reclaimer: str) -> Any:
    """Return the line style of a reclaimer."""
    return _look(reclaimer)[0]


def reclaimer_hatch(reclaimer: str) -> str:
    """Return the hatch of a reclaimer."""
    return _look(reclaimer)[1]


def reclaimer_marker(reclaimer: str) -> str:
    """Return the marker of a reclaimer."""
    return _look(reclaimer)[2]


def edge_colour(face: str) -> str:
    """Return black, or white for a face so dark that black hatches would not show on it."""
    red, green, blue = to_rgb(face)
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > DARK else "white"


def legend_beside(axes: Axes, *, reverse: bool = False, **given: Any) -> None:
    """Put the legend to the right of the axes or above them, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    options: dict[str, Any] = {"handles": handles, "labels": labels, "reverse": reverse} | given
    above = current_style().legends_above
    figure = axes.figure
    if above and isinstance(figure, Figure) and figure.axes == [axes] and figure.get_constrained_layout():
        figure_legend(figure, **options)  # has the width of the axes' labels too
        return
    if above:
        labels = options["labels"][::-1] if reverse else options["labels"]
        options |= _in_rows(labels, axes.bbox.width / axes.figure.dpi, options.get("title"))
    place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.02)} if above else BESIDE
    axes.legend(borderaxespad=0.0, **options | place)


def figure_legend(
    figure: Figure,
    handles: Sequence[Any],
    labels: Sequence[str],
    title: str | None = None,
    *,
    reverse: bool = False,
    below: bool = False,
) -> None:
    """Put a legend for all panels to the right of them, or above them where the style wants that, or below them."""
    options: dict[str, Any] = {"loc": "outside right upper", "title": title, "alignment": "left"}
    if below or current_style().legends_above:
        place = "outside lower left" if below else "outside upper left"
        options = {"loc": place} | _in_rows(labels[::-1] if reverse else labels, figure.get_figwidth(), title)
    figure.legend(handles, labels, reverse=reverse, **options)


def _in_rows(labels: Sequence[str], width: float, title: str | None) -> dict[str, Any]:
    """Return what makes a legend as flat as ``width`` inches allow."""
    size = mpl.rcParams["legend.fontsize"]
    marks = size * (mpl.rcParams["legend.handlelength"] + mpl.rcParams["legend.handletextpad"])
    gap = size * mpl.rcParams["legend.columnspacing"]
    room = 72 * width - 2 * size * (mpl.rcParams["legend.borderpad"] + mpl.rcParams["legend.borderaxespad"]) + gap
    entries = [marks + gap + WIDER * _width(label, size) for label in labels]
    columns = len(entries)
    while columns > 1 and sum(map(max, np.array_split(entries, columns))) > room:
        columns -= 1
    return {"ncols": max(columns, 1), "title": title, "alignment": "left"}


def _width(text: str, size: float) -> float:
    """Return the width in points of a text of this size, as drawn without a grid of pixels."""
    return float(TextPath((0, 0), text, size=size).get_extents().width) if text.strip() else 0.0


def log_axis(axis: Any) -> None:
    """Label 1, 2 and 5 of each decade of an axis with a logarithmic scale."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def count_axis(axis: Any) -> None:
    """Label an axis of counts with k and M."""
    axis.set_major_formatter(EngFormatter(sep=""))
