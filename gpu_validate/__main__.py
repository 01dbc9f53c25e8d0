"""Entry point of ``python -m gpu_validate``: the commands, with nothing but the standard library to read them."""

from __future__ import annotations

import argparse
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gpu_validate.commands import COMMANDS, EXIT_FAILED, EXIT_INTERRUPTED, Flag
from sim.errors import InputError

__all__ = ["main"]

EXIT_INPUT = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an error is one line on standard error.

    Parameters
    ----------
    arguments
        What follows ``python -m gpu_validate``; from the process if None.
    """
    try:
        values = vars(_parser().parse_args(arguments))
        return int(COMMANDS[values.pop("command")](**values))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m gpu_validate", description="Replay KV event logs on a real pool, and measure.")
    several = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        text = inspect.getdoc(function)
        _add_flags(several.add_parser(name, help=text, description=text), function)
    return parser


def _add_flags(parser: argparse.ArgumentParser, function: Callable[..., int]) -> None:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, flag = typing.get_args(hints[name])
        assert isinstance(flag, Flag)
        if isinstance(kind, types.UnionType):
            kind = next(option for option in typing.get_args(kind) if option is not type(None))
        names = flag.names or "--" + name.replace("_", "-")
        if kind is bool:
            on, _, off = names.partition("/")
            parser.add_argument(on, dest=name, action="store_true", default=parameter.default, help=flag.help)
            parser.add_argument(off or f"--no{on[1:]}", dest=name, action="store_false", help=argparse.SUPPRESS)
            continue
        required = parameter.default is inspect.Parameter.empty
        given: dict[str, Any] = {"required": True} if required else {"default": parameter.default}
        parser.add_argument(names, dest=name, type=kind, metavar=flag.metavar or None, help=flag.help, **given)


if __name__ == "__main__":
    sys.exit(main())
