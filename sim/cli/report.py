"""``vtoken report``: one page about a run or a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli.screen import warn_unused

__all__ = ["report"]


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run or of a sweep.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; DIR/report.html when not given.")] = None,
    events: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[LABEL=]FILE",
            help="KV events to draw a block map from, or the directory of a run that kept them; may be given several "
            "times. When not given: DIR/events.parquet and DIR/events/*/events.parquet.",
        ),
    ] = None,
) -> None:
    """Write one HTML file with the table of runs, the plots, the configuration, and block maps to play.

    The file needs no network and no server.

    [bold]Example:[/bold] vtoken report out/demo --events naive=runs/naive --events vtoken=runs/vtoken
    """
    from sim.study.report import write_report
    from sim.study.store import Store

    if Store.is_store(directory):
        warn_unused(Store(directory).frame()[1])

    print(write_report(directory, out, events=events or ()))
