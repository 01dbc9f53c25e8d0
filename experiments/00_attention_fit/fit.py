"""Compare attention models with the measured fragmentation of a real model, and fit the synthetic one.

python experiments/00_attention_fit/fit.py                      compare: table.csv and a summary
python experiments/00_attention_fit/fit.py --search 600         fit for 600 s, starting from the defaults
python experiments/00_attention_fit/fit.py --search 300 --hold-out 3     fit to four captures, test on three
python experiments/00_attention_fit/fit.py --recorded FOLDER    each capture replayed, against its own measurements
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import open_loop
import pandas as pd
from numpy.typing import NDArray

from sim.kv.view import View
from sim.rng import request_key
from sim.serving.attention import AttentionModel
from sim.serving.attention.recorded import Recorded
from sim.serving.attention.synthetic import Synthetic

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "attention"
Fractions = NDArray[np.float64]
"""[ratio, block size, measure] in percent."""
Table = dict[str, tuple[Fractions, Fractions]]
"""Policy -> fractions at the end of the prompt, fractions in decode (mean over all checkpoints)."""

# What the search may touch, and how far. Whole numbers are steps, clipped to their range.
RANGES: dict[str, tuple[float, float] | tuple[int, int]] = {
    "age_exponent": (0.3, 1.3),
    "age_offset": (0.3, 6.0),
    "noise_floor": (-1.5, 0.0),
    "row_sigma": (0.0, 0.25),
    "weight_sigma": (0.2, 1.5),
    "weight_skew": (0.0, 1.0),
    "weight_cluster": (0.0, 0.9),
    "start_boost": (0.0, 3.0),
    "start_tokens": (5.0, 800.0),
    "region_sigma": (0.0, 1.5),
    "region_bits": (2, 6),
    "region_steps_bits": (0, 7),
    "token_sigma": (0.0, 1.2),
    "token_steps_bits": (0, 4),
    "score_sigma": (0.2, 0.8),
    "score_weight": (0.0, 0.95),
    "score_region": (0.0, 0.9),
    "score_region_memory": (0.6, 0.98),
    "score_exponent": (0.8, 2.6),
}


GUESS = Synthetic(
    age_exponent=0.9,
    age_offset=0.5,
    row_sigma=0.1,
    weight_sigma=0.5,
    weight_skew=0.3,
    weight_cluster=0.2,
    start_boost=0.5,
    start_tokens=100.0,
    region_sigma=0.5,
    region_bits=3,
    region_steps_bits=3,
    token_sigma=0.4,
    token_steps_bits=1,
    noise_floor=-1.0,
    score_sigma=0.45,
    score_weight=0.5,
    score_region=0.4,
    score_region_memory=0.9,
    score_exponent=1.8,
)
"""Round numbers from attention statistics, where a search starts that must know nothing of the captures held out."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The real model's fractions, for some captures or for all."""

    sizes: dict[str, tuple[int, int]]
    """Capture -> P, G."""
    table: Table

    @classmethod
    def read(cls, captures: Iterable[str] | None = None) -> Measured:
        """Read the measurements; for all captures, those of decode are the published means over ten prompts."""
        frame = pd.read_parquet(SHARED / "fragmentation.parquet")
        frame = frame[frame.gran == "global"]
        names = sorted(frame.cap.unique()) if captures is None else list(captures)
        frame = frame[frame.cap.isin(names)]
        ends = frame[frame.when == 0].groupby("cap").n.first()
        sizes = {name: (int(ends[name]), int(frame[frame.cap == name].when.max())) for name in names}
        decode = frame[frame.when > 0]
        if captures is None:
            decode = pd.read_csv(SHARED / "fragmentation_by_policy.csv")
            decode = decode[decode.gran == "global"]
        at_end, later = _by_policy(frame[frame.when == 0]), _by_policy(decode)
        return cls(sizes, {name: (at_end[name], later[name]) for name in open_loop.POLICIES})


def _by_policy(frame: pd.DataFrame) -> dict[str, Fractions]:
    shape = (len(open_loop.RATIOS), len(open_loop.BLOCK_SIZES), len(open_loop.MEASURES))
    mean = frame.groupby(["pol", "ratio", "bs"])[list(open_loop.MEASURES)].mean().mul(100)
    return {str(name): rows.to_numpy(float).reshape(shape) for name, rows in mean.groupby("pol")}


def sequence(model: AttentionModel, key: int, prompt: int, generated: int) -> tuple[Any, Any]:
    """Return what one request sees: float32[H + G, P + G] attention, all tokens live, and float32[P] column sums."""
    total, history = prompt + generated, min(open_loop.WINDOW, prompt)
    columns = {name: np.zeros(total, np.float32) for name in model.columns}

    keys = np.array([key], np.uint64)
    position = np.arange(total, dtype=np.int32)
    scratch = np.zeros((2, total), np.float32)

    def view(length: int) -> View:
        # Row, start, live tokens, length, prompt, budget.
        numbers = np.array([0, 0, length, length, prompt, length], np.int64).reshape(6, 1)
        return View(numbers, keys, position, columns, scratch)

    attention = np.zeros((history + generated, total), np.float32)
    accumulated = np.zeros(total, np.float32)
    model.begin(view(prompt))
    model.accumulated(view(prompt), accumulated)
    for back in range(history):
        model.query(view(prompt), back, attention[history - 1 - back])
    for step in range(generated):
        model.attend(view(prompt + step + 1), attention[history + step])
    return attention, accumulated[:prompt]


def simulate(
    model: AttentionModel,
    sizes: dict[str, tuple[int, int]],
    seeds: Iterable[int],
    policies: tuple[str, ...] = tuple(open_loop.POLICIES),
) -> Table:
    """Return the model's fractions over requests with the lengths of the captures, ``seeds`` of each."""
    ends: dict[str, list[Any]] = {name: [] for name in policies}
    decode: dict[str, list[Any]] = {name: [] for name in policies}
    for seed in seeds:
        for ordinal, (prompt, generated) in enumerate(sizes.values()):
            found = open_loop.run(
                *sequence(model, request_key(seed, ordinal), prompt, generated), prompt, policies=policies
            )
            for name, values in found.items():
                ends[name].append(values[:, 0] * 100)
                decode[name].append(values[:, 1:] * 100)
    return {name: (np.mean(ends[name], 0), np.concatenate(decode[name], 1).mean(1)) for name in policies}


def loss(found: Table, measured: Table) -> float:
    """Return the mean squared difference in points, with a fine for every point beyond three."""
    total = 0.0
    for name in found:
        for ours, theirs in zip(found[name], measured[name], strict=True):
            off = np.abs(ours - theirs)
            total += float((off**2).mean() + 0.02 * (np.maximum(off - 3, 0) ** 2).sum())
    return total / (2 * len(found))


def search(measured: Measured, start: Synthetic, seconds: float, seed: int) -> Synthetic:
    """Anneal the parameters in :data:`RANGES` for so long (every candidate sees the same requests)."""
    rng = np.random.default_rng(seed)

    def cost(values: dict[str, Any]) -> float:
        return loss(simulate(Synthetic(**values), measured.sizes, range(4), open_loop.ATTENDING), measured.table)

    current = {f.name: getattr(start, f.name) for f in dataclasses.fields(Synthetic) if f.init}
    best, at = current, cost(current)
    lowest, step, begun = at, 0.25, time.perf_counter()
    while (spent := (time.perf_counter() - begun) / seconds) < 1:
        candidate = dict(current)
        for name in rng.choice(list(RANGES), rng.integers(1, 6), replace=False):
            low, high = RANGES[name]
            if isinstance(low, int):
                candidate[name] = int(np.clip(candidate[name] + rng.choice((-2, -1, 1, 2)), low, high))
            else:
                moved = candidate[name] + rng.normal() * step * (high - low) / 2
                candidate[name] = round(float(np.clip(moved, low, high)), 3)
        value = cost(candidate)
        accepted = value < at + 0.25 * (1 - spent) * rng.exponential()
        step = min(0.4, step * 1.2) if accepted else max(0.05, step * 0.98)
        if accepted:
            current, at = candidate, value
        if value < lowest:
            best, lowest = candidate, value
            print(f"{100 * spent:3.0f} %  loss {lowest:.2f}", file=sys.stderr)
    return Synthetic(**best)


def tidy(found: Table, measured: Table) -> pd.DataFrame:
    """Return one row a number: policy, when, ratio, block size, measure, measured, simulated, difference."""
    rows = [
        (name, when, ratio, size, measure, theirs[i, j, k], ours[i, j, k], ours[i, j, k] - theirs[i, j, k])
        for name in found
        for when, ours, theirs in zip(("prompt end", "decode"), found[name], measured[name], strict=True)
        for i, ratio in enumerate(open_loop.RATIOS)
        for j, size in enumerate(open_loop.BLOCK_SIZES)
        for k, measure in enumerate(open_loop.MEASURES)
    ]
    names = ["policy", "when", "budget", "block_size", "measure", "measured_pct", "simulated_pct", "difference_points"]
    return pd.DataFrame(rows, columns=names)


def summary(table: pd.DataFrame) -> str:
    """Return a markdown table: how far off, by policy and moment."""
    off = table.assign(off=table.difference_points.abs())
    lines = ["| policy | when | mean | largest | within 3 points |", "|---|---|---|---|---|"]
    for (policy, when), rows in off.groupby(["policy", "when"], sort=False):
        share = 100 * (rows.off <= 3).mean()
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


def replay(folder: Path) -> pd.DataFrame:
    """Return the differences of `recorded` attention from each capture's own measurements."""
    parts = []
    for path in sorted(folder.glob("*.npz")):
        measured = Measured.read([path.stem])
        found = simulate(Recorded(str(path)), measured.sizes, [0], open_loop.ATTENDING)
        parts.append(tidy(found, measured.table).assign(capture=path.stem))
    return pd.concat(parts)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=float, metavar="SECONDS", default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=16, help="requests a capture when comparing")
    parser.add_argument("--hold-out", type=int, default=0, metavar="N", help="fit without the last N captures")
    parser.add_argument("--recorded", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if not SHARED.is_dir():
        raise SystemExit(
            f"error: {SHARED} is absent: the measurements that this compares with are not part of vtoken-sim"
        )
    if options.recorded:
        print(summary(replay(options.recorded)))
        return
    names = list(Measured.read().sizes)
    kept = names[: len(names) - options.hold_out]
    model = Synthetic()
    if options.search:
        fitted_to = Measured.read(kept) if options.hold_out else Measured.read()
        start = GUESS if options.hold_out else Synthetic()
        model = search(fitted_to, start, options.search, options.seed)
        print(model)
    # Requests that the search has not seen.
    seeds = range(1000, 1000 + options.seeds)
    groups = {"all captures": Measured.read()}
    if options.hold_out:
        groups = {", ".join(some): Measured.read(some) for some in (kept, names[len(kept) :])}
    for title, measured in groups.items():
        table = tidy(simulate(model, measured.sizes, seeds), measured.table)
        print(f"\n{title}\n\n{summary(table)}")
        if not options.hold_out:
            print(f"\nmeasured / simulated, % of blocks, block size 16\n\n{side_by_side(table)}")
            if not options.search:
                table.round(2).to_csv(HERE / "table.csv", index=False)


if __name__ == "__main__":
    main()
