"""``python -m benchmarks``: measure, show, compare with the bounds."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from benchmarks.child import ROOT, FailedError, run
from benchmarks.figures import Figure, missed

PARTS = ("steps", "policies", "reclaimers", "process", "memory", "sweep", "many", "start")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return 1 if a bound is missed or a part failed."""
    options = _parser().parse_args(arguments)
    if options.worker:
        figures = importlib.import_module(f"benchmarks.{options.worker}").measure(quick=options.quick)
        print(json.dumps([figure.to_dict() for figure in figures]))
        return 0
    figures, failed = [], False
    for part in options.only:
        print(f"{part} ...", file=sys.stderr)
        try:
            figures += _measure(part, options.quick)
        except FailedError as error:
            failed = True
            figures.append(Figure(part, "failed", None, "", note=str(error)))
    return _report(figures, options) or int(failed)


def _measure(part: str, quick: bool) -> list[Figure]:
    """Measure one part in a process of its own: small, and with nothing left over from another part."""
    command = [sys.executable, "-m", "benchmarks", "--worker", part, *(["--quick"] if quick else [])]
    taken = run(command, env={"PYTHONPATH": str(ROOT)})
    return [Figure(**fields) for fields in json.loads(taken.output.splitlines()[-1])]


def _report(figures: list[Figure], options: argparse.Namespace) -> int:
    from benchmarks import report
    from sim.cli.screen import wide_console

    console = wide_console()
    console.print(f"{report.machine()}{' (quick: shorter runs, coarser figures)' if options.quick else ''}")
    report.show(figures, console)
    late = missed(figures)
    for figure in late:
        console.print(f"bound missed: {figure.name}: {figure.value:.3g} {figure.unit}, {figure.bound}", style="red")
    if options.save:
        only = "" if tuple(options.only) == PARTS else f" --only {','.join(options.only)}"
        saved = report.write(figures, f"python -m benchmarks{only}{' --quick' if options.quick else ''} --save")
        report.update_readme(saved)
        console.print(f"written to {saved}; {report.README} has its figures")
    return int(bool(late))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", type=_parts, default=PARTS, metavar="PART,..", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="shorter runs and fewer repeats: to see that it works")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results and in its README")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    return parser


def _parts(text: str) -> tuple[str, ...]:
    """Return the parts that ``text`` names, in their usual order."""
    wanted = [word.strip() for word in text.split(",")]
    for word in wanted:
        if word not in PARTS:
            raise argparse.ArgumentTypeError(f"unknown part {word!r}: expected some of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in wanted)


if __name__ == "__main__":
    sys.exit(main())
