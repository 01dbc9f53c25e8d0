"""What the page says about the configuration: what all runs share, in what they differ, and who made them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.study.config import SimConfig
from sim.study.report.summary import command
from sim.study.spec import SweepSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["configuration_html", "read_spec", "spec_toml"]


def configuration_html(
    configs: Sequence[SimConfig], versions: Mapping[str, str], *, spec: SweepSpec | None, hashes: Sequence[str]
) -> str:
    """Return the section as HTML.

    Parameters
    ----------
    configs, hashes
        Of the runs.
    versions
        Of the software that made them.
    spec
        Of the sweep; None for a run, or where the sweep's directory does not say.
    """
    values = {name: [getattr(config, name) for config in configs] for name in SimConfig.model_fields}
    distinct = {name: list(dict.fromkeys(column)) for name, column in values.items()}
    shared = [(name, _shown(column[0])) for name, column in distinct.items() if len(column) == 1]
    varied = [(name, ", ".join(map(_shown, column))) for name, column in distinct.items() if len(column) > 1]
    parts = []
    if varied:
        parts += ["<h3>In what the runs differ</h3>", _table(varied, "wide")]
    shared_head = "What all runs share" if len(configs) > 1 else "All fields"
    parts += [f"<h3>{shared_head}</h3>", f'<div class="columns">{_table(shared)}</div>']
    parts += ["<h3>Made with</h3>", f'<div class="columns">{_table(sorted(versions.items()))}</div>']
    parts.append("<h3>To make it again</h3>")
    if spec is not None:
        parts.append(f"<p>As <code>sweep.toml</code>:</p><pre>{escape(spec_toml(spec))}</pre>")
        parts.append("<pre>vtoken sweep sweep.toml --out DIR\nvtoken report DIR</pre>")
    elif len(configs) == 1:
        parts.append(f"<p>Configuration {escape(hashes[0])}:</p>")
        parts.append(f"<pre>{escape(command(configs[0]))} --out DIR\nvtoken report DIR</pre>")
    else:
        parts.append("<p>The directory does not say which sweep it was; each row of the table has its command.</p>")
    return "\n".join(parts)


def read_spec(directory: Path) -> SweepSpec | None:
    """Return the specification that a sweep left in its directory; None if there is none that can be read."""
    try:
        return SweepSpec(**json.loads((directory / "sweep.json").read_text(encoding="utf-8"))["spec"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def spec_toml(spec: SweepSpec) -> str:
    """Return a specification as the TOML file that it is read from."""
    lines = [f"name = {_toml(spec.name)}", f"seeds = {_toml(spec.seeds)}"]
    for head, settings in (("[base]", spec.base), ("[grid]", spec.grid)):
        lines += ["", head, *_entries(settings)] if settings else []
    for head, tables in (("[[exclude]]", spec.exclude), ("[[include]]", spec.include)):
        for settings in tables:
            lines += ["", head, *_entries(settings)]
    return "\n".join(lines) + "\n"


def _entries(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in settings.items()]


def _toml(value: Any) -> str:
    """Write what a specification may hold (text, numbers, truth values, lists of them) as TOML, which is as in JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[tuple[str, str]], name: str = "") -> str:
    lines = [f'<tr><th scope="row">{escape(key)}</th><td>{escape(value)}</td></tr>' for key, value in rows]
    attribute = f' class="{name}"' if name else ""
    return f"<table{attribute}><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"
