"""``vtoken sweep`` and ``vtoken results``: many simulations, and the table of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.executors import Dask, DaskLocal, Workers, executor, going_on
from sim.cli.options import with_config_flags
from sim.cli.screen import warn_unused, wide_console
from sim.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from sim.study.spec import Plan, SweepSpec
    from sim.study.sweep import SweepReport

__all__ = ["results", "sweep"]

SHOWN_RUNS = 50


@with_config_flags(repeat=True)
def sweep(
    flags: dict[str, Any],
    out: Annotated[
        Path, typer.Option(help="Directory of the sweep; finished runs in it are kept, the others are made.")
    ],
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC.toml]", help="What to run: base, grid, seeds, exclude, include.")
    ] = None,
    workers: Workers = None,
    dask: Dask = None,
    dask_local: DaskLocal = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Make at most this many runs now.")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what would be run, how long it takes, and how much disk; keep nothing.")
    ] = False,
    probe_s: Annotated[
        float, typer.Option(min=0, help="With --plan: seconds to try runs for, to say how long it takes; 0 for none.")
    ] = 10.0,
) -> None:
    """Simulate every combination of a grid and its seeds, in several processes or on a cluster.

    Any flag of a configuration may be given: once, and all runs have this value; several times, and it is an axis of
    the grid. Flags win over the file. The same command again goes on where it was stopped.

    [bold]Example:[/bold] vtoken sweep --policy h2o --policy random --reclaimer naive --reclaimer vtoken --budget 0.5
    --out sweeps/first
    """
    wanted = _spec(spec, flags)
    if plan:
        from sim.study.check import check
        from sim.study.executors import default_workers

        runs = wanted.expand()
        check([run.config for run in runs.runs])
        _print_plan(runs, out)
        _print_estimate(runs, out, probe_s, None if dask else workers or dask_local or default_workers())
        return
    _conclude(out, _run(wanted, out, workers, dask, dask_local, limit))


def results(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a sweep.")],
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the tidy table of all runs as CSV.")] = False,
    best: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BOUND",
            help="Print one table, a row a configuration: which of them keep a bound in seconds, such as e2e_p95=20, "
            "and which of those is best. Several bounds must hold together.",
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(metavar="FIGURE", help="Sort that table by a figure, such as e2e_s_p95; throughput otherwise."),
    ] = None,
) -> None:
    """Print the tables of a sweep, and write all its runs to summary.csv and summary.parquet."""
    from sim.study.store import Store
    from sim.study.tables import markdown, paired

    if not Store.is_store(directory):
        raise InputError(f"{directory}: expected the directory of a sweep, it has no runs in it")
    store = Store(directory)
    table, aside = store.frame()
    table = paired(table)
    try:
        store.write_tables(table)
    except OSError as error:
        print(f"warning: {directory}: the tables are printed, not written: {error.strerror}", file=sys.stderr)
    warn_unused(aside)
    missing, failed = store.missing(), len(store.failures())
    if missing:
        print(f"{missing} runs of the last sweep are missing; {failed} failed, see {directory}/failed", file=sys.stderr)
    if table.empty:
        raise InputError(f"{directory}: no finished run in it")
    if best or sort:
        _print_ranking(table, best or [], sort, as_markdown, as_csv)
    elif as_csv:
        sys.stdout.write(table.to_csv(index=False))
    elif as_markdown:
        sys.stdout.write(markdown(table))
    else:
        _print_table(table)
        _note(table)


def _spec(path: Path | None, flags: dict[str, Any]) -> SweepSpec:
    from sim.study.spec import SweepSpec

    spec = SweepSpec() if path is None else SweepSpec.from_toml(path)
    return spec.with_flags({name: value if isinstance(value, list) else [value] for name, value in flags.items()})


def _run(
    spec: SweepSpec, out: Path, workers: int | None, dask: str | None, dask_local: int | None, limit: int | None
) -> SweepReport:
    from sim.progress import Progress
    from sim.study.sweep import sweep as run_all

    progress = Progress(sys.stderr, "runs")
    with going_on(out, progress), executor(workers, dask, dask_local, progress) as place:
        return run_all(spec, out, workers=workers, executor=place, limit=limit, progress=progress)


def _conclude(out: Path, report: SweepReport) -> None:
    """Print the table, and on standard error how the sweep went; exit with 1 if a run failed."""
    from sim.study.store import Store
    from sim.study.tables import paired

    table, _ = Store(out).frame()
    if not table.empty:
        _print_table(paired(table))
        _note(table)
    made = len(report.outcomes) - len(report.failures)
    parts = [f"{made} runs made", f"{report.already_done} were there"]
    parts += [f"{len(report.failures)} failed"] * bool(report.failures)
    parts += [f"{report.left} left by --limit"] * bool(report.left)
    print(f"{', '.join(parts)}; {out}/summary.csv, pictures: vtoken plot {out}", file=sys.stderr)
    if len(table) > 1:
        print(f"which is best within a bound: vtoken results {out} --best e2e_p95=20", file=sys.stderr)
    if report.failures:
        print(f"error: {len(report.failures)} runs failed, see {out}/failed", file=sys.stderr)
        raise typer.Exit(1)


def _print_plan(plan: Plan, out: Path) -> None:
    """Say which runs there are, and which of them are done."""
    from rich import box
    from rich.table import Table

    from sim.study.config import BUDGETS, SimConfig
    from sim.study.store import Store

    store = Store(out)
    done = {run.config_hash for run in plan.runs if store.path(run.config_hash).exists()}
    shown = ["policy", *BUDGETS, "reclaimer", "seed"]
    varied = [
        name
        for name in SimConfig.model_fields
        if name not in shown and len({getattr(run.config, name) for run in plan.runs}) > 1
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["policy", "keeps", "reclaimer", *varied, "seed"]
    for name in ("run", *names, "there"):
        table.add_column(name)
    for run in plan.runs[:SHOWN_RUNS]:
        values = [str(getattr(run.config, name)) for name in names]
        table.add_row(run.config_hash, *values, "yes" if run.config_hash in done else "")
    console = wide_console()
    console.print(table)
    if len(plan.runs) > SHOWN_RUNS:
        console.print(f"... and {len(plan.runs) - SHOWN_RUNS:,} more", highlight=False)
    console.print(
        f"{len(plan.runs)} runs ({len(done)} there, {len(plan.runs) - len(done)} to make); "
        f"{plan.excluded} excluded, {plan.duplicates} duplicates dropped",
        highlight=False,
    )


def _print_estimate(plan: Plan, out: Path, probe_s: float, processes: int | None) -> None:
    """Say what the runs that are left will take, and on what that rests."""
    from sim.progress import duration
    from sim.study.estimate import estimate
    from sim.study.store import Store

    store = Store(out)
    left = [run for run in plan.runs if not store.path(run.config_hash).exists()]
    if not left:
        return
    found = estimate(left, store, probe_s)
    console = wide_console()
    if found.wall_s is None or found.size is None:
        if not probe_s:
            return
        console.print("expected time: not known, no run could be tried in time (--probe-s)", highlight=False)
        return
    low, high = map(duration, found.wall_s)
    parts = [f"{low} to {high} of one process"]
    if processes is not None and processes > 1:
        fast, slow = map(duration, found.on(processes))
        parts.insert(0, f"{fast} to {slow} on {processes} processes")
    few, many = (f"{size / 1e6:,.1f}" for size in found.size)
    console.print(f"expected time: {'; '.join(parts)}; expected size: {few} to {many} MB", highlight=False)
    console.print(f"from {found.rests_on}, and a quarter either way", highlight=False)


def _print_table(table: pd.DataFrame) -> None:
    from sim.study.tables import text

    console = wide_console()
    for part in text(table):
        console.print(part)


def _print_ranking(table: pd.DataFrame, bounds: list[str], sort: str | None, as_markdown: bool, as_csv: bool) -> None:
    from sim.study.ranking import cells, notes, ranked
    from sim.study.tables import markdown_table, rich_table

    rows = ranked(table, bounds, sort=sort)
    heads, lines, settings = cells(rows)
    if as_csv:
        sys.stdout.write(rows.to_csv(index=False))
    elif as_markdown:
        sys.stdout.write(markdown_table(heads, lines))
    else:
        wide_console().print(rich_table(heads, lines, settings))
    for note in notes(rows):
        print(f"note: {note}", file=sys.stderr)


def _note(table: pd.DataFrame) -> None:
    """Say on standard error what the tables do not show."""
    from sim.study.ranking import notes, ranked

    for note in notes(ranked(table)):
        print(f"note: {note}", file=sys.stderr)
