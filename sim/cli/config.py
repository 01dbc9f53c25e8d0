"""``vtoken config``: the schema of a configuration, and the configuration that flags describe."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from sim.cli.options import ConfigFile, configuration, with_config_flags

__all__ = ["app"]

app = typer.Typer(help="Show what can be configured, and what is.", no_args_is_help=True)


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of a configuration file."""
    from sim.study.config import SimConfig

    print(json.dumps(SimConfig.model_json_schema(), indent=2))


@app.command("show")
@with_config_flags(repeat=False)
def show(
    flags: dict[str, Any],
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
) -> None:
    """Print the configuration that flags and file describe, with its hash."""
    settled = configuration(flags, config)
    if as_json:
        print(json.dumps({"config_hash": settled.hash(), "config": settled.model_dump()}, indent=2))
    else:
        print(f"# {settled.hash()}\n{settled.to_toml()}", end="")
