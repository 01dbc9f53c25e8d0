"""Draw kept.png and print this page's tables.

python experiments/13_shared_budget/draw.py: reads kept.csv and served.csv beside it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from sim.study.plots.style import new_figure, policy_colour, save, styled

HERE = Path(__file__).parent
SHOWN = ("h2o", "tova")
LOOKS = {
    ("request", False): ("--", "o", "none", "a share, each for itself"),
    ("batch", False): ("-", "o", "full", "a share, together"),
    ("request", True): ("--", "s", "none", "a number, each for itself"),
    ("batch", True): ("-", "s", "full", "a number, together"),
}
FIGURES = ("kept_mean", "kept_p5", "kept_least", "kept_shortest_quarter", "kept_longest_quarter")


@styled
def draw(table: pd.DataFrame) -> None:
    """Draw attention kept against tokens kept."""
    figure = new_figure(10.0, 7.0)
    for row, (column, what) in enumerate((("kept_mean", "mean over requests"), ("kept_p5", "5th percentile"))):
        for at, workload in enumerate(("azure", "azure, recorded")):
            axes = figure.add_subplot(2, 2, 2 * row + at + 1)
            for policy in SHOWN:
                for (scope, number), (line, marker, fill, _) in LOOKS.items():
                    rows = table[
                        (table["workload"] == workload)
                        & (table["policy"] == policy)
                        & (table["scope"] == scope)
                        & (table["budget"].str.contains("tokens") == number)
                    ]
                    axes.plot(
                        rows["live_tokens_a_request"],
                        rows[column],
                        linestyle=line,
                        marker=marker,
                        fillstyle=fill,
                        color=policy_colour(policy),
                        markersize=5,
                    )
            axes.set_title(f"Azure conversation, {'recorded' if at else 'synthetic'} attention")
            axes.set_xlabel("live tokens a request (mean over time)")
            axes.set_ylabel(f"attention kept, {what}")
    for policy in SHOWN:
        axes.plot([], [], color=policy_colour(policy), label=policy)
    for line, marker, fill, label in LOOKS.values():
        axes.plot([], [], color="black", linestyle=line, marker=marker, fillstyle=fill, markersize=5, label=label)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    save(figure, HERE / "kept.png")


def beside(table: pd.DataFrame, figures: tuple[str, ...]) -> pd.DataFrame:
    """Return a row a setting, means over seeds, with ``request`` and ``batch`` side by side."""
    means = table.groupby(["workload", "policy", "budget", "scope"], sort=False)[list(figures)].mean()
    return means.unstack("scope").swaplevel(axis=1).sort_index(axis=1, level=1, sort_remaining=False)


def at_equal_tokens(table: pd.DataFrame) -> pd.DataFrame:
    """Interpolate at the tokens that a share of 0.2 keeps together; and the tokens that keep what 0.3 keeps alone."""
    lines = []
    for (workload, policy), rows in table.groupby(["workload", "policy"], sort=False):
        number = rows["budget"].str.contains("tokens")
        if not number.any():
            continue
        kinds = {
            "share, alone": rows[(rows["scope"] == "request") & ~number],
            "share, together": rows[(rows["scope"] == "batch") & ~number],
            "number, alone": rows[(rows["scope"] == "request") & number],
            "number, together": rows[(rows["scope"] == "batch") & number],
        }
        alone, together = kinds["share, alone"], kinds["share, together"]
        at = float(together.loc[together["budget"] == "0.2", "live_tokens_a_request"].iloc[0])
        goal = alone[alone["budget"] == "0.3"].iloc[0]
        need = np.interp(goal["kept_mean"], together["kept_mean"], together["live_tokens_a_request"])
        line = {"workload": workload, "policy": policy, "tokens": at, "saved": 1 - need / goal["live_tokens_a_request"]}
        for kind, some in kinds.items():
            for figure in FIGURES[:3]:
                line[f"{figure.removeprefix('kept_')} {kind}"] = np.interp(
                    at, some["live_tokens_a_request"], some[figure]
                )
        lines.append(line)
    return pd.DataFrame(lines)


def main() -> None:
    """Draw, and print what the README quotes."""
    kept = pd.read_csv(HERE / "kept.csv")
    draw(kept)
    with pd.option_context("display.width", 250, "display.max_rows", None, "display.max_columns", None):
        print(beside(kept, FIGURES).round(3))
        print(at_equal_tokens(kept).round(3).to_string())
        served = pd.read_csv(HERE / "served.csv")
        print(beside(served, ("kept_mean", "kept_p5", "requests_per_s", "preemptions", "e2e_p95_s")).round(3))


if __name__ == "__main__":
    main()
