"""All pictures of a run's or a sweep's directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sim.errors import InputError, did_you_mean
from sim.kv.events import KVEventLog
from sim.study.config import SimConfig
from sim.study.plots.block_map import block_map_around_repack, has_repack
from sim.study.plots.concurrency import concurrency_over_time
from sim.study.plots.latency import latency_by_setting, latency_cdf
from sim.study.plots.liveness import liveness_over_time
from sim.study.plots.medium import style_named, use_style
from sim.study.plots.panels import cdf_panels, time_panels
from sim.study.plots.pool import pool_before_after
from sim.study.plots.retained import reduction_cdf, retained_cdf
from sim.study.plots.settings import (
    concurrency_by_setting,
    fragmentation_by_setting,
    retained_by_setting,
    throughput_by_setting,
)
from sim.study.plots.slots import slots_over_time
from sim.study.plots.style import FORMATS, base_name, save
from sim.study.result import RunResult
from sim.study.store import Store
from sim.study.tables import BASELINE, RECLAIM_FIELDS, reclaimer_rank

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["plot_directory", "run_figures", "sweep_figures"]


def plot_directory(
    directory: str | Path, out: str | Path | None = None, *, file_format: str | None = None, style: str = "screen"
) -> list[Path]:
    """Draw every picture of a run or a sweep.

    Parameters
    ----------
    directory
        Of a run (:meth:`RunResult.save`) or a sweep.
    out
        Where the pictures go; ``directory/plots`` if None.
    file_format
        ``png``, ``svg`` or ``pdf``; the style's own if None: pixels for the screen, ``pdf`` for a paper.
    style
        ``screen`` or ``paper``.

    Returns
    -------
    paths
        The files, in a fixed order.

    Raises
    ------
    InputError
        If the directory is neither, there is no such format or style, or the pictures cannot be written.
    """
    directory = Path(directory)
    file_format = style_named(style).file_format if file_format is None else file_format
    if file_format not in FORMATS:
        hint = did_you_mean(file_format, FORMATS)
        raise InputError(f"--format: expected one of {', '.join(FORMATS)}, got {file_format!r}{hint}")
    if not directory.is_dir():
        raise InputError(f"{directory}: expected the directory of a run or a sweep, there is none")
    out = directory / "plots" if out is None else Path(out)
    paths = []
    with use_style(style):
        figures = sweep_figures(Store(directory)) if Store.is_store(directory) else _of_run(directory)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{out}: cannot write there: {error.strerror}") from None
        for name, figure in figures:
            paths.append(out / f"{name}.{file_format}")
            save(figure, paths[-1])
    return paths


def _of_run(directory: Path) -> Iterator[tuple[str, Figure]]:
    result = RunResult.load(directory)
    yield from run_figures(result)
    events = directory / "events.parquet"
    if events.exists():
        log = KVEventLog.load(events)
        if has_repack(log):
            yield "block_map", block_map_around_repack(log, result.config.label)


def run_figures(result: RunResult) -> Iterator[tuple[str, Figure]]:
    """Yield name and figure of every picture of one run."""
    for name, axes in (
        ("slots", slots_over_time(result)),
        ("block_liveness", liveness_over_time(result)),
        ("retained_blocks", retained_cdf([result])),
        ("concurrency", concurrency_over_time(result)),
    ):
        yield name, _whole(axes)
    yield "latency", latency_cdf(result)
    if result.pool_snapshot is not None:
        yield "pool", pool_before_after(result)


def _whole(axes: object) -> Figure:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    assert isinstance(axes, Axes)
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure


def sweep_figures(store: Store) -> Iterator[tuple[str, Figure]]:
    """Yield name and figure of every picture of a sweep.

    Pictures over time show, of each policy, the middle budget and the first seed; the others show all runs.

    Raises
    ------
    InputError
        If no run has finished.
    """
    table, _ = store.frame()
    if table.empty:
        raise InputError(f"{store.root}: no finished run in it")
    yield "fragmentation", fragmentation_by_setting(table)
    yield "retained_blocks", retained_by_setting(table)
    yield "concurrency", concurrency_by_setting(table)
    yield "throughput", throughput_by_setting(table)
    yield "latency", latency_by_setting(table)
    groups = [[store.load(config_hash) for config_hash in group] for group in _middle_groups(table)]
    yield "slots", time_panels(groups, slots_over_time, "Slots of the KV pool over time")
    yield (
        "block_liveness",
        time_panels(groups, liveness_over_time, "Allocated blocks by share of live slots", "share of slots live"),
    )
    pairs = [group for group in groups if len(group) > 1 and any(_is_naive(result) for result in group)]
    if pairs:
        yield "retained_blocks_cdf", cdf_panels(pairs, retained_cdf, "Blocks a request holds (mean over its decode)")
        yield (
            "retained_blocks_paired",
            cdf_panels(pairs, reduction_cdf, "The same request, against naive reclamation"),
        )
    snapshots = [result for group in groups for result in group if result.pool_snapshot is not None]
    if snapshots:
        yield "pool", pool_before_after(max(snapshots, key=_freed))


def _is_naive(result: RunResult) -> bool:
    return base_name(result.config.reclaimer) == BASELINE


def _freed(result: RunResult) -> int:
    snapshot = result.pool_snapshot
    assert snapshot is not None
    return int((snapshot["owner_before"] >= 0).sum() - (snapshot["owner_after"] >= 0).sum())


def _middle_groups(table: pd.DataFrame) -> list[list[str]]:
    """Return, for each policy, the hashes of one pair group: the middle one by budget, naive reclamation first."""
    same = [name for name in SimConfig.model_fields if name not in RECLAIM_FIELDS]
    groups = []
    for _, of_policy in table.groupby("policy", sort=False):
        of_seed = of_policy[of_policy["seed"] == of_policy["seed"].min()]
        settings = [group for _, group in of_seed.groupby(same, sort=False, dropna=False)]
        middle = settings[(len(settings) - 1) // 2]
        hashes = middle.drop_duplicates("reclaimer").set_index("reclaimer")["config_hash"]
        groups.append([hashes[name] for name in sorted(hashes.index, key=reclaimer_rank)])
    # A group of one (full retention) leaves most of its row empty: last.
    return sorted(groups, key=lambda group: len(group) == 1)
