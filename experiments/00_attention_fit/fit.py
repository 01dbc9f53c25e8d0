"""Compare attention models with the measured fragmentation of a real model, and fit the synthetic one.

python experiments/00_attention_fit/fit.py                      compare: table.csv, fit.png and a summary
python experiments/00_attention_fit/fit.py --attention synthetic:heavy_share=0     compare something else
python experiments/00_attention_fit/fit.py --search 1200        fit for 1200 s, starting from the defaults
python experiments/00_attention_fit/fit.py --search 600 --hold-out 3     fit to four captures, test on three
python experiments/00_attention_fit/fit.py --recorded FOLDER [--rows FOLDER]   each capture replayed, against its own
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import open_loop
import pandas as pd
from figures import compared
from measured import SHARED, Measured, Table
from minimax import search
from picture import draw
from simulated import simulate

from sim.serving.attention import build_attention
from sim.serving.attention.recorded import Recorded
from sim.serving.attention.synthetic import Synthetic

HERE = Path(__file__).parent
ROWS = HERE / "rows"
WHEN = ("prompt end", "decode")
NOT_SHOWN = "the captures not shown"
GUESS = Synthetic(
    second_share=0.3,
    age_exponent=0.9,
    age_offset=0.2,
    row_sigma=0.1,
    weight_sigma=0.5,
    weight_skew=0.3,
    weight_cluster=0.3,
    heavy_share=0.01,
    heavy_weight=2.0,
    start_boost=1.0,
    start_tokens=200.0,
    region_sigma=0.7,
    region_text=0.2,
    region_time=0.2,
    region_bits=2,
    region_wide=0.5,
    region_steps_bits=3,
    token_sigma=0.3,
    token_jump=0.5,
    token_steps_bits=1,
    noise_floor=0.0,
    score_sigma=0.6,
    score_weight=0.5,
    score_region=0.3,
    score_region_memory=0.9,
    score_exponent=1.5,
)
"""Round numbers from attention statistics, where a search starts that must know nothing of the captures held out."""


def tidy(found: Table, measured: Table) -> pd.DataFrame:
    """Return one row a number: policy, when, ratio, block size, measure, measured, simulated, difference."""
    rows = [
        (name, when, ratio, size, measure, theirs[i, j, k], ours[i, j, k], ours[i, j, k] - theirs[i, j, k])
        for name in found
        for when, ours, theirs in zip(WHEN, found[name], measured[name], strict=True)
        for i, ratio in enumerate(open_loop.RATIOS)
        for j, size in enumerate(open_loop.BLOCK_SIZES)
        for k, measure in enumerate(open_loop.MEASURES)
    ]
    names = ["policy", "when", "budget", "block_size", "measure", "measured_pct", "simulated_pct", "difference_points"]
    return pd.DataFrame(rows, columns=names).dropna()


def summary(table: pd.DataFrame, within: float = 3) -> str:
    """Return a markdown table: how far off, by policy and moment."""
    off = table.assign(off=table.difference_points.abs())
    lines = [f"| policy | when | mean | largest | within {within:g} |", "|---|---|---|---|---|"]
    for (policy, when), rows in off.groupby(["policy", "when"], sort=False):
        share = 100 * (rows.off <= within).mean()
        lines.append(f"| {policy} | {when} | {rows.off.mean():.1f} | {rows.off.max():.1f} | {share:.0f} % |")
    return "\n".join(lines)


def side_by_side(table: pd.DataFrame) -> str:
    """Return a markdown table of measured / simulated shares at block size 16."""
    lines = ["| policy, budget | when | dead | partial | reclaim |", "|---|---|---|---|---|"]
    rows = table[(table.block_size == 16) & table.policy.isin(open_loop.ATTENDING)]
    for (policy, budget, when), cells in rows.groupby(["policy", "budget", "when"], sort=False):
        three = cells.set_index("measure")
        pairs = " | ".join(f"{three.measured_pct[m]:.0f} / {three.simulated_pct[m]:.0f}" for m in open_loop.MEASURES)
        lines.append(f"| {policy} {100 * budget:.0f} | {when} | {pairs} |")
    return "\n".join(lines)


def spread(table: pd.DataFrame) -> str:
    """Return a markdown table: how far captures are from each other, and from the mean over many synthetic requests.

    No single number can be nearer to all captures than half of their range.
    """
    captures = list(Measured.read().sizes)[: Measured.read().at_end]
    each = [Measured.read([name]).table for name in captures]
    head = "| policy | when | half the range, mean | largest | cells where a number within 6 of all captures exists "
    lines = [head + "| captures within 6 of the synthetic mean |", "|---|---|---|---|---|---|"]
    for policy in open_loop.ATTENDING:
        for w, when in enumerate(WHEN):
            values = np.stack([one[policy][w].ravel() for one in each])
            half = (values.max(0) - values.min(0)) / 2
            ours = table[(table.policy == policy) & (table.when == when)].simulated_pct.to_numpy()
            near = 100 * (np.abs(values - ours) <= 6).mean()
            lines.append(
                f"| {policy} | {when} | {half.mean():.1f} | {half.max():.1f} | {100 * (half <= 6).mean():.0f} % "
                f"| {near:.0f} % |"
            )
    return "\n".join(lines)


def replay(folder: Path, rows: Path | None) -> pd.DataFrame:
    """Return the differences of `recorded` attention from each capture's own measurements."""
    parts = []
    for path in sorted(folder.glob("*.npz")):
        measured = Measured.read([path.stem], folder)
        model = Recorded(str(path), str(rows) if rows else "")
        parts.append(
            tidy(simulate(model, measured, [0], open_loop.ATTENDING), measured.table).assign(capture=path.stem)
        )
    return pd.concat(parts)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=float, metavar="SECONDS", default=0)
    parser.add_argument("--seeds", type=int, default=64, help="requests a capture when comparing")
    parser.add_argument("--hold-out", type=int, default=0, metavar="N", help="fit without the last N captures")
    parser.add_argument("--attention", metavar="SPEC", help="compare this model, and write nothing")
    parser.add_argument("--recorded", type=Path, metavar="FOLDER", help="captures, with their fragmentation.parquet")
    parser.add_argument("--rows", type=Path, metavar="FOLDER", help="what extend.py has made of them")
    options = parser.parse_args()
    if not SHARED.is_dir():
        raise SystemExit(
            f"error: {SHARED} is absent: the measurements that this compares with are not part of vtoken-sim"
        )
    if options.recorded:
        table = replay(options.recorded, options.rows)
        print(summary(table, within=1))
        worst = table.assign(off=table.difference_points.abs()).pivot_table("off", "capture", ["policy", "when"], "max")
        print("\nlargest difference, by capture\n\n" + worst.round(1).to_string())
        return
    # Requests that the search has not seen.
    seeds = range(1_000_000, 1_000_000 + options.seeds)
    if options.attention:
        measured = Measured.read()
        print(summary(tidy(simulate(build_attention(options.attention), measured, seeds), measured.table)))
        return
    if options.hold_out:
        names = [name for name in Measured.read().sizes if not name.startswith("not shown")]
        kept, held = names[: -options.hold_out], names[-options.hold_out :]
        model = search(Measured.read(kept), GUESS, options.search)
        groups = {", ".join(some): Measured.read(some) for some in (kept, held)}
    else:
        model = search(Measured.read(), Synthetic(), options.search) if options.search else Synthetic()
        groups = {"all captures": Measured.read(), NOT_SHOWN: Measured.not_shown()}
    print(model)
    tables = {title: tidy(simulate(model, group, seeds), group.table) for title, group in groups.items()}
    for title, table in tables.items():
        within = 6 if title == NOT_SHOWN else 3
        print(f"\n{title}\n\n{summary(table, within)}")
    if not options.hold_out:
        table = tables["all captures"]
        print(f"\nmeasured / simulated, % of blocks, block size 16\n\n{side_by_side(table)}")
        print(f"\nhow far texts differ, points\n\n{spread(table)}")
        if not options.search:
            print(f"\nother figures\n\n{compared(range(1000, 1008))}")
            table.round(2).to_csv(HERE / "table.csv", index=False)
            draw(table, HERE / "fit.png")


if __name__ == "__main__":
    main()
