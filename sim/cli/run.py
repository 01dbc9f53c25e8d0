"""``vtoken run``: one simulation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.options import ConfigFile, configuration, with_config_flags
from sim.cli.screen import wide_console
from sim.errors import InputError
from sim.study.config import BUDGETS

if TYPE_CHECKING:
    from sim.study.config import SimConfig
    from sim.study.result import RunResult

__all__ = ["run"]

OUTPUT = "Output"


@with_config_flags(repeat=False)
def run(
    flags: dict[str, Any],
    config: ConfigFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for summary.json, config.json and the Parquet files; a previous run in it is replaced.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the summary as one JSON object, and nothing else.", rich_help_panel=OUTPUT),
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", help="Write the KV events to DIR, too.", rich_help_panel=OUTPUT)
    ] = False,
    dump_steps: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Write the state at every step.", rich_help_panel=OUTPUT)
    ] = None,
    dump_tables: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Write what was scheduled at every step, and the blocks it was given.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No progress on standard error.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Simulate one configuration: print its figures, and write them to a directory.

    [bold]Example:[/bold] vtoken run --policy h2o --budget 0.5 --reclaimer vtoken --out runs/h2o
    """
    if events and out is None:
        raise InputError("--events: expected --out DIR as well, the events are written there")
    settled = configuration(flags, config)
    if settled.policy.partition(":")[0] == "full" and flags.keys() & set(BUDGETS):
        print("note: policy full keeps every token; the budget is not used", file=sys.stderr)
    with _directory(out) as directory:
        result = _simulate(
            settled,
            quiet,
            dump_steps=dump_steps,
            dump_tables=dump_tables,
            events=directory / "events.parquet" if events and directory is not None else None,
        )
        if directory is not None:
            result.write_files(directory)
    refused = result.summary["refused"]
    if refused:
        print(f"note: {refused:,} requests refused; {result.summary['first_refusal']}", file=sys.stderr)
    if as_json:
        from sim.study.result import to_json

        print(to_json(result.summary))
    else:
        _print(result, out)


@contextlib.contextmanager
def _directory(out: Path | None) -> Iterator[Path | None]:
    """Give a directory that becomes ``out`` if all goes well, or None if nothing is to be written."""
    if out is None:
        yield None
        return
    from sim.study.export import complete_directory

    with complete_directory(out) as directory:
        yield directory


def _simulate(config: SimConfig, quiet: bool, **files: Any) -> RunResult:
    from sim.progress import Progress
    from sim.study.run import simulate

    progress = Progress(None if quiet else sys.stderr, "requests")

    def tell(done: int, total: int | None, clock_s: float) -> None:
        progress.total = total
        progress.update(done, f"simulated time {clock_s:,.0f} s")

    try:
        return simulate(config, progress=tell, **files)
    except KeyboardInterrupt:
        progress.clear()
        print("interrupted; nothing was written", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        progress.clear()


FIGURES = (
    ("requests", ("requests", "finished", "refused", "preemptions", "load_state")),
    ("throughput", ("makespan_s", "requests_per_s", "output_tokens_per_s", "mean_running", "peak_running")),
    (
        "KV memory",
        (
            "kv_bytes_per_token",
            "pool_blocks",
            "retained_blocks_mean",
            "over_retention_mean",
            "fragmentation_mean",
            "dead_fraction_mean",
            "tail_slack_mean",
            "used_blocks_mean",
            "used_blocks_peak",
        ),
    ),
    (
        "reclamation",
        (
            "tokens_evicted",
            "tokens_moved",
            "blocks_freed_by_death",
            "blocks_freed_by_repack",
            "repacks_committed",
            "repacks_cancelled",
            "copy_time_s",
            "copy_delay_s",
        ),
    ),
)
"""What the table shows, by heading."""

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


def _print(result: RunResult, out: Path | None) -> None:
    """Print the figures as a compact table."""
    from rich import box
    from rich.table import Table

    console = wide_console()
    summary = result.summary
    console.print(f"[bold]{result.config.label}[/bold] (configuration {result.config_hash})", highlight=False)
    console.print(f"step cost: {summary['step_cost_used']}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for heading, names in FIGURES:
        for place, name in enumerate(name for name in names if name in summary):
            table.add_row("" if place else heading, name, _figure(summary[name]))
    console.print(table)
    latency = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    latency.add_column("latency, s")
    parts = ("mean", "p50", "p90", "p95", "p99")
    for part in parts:
        latency.add_column(part, justify="right")
    for name in LATENCIES:
        latency.add_row(name.removesuffix("_s"), *(_figure(summary[name].get(part)) for part in parts))
    console.print(latency)
    if out is not None:
        console.print(f"written to {out}; pictures: vtoken plot {out}", highlight=False)


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
