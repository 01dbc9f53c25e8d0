"""Where tables are printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from sim.study.store import Aside

__all__ = ["warn_unused", "wide_console"]

PIPE_COLUMNS = 160


def wide_console() -> Console:
    """Return a console as wide as the terminal; wide enough for any of our tables when piped."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)


def warn_unused(aside: Iterable[Aside]) -> None:
    """Say on standard error which files of a sweep's directory were not used, and why."""
    for each in aside:
        print(f"warning: not used: {each}", file=sys.stderr)
