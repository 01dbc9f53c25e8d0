"""Where tables are printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["wide_console"]

PIPE_COLUMNS = 160


def wide_console() -> Console:
    """Return a console as wide as the terminal; wide enough for any of our tables when piped."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
