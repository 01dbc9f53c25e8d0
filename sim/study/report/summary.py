"""The table of runs, as what the page reads: columns with heads and units, and a row a run."""

from __future__ import annotations

import math
import re
import shlex
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.study.config import BUDGETS, SimConfig
from sim.study.run_file import flat_summary
from sim.study.tables import BASELINE, METRICS, paired, sections

if TYPE_CHECKING:
    import pandas as pd

    from sim.study.result import RunResult

__all__ = ["command", "configs_of", "frame_of_run", "means_html", "run_table"]

MAIN = (
    "retained_blocks_mean",
    "fragmentation_mean",
    "used_blocks_mean",
    "mean_running",
    "requests_per_s",
    "output_tokens_per_s",
    "ttft_s_p95",
    "tpot_s_p95",
    "e2e_s_p95",
    "preemptions",
)
"""Figures that the table shows at first; all others are a click away."""

UNITS = {
    "retained_blocks_mean": "blocks a request",
    "fragmentation_mean": "share of slots",
    "used_blocks_mean": "blocks",
    "mean_running": "requests",
    "requests_per_s": "1/s",
    "output_tokens_per_s": "tokens/s",
}

MOST_CHOICES = 30
"""Values of a column that are worth a menu."""


def frame_of_run(result: RunResult) -> pd.DataFrame:
    """Return one run as the table that :meth:`sim.study.store.Store.frame` gives of a sweep."""
    import pandas as pd

    row = {"config_hash": result.config_hash} | result.config.model_dump()
    row |= {name: value for name, value in flat_summary(result.summary).items() if name not in row}
    return pd.DataFrame([row])


def run_table(table: pd.DataFrame) -> dict[str, Any]:
    """Return columns and rows for the page.

    Parameters
    ----------
    table
        One row a run: configuration and figures.

    Returns
    -------
    data
        ``columns``: ``name``, ``head``, ``unit``, ``title``, ``number``, ``decimals``, ``facet`` (a menu filters by
        it), ``main`` (shown at first), ``change`` (name of the column that holds the change against naive reclamation),
        ``change_of``. ``rows``: a list of values a run; None where there is none.
    """
    table = paired(table.copy())
    table["keeps"] = [config.keeps for config in configs_of(table)]
    table["command"] = [command(config) for config in configs_of(table)]
    settings = [name for name in SimConfig.model_fields if name in table and name not in BUDGETS]
    varied = [name for name in settings if table[name].nunique(dropna=False) > 1]
    first = ["policy", "keeps", "reclaimer"]
    names = [*first, *(name for name in (*varied, *settings) if name not in first)]
    names = list(dict.fromkeys(names))
    figures = [str(name) for name in table if name not in {*names, *BUDGETS, "config_hash", "command"}]
    figures.sort(key=lambda name: MAIN.index(name) if name in MAIN else len(MAIN))
    columns = [
        _column(name, table[name], main=name in {*first, *varied, *MAIN}, facet=name in {*first, *varied})
        for name in [*names, *figures, "config_hash", "command"]
    ]
    known = {column["name"] for column in columns}
    for column in columns:
        change = f"{column['name']}_vs_{BASELINE}"
        column["change"] = change if change in known else None
        column["change_of"] = column["name"].endswith(f"_vs_{BASELINE}") or column["name"] == "command"
    cells = [[_plain(value) for value in table[column["name"]]] for column in columns]
    return {"columns": columns, "rows": [list(row) for row in zip(*cells, strict=True)]}


def means_html(table: pd.DataFrame) -> str:
    """Return the tables that ``vtoken results`` prints: a row a setting, a column a reclaimer, means over seeds."""
    parts = []
    for title, heads, rows in sections(paired(table.copy())):
        index = len(heads) - len(set(table["reclaimer"]))
        lines = ["".join(f'<th scope="col">{escape(head)}</th>' for head in heads)]
        for row in rows:
            cells = [f"<td>{escape(cell)}</td>" for cell in row[:index]]
            lines.append("".join([*cells, *(f'<td class="number">{escape(cell)}</td>' for cell in row[index:])]))
        body = "\n".join(f"<tr>{line}</tr>" for line in lines[1:])
        parts.append(
            f"<h3>{escape(title)}</h3>\n<table><thead><tr>{lines[0]}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
        )
    return "\n".join(parts)


def command(config: SimConfig) -> str:
    """Return the command that makes a run: every field that is not at its default."""
    words = ["vtoken", "run"]
    for name, field in SimConfig.model_fields.items():
        value = getattr(config, name)
        if value == field.default:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


def configs_of(table: pd.DataFrame) -> list[SimConfig]:
    """Return the configuration of each row of a table."""
    fields = [name for name in SimConfig.model_fields if name in table]
    rows = zip(*([_plain(value) for value in table[name]] for name in fields), strict=True)
    return [SimConfig(**{name: _typed(name, value) for name, value in zip(fields, row, strict=True)}) for row in rows]


def _typed(name: str, value: Any) -> Any:
    """Undo what a table does to whole numbers that are missing in some rows: it makes them fractions."""
    whole = "int" in str(SimConfig.model_fields[name].annotation)
    return int(value) if whole and isinstance(value, float) else value


def _column(name: str, values: pd.Series[Any], *, main: bool, facet: bool) -> dict[str, Any]:
    known = [_plain(value) for value in values if _plain(value) is not None]
    number = bool(known) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
    titles = {metric.column: metric.title for metric in METRICS}
    head, unit = _head(name)
    return {
        "name": name,
        "head": head,
        "unit": UNITS.get(name, unit),
        "title": f"{titles.get(name, head)}: {name}",
        "number": number,
        "decimals": _decimals(name, known) if number else 0,
        "facet": facet and 1 < values.nunique(dropna=False) <= MOST_CHOICES,
        "main": main,
    }


def _head(name: str) -> tuple[str, str]:
    """Return a column's name in words, and its unit: ``ttft_s_p95`` is ("ttft p95", "s")."""
    match = re.fullmatch(r"(.+?)_(per_s|s)((?:_(?:mean|p\d+))?)", name)
    if match is None:
        return name.replace("_", " "), ""
    what, unit, part = match.groups()
    return f"{what}{part}".replace("_", " "), "1/s" if unit == "per_s" else "s"


def _decimals(name: str, values: list[float]) -> int:
    """Return how many decimals tell about four digits of the largest value."""
    for metric in METRICS:
        if metric.column == name:
            return int(re.sub(r"\D", "", metric.form))
    if name in SimConfig.model_fields or all(float(value).is_integer() for value in values):
        return max((len(f"{value:g}".partition(".")[2]) for value in values), default=0)
    most = max(abs(value) for value in values)
    return 0 if most >= 1000 else min(6, 3 - math.floor(math.log10(most))) if most else 0


def _plain(value: Any) -> Any:
    """Return a value of a table as JSON has it; what is missing is None."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
