"""Options of ``vtoken`` itself, and the stand-in for a command whose code is not needed."""

from __future__ import annotations

from typing import Annotated

import typer


def _print_version(wanted: bool) -> None:
    if wanted:
        from sim.study.versions import package_version

        print(f"vtoken-sim {package_version()}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    trace_back: Annotated[
        bool, typer.Option("--traceback", help="Show where an error happened; may stand anywhere.")
    ] = False,
) -> None:
    """Take the options that come before a command: a callback prints the version, main looks for the traceback flag."""


def not_loaded() -> None:
    """Stand for a command in the list of all."""
    raise AssertionError("a command was listed, but not loaded, and then called")
