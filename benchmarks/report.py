"""Showing figures, keeping them, and putting the last ones into the README."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure
from sim.study.versions import versions

__all__ = ["machine", "show", "slug", "update_readme", "write"]

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"
BEGIN, END = "<!-- figures: written by python -m benchmarks --save -->", "<!-- end of figures -->"


def machine() -> str:
    """Return processor, number of usable cores and Python, in words."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        model = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
        cpu = model.group(1).strip() if model else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu}, {cores} cores, Python {platform.python_version()}"


def slug(text: str) -> str:
    """Return ``text`` as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def show(figures: Sequence[Figure], console: Console) -> None:
    """Print the table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "what", "median", "best", "unit", "bound", "kept", "note"):
        table.add_column(heading, justify="right" if heading in ("median", "best") else "left", overflow="fold")
    part = ""
    for figure in figures:
        if part and figure.part != part:
            table.add_section()
        style = "red" if figure.kept is False else ""
        table.add_row(figure.part if figure.part != part else "", *_cells(figure), style=style)
        part = figure.part
    console.print(table)


def write(figures: Sequence[Figure], command: str) -> Path:
    """Write the figures to ``results/<date>-<machine>.json``; a run of the same day on the same machine is replaced."""
    today = datetime.date.today().isoformat()
    what = machine()
    content: dict[str, Any] = {
        "date": today,
        "machine": what,
        "command": command,
        "versions": versions(),
        "figures": [figure.to_dict() | {"bound": figure.bound, "kept": figure.kept} for figure in figures],
    }
    path = RESULTS / f"{today}-{slug(what.partition(', Python')[0])}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def update_readme(saved: Path, readme: Path = README) -> None:
    """Replace the figures in the README by those of a file that :func:`write` made.

    Raises
    ------
    ValueError
        If the README does not have the two lines between which they belong.
    """
    content = json.loads(saved.read_text(encoding="utf-8"))
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme}: expected the lines {BEGIN!r} and {END!r}")
    readme.write_text(f"{before}{BEGIN}\n\n{_markdown(content)}\n{END}{after}", encoding="utf-8")


def _markdown(content: dict[str, Any]) -> str:
    lines = [
        f"{content['date']}, {content['machine']}, by `{content['command']}`.",
        "",
        "| part | what | median | best | unit | bound | kept | note |",
        "|---|---|---:|---:|---|---|---|---|",
    ]
    for fields in content["figures"]:
        figure = Figure(**{key: value for key, value in fields.items() if key not in ("bound", "kept")})
        lines.append("| " + " | ".join([figure.part, *_cells(figure)]) + " |")
    return "\n".join(lines) + "\n"


def _cells(figure: Figure) -> list[str]:
    kept = {True: "yes", False: "NO", None: ""}[figure.kept]
    if figure.value is None and figure.bound:
        kept = "not measured"
    return [figure.name, _number(figure.value), _number(figure.best), figure.unit, figure.bound, kept, figure.note]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
