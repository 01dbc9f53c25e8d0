"""Draw sharing.png from table.csv: what each policy and way of reclaiming holds and finishes, over the sharing degree.

``python experiments/03_prefix_sharing/plot.py``
"""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.figure import Figure

from sim.study.plots.style import new_figure, policy_colour, reclaimer_line, reclaimer_marker, save, styled

HERE = Path(__file__).parent
BUDGET = "0.3"
POLICIES = ("random", "h2o", "scissorhands")
LOOKS = {
    "naive": ("naive", "naive"),
    "always skip": ("vtoken, skip", "vtoken"),
    "always copy_out": ("vtoken, copy_out", "vtoken:copy_out"),
    "ideal": ("ideal", "ideal"),
}
"""Label, and whose line and marker it gets."""
PANELS = (
    ("ample", "blocks in a request's table", lambda row: float(row["retained_blocks_mean"])),
    (
        "ample",
        "pool blocks per running request",
        lambda row: float(row["table_blocks_mean"]) / float(row["mean_running"]),
    ),
    ("tight", "finished requests/s, pool of 2,000 blocks", lambda row: float(row["requests_per_s"])),
)
"""Memory, what is drawn, and how it is read off a row."""


@styled
def picture(rows: list[dict[str, str]]) -> Figure:
    """Draw a row of panels for each policy."""
    figure = new_figure(10.0, 7.0)
    grid = figure.subplots(len(POLICIES), len(PANELS), sharex=True, sharey="col")
    for i, policy in enumerate(POLICIES):
        for j, (pool, title, value) in enumerate(PANELS):
            axes = grid[i, j]
            for reclaimer, (label, look) in LOOKS.items():
                setting = (pool, policy, BUDGET, reclaimer)
                mine = [r for r in rows if (r["pool"], r["policy"], r["budget"], r["reclaimer"]) == setting]
                axes.plot(
                    [int(r["degree"]) for r in mine], [value(r) for r in mine], label=label, linewidth=1.3,
                    color=policy_colour(policy), linestyle=reclaimer_line(look),
                    marker=reclaimer_marker(look), markersize=4,
                )  # fmt: skip
            axes.set(xscale="log", ylim=(0, None))
            axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
            axes.minorticks_off()
            if i == 0:
                axes.set_title(title)
        grid[i, 0].set_ylabel(f"{policy}, budget {BUDGET}")
        grid[i, -1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.supxlabel("sharing degree: requests that have a prefix of 2,048 tokens in common", fontsize=9)
    return figure


def main() -> None:
    """Draw the picture."""
    with (HERE / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    save(picture(rows), HERE / "sharing.png")


if __name__ == "__main__":
    main()
