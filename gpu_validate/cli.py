"""The commands of the torch harness as ``vtoken`` takes them: entry points of the group ``vtoken.commands``."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from gpu_validate import commands
from gpu_validate.commands import Flag

__all__ = ["calibrate", "replay", "validate"]


def _command(function: Callable[..., int]) -> Callable[..., Any]:
    """Return the function with each parameter's :class:`Flag` turned into an option of typer."""

    @functools.wraps(function)
    def command(**values: Any) -> None:
        code = function(**values)
        if code:
            raise typer.Exit(code)

    hints = typing.get_type_hints(function, include_extras=True)
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, flag = typing.get_args(hints[name])
        assert isinstance(flag, Flag)
        option = typer.Option(
            flag.names or ("--" + name.replace("_", "-")),
            help=flag.help,
            metavar=flag.metavar or None,
            show_default=parameter.default not in (None, False),
        )
        annotation: Any = Annotated[kind, option]
        parameters.append(parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


replay = _command(commands.replay)
calibrate = _command(commands.calibrate)
validate = _command(commands.validate)
