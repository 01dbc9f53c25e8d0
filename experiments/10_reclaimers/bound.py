"""How many tokens each way to choose moves to free a share of a request's blocks, against the fewest there can be.

python experiments/10_reclaimers/bound.py [OUT]: writes bound.csv and bound.png into OUT (this folder unless given).

A request of 4,096 tokens in blocks of 16 under each policy, right after its prompt, keeping a share of the tokens; and
one that has decoded 2,000 tokens since. Live tokens a block come from real runs of the engine.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from sim import SimConfig
from sim.kv.bound import fewest_copies
from sim.kv.window import find_window
from sim.study.plots.style import figure_legend, log_axis, new_figure, policy_colour, save, styled
from sim.study.run import build_engine
from sim.workload.trace import Trace

PROMPT, SIZE, OUTPUT = 4096, 16, 2000
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


class Watch:
    """Stops to look at the request's blocks, right behind its prompt and at the end."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}
        self.windows: dict[str, list[tuple[int, int]]] = {}

    def scheduled(self, engine: object) -> None:
        """Look at the state that a step begins with."""
        if engine.step in (1, OUTPUT - 1):  # type: ignore[attr-defined]
            s = engine.cache.store.s  # type: ignore[attr-defined]
            full = int(s.rows["written"][0]) // SIZE
            when = "after the prompt" if engine.step == 1 else f"{OUTPUT:,} tokens later"  # type: ignore[attr-defined]
            self.seen[when] = s.blocks["live"][s.table[0, :full]].tolist()
            runs = [find_window(s, 0, most) for most in range(1, full + 1)]
            self.windows[when] = [(int(a), int(b)) for a, b in runs if b > a]

    def applied(self, engine: object, finished: int) -> None:
        """Nothing."""


def main(out: Path) -> None:
    """Run, tabulate, draw."""
    rows = []
    for policy in ("h2o", "scissorhands", "random"):
        for budget in (0.3, 0.5):
            watch = Watch()
            config = SimConfig(
                policy=policy, budget=budget, reclaimer="naive", kv_blocks=2000, max_num_batched_tokens=8192
            )
            source = Trace(np.zeros(1, np.int64), np.array([PROMPT]), np.array([OUTPUT]))
            build_engine(config, source, observer=watch).run()
            for when, live in watch.seen.items():
                best = fewest_copies(live, SIZE, "any")
                most = len(best) - 1
                window = {}
                for first, last in watch.windows[when]:
                    tokens = sum(live[first:last])
                    won = last - first - -(-tokens // SIZE)
                    window[won] = min(tokens, window.get(won, tokens))
                curves = {
                    "fill": dict(enumerate(best)),
                    "scattered": dict(enumerate(fewest_copies(live, SIZE, "fresh"))),
                    "ordered, any number of runs": dict(enumerate(fewest_copies(live, SIZE, "ordered"))),
                    "ordered, one run (vtoken)": window,
                }
                for share in SHARES:
                    won = round(share * most)
                    for way, curve in curves.items():
                        enough = [tokens for g, tokens in curve.items() if g >= won]
                        tokens = min(enough) if enough else None
                        ratio = round(tokens / best[won], 2) if tokens is not None and best[won] else ""
                        rows.append([policy, budget, when, len(live), sum(live), share, won, way, tokens, ratio])
    head = [
        "policy",
        "budget",
        "when",
        "blocks",
        "live_tokens",
        "share_of_most",
        "blocks_won",
        "choice",
        "tokens_moved",
    ]
    with (out / "bound.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*head, "by_the_fewest"])
        writer.writerows(rows)
    draw(rows, out)


@styled
def draw(rows: list[list[object]], out: Path) -> None:
    """Draw tokens moved by the fewest possible, for each choice, policy and moment at a budget of 0.5."""
    figure = new_figure(11.0, 3.4)
    policies = ("h2o", "scissorhands", "random")
    whens = sorted({str(row[2]) for row in rows}, reverse=True)
    looks = {"scattered": ":", "ordered, any number of runs": "--", "ordered, one run (vtoken)": "-"}
    for at, when in enumerate(whens):
        axes = figure.add_subplot(1, len(whens), at + 1)
        for policy in policies:
            for way, line in looks.items():
                points = [
                    (row[5], row[9]) for row in rows if row[:3] == [policy, 0.5, when] and row[7] == way and row[9]
                ]
                axes.plot(
                    [100 * float(str(x)) for x, _ in points],
                    [float(str(y)) for _, y in points],
                    line,
                    color=policy_colour(policy),
                )
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        log_axis(axes.yaxis)
        axes.set_title(when)
        axes.set_xlabel("blocks freed, % of the most that can be")
        axes.set_ylabel("tokens moved / fewest possible (fill)")
    handles = {policy: Line2D([], [], color=policy_colour(policy)) for policy in policies}
    handles |= {way: Line2D([], [], color="black", linestyle=line) for way, line in looks.items()}
    figure_legend(figure, list(handles.values()), list(handles))
    save(figure, out / "bound.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
