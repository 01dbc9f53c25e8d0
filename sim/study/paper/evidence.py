"""The runs as one table, and figures of it with their spread over seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.study.config import SimConfig
from sim.study.paper.setups import FrontierRow, Part, Server
from sim.study.store import Store
from sim.study.tables import BASELINE, RECLAIM_FIELDS, bootstrap

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Capacity",
    "Cell",
    "Evidence",
    "Figure",
    "Limit",
    "cells",
    "evidence_table",
    "figure",
    "grouped",
    "interval",
]

CELL = ("model", "memory", "lengths", "load", "variant", "policy", "ratio", "reclaimer")
"""What tells one set-up from another; runs that differ in nothing but the seed are one."""

CHANGES = ("retained_blocks_mean", "requests_per_s", "e2e_s_p95", "used_blocks_mean", "mean_running")

Capacity = Mapping[tuple[Server, str], float]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A mean, and the 95 % bootstrap interval of it; NaN if there is nothing to take the mean of."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


@dataclasses.dataclass(frozen=True)
class Cell:
    """One set-up with a figure of it."""

    model: str
    memory: float
    lengths: str
    load: float | str
    variant: str
    policy: str
    ratio: float
    reclaimer: str
    figure: Figure


@dataclasses.dataclass(frozen=True)
class Limit:
    """The end of a search: what was asked, what was found, and of whom."""

    about: tuple[Any, ...]
    policy: str
    ratio: float
    reclaimer: str
    value: float


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that claims are judged by.

    Attributes
    ----------
    table
        One row a run and set-up: ``part``, the columns of :data:`CELL` (``ratio`` is of evicted tokens), ``seed``,
        the summary's figures, and ``<figure>_change`` against the paired run with naive reclamation, as a share.
    frontier, sla
        Limits that were searched, by row of the frontier, and by (server, lengths, load of the baseline).
    liveness
        Of the runs with a context of 16K: share of their blocks that are at most half alive, at their last sample.
    """

    table: pd.DataFrame
    frontier: Sequence[tuple[FrontierRow, Limit]]
    sla: Sequence[Limit]
    liveness: Mapping[tuple[str, str, str], float]

    def part(self, *names: str) -> pd.DataFrame:
        """Return the rows of these parts."""
        return self.table[self.table["part"].isin(names)]


def evidence_table(parts: Sequence[Part], store: Store) -> pd.DataFrame:
    """Return the table of all runs of these parts, which the store has."""
    import pandas as pd

    runs, _ = store.frame()
    runs = runs.set_index("config_hash", drop=False)
    tags = []
    for part in parts:
        for config_hash, config in part.runs():
            evicted = None if config.budget is None else round(1 - config.budget, 6)
            about = {"part": part.name, **part.tags, "memory": config.gpu_memory_utilization, "ratio": evicted}
            tags.append({"config_hash": config_hash, **about})
    found = pd.DataFrame(tags)
    table = found.join(runs.drop(columns=["config_hash"]), on="config_hash")
    return _with_changes(table)


def _with_changes(table: pd.DataFrame) -> pd.DataFrame:
    """Add the change of each figure against the paired naive run, and that run's fragmentation."""
    same = ["part", "lengths", *(name for name in SimConfig.model_fields if name not in RECLAIM_FIELDS)]
    baseline = table[table["reclaimer"] == BASELINE].drop_duplicates(same)
    wanted = [*CHANGES, "fragmentation_mean"]
    both = table[same].merge(baseline[[*same, *wanted]], on=same, how="left")
    changes = {f"{name}_change": table[name].to_numpy() / both[name].to_numpy() - 1 for name in CHANGES}
    return table.assign(**changes, naive_fragmentation=both["fragmentation_mean"].to_numpy())


def interval(values: NDArray[np.float64]) -> Figure:
    """Return the mean of what seeds gave, with its bootstrap interval; NaN are left out."""
    return Figure(*bootstrap(values))


def grouped(table: pd.DataFrame, by: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Yield the rows that agree in some columns, with what they agree in, in the order of their first rows."""
    for key, group in table.groupby(list(by), sort=False, dropna=False):
        yield tuple(key) if isinstance(key, tuple) else (key,), group


def cells(table: pd.DataFrame, column: str) -> list[Cell]:
    """Return a figure of each set-up over its seeds; those that have none are left out."""
    found = [(*key, interval(group[column].to_numpy(np.float64))) for key, group in grouped(table, CELL)]
    return [cell for cell in itertools.starmap(Cell, found) if not math.isnan(cell.figure.mean)]


def figure(table: pd.DataFrame, column: str) -> Figure:
    """Return the mean of a figure over set-ups, with its spread over seeds: each seed's mean is one value."""
    return interval(table.groupby("seed")[column].mean().to_numpy(np.float64))
