"""``vtoken trace``: look at workloads, convert them, generate them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sim.workload import Source, Trace

__all__ = ["app"]

app = typer.Typer(help="Look at workloads, convert them between formats, generate them.", no_args_is_help=True)

_Trace = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="Trace file of any known format, 'default', or a generator: poisson:rate=16,n=1000,prompt=1000.",
    ),
]
_Format = Annotated[
    str | None, typer.Option("--format", help="Format of the file; recognised by content if not given.")
]
_Arrivals = Annotated[
    str | None,
    typer.Option(
        "--arrivals", help="Arrival process for files with lengths only, or starts of sessions: poisson:rate=4."
    ),
]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of what has to be drawn.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def describe(
    trace: _Trace, format: _Format = None, arrivals: _Arrivals = None, seed: _Seed = 0, json: _Json = False
) -> None:
    """Print length, rate, burstiness and sharing of a workload."""
    from sim.workload import describe as summarise
    from sim.workload import read_trace

    description = summarise(read_trace(trace, format=format, arrivals=arrivals, seed=seed))
    if json:
        from json import dumps

        typer.echo(dumps(description.to_dict(), indent=2, allow_nan=False))
    else:
        typer.echo(description.text())


@app.command()
def convert(
    trace: _Trace,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .csv, .csv.gz or .parquet.")],
    format: _Format = None,
    arrivals: _Arrivals = None,
    seed: _Seed = 0,
    from_s: Annotated[float, typer.Option("--from-s", min=0, help="Keep arrivals from this time on (seconds).")] = 0.0,
    to_s: Annotated[float | None, typer.Option("--to-s", help="Keep arrivals before this time (seconds).")] = None,
    head: Annotated[int | None, typer.Option("--head", min=1, help="Keep the first N requests.")] = None,
    spread_ties: Annotated[
        bool, typer.Option("--spread-ties", help="Spread requests with equal times over their tick of the clock.")
    ] = False,
    tick_s: Annotated[
        float | None,
        typer.Option("--tick-s", help="Length of a tick (seconds); up to the next time stamp if not given."),
    ] = None,
    rate_scale: Annotated[float, typer.Option("--rate-scale", help="Offer the requests so many times as fast.")] = 1.0,
    max_prompt: Annotated[int | None, typer.Option("--max-prompt", min=1, help="Cut prompts (tokens).")] = None,
    max_output: Annotated[int | None, typer.Option("--max-output", min=1, help="Cut outputs (tokens).")] = None,
    max_total: Annotated[
        int | None, typer.Option("--max-total", min=2, help="Cut prompts until prompt and output fit (tokens).")
    ] = None,
    shift_to_zero: Annotated[bool, typer.Option("--shift-to-zero", help="Let the first request arrive at 0.")] = False,
) -> None:
    """Write a workload in the canonical format, changed on the way if asked.

    Changes apply in the order of the options above: window, head, spread, rate, lengths, shift.
    """
    from sim.errors import InputError
    from sim.workload import limit, open_source, transform

    if tick_s is not None and not spread_ties:
        raise InputError("--tick-s has a meaning only with --spread-ties")
    source = open_source(trace, format=format, arrivals=arrivals, seed=seed)
    windowed = from_s > 0 or to_s is not None
    if head is not None and not windowed:
        source = limit(source, head)
    if windowed or spread_ties or rate_scale != 1 or shift_to_zero or max_prompt or max_output or max_total:
        whole = _whole(source)
        if windowed:
            whole = transform.window(whole, from_s, to_s)
        if head is not None:
            whole = transform.head(whole, head)
        if spread_ties:
            whole = transform.spread_ties(whole, tick_s, seed)
        whole = transform.rate_scale(whole, rate_scale)
        whole = transform.cap_lengths(whole, prompt=max_prompt, output=max_output, total=max_total)
        source = transform.shift_to_zero(whole) if shift_to_zero else whole
    _write(source, out)


@app.command()
def generate(
    spec: Annotated[
        str,
        typer.Argument(metavar="SPEC", help="A generator, such as gamma:rate=8,cv=2,n=5000,prompt=lognormal:1000:0.8."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write (.csv, .csv.gz, .parquet); CSV on stdout if not given."),
    ] = None,
    seed: _Seed = 0,
) -> None:
    """Draw a workload and write it in the canonical format."""
    from sim.errors import InputError, did_you_mean
    from sim.workload import GeneratedSource, generators, open_source
    from sim.workload.write import csv_lines

    source = open_source(spec, seed=seed) if spec.partition(":")[0].strip() in generators else None
    if not isinstance(source, GeneratedSource):
        name = spec.partition(":")[0]
        raise InputError(
            f"unknown generator {name!r}: expected one of {', '.join(generators)}{did_you_mean(name, generators)}"
        )
    if out is None:
        for line in csv_lines(source):
            typer.echo(line, nl=False)
    else:
        _write(source, out)


@app.command()
def formats() -> None:
    """List the trace formats that can be read, and the packages that those not built in come from."""
    from sim.errors import InputError
    from sim.workload.readers import trace_readers

    for name in trace_readers:
        origin = trace_readers.origin(name)
        try:
            summary = trace_readers.get(name).summary
        except InputError as error:
            summary = str(error)
        typer.echo(f"{name:<15}{summary}" + ("" if origin == "built in" else f" [{origin}]"))


def _whole(source: Source) -> Trace:
    """Read what is left of a source into memory."""
    from dataclasses import replace

    from sim.workload import Trace

    if isinstance(source, Trace):
        return source
    return replace(Trace.concat(source.chunks(), name=source.name), hash_tokens=source.hash_tokens, notes=source.notes)


def _write(source: Source, out: Path) -> None:
    from sim.workload import write_trace

    count = write_trace(source, out)
    for note in source.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{out}: {count:,} requests", err=True)
