"""``vtoken reproduce``: the paper's claims, one by one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli.executors import Dask, DaskLocal, Workers, executor, going_on
from sim.cli.screen import wide_console
from sim.errors import InputError

if TYPE_CHECKING:
    from sim.study.paper import Reproduction

__all__ = ["reproduce"]


def reproduce(
    out: Annotated[
        Path, typer.Option(help="Directory of the runs; finished runs in it are kept, the others are made.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Short for --size quick.")] = False,
    size: Annotated[
        str,
        typer.Option(
            metavar="default|quick|smoke",
            help="How much to run: quick has fewer servers, loads, seeds and requests; smoke takes every step in "
            "seconds, and its figures mean nothing.",
        ),
    ] = "default",
    workers: Workers = None,
    dask: Dask = None,
    dask_local: DaskLocal = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the set-ups of the vToken paper and say of each of its claims whether it holds.

    What the paper does not tell (arrival rates, watermark, headroom, cadence, memory) is varied: a claim holds if it
    does whatever these are. The same command again goes on where it was stopped. The tables, the page paper.md and the
    pictures go to the directory; vtoken results and vtoken report read it, too.

    [bold]Example:[/bold] vtoken reproduce --quick --out out/paper
    """
    from sim.progress import Progress
    from sim.study.paper import reproduce as run
    from sim.study.paper import size_named, write
    from sim.study.paper.pictures import draw

    progress = Progress(sys.stderr, "runs")
    chosen = size_named("quick" if quick and size == "default" else size)
    if quick and chosen.name != "quick":
        raise InputError(f"--quick and --size {size} exclude each other: both say how much to run")
    with going_on(out, progress), executor(workers, dask, dask_local, progress) as place:
        found = run(out, chosen, workers=workers, executor=place, progress=progress)
    paths = [*write(found, out), *draw(found, out)]
    if as_json:
        from sim.study.paper import claims_frame
        from sim.study.result import to_json

        print(to_json({"size": found.size.name, "claims": claims_frame(found.judgements).to_dict("records")}))
    else:
        _print(found)
    print(f"{found.made} runs made; {', '.join(str(path) for path in paths)}", file=sys.stderr)


def _print(found: Reproduction) -> None:
    from rich import box
    from rich.table import Table

    styles = {"holds": "green", "does not hold": "red", "cannot be said": "yellow"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="The paper's claims", title_justify="left")
    for name in ("claim", "paper", "ours", "verdict", "worlds"):
        table.add_column(name, justify="right" if name in ("paper", "ours", "worlds") else "left")
    for each in found.judgements:
        verdict = f"[{styles[each.verdict]}]{each.verdict}[/]"
        table.add_row(each.claim.what, each.claim.paper, each.ours, verdict, each.count)
    wide_console().print(table)
