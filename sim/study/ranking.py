"""Which configuration to take: a row each, what it costs and gives side by side, and which is best within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import InputError, did_you_mean
from sim.study.sla import Bound, parse_bound
from sim.study.tables import with_settings

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SHOWN", "cells", "notes", "ranked"]

HELD = "retained_blocks_mean"
SHOWN = {
    "mean_running": ("running", ".1f"),
    "peak_running": ("at most", ".0f"),
    "e2e_s_p95": ("e2e p95, s", ".2f"),
    "requests_per_s": ("requests/s", ".3f"),
    HELD: ("blocks", ".1f"),
    "pool_used": ("pool", ".0%"),
    "preemptions": ("preempted", ".0f"),
    "refused": ("refused", ".0f"),
    "load_state": ("load", ""),
    "holds": ("holds", ""),
    "best": ("best", ""),
}
"""Columns of the table, with their heads and formats; others that are asked for stand after the latency."""

MORE_IS_BETTER = frozenset(
    {"mean_running", "peak_running", "requests_per_s", "output_tokens_per_s", "finished", "budget", "budget_tokens"}
)
LOADS = ("stable", "backlogged", "overloaded")
NEVER = "ideal"
"""A reclaimer that nobody can have: it is shown, and never the best."""
AS_FAST = 0.99
"""Share of the highest throughput from which on a configuration counts as equally fast."""
SHORT = 0.9
"""Share of the pool above which memory counts as short: a long prompt waits for more blocks than are left."""


def ranked(table: pd.DataFrame, sla: str | Sequence[str] = (), *, sort: str | None = None) -> pd.DataFrame:
    """Return one row for each configuration, the best first: policy, budget, reclaimer, and what one decides by.

    Parameters
    ----------
    table
        One row a run, as :func:`sim.sweep` returns it or ``summary.csv`` holds it.
    sla
        Bounds in seconds that must hold together, such as ``e2e_p95=20``.
    sort
        A figure to sort by, those that hold first; throughput if None. Of throughput and running requests the highest
        comes first, of everything else the lowest.

    Returns
    -------
    pandas.DataFrame
        ``policy``, ``keeps``, ``reclaimer`` and whatever else differs between the runs but the seed; means over seeds
        of ``mean_running`` and ``peak_running`` (requests), latencies (s), ``requests_per_s``, ``retained_blocks_mean``
        (blocks a request holds while it decodes), ``pool_used`` (largest share of the pool in use), ``preemptions``,
        ``refused``; ``load_state``, the worst of all seeds. With bounds also ``holds`` (no overloaded run does, nor one
        that refuses requests), and ``best``: "fastest" for the highest throughput that holds (of those within 1 % of
        it, the lowest latency), "fewest blocks" for the fewest blocks a request. ``ideal`` is never marked.

    Raises
    ------
    InputError
        If a bound is none, or there is no such figure.

    Examples
    --------
    >>> import sim
    >>> table = sim.sweep({"trace": "poisson:rate=8,n=20,prompt=200,output=40", "policy": "random", "budget": 0.5,
    ...                    "reclaimer": ["naive", "vtoken"], "kv_blocks": 60})
    >>> sim.ranked(table, "e2e_p95=2")[["reclaimer", "holds"]].iloc[0].tolist()
    ['vtoken', True]
    """
    bounds = [_bound(text) for text in ([sla] if isinstance(sla, str) else sla)]
    table, by = with_settings(table)
    table = table.assign(pool_used=table["used_blocks_peak"] / table["pool_blocks"])
    wanted = [f"{bound.latency}_s_{bound.part}" for bound in bounds]
    figures = [str(name) for name in table if name not in by and table[name].dtype.kind in "fi"]
    key = "requests_per_s" if sort is None else sort
    if key not in (*figures, *by):
        raise InputError(f"sort {key!r}: expected a figure of the runs{did_you_mean(key, figures)}")
    first = ["mean_running", "peak_running", "e2e_s_p95", *wanted, *{key} - {*by}]
    names = list(dict.fromkeys([*first, *SHOWN]))
    groups = table.groupby([*by, "reclaimer"], sort=False, dropna=False)
    means = groups[[name for name in names if name in figures]].mean()
    means["load_state"] = groups["load_state"].agg(lambda states: max(states, key=LOADS.index))
    rows = means[[name for name in names if name in means]].reset_index()
    order, ascending = [key], [key not in MORE_IS_BETTER]
    if bounds:
        rows["holds"] = (rows["load_state"] != "overloaded") & (rows["refused"] == 0)
        for name, bound in zip(wanted, bounds, strict=True):
            rows["holds"] &= rows[name] <= bound.limit
        rows["best"] = _marks(rows, wanted[0])
        order, ascending = ["holds", *order], [False, *ascending]
    return rows.sort_values(order, ascending=ascending, kind="stable", ignore_index=True)


def _bound(text: str) -> Bound:
    bound = parse_bound(text)
    if bound.relative:
        raise InputError(
            f"bound {text!r}: expected seconds, such as e2e_p95=20; multiples of a baseline are for "
            "vtoken search sla-throughput"
        )
    return bound


def _marks(rows: pd.DataFrame, latency: str) -> list[str]:
    """Say which row is the fastest that holds, and which holds the fewest blocks."""
    marks = [""] * len(rows)
    possible = rows["holds"] & (rows["reclaimer"].str.partition(":")[0] != NEVER)
    places = np.flatnonzero(possible)
    if not len(places):
        return marks
    rate, blocks, late = (rows[name].to_numpy(float)[places] for name in ("requests_per_s", HELD, latency))
    fastest = places[np.argmin(np.where(rate >= AS_FAST * rate.max(), late, np.inf))]
    marks[fastest] = "fastest"
    if not np.isnan(blocks).all():
        least = places[np.nanargmin(blocks)]
        marks[least] = ", ".join(filter(None, [marks[least], "fewest blocks"]))
    return marks


def notes(rows: pd.DataFrame) -> list[str]:
    """Return lines on what the rows of :func:`ranked` cannot say: memory that was not short, load that was too much."""
    said = []
    real = rows[rows["reclaimer"].str.partition(":")[0] != NEVER]
    real = rows if real.empty else real
    if (real["pool_used"] < SHORT).all() and not real["preemptions"].any():
        said.append(
            f"memory was not short: at most {real['pool_used'].max():.0%} of the blocks were in use, so that winning "
            "some back makes nothing faster; less memory (--gpu-memory-utilization, --kv-blocks) or more load "
            "(--rate-scale) shows where it does"
        )
    over = int((real["load_state"] == "overloaded").sum())
    if over:
        said.append(
            f"{over} of {len(real)} configurations are overloaded: their queue grows to the end, and their latencies "
            "with the length of the trace; less load (a lower --rate-scale) shows what they can do"
        )
    refused = int((real["refused"] > 0).sum())
    if refused:
        said.append(
            f"{refused} of {len(real)} configurations refuse requests that do not fit their memory, up to "
            f"{real['refused'].max():.0f} a run"
        )
    if "holds" in rows and not real["holds"].any():
        said.append("no configuration holds the bound")
    return said


def cells(rows: pd.DataFrame) -> tuple[list[str], list[list[str]], int]:
    """Return heads, rows of text, and how many columns name the configuration."""
    needless = {"load_state"} if "holds" in rows else set()
    needless |= {name for name in ("refused", "preemptions") if not rows[name].any()}
    shown = [str(name) for name in rows if name not in needless]
    heads = [SHOWN.get(name, (name, ""))[0] for name in shown]
    if "holds" in rows:
        why = rows["holds"].map({True: "yes", False: "no"}).where(rows["load_state"] != "overloaded", "overloaded")
        rows = rows.assign(holds=why)
    columns = [[_cell(name, value) for value in rows[name]] for name in shown]
    return heads, [list(row) for row in zip(*columns, strict=True)], shown.index("mean_running")


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else format(value, SHOWN.get(name, ("", ".4g"))[1])
    return str(value)
