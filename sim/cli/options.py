"""Flags made from the fields of :class:`sim.study.config.SimConfig`, so that both say the same."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from sim.study.config import SimConfig, overlay, read_toml

__all__ = ["ConfigFile", "configuration", "with_config_flags"]

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="TOML", help="Read fields from this file; flags win.", show_default=False),
]


def with_config_flags(*, repeat: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a command's parameter ``flags`` by one flag for every configuration field.

    The command gets ``flags``: the fields that were given, each with its value, or with the list of its values if
    ``repeat`` lets a flag be given more than once.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "flags"
        ]

        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            given = {name: values.pop(name) for name in SimConfig.model_fields}
            return command(flags={name: value for name, value in given.items() if value not in (None, [])}, **values)

        parameters = [*own, *(_flag(name, repeat) for name in SimConfig.model_fields)]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def configuration(flags: dict[str, Any], config: Path | None) -> SimConfig:
    """Return the configuration that flags and file describe; flags win."""
    if config is None:
        return SimConfig(**flags)
    return SimConfig.from_fields(overlay(read_toml(config), flags), where=str(config) if not flags else "")


def _flag(name: str, repeat: bool) -> inspect.Parameter:
    """Return the parameter that makes typer offer a field as a flag."""
    field = SimConfig.model_fields[name]
    kind = field.annotation
    if isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices:
        kind = str  # the configuration refuses other values, in one line
    flag = "--" + name.replace("_", "-")
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    assert kind is not None
    declarations = (f"{flag}/--no{flag[1:]}",) if kind is bool else (flag,)
    several = repeat and kind is not bool
    option = typer.Option(
        *declarations,
        help=field.description,
        show_default=False if field.default is None else _shown(field.default),
        rich_help_panel=str(extra["group"]),
        autocompletion=_completion(name, choices),
        metavar="|".join(choices) or ("TEXT" if kind is str else None),
    )
    annotation = Annotated[(list[kind] if several else kind) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return str(default)


def _completion(name: str, choices: Iterable[str]) -> Callable[[str], list[str]] | None:
    """Return what completes a flag's value in the shell."""
    from sim.cli import catalogue

    known = catalogue.NAMES.get(name)
    if known is None and not choices:
        return None

    def complete(incomplete: str) -> list[str]:
        names = list(choices) if known is None else known()
        return [each for each in names if each.startswith(incomplete)]

    return complete
