"""What a picture is drawn for, a screen or a two-column paper: sizes, fonts, lines, and what stands around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl

from sim.errors import InputError, did_you_mean

__all__ = ["STYLES", "Style", "current_style", "settings", "style_named", "styled", "use_style"]

P = ParamSpec("P")
R = TypeVar("R")

# As Any: matplotlib's stubs want every key of it to be a literal. Letters become paths in an SVG, which then needs no
# font where it is shown, and TrueType fonts in a PDF (42), as publishers ask for.
COMMON: Any = {
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#D9D9D9",
    "legend.frameon": False,
    "figure.dpi": 100,
    "svg.hashsalt": "vtoken-sim",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}


@dataclass(frozen=True)
class Style:
    """What tells pictures for one place from those for another.

    Attributes
    ----------
    rc
        Settings of matplotlib: fonts, sizes of text (points), widths of lines (points).
    file_format
        Of a file for which none is asked.
    letter
        Width of a letter of a label, in inches.
    titles
        Whether a picture says above itself what it shows; in a paper its caption does.
    legends_above
        Whether legends stand above the axes and not beside them, where they would take width.
    widths
        The widths in inches that a figure may have, in order; any when there are none.
    shrink
        Width of a figure of one column, of one that is an inch wide on the screen.
    shrink_height
        The same for its height.
    """

    name: str
    rc: Any
    file_format: str
    letter: float
    titles: bool = True
    legends_above: bool = False
    widths: tuple[float, ...] = ()
    shrink: float = 1.0
    shrink_height: float = 1.0

    def size(self, width: float, height: float) -> tuple[float, float]:
        """Return the size in inches of a figure for which these inches are right on a screen."""
        width *= self.shrink
        if self.widths:
            width = next((each for each in self.widths if width <= each), self.widths[-1])
        return width, height * self.shrink_height


SCREEN = Style(
    "screen",
    COMMON
    | {
        "font.family": "DejaVu Sans",
        "font.size": 8,
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "figure.titlesize": 10,
        "figure.labelsize": 9,
        "legend.fontsize": 8.5,
        "legend.title_fontsize": 9,
        "legend.columnspacing": 1.4,
        "legend.handlelength": 1.8,
        "lines.linewidth": 1.3,
        "lines.markersize": 4.5,
        "patch.linewidth": 0.6,
        "hatch.linewidth": 0.6,
        "grid.linewidth": 0.4,
        "errorbar.capsize": 2,
        "savefig.dpi": 150,
    },
    file_format="png",
    letter=0.064,
)

PAPER = Style(
    "paper",
    COMMON
    | {
        # What the first one lacks comes from the second one.
        "font.family": ["STIXGeneral", "DejaVu Sans"],
        "font.size": 7,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "axes.labelpad": 2,
        "axes.titlepad": 3,
        "axes.linewidth": 0.5,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "xtick.major.width": 0.5,
        "ytick.major.width": 0.5,
        "xtick.major.pad": 2,
        "ytick.major.pad": 2,
        "xtick.minor.size": 1.5,
        "xtick.minor.width": 0.4,
        "figure.labelsize": 8,
        "figure.constrained_layout.h_pad": 0.02,
        "figure.constrained_layout.w_pad": 0.02,
        "figure.constrained_layout.wspace": 0.04,
        "legend.fontsize": 7.5,
        "legend.title_fontsize": 7.5,
        "legend.columnspacing": 1.0,
        "legend.handlelength": 1.7,
        "legend.handletextpad": 0.5,
        "legend.labelspacing": 0.3,
        "lines.linewidth": 0.9,
        "lines.markersize": 3,
        "patch.linewidth": 0.4,
        "hatch.linewidth": 0.4,
        "grid.linewidth": 0.3,
        "errorbar.capsize": 1.5,
        "savefig.dpi": 600,
    },
    file_format="pdf",
    letter=0.043,
    titles=False,
    legends_above=True,
    widths=(3.33, 7.0),
    shrink=3.33 / 7.5,
    shrink_height=0.6,
)
"""For a column of a two-column paper, or both where one is too narrow for what is shown."""

STYLES = {each.name: each for each in (SCREEN, PAPER)}

_current: ContextVar[Style] = ContextVar("style", default=SCREEN)


def style_named(name: str) -> Style:
    """Return a style.

    Raises
    ------
    InputError
        If there is none of that name.
    """
    if name not in STYLES:
        raise InputError(f"style: expected one of {', '.join(STYLES)}, got {name!r}{did_you_mean(name, STYLES)}")
    return STYLES[name]


def current_style() -> Style:
    """Return the style in which pictures are drawn now."""
    return _current.get()


@contextmanager
def use_style(name: str) -> Iterator[None]:
    """Draw and save in another style than the one for screens, within the block.

    Parameters
    ----------
    name
        ``screen`` or ``paper``.

    Raises
    ------
    InputError
        If there is no such style.
    """
    token = _current.set(style_named(name))
    try:
        with settings():
            yield
    finally:
        _current.reset(token)


@contextmanager
def settings() -> Iterator[None]:
    """Set what matplotlib is to do in the current style, whatever the program around has set."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(current_style().rc)
        yield


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Make a plotting function draw in the current style, whatever the program around it has set."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with settings():
            return draw(*args, **kwargs)

    return wrapper
