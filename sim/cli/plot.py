"""``vtoken plot``: pictures of a run or a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli.screen import warn_unused

__all__ = ["plot"]


def plot(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run or of a sweep.")],
    out: Annotated[Path | None, typer.Option(help="Where the pictures go; DIR/plots when not given.")] = None,
    style: Annotated[
        str,
        typer.Option(
            metavar="screen|paper",
            help="What the pictures are for: a screen, or a paper of two columns, of which they take the width of one "
            "(3.33 in) or of both (7 in).",
        ),
    ] = "screen",
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="png|svg|pdf", help="File format; png when not given, and pdf with --style paper."
        ),
    ] = None,
) -> None:
    """Draw what a run or a sweep shows about KV memory, concurrency and latency."""
    from sim.study.plots import plot_directory
    from sim.study.store import Store

    if Store.is_store(directory):
        warn_unused(Store(directory).frame()[1])

    for path in plot_directory(directory, out, file_format=file_format, style=style):
        print(path)
