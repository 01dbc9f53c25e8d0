"""The picture of a validation: each step's time over the run, and predicted against measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpu_validate.validate import Comparison

__all__ = ["draw"]

# Okabe and Ito's palette, as in the simulator's pictures.
COLOURS = {"decode only": "#0072B2", "with prefill": "#E69F00", "with a copy": "#009E73"}
INK = "#333333"


def draw(comparison: Comparison, path: Path, *, title: str, tolerance: float) -> None:
    """Draw a comparison.

    Parameters
    ----------
    comparison
        What to draw.
    path
        PNG, SVG or PDF file.
    title
        Device and log.
    tolerance
        Drawn as a band around equality.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "legend.frameon": False,
        "svg.hashsalt": "vtoken-sim",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(10.0, 4.2), layout="constrained")
        over, against = figure.subplots(1, 2, width_ratios=(1.5, 1))
        _draw_steps(over, comparison)
        _draw_scatter(against, comparison, tolerance)
        total = comparison.groups["all"]
        figure.suptitle(
            f"{title}: total predicted {total['predicted_s']:.3g} s, measured {total['measured_s']:.3g} s "
            f"({total['difference']:+.1%}; repeated runs differ by {comparison.spread:.1%})",
            fontsize=10,
        )
        figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else None)


def _milliseconds(comparison: Comparison) -> tuple[Any, Any]:
    predicted = comparison.predicted.columns["predicted_ns"] / 1e6
    return predicted, comparison.typical_ns / 1e6


def _draw_steps(axes: Any, comparison: Comparison) -> None:
    """Draw measured and predicted times over the steps: means of as many neighbours as there are too many of."""
    columns = comparison.predicted.columns
    predicted, measured = _milliseconds(comparison)
    width = max(1, len(predicted) // 300)
    whole = len(predicted) // width * width
    steps, predicted, measured = (
        values[:whole].reshape(-1, width).mean(axis=1) for values in (columns["step"], predicted, measured)
    )
    axes.plot(steps, measured, color=INK, linewidth=1.2, label="measured")
    axes.plot(steps, predicted, color="#D55E00", linewidth=1.0, label="predicted")
    axes.set_xlabel("step" if width == 1 else f"step (means of {width})")
    axes.set_ylabel("step time, ms")
    axes.set_ylim(0, 1.15 * max(measured.max(), predicted.max()))  # room for the legend
    axes.set_title("Over the run")
    axes.legend(loc="upper right", ncols=2)


def _draw_scatter(axes: Any, comparison: Comparison, tolerance: float) -> None:
    from matplotlib.ticker import LogLocator

    columns = comparison.predicted.columns
    predicted, measured = _milliseconds(comparison)
    prefill = columns["tokens"] > columns["seqs"]
    copying = (columns["beside_copy"] > 0) | (columns["pause_ns"] > 0)
    masks = {"decode only": ~prefill & ~copying, "with prefill": prefill & ~copying, "with a copy": copying}
    ends = np.array([min(predicted.min(), measured.min()) * 0.9, max(predicted.max(), measured.max()) * 1.1])
    axes.fill_between(ends, ends * (1 - tolerance), ends * (1 + tolerance), color="#E4E4E4", linewidth=0)
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    for name, mask in masks.items():
        if mask.any():
            axes.scatter(measured[mask], predicted[mask], s=6, color=COLOURS[name], alpha=0.6, linewidth=0, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_xlabel("measured, ms")
    axes.set_ylabel("predicted, ms")
    axes.set_title(f"Each step; grey: within {tolerance:.0%}")
    axes.legend(loc="upper left", markerscale=2)
