"""``vtoken policies``, ``reclaimers``, ``models`` and so on: what there is to choose from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.screen import wide_console

if TYPE_CHECKING:
    from sim.registry import Registry

__all__ = [
    "NAMES",
    "attention",
    "copy_costs",
    "hardware",
    "models",
    "policies",
    "reclaimers",
    "step_costs",
]

Row = dict[str, Any]


def _policies() -> Registry[Any]:
    from sim.kv.policies import policies

    return policies


def _reclaimers() -> Registry[Any]:
    from sim.kv.reclaim import reclaimers

    return reclaimers


def _attention() -> Registry[Any]:
    from sim.serving.attention import attention_models

    return attention_models


def _step_costs() -> Registry[Any]:
    from sim.serving.cost import step_costs

    return step_costs


def _copy_costs() -> Registry[Any]:
    from sim.serving.copy import copy_costs

    return copy_costs


def _models() -> list[Row]:
    from sim.serving.models import table

    return table()


def _hardware() -> list[Row]:
    from sim.serving.hardware import table

    return table()


NAMES: dict[str, Callable[[], list[str]]] = {
    "policy": lambda: _policies().names(),
    "reclaimer": lambda: _reclaimers().names(),
    "attention": lambda: _attention().names(),
    "step_cost": lambda: _step_costs().names(),
    "copy_cost": lambda: _copy_costs().names(),
    "model": lambda: [row["model"] for row in _models()],
    "hardware": lambda: [row["hardware"] for row in _hardware()],
}
"""What completes the value of a configuration field in the shell."""


def _lister(source: Callable[[], Any], text: str) -> Callable[..., None]:
    """Return a command that prints what ``source`` gives."""

    def show(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        found = source()
        rows = found if isinstance(found, list) else _entries(found)
        if as_json:
            print(json.dumps(rows, indent=2))
        else:
            _print(rows)

    show.__doc__ = text
    return show


policies = _lister(_policies, "List the eviction policies, with their parameters and defaults.")
reclaimers = _lister(_reclaimers, "List what can happen to the slots of dead tokens.")
attention = _lister(_attention, "List the attention models: what a policy sees.")
step_costs = _lister(_step_costs, "List the models of a step's time.")
copy_costs = _lister(_copy_costs, "List the models of a copy's time.")
models = _lister(_models, "List the model presets and where their figures are from.")
hardware = _lister(_hardware, "List the hardware presets and where their figures are from.")


def _entries(registry: Registry[Any]) -> list[Row]:
    """Return name, first sentence of the documentation, parameters and origin of each entry."""
    import dataclasses
    import inspect

    from sim.errors import InputError

    rows: list[Row] = []
    for name in registry:
        origin = registry.origin(name)
        try:
            entry = registry.get(name)
        except InputError as error:
            rows.append({"name": name, "what": str(error), "parameters": {}, "from": origin})
            continue
        text = inspect.getdoc(entry) or ""
        parameters = {
            field.name: None if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(entry)
            if field.init
        }
        rows.append(
            {
                "name": name,
                "what": " ".join(text.partition("\n\n")[0].split()),
                "parameters": parameters,
                "from": origin,
            }
        )
    return rows


def _print(rows: list[Row]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    # Sources are long: they go under the table, so that the figures stay in line.
    notes = [key for key in rows[0] if key.endswith("source")]
    columns = [key for key in rows[0] if key not in notes]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in columns:
        numbers = all(isinstance(row[key], int | float) for row in rows)
        table.add_column(key.replace("_", " "), justify="right" if numbers else "left", no_wrap=key == columns[0])
    for row in rows:
        table.add_row(*(escape(_text(row[key])) for key in columns))
    console = wide_console()
    console.print(table)
    for key in notes:
        console.print(f"[bold]{key.replace('_', ' ')}[/bold]")
        for row in rows:
            console.print(f"  {row[columns[0]]}: {escape(str(row[key]))}", highlight=False, soft_wrap=True)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items()) or "-"
    if value is None:
        return "(none)"
    if isinstance(value, int) and value >= 10**8:
        return f"{value / 1e9:,.2f} G"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
