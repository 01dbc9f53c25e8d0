"""``vtoken search``: limits, found by simulating at values nearer and nearer to them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.executors import Dask, DaskLocal, Workers, executor, going_on
from sim.cli.options import with_config_flags
from sim.cli.screen import wide_console

if TYPE_CHECKING:
    from sim.study.search import Finding, Group, Question, Report

__all__ = ["app"]

app = typer.Typer(
    help="Find limits: how many requests fit together, which arrival rate a latency bound allows.", no_args_is_help=True
)

OUTPUT = "Output"

_Spec = Annotated[
    Path | None,
    typer.Argument(metavar="[SPEC.toml]", help="As for vtoken sweep: a search for each combination of its grid."),
]
_Out = Annotated[Path, typer.Option(help="Directory of the probes; finished ones in it are used, the others are made.")]
_Checks = Annotated[
    int,
    typer.Option(
        min=0,
        max=10,
        help="Probes on either side of the answer that must agree with it: it is assumed, not known, that "
        "what holds at a value holds at all lower ones.",
    ),
]
_Json = Annotated[
    bool,
    typer.Option("--json", help="Print answers and probes as one JSON object.", rich_help_panel=OUTPUT),
]
_Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on standard error.", rich_help_panel=OUTPUT)]


@app.command(short_help="The most requests that decode together without a preemption.")
@with_config_flags(repeat=True)
def concurrency(
    flags: dict[str, Any],
    out: _Out,
    spec: _Spec = None,
    load: Annotated[
        str,
        typer.Option(
            metavar="burst|sustained",
            help="burst: N requests at once. sustained: N clients, each sends its next request when the last is "
            "answered.",
        ),
    ] = "burst",
    rounds: Annotated[int, typer.Option(min=1, help="Requests a client sends, if the load is sustained.")] = 3,
    least: Annotated[int, typer.Option("--from", min=1, help="Least number of requests to look at.")] = 1,
    most: Annotated[
        int | None, typer.Option("--to", min=1, help="Most to look at; all that the trace holds when not given.")
    ] = None,
    checks: _Checks = 2,
    workers: Workers = None,
    dask: Dask = None,
    dask_local: DaskLocal = None,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Find the most requests that decode together without a preemption, under the KV budget that the flags say.

    The first N requests of the trace arrive at once, and the scheduler may run N. N holds if nobody is preempted or
    refused and all N are between their first and their last token at one moment. A flag given several times makes a
    search for each of its values, and so do several seeds together, all of which must hold.

    [bold]Example:[/bold] vtoken search concurrency --trace poisson:rate=1,prompt=4096,output=12288 --kv-blocks 5822
    --policy h2o --reclaimer naive --reclaimer vtoken --out out/limit
    """
    from sim.study.concurrency import TAKEN, Concurrency

    about = _groups(spec, flags, TAKEN)
    asked = [
        (group, Concurrency(group, load=load, rounds=rounds, low=least, high=most))  # type: ignore[arg-type]
        for group in about
    ]
    _conclude(_search(asked, out, checks, (workers, dask, dask_local), quiet), out, as_json)


@app.command("sla-throughput", short_help="The highest arrival rate that keeps within latency bounds.")
@with_config_flags(repeat=True)
def sla_throughput(
    flags: dict[str, Any],
    out: _Out,
    sla: Annotated[
        list[str],
        typer.Option(
            metavar="BOUND",
            help="What must hold: e2e_p95=20 (seconds), ttft_p99=1.5, tpot_p95=0.05; e2e_p95=1.05x is a multiple of "
            "the baseline's; paper is that one. Several must hold together.",
        ),
    ],
    spec: _Spec = None,
    baseline: Annotated[str, typer.Option(help="Reclaimer that multiples are of; all else is the same.")] = "naive",
    baseline_rate: Annotated[
        float | None,
        typer.Option(help="Requests/s that the baseline is offered; the trace's own rate when not given."),
    ] = None,
    least: Annotated[
        float | None, typer.Option("--from", help="Lowest rate, requests/s; a 64th of the trace's when not given.")
    ] = None,
    most: Annotated[
        float | None, typer.Option("--to", help="Highest rate, requests/s; 64 times the trace's when not given.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How far apart the bracket's ends may be, as a share.")] = 0.02,
    duration_s: Annotated[
        float | None,
        typer.Option(help="Serve the requests that arrive in this time at every rate; the whole trace when not given."),
    ] = None,
    least_s: Annotated[
        float,
        typer.Option("--min-duration-s", help="The whole trace must last this long, or the rate is out of range."),
    ] = 60.0,
    checks: _Checks = 2,
    workers: Workers = None,
    dask: Dask = None,
    dask_local: DaskLocal = None,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Find the highest arrival rate at which latencies keep within bounds.

    The same requests are offered faster or slower (rate-scale). A run whose queue grows to the end (load state
    overloaded) does not hold, however short the trace keeps its latencies.

    [bold]Example:[/bold] vtoken search sla-throughput --sla paper --policy h2o --reclaimer naive --reclaimer vtoken
    --gpu-memory-utilization 0.3 --out out/sla
    """
    from sim.study.sla import TAKEN, SlaThroughput, parse_bound

    bounds = tuple(parse_bound(text) for text in sla)
    asked = [
        (
            group,
            SlaThroughput(
                group,
                bounds,
                low=least,
                high=most,
                tolerance=tolerance,
                duration_s=duration_s,
                least_s=least_s,
                baseline=baseline,
                baseline_rate=baseline_rate,
            ),
        )
        for group in _groups(spec, flags, TAKEN)
    ]
    _conclude(_search(asked, out, checks, (workers, dask, dask_local), quiet), out, as_json)


def _groups(path: Path | None, flags: dict[str, Any], taken: Sequence[str]) -> list[Group]:
    from sim.study.search import groups
    from sim.study.spec import SweepSpec

    spec = SweepSpec() if path is None else SweepSpec.from_toml(path)
    values = {name: value if isinstance(value, list) else [value] for name, value in flags.items()}
    return groups(spec.with_flags(values), taken=taken)


def _search(
    questions: Sequence[tuple[Group, Question]],
    out: Path,
    checks: int,
    where: tuple[int | None, str | None, int | None],
    quiet: bool,
) -> Report:
    from sim.progress import Progress
    from sim.study.search import search

    progress = Progress(None if quiet else sys.stderr, "runs")
    with going_on(out, progress), executor(*where, progress) as place:
        return search(questions, out, checks=checks, workers=where[0], executor=place, progress=progress)


def _conclude(report: Report, out: Path, as_json: bool) -> None:
    """Print the answers, on standard error what to mind; exit with 1 if a run failed."""
    if as_json:
        from sim.study.result import to_json

        print(to_json({"searches": [each.to_dict() for each in report.findings]}))
    else:
        _print_table(report)
    for each in report.findings:
        for line in _remarks(each):
            print(f"{each.group.label}: {line}", file=sys.stderr)
    print(f"{report.made} runs made, {report.found_done} were there; {out}/answers.csv, probes.csv", file=sys.stderr)
    if any(each.error is not None for each in report.findings):
        raise typer.Exit(1)


def _print_table(report: Report) -> None:
    from rich import box
    from rich.table import Table

    from sim.study.tables import BASELINE

    first = report.findings[0].question
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{first.name} ({first.unit})", title_justify="left")
    for name in ("", "holds", "fails", f"vs {BASELINE}", "probes", ""):
        table.add_column(name, justify="left" if not name else "right")
    for each, row in zip(report.findings, report.answers().to_dict("records"), strict=True):
        ratio = row[f"vs_{BASELINE}"]
        values = [None, None] if each.found is None else [each.found.value, each.found.fails]
        table.add_row(
            each.group.label,
            *("-" if value is None else f"{value:g}" for value in values),
            f"{ratio:.2f}x" if ratio == ratio and ratio is not None else "-",
            str(len(each.probes)),
            "" if each.found is None or not each.found.outside else f"{each.found.outside} the range",
        )
    wide_console().print(table)


def _remarks(each: Finding) -> list[str]:
    """Return what a reader of the answer must know."""
    if each.found is None:
        return [f"error: {each.error}"]
    found, axis, unit = each.found, each.question.axis, each.question.unit
    lines = list(each.question.notes)
    if found.outside == "below":
        lines.append(f"warning: the lowest of the range, {axis.low:g} {unit}, fails: {_why(each, axis.low)}")
    if found.outside == "above":
        lines.append(f"warning: the highest of the range, {axis.high:g} {unit}, holds: the limit is higher")
    if not found.monotone:
        above = ", ".join(f"{value:g}" for value in found.held_above)
        lines.append(
            f"warning: {above} {unit} hold although {found.fails:g} fails: "
            "the answer is the highest below the first failure"
        )
    if any("overloaded" in str(probe.verdict.figures.get("baseline_load_state")) for probe in each.probes):
        lines.append("warning: the baseline is overloaded at its rate: its latency says how long one watched")
    return lines


def _why(each: Finding, value: float) -> str:
    return next(probe.verdict.why for probe in each.probes if probe.value == value)
