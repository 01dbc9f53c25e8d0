"""Small files about what was measured: tables as CSV and Markdown."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_validate.calibrate import Calibration, Row
from gpu_validate.validate import COLUMNS, Comparison
from sim.serving.profile import FIGURES, Curve, Figure

__all__ = ["figure_table", "markdown", "write_json", "write_rows", "write_steps", "write_whole"]

UNITS = {
    "attention_ns_per_byte": "ns/B",
    "copy_ns_per_byte_scattered": "ns/B",
    "copy_ns_per_byte_contiguous": "ns/B",
    "attention_free_sequences": "sequences",
    "dead_slot_factor": "",
    "copy_share": "",
    "copy_interference": "",
    "score_pair_bytes": "B",
}
"""Units that are not ns."""


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write JSON."""
    write_whole(path, json.dumps(content, indent=2, sort_keys=False) + "\n")


def figure_table(calibration: Calibration) -> list[tuple[str, str, str, str, str]]:
    """Return (figure, value, unit, n, error) of each figure of a profile, as text, with a header."""
    profile = calibration.profile
    lines = [("figure", "value", "unit", "n", "error, held out")]
    for name in FIGURES:
        figure = getattr(profile, name)
        unit = UNITS.get(name, "ns")
        if profile.kind(name) == "assumed":
            unit = f"{unit} (assumed)".strip()
        error = "-" if figure.error is None else f"{figure.error.mean:.1%} mean, {figure.error.p90:.1%} p90"
        lines.append((name, _value(figure), unit, "-" if figure.n is None else str(figure.n), error))
    return lines


def _value(figure: Figure | Curve) -> str:
    if isinstance(figure, Curve):
        (first, low), (last, high) = figure.points[0], figure.points[-1]
        return f"{low:,.0f} at {first} to {high:,.0f} at {last}"
    return f"{figure.value:,.0f}" if figure.value >= 1000 else f"{figure.value:.4g}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first line is its header."""
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body]) + "\n"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write every measurement of a calibration as CSV, one line each; the point as ``name=value`` pairs."""
    lines = [["series", "point", "ns", "p20_ns", "p80_ns", "n", "drift"]]
    for row in rows:
        point = " ".join(f"{name}={value:g}" for name, value in row.point.items())
        times = [f"{ns:.1f}" for ns in (row.ns, row.p20_ns, row.p80_ns)]
        lines.append([row.series, point, *times, str(row.n), f"{row.drift:.4f}"])
    _write_csv(path, lines)


def write_steps(path: Path, comparison: Comparison) -> None:
    """Write predicted and measured time of every step as CSV: what stands for the repeats, and each of them."""
    import numpy as np

    columns = comparison.predicted.columns
    measured = comparison.measured_ns
    head = [*COLUMNS, "measured_ns", *(f"measured_{k}_ns" for k in range(len(measured)))]
    numbers = [columns[name].tolist() for name in COLUMNS]
    times = [np.round(row).astype(np.int64).tolist() for row in (comparison.typical_ns, *measured)]
    _write_csv(path, [head, *([str(x) for x in line] for line in zip(*numbers, *times, strict=True))])


def _write_csv(path: Path, lines: Iterable[Sequence[str]]) -> None:
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_whole(path, text.getvalue())
