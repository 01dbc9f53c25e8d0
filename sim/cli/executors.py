"""The flags that say where runs are made, and what ends a job before its end."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.errors import InputError

if TYPE_CHECKING:
    from sim.progress import Progress
    from sim.study.executors import Executor

__all__ = ["Dask", "DaskLocal", "Workers", "executor", "going_on"]

PANEL = "Where runs are made"

Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes here; one for each processor when nothing is given.", rich_help_panel=PANEL),
]
Dask = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="A Dask cluster: its scheduler's address (tcp://host:8786) or scheduler file.",
        rich_help_panel=PANEL,
    ),
]
DaskLocal = Annotated[
    int | None,
    typer.Option(min=1, help="A Dask cluster of this many workers, started here for this job.", rich_help_panel=PANEL),
]


@contextlib.contextmanager
def executor(
    workers: int | None, dask: str | None, dask_local: int | None, progress: Progress
) -> Iterator[Executor | None]:
    """Give what makes runs where the flags say so; None is processes here.

    Raises
    ------
    InputError
        If they say two things, or there is no such place.
    """
    given = {"--workers": workers, "--dask": dask, "--dask-local": dask_local}
    named = [flag for flag, value in given.items() if value is not None]
    if len(named) > 1:
        raise InputError(f"{named[0]} and {named[1]} exclude each other: runs are made in one place")
    if dask is None and dask_local is None:
        yield None
        return
    from sim.study.executors import DaskCluster

    with DaskCluster(dask or "", progress, local=dask_local or 0) as cluster:
        yield cluster


@contextlib.contextmanager
def going_on(out: Path, progress: Progress) -> Iterator[None]:
    """Say how to go on when the block is interrupted, or has lost its workers."""
    from sim.study.executors import WorkersError

    try:
        yield
    except KeyboardInterrupt:
        progress.clear()
        why, code = "interrupted", 130
    except WorkersError as error:
        progress.clear()
        why, code = f"error: {error}", 1
    else:
        return
    command = shlex.join(["vtoken", *sys.argv[1:]])
    print(f"{why}; finished runs are in {out}, the same command goes on: {command}", file=sys.stderr)
    raise typer.Exit(code)
