"""The command ``vtoken``: one module a group of commands, and nothing heavy imported before a command needs it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoint

    import typer

__all__ = ["app", "main"]

EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_NO_PROGRESS = 3
EXIT_INTERRUPTED = 130

PLUGINS = "vtoken.commands"
"""Entry-point group of commands that other packages add; each loads a function or a ``typer.Typer``."""

CHOICES = "What there is to choose from"

COMMANDS = {
    "run": ("sim.cli.run:run", None, "Simulate one configuration."),
    "sweep": ("sim.cli.sweep:sweep", None, "Simulate every combination of a grid and its seeds."),
    "results": ("sim.cli.sweep:results", None, "Print the tables of a sweep."),
    "search": ("sim.cli.search:app", None, "Find limits: requests that fit together, rates that bounds allow."),
    "reproduce": ("sim.cli.reproduce:reproduce", None, "Try the claims of the vToken paper, one by one."),
    "plot": ("sim.cli.plot:plot", None, "Draw what a run or a sweep shows."),
    "report": ("sim.cli.report:report", None, "Write one HTML page about a run or a sweep, with block maps to play."),
    "trace": ("sim.cli.trace:app", None, "Describe, convert and generate traces."),
    "profile": ("sim.cli.profile:app", None, "Make and show cost profiles: what steps and copies cost on a device."),
    "config": ("sim.cli.config:app", None, "Show what can be configured, and what is."),
    "policies": ("sim.cli.catalogue:policies", CHOICES, "List the eviction policies."),
    "reclaimers": ("sim.cli.catalogue:reclaimers", CHOICES, "List what can happen to the slots of dead tokens."),
    "attention": ("sim.cli.catalogue:attention", CHOICES, "List the attention models."),
    "step-costs": ("sim.cli.catalogue:step_costs", CHOICES, "List the models of a step's time."),
    "copy-costs": ("sim.cli.catalogue:copy_costs", CHOICES, "List the models of a copy's time."),
    "models": ("sim.cli.catalogue:models", CHOICES, "List the model presets."),
    "hardware": ("sim.cli.catalogue:hardware", CHOICES, "List the hardware presets."),
}
"""Where each command is, the heading it is listed under, and what the list says."""


def app(only: str | None = None) -> typer.Typer:
    """Put the command together.

    Parameters
    ----------
    only
        Load the code of this command alone; the others are there in name, for the list. All are loaded if None.
    """
    from importlib.metadata import entry_points

    import typer

    from sim.cli import root

    command = typer.Typer(
        name="vtoken",
        help="Simulate KV-cache eviction in LLM serving, and what happens to the slots of the dead.",
        epilog="Exit codes: 0 done, 1 failed, 2 something given cannot be used, 3 the simulated system is stuck, "
        "130 interrupted.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    command.callback()(root.options)
    for name, (place, panel, text) in COMMANDS.items():
        if only in (None, name):
            module, _, attribute = place.partition(":")
            _add(command, name, getattr(importlib.import_module(module), attribute), panel, text)
        else:
            _add(command, name, root.not_loaded, panel, text)
    for entry in entry_points(group=PLUGINS):
        found, said = (root.not_loaded, None) if only in COMMANDS else _plugin(entry, wanted=only == entry.name)
        _add(command, entry.name, found, None, said)
    return command


def _plugin(entry: EntryPoint, *, wanted: bool) -> tuple[Any, str | None]:
    """Load another package's command; what cannot be loaded says so in the list, and stops nobody but who wants it."""
    from sim.cli import root
    from sim.errors import InputError

    try:
        return entry.load(), None
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        if wanted:
            raise InputError(f"command {entry.name!r} ({entry.value}) cannot be loaded: {why}") from error
        return root.not_loaded, f"Cannot be loaded: {why}"


def _add(command: typer.Typer, name: str, what: Any, panel: str | None, text: str | None) -> None:
    """Add a function or a group of commands under ``name``."""
    import typer

    if isinstance(what, typer.Typer):
        command.add_typer(what, name=name, short_help=text, rich_help_panel=panel)
    else:
        command.command(name, short_help=text, rich_help_panel=panel)(what)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; an error is one line on standard error.

    Parameters
    ----------
    arguments
        What follows ``vtoken``; from the process if None.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    trace_back = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        # Typer completes in the shell by way of an environment variable; it needs every command then.
        first = None if "_VTOKEN_COMPLETE" in os.environ else next((w for w in words if not w.startswith("-")), "")
        code = app(first)(args=words, prog_name="vtoken", standalone_mode=False)
    except BaseException as error:
        return _end(error, trace_back)
    return code if isinstance(code, int) else 0


def _end(error: BaseException, trace_back: bool) -> int:
    """Say what ended the command, and return the exit code for it."""
    import typer

    from sim.errors import InputError, NoProgressError

    if isinstance(error, SystemExit | typer.Exit):
        code = error.code if isinstance(error, SystemExit) else error.exit_code
        return code if isinstance(code, int) else 0
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    if not isinstance(error, Exception):
        raise error
    if trace_back:
        import traceback

        traceback.print_exception(error)
    if hasattr(error, "format_message"):  # a usage error of typer, whichever copy of click it carries
        context = getattr(error, "ctx", None)
        where = f" (see {context.command_path} --help)" if context is not None else ""
        print(f"error: {' '.join(error.format_message().split())}{where}", file=sys.stderr)
        return EXIT_INPUT
    if isinstance(error, InputError | NoProgressError):
        print(f"error: {error}", file=sys.stderr)
        return EXIT_INPUT if isinstance(error, InputError) else EXIT_NO_PROGRESS
    text = " ".join(str(error).split())
    hint = "" if trace_back else " (--traceback shows where)"
    print(f"error: {type(error).__name__}: {text}{hint}", file=sys.stderr)
    return EXIT_FAILED
