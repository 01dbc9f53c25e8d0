"""The table of a sweep: paired with naive reclamation, averaged over seeds, as text or Markdown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.rng import stream
from sim.study.config import BUDGETS, SimConfig

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

__all__ = [
    "BASELINE",
    "METRICS",
    "RECLAIM_FIELDS",
    "Grid",
    "Metric",
    "Spread",
    "bootstrap",
    "comparison",
    "markdown",
    "markdown_table",
    "paired",
    "reclaimer_rank",
    "rich_table",
    "sections",
    "text",
    "with_settings",
]

BASELINE = "naive"
"""Reclaimer that the others are compared with: the paper's Naive-Evict."""

RECLAIM_FIELDS = (
    "reclaimer",
    "repack_when",
    "theta_f",
    "low_watermark",
    "shared_blocks",
    "headroom_blocks",
    "copy_cost",
)
"""Fields that say what happens to dead slots; runs that differ in nothing else are pairs."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A section of the printed table; :func:`paired` adds the change of each against the baseline."""

    column: str
    title: str
    form: str


METRICS = (
    Metric("retained_blocks_mean", "KV blocks a request holds while it decodes (mean)", ".1f"),
    Metric("fragmentation_mean", "Fragmentation F of allocated blocks (mean over time)", ".3f"),
    Metric("used_blocks_mean", "Blocks in use (mean over time)", ",.0f"),
    Metric("mean_running", "Requests running (mean over time)", ".1f"),
    Metric("requests_per_s", "Finished requests per second", ".3f"),
    Metric("e2e_s_p95", "End-to-end latency, p95 (s)", ".2f"),
)


class Spread(NamedTuple):
    """A mean over seeds and the half width of its 95 % bootstrap interval: 0 for one seed; NaN if there is no run."""

    mean: float = math.nan
    half: float = 0.0


@dataclasses.dataclass(frozen=True)
class Grid:
    """One figure of a sweep: a row for each setting, a column for each reclaimer.

    Attributes
    ----------
    names
        What a key holds: policy, budget ("keeps"), and whatever else differs between the runs, apart from the seed.
    keys
        Of the rows.
    reclaimers
        Of the columns.
    cells
        The figure, row by row.
    """

    names: tuple[str, ...]
    keys: tuple[tuple[Any, ...], ...]
    reclaimers: tuple[str, ...]
    cells: tuple[tuple[Spread, ...], ...]

    def present(self, row: int) -> list[int]:
        """Return the columns that have a value in a row."""
        return [column for column, cell in enumerate(self.cells[row]) if not math.isnan(cell.mean)]


def paired(table: pd.DataFrame) -> pd.DataFrame:
    """Add ``<figure>_vs_naive``: the change against the paired run with naive reclamation, as a share.

    A pair has the same trace, model, policy, budget, seed and scheduler; runs without one get NaN.
    """
    if table.empty:
        return table
    same = [name for name in SimConfig.model_fields if name not in RECLAIM_FIELDS]
    present = [metric.column for metric in METRICS if metric.column in table.columns]
    # Naive reclamation reads none of the other reclaim fields, so any of its runs will do.
    baseline = table[table["reclaimer"] == BASELINE].drop_duplicates(same)
    both = table.merge(baseline[[*same, *present]], on=same, how="left", suffixes=("", "_naive"))
    for name in present:
        table[f"{name}_vs_naive"] = (both[name] / both[f"{name}_naive"] - 1).to_numpy()
    return table


def comparison(table: pd.DataFrame, column: str) -> Grid:
    """Return one figure of a sweep by setting and reclaimer.

    Parameters
    ----------
    table
        One row a run, as :meth:`sim.study.store.Store.frame` gives it.
    column
        The figure.
    """
    table, by = with_settings(table)
    rows: dict[tuple[Any, ...], dict[Any, Spread]] = {}
    for key, group in table.groupby([*by, "reclaimer"], sort=False, dropna=False):
        rows.setdefault(tuple(key[:-1]), {})[key[-1]] = _spread(group[column].to_numpy(np.float64))
    reclaimers = tuple(sorted(table["reclaimer"].unique(), key=reclaimer_rank))
    cells = tuple(tuple(row.get(name, Spread()) for name in reclaimers) for row in rows.values())
    return Grid(tuple(by), tuple(rows), reclaimers, cells)


def with_settings(table: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the table with its budgets in words (``keeps``), and what tells settings apart besides reclaimer, seed."""
    table = table.assign(keeps=[_keeps(*budget) for budget in zip(*(table[name] for name in BUDGETS), strict=True)])
    fixed = {"policy", *BUDGETS, "reclaimer", "seed"}
    varied = [name for name in SimConfig.model_fields if name not in fixed and table[name].nunique(dropna=False) > 1]
    return table, ["policy", "keeps", *varied]


def reclaimer_rank(reclaimer: str) -> tuple[int, str]:
    """Return what to sort reclaimers by: no reclamation, the baseline, the others by name, the bound."""
    places = {"none": 0, BASELINE: 1, "ideal": 3}
    return places.get(reclaimer.partition(":")[0], 2), reclaimer


def _keeps(share: float, tokens: float, memory: str | None) -> str:
    if isinstance(memory, str):
        return memory
    if not math.isnan(tokens):
        return f"{int(tokens)} tokens"
    return "all" if math.isnan(share) else f"{share:g}"


def _spread(values: np.ndarray[Any, np.dtype[np.float64]]) -> Spread:
    """Return the mean over seeds with its spread."""
    mean, low, high = bootstrap(values)
    return Spread() if math.isnan(mean) else Spread(mean, (high - low) / 2)


def bootstrap(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """Return the mean of what seeds gave and the ends of its 95 % bootstrap interval; NaN are left out.

    Of one value all three are that; of none they are NaN.
    """
    values = values[~np.isnan(values)]
    if len(values) < 2:
        alone = float(values[0]) if len(values) else math.nan
        return alone, alone, alone
    draws = stream(0, "bootstrap").integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def sections(table: pd.DataFrame) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield a title, the heads and the rows of text for each metric; the first heads are of the index."""
    for metric in METRICS:
        if metric.column not in table.columns:
            continue
        grid = comparison(table, metric.column)
        changes = comparison(table, f"{metric.column}_vs_{BASELINE}")
        rows = [
            [*map(_plain, key), *(_cell(metric, *both) for both in zip(row, change, strict=True))]
            for key, row, change in zip(grid.keys, grid.cells, changes.cells, strict=True)
        ]
        yield metric.title, [*grid.names, *grid.reclaimers], rows


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:g}"
    return str(value)


def _cell(metric: Metric, value: Spread, change: Spread) -> str:
    """Return ``"48.1 (-56.2 ±0.2 %)"``; where there is nothing to compare with, ``"48.1 ±8.0"``."""
    mean, half = value
    if math.isnan(mean):
        return "-"
    share, share_half = 100 * change.mean, 100 * change.half
    if math.isnan(share) or share == share_half == 0:
        return f"{mean:{metric.form}}" + (f" ±{half:{metric.form}}" if half else "")
    share = round(share, 1) + 0.0  # no "-0.0"
    return f"{mean:{metric.form}} ({share:+.1f}" + (f" ±{share_half:.1f}" if share_half else "") + " %)"


def text(table: pd.DataFrame) -> list[Table]:
    """Return a table for a terminal for each metric of :data:`METRICS`."""
    shown = []
    for title, heads, rows in sections(paired(table)):
        index = len(heads) - sum(1 for head in heads if head in set(table["reclaimer"]))
        shown.append(rich_table(heads, rows, index, title))
    return shown


def rich_table(heads: Sequence[str], rows: Sequence[Sequence[str]], index: int, title: str | None = None) -> Table:
    """Return a table for a terminal, whose first ``index`` columns say what a row is about."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for place, head in enumerate(heads):
        grid.add_column(head, justify="left" if place < index else "right")
    for row in rows:
        grid.add_row(*row)
    return grid


def markdown(table: pd.DataFrame) -> str:
    """Return the same tables as Markdown."""
    parts = []
    for title, heads, rows in sections(paired(table)):
        parts.append(f"**{title}**\n\n{markdown_table(heads, rows)}")
    return "\n".join(parts)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return one table as Markdown."""
    return "".join(_line(cells) + "\n" for cells in (heads, ["---"] * len(heads), *rows))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
