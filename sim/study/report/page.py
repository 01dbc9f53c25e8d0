"""One HTML file that needs nothing else: table, plots, block maps and configuration of a run or a sweep."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import InputError
from sim.kv.events import KVEventLog
from sim.study.export import write_atomically
from sim.study.plots import run_figures, sweep_figures
from sim.study.plots.block_map import block_map_around_repack, has_repack
from sim.study.plots.style import RAMP_COLOURS, SLOT_COLOURS
from sim.study.report.block_map import block_map
from sim.study.report.figures import figures_html
from sim.study.report.settings import configuration_html, read_spec
from sim.study.report.sources import EventSource, event_sources
from sim.study.report.summary import command, configs_of, frame_of_run, means_html, run_table
from sim.study.result import RunResult, to_json
from sim.study.store import Store
from sim.study.tables import BASELINE
from sim.study.versions import package_version

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["MOST_STATES_BYTES", "write_report"]

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("text.js", "states.js", "map_view.js", "strip.js", "player.js", "table.js", "page.js")

MOST_STATES_BYTES = 4_000_000
"""Compressed block states of all maps of a page together; base64 makes a third more of them."""

COLOURS = {
    "live": SLOT_COLOURS["live"],
    "dead": SLOT_COLOURS["dead"],
    "tail": SLOT_COLOURS["tail, not yet written"],
    "destination": SLOT_COLOURS["copy destination"],
    "source": "#CC79A7",
    "ramp": list(RAMP_COLOURS),
}


def write_report(directory: str | Path, out: str | Path | None = None, *, events: Sequence[str] = ()) -> Path:
    """Write the page of a run or a sweep, as a whole or not at all.

    Parameters
    ----------
    directory
        Of a run (:meth:`RunResult.save`) or a sweep.
    out
        The file; ``directory/report.html`` if None.
    events
        Logs of KV events to draw block maps from, each ``FILE``, ``DIR`` of a run, or one of these behind ``LABEL=``;
        see :func:`sim.study.report.sources.event_sources` for those that are found by themselves.

    Returns
    -------
    path
        The file.

    Raises
    ------
    InputError
        If the directory is neither a run's nor a sweep's, a log cannot be used, or the file cannot be written.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"{directory}: expected the directory of a run or a sweep, there is none")
    out = directory / "report.html" if out is None else Path(out)
    if out.is_dir():
        raise InputError(f"{out}: expected a file to write, it is a directory")
    if not out.parent.is_dir():
        raise InputError(f"{out}: there is no directory {out.parent}")
    sources = event_sources(directory, events)
    page = _sweep(directory, sources) if Store.is_store(directory) else _run(directory, sources)
    try:
        write_atomically(out, page)
    except OSError as error:
        raise InputError(f"{out}: cannot write it: {error.strerror}") from None
    return out


def _run(directory: Path, sources: Sequence[EventSource]) -> str:
    result = RunResult.load(directory)
    return _page(
        title=result.config.label,
        about=f"One simulated run, configuration {result.config_hash}.",
        table=frame_of_run(result),
        figures=list(run_figures(result)),
        versions=result.versions,
        sources=sources,
        directory=directory,
    )


def _sweep(directory: Path, sources: Sequence[EventSource]) -> str:
    store = Store(directory)
    figures = list(sweep_figures(store))
    table, aside = store.frame()
    failures = store.failures()
    spec = read_spec(directory)
    about = f"{len(table):,} simulated runs."
    if failures:
        about += f" {len(failures):,} failed, the first with: {next(iter(failures.values()))}."
    if aside:
        about += f" {len(aside):,} files could not be used, the first is {aside[0]}."
    return _page(
        title=f"Sweep {spec.name if spec is not None else directory.name}",
        about=about,
        table=table,
        figures=figures,
        versions=store.load(table["config_hash"][0]).versions,
        sources=sources,
        directory=directory,
    )


def _page(
    *,
    title: str,
    about: str,
    table: pd.DataFrame,
    figures: list[tuple[str, Figure]],
    versions: Mapping[str, str],
    sources: Sequence[EventSource],
    directory: Path,
) -> str:
    maps: list[dict[str, Any]] = []
    for source in sources:
        log = KVEventLog.load(source.path)
        try:
            states = block_map(log, limit_bytes=MOST_STATES_BYTES // len(sources))
        except InputError as error:
            raise InputError(f"{source.path}: {error}") from None
        maps.append({"label": source.label} | states)
        if has_repack(log):
            figures.append(("block_map", block_map_around_repack(log, source.label)))
    data = {"table": run_table(table), "maps": maps, "colours": COLOURS}
    configs = configs_of(table)
    several = len(configs) > 1
    paired = f"A share behind a figure is its change against the paired run with {BASELINE} reclamation."
    script = "\n".join(_asset(name) for name in SCRIPTS)
    style = _asset("report.css")
    return _filled(
        _asset("report.html"),
        {
            "policy": _policy(script, style),
            "title": escape(title),
            "about": escape(about),
            "style": style,
            "map": _map_html(maps, command(configs[0]), directory),
            "means": means_html(table) if several else "<p>One run: nothing to average or to compare.</p>",
            "runs": paired if several else "All figures are defined in docs/metrics.md.",
            "csv_name": escape(f"{directory.resolve().name}.csv"),
            "plots": figures_html(figures),
            "configuration": configuration_html(
                configs,
                versions,
                spec=read_spec(directory),
                hashes=list(table["config_hash"]),
            ),
            "footer": f"Made by vtoken-sim {escape(package_version())}: <code>vtoken report</code>. "
            "This file needs nothing else, and loads nothing.",
            "data": _embedded(data),
            "script": script,
        },
    )


def _map_html(maps: Sequence[dict[str, Any]], example: str, directory: Path) -> str:
    """Return the controls of the maps or, if there is none, how to get one."""
    if maps:
        sizes = " or ".join(str(size) for size in sorted({each["block_size"] for each in maps}))
        return _filled(_asset("map.html"), {"size": sizes})
    return (
        '<p class="note">No KV events were given, and a block map is drawn from them. A sweep keeps none; make one of '
        "its runs again with its events, and the page with them:</p>"
        f"<pre>{escape(example)} --events --out RUN\nvtoken report {escape(str(directory))} --events RUN</pre>"
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _filled(template: str, parts: dict[str, str]) -> str:
    """Put the parts where their names stand, in one go: what looks like a name inside a part is left alone."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _embedded(data: Any) -> str:
    """Return JSON in which no text can end the element that it stands in."""
    return to_json(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(script: str, style: str) -> str:
    """Return what the browser may do for this page: run this script, apply this style, and load nothing."""

    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {source(script)}; style-src {source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
