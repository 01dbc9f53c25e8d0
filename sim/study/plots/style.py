"""One look for all: colour and marker for a policy, line and hatch for a reclaimer; the same bytes each time."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "FORMATS",
    "LIVENESS_COLOURS",
    "RAMP_COLOURS",
    "SLOT_COLOURS",
    "axes_or_new",
    "base_name",
    "count_axis",
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
    "write",
]

P = ParamSpec("P")
R = TypeVar("R")

FORMATS = ("png", "svg", "pdf")

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

RAMP_COLOURS = ("#F28C3C", "#CA8A61", "#A28779", "#7A818D", "#517BA0", "#0072B2")
"""Share of a block's slots that is live: none, four quarters, all. From orange to blue, and darker all the way."""

# Dark is dead, light is full: cividis, which keeps its order in greyscale.
LIVENESS_COLOURS = ("#00224E", "#35456C", "#666970", "#948E77", "#C8B866", "#FEE838")

# As Any: matplotlib's stubs want every key of it to be a literal.
RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.6,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "svg.hashsalt": "vtoken-sim",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}

# Dates and versions would make equal pictures differ.
METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Make a plotting function draw in this style, whatever the program around it has set."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(RC)
            return draw(*args, **kwargs)

    return wrapper


def new_figure(width: float = 7.0, height: float = 3.6) -> Figure:
    """Return an empty figure (size in inches) that makes room for what is put in it."""
    return Figure(figsize=(width, height), layout="constrained")


def axes_or_new(axes: Axes | None, width: float = 7.0, height: float = 3.6) -> Axes:
    """Return ``axes``, or the axes of a new figure."""
    return new_figure(width, height).subplots() if axes is None else axes


def save(figure: Figure, path: Path) -> None:
    """Write a figure; equal figures give equal bytes."""
    write(figure, path, path.suffix[1:])


def write(figure: Figure, to: Path | BinaryIO, file_format: str) -> None:
    """Write a figure to a file of any name, or one that is open."""
    with mpl.rc_context(RC):
        figure.savefig(to, format=file_format, metadata=METADATA[file_format])


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


def legend_beside(axes: Axes, **options: Any) -> None:
    """Put the legend to the right of the axes, where it covers nothing."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, **options)


def log_axis(axis: Any) -> None:
    """Label 1, 2 and 5 of each decade of an axis with a logarithmic scale."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def count_axis(axis: Any) -> None:
    """Label an axis of counts with k and M."""
    axis.set_major_formatter(EngFormatter(sep=""))
