"""Compare what layers and heads keep, each for itself: synthetic against measured; and fit.

    python experiments/00_attention_fit/fit_units.py                 # the tables of README.md, units.csv
    python experiments/00_attention_fit/fit_units.py --search 900    # fit to four captures for 900 s, print the best
    python experiments/00_attention_fit/fit_units.py --levels        # how the scores of layers correlate

Each layer, or each KV head of each layer, has its own live tokens. ``union`` is the share of tokens that at least one
unit still holds: under one block table for all of them a slot is free only when every unit has dropped its token, and
``dead`` and ``reclaim`` of such a table follow from the union. The policies are the simulator's own, on its own cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fit_keys import alive
from measured import SHARED
from minimax import SPREAD, plane, promised
from numpy.typing import NDArray

from sim.kv.cache import KVCache
from sim.kv.policies import policies
from sim.kv.units import Units
from sim.rng import request_key
from sim.serving.attention import synthetic
from sim.serving.attention.units import UnitStatistics
from sim.study.plots.style import new_figure, policy_colour, save, styled

HERE = Path(__file__).parent
SPECS = {
    "h2o": "h2o",
    "tova": "tova",
    "scissor": "scissorhands:history=400,threshold=0",
    "snapkv": "snapkv:pool=7",
    "random": "random",
}
"""Name in the measurements -> the simulator's policy with the same parameters."""
GRANULARITIES = {"layer": Units(30, 1), "kvhead": Units(30, 3)}
BUDGETS = (0.2, 0.4, 0.6, 0.8)
SIZE, EVERY = 16, 32
MEASURES = ("union", "dead", "reclaim", "own_dead", "own_reclaim")
"""Tokens that any unit holds; blocks of one table for all units; blocks of a table for each unit."""
COLUMNS = ("union_live", "u_dead", "u_reclaim", "dead", "reclaim")
WHEN = ("prompt end", "decode")
KEYS = ["policy", "granularity", "budget", "when"]
HELD_OUT = 3
RANGES = {
    "row_common": (0.0, 1.0),
    "weight_spread": (0.5, 2.5),
    "score_spread": (0.5, 2.0),
    "row_spread": (0.3, 2.0),
    "token_spread": (0.3, 3.0),
    "alike": (0.2, 1.0),
    "weight_cluster": (0.0, 1.5),
    "score_cluster": (0.0, 1.5),
}
FITTED = ("h2o", "tova", "scissor", "snapkv")
CANDIDATES, REQUESTS = 14, 1
"""Candidates a step of the search, and requests of each length for every one of them."""


def measured(captures: Iterable[str]) -> pd.DataFrame:
    """Return one row a policy, granularity, budget and moment: the mean over the captures, in percent."""
    frame = pd.read_parquet(SHARED / "fragmentation.parquet")
    chosen = frame.cap.isin(list(captures)) & frame.pol.isin(SPECS) & frame.gran.isin(GRANULARITIES)
    frame = frame[chosen & (frame.bs == SIZE)].rename(
        columns={"pol": "policy", "gran": "granularity", "ratio": "budget"}
    )
    frame = frame.assign(when=np.where(frame.when == 0, *WHEN))
    means = frame.groupby([*KEYS, "cap"])[list(COLUMNS)].mean().groupby(KEYS).mean() * 100
    return means.set_axis(MEASURES, axis=1)


def captures() -> dict[str, tuple[int, int]]:
    """Return the lengths of each capture: prompt, generated."""
    found = {}
    for path in sorted(SHARED.glob("*.npz")):
        with np.load(path) as archive:
            found[path.stem] = int(archive["P"]), int(archive["G"])
    return found


def shares(live: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return % of the measures for bool[units, length]."""
    padded = np.zeros((len(live) + 1, -(-live.shape[1] // SIZE) * SIZE), bool)
    padded[:-1, : live.shape[1]] = live
    padded[-1] = padded[:-1].any(axis=0)
    dead = 1 - padded.reshape(len(padded), -1, SIZE).any(axis=2).mean(axis=1)
    blocks = padded.shape[1] // SIZE
    spare = 1 - dead - np.ceil(padded.sum(axis=1) / SIZE) / blocks
    union = padded[-1].sum() / live.shape[1]
    return 100 * np.array([union, dead[-1], spare[-1], dead[:-1].mean(), spare[:-1].mean()])


def serve(name: str, units: Units, key: int, prompt: int, generated: int, share: float) -> list[NDArray[np.float64]]:
    """Return the measures at the end of the prompt, and the mean over every 32nd decode step."""
    policy, model = policies.build(SPECS[name]), synthetic.Synthetic()
    blocks = units.count * (-(-(prompt + generated) // 16) + 1)
    cache = KVCache(blocks + 1, 16, columns=(*policy.columns, *model.columns), units=units)
    rows = np.array(cache.bundle(cache.open(0, key, prompt, generated + 1)))
    seen = []
    for step in range(1 if policy.prompt_only else generated + 1):
        for row in rows.tolist():
            cache.sync_new_tokens(row, 1 if step else prompt)
        cache.store.s.rows["decode_from"][rows] = prompt
        view = cache.view(rows, share, 0, model)
        if step == 0:
            if policy.attends:
                model.begin(view)
            policy.begin(view)
        else:
            policy.observe(view)
        view, excess = view.over_budget()
        if len(view):
            cache.evict_cells(view.row, *policy.select(view, excess))
        if step % EVERY == 0:
            seen.append(shares(np.stack([alive(cache, row, prompt + step) for row in rows])))
    return [seen[0], np.mean(seen[1:], axis=0)] if seen[1:] else [seen[0]]


def simulated(
    sizes: Iterable[tuple[int, int]],
    seeds: Iterable[int],
    names: Iterable[str] = tuple(SPECS),
    granularities: Iterable[str] = tuple(GRANULARITIES),
    budgets: Iterable[float] = BUDGETS,
    decoding: Iterable[str] = tuple(SPECS),
) -> pd.DataFrame:
    """Return what :func:`measured` does, for requests of these lengths; ``decoding`` are followed in decode too."""
    sizes = list(sizes)
    found = [
        (name, granularity, share, when, *values)
        for granularity in granularities
        for name in names
        for share in budgets
        for seed in seeds
        for ordinal, (prompt, generated) in enumerate(sizes)
        for when, values in zip(
            WHEN,
            serve(
                name,
                GRANULARITIES[granularity],
                request_key(seed, ordinal),
                prompt,
                generated if name in decoding else 0,
                share,
            ),
            strict=False,
        )
    ]
    return pd.DataFrame(found, columns=[*KEYS, *MEASURES]).groupby(KEYS).mean()


def search(seconds: float, seed: int) -> UnitStatistics:
    """Improve on the defaults for so long, as ``minimax.py`` does, by what the captures that are not held out show."""
    sizes = captures()
    names = list(sizes)[:-HELD_OUT]
    goal = measured(names)
    rng = np.random.default_rng(seed)
    low, high = np.array(list(RANGES.values())).T
    start = synthetic.UNITS

    def model(at: NDArray[np.float64]) -> UnitStatistics:
        values = {n: round(float(v), 3) for n, v in zip(RANGES, low + at * (high - low), strict=True)}
        return replace(start, **values)

    at = (np.array([getattr(start, name) for name in RANGES]) - low) / (high - low)
    tried: list[Any] = []
    values: list[Any] = []
    reach, end = 2 * SPREAD, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(CANDIDATES):
            tried.append(np.clip(at + SPREAD * rng.normal(size=len(at)), 0.002, 0.998))
            synthetic.UNITS = model(tried[-1])
            seeds = range(REQUESTS * len(tried), REQUESTS * (len(tried) + 1))
            # What costs least and says most: heads keep nearly everything at 40 % already.
            lengths = [sizes[name] for name in names]
            layers = simulated(lengths, seeds, FITTED, ["layer"], (0.2, 0.4), decoding=("tova",))
            found = pd.concat([layers, simulated(lengths, seeds, FITTED, ["kvhead"], (0.2,), decoding=())])
            off = found - goal.loc[found.index]
            values.append(off.to_numpy().ravel())
        off, slopes = plane(np.array(tried) - at, np.array(values))
        at = np.clip(at + promised(off, slopes, at, reach), 0.002, 0.998)
        reach *= 0.9
        print(f"largest {np.abs(off).max():.2f}, mean {np.abs(off).mean():.2f} points", model(at), file=sys.stderr)
    synthetic.UNITS = start
    return model(at)


def compare(seeds: int) -> pd.DataFrame:
    """Return one row a number, for the captures of the search and for those held out; decode of one request each."""
    sizes = captures()
    names = list(sizes)
    parts = []
    for group, some in (("fitted", names[:-HELD_OUT]), ("held out", names[-HELD_OUT:])):
        lengths = [sizes[name] for name in some]
        # Texts differ in how strongly all layers read the same passage: the end of the prompt takes several requests.
        ends = simulated(lengths, range(1_000_000, 1_000_000 + seeds), decoding=())
        ours = pd.concat([ends, simulated(lengths, [1_000_000]).query("when == 'decode'")])
        both = pd.concat({"measured_pct": measured(some).stack(), "simulated_pct": ours.stack()}, axis=1).dropna()
        parts.append(both.rename_axis([*KEYS, "measure"]).reset_index().assign(captures=group))
    table = pd.concat(parts).sort_values(["captures", *KEYS], kind="stable")
    return table.assign(difference_points=table.simulated_pct - table.measured_pct)


def summary(table: pd.DataFrame) -> str:
    """Return a markdown table: how far off, by policy and granularity."""
    lines = ["| captures | policy | units | mean | largest | where | within 3 |", "|---|---|---|---|---|---|---|"]
    off = table.assign(off=table.difference_points.abs()).reset_index(drop=True)
    for (group, policy, unit), rows in off.groupby(["captures", "policy", "granularity"]):
        worst = rows.loc[rows.off.idxmax()]
        where = f"{worst.measure}, {100 * worst.budget:.0f} %, {worst.when}"
        share = 100 * (rows.off <= 3).mean()
        lines.append(
            f"| {group} | {policy} | {unit} | {rows.off.mean():.1f} | {rows.off.max():.1f} | {where} | {share:.0f} % |"
        )
    return "\n".join(lines)


def side_by_side(table: pd.DataFrame) -> str:
    """Return a markdown table of measured / simulated shares, mean over all captures, where units matter most."""
    weight = table.captures.map({"fitted": len(captures()) - HELD_OUT, "held out": HELD_OUT})
    numbers = ["measured_pct", "simulated_pct"]
    sums = table.assign(weight=weight, **{name: table[name] * weight for name in numbers})
    mean = sums.groupby([*KEYS, "measure"])[[*numbers, "weight"]].sum()
    pairs = {
        where: f"{row.measured_pct / row.weight:.0f} / {row.simulated_pct / row.weight:.0f}"
        for where, row in mean.iterrows()
    }
    lines = ["| policy, budget | units | when | " + " | ".join(MEASURES) + " |", "|---" * (3 + len(MEASURES)) + "|"]
    for policy, unit, budget, when in dict.fromkeys(where[:-1] for where in pairs):
        if budget <= 0.4:
            cells = " | ".join(pairs[policy, unit, budget, when, measure] for measure in MEASURES)
            lines.append(f"| {policy} {100 * budget:.0f} | {unit} | {when} | {cells} |")
    return "\n".join(lines)


@styled
def draw(table: pd.DataFrame, path: Path) -> None:
    """Write a panel for each granularity: tokens that some unit still holds, by budget."""
    figure = new_figure(7.0, 3.4)
    panels = figure.subplots(1, 2, sharey=True)
    rows = table[(table.measure == "union") & (table.when == WHEN[0])]
    for axes, (unit, title) in zip(panels, {"layer": "30 layers", "kvhead": "90 KV heads"}.items(), strict=True):
        for policy in FITTED:
            some = rows[(rows.granularity == unit) & (rows.policy == policy)]
            lines = some.groupby("budget")[["measured_pct", "simulated_pct"]].mean()
            colour = policy_colour("scissorhands" if policy == "scissor" else policy)
            label = policy if unit == "layer" else None
            axes.plot(100 * lines.index, lines.measured_pct, color=colour, marker="o", label=label)
            axes.plot(100 * lines.index, lines.simulated_pct, color=colour, marker="x", ls="--")
        axes.plot([20, 80], [20, 80], color="#595959", lw=0.8)
        axes.set(
            title=f"{title}, end of the prompt", xlabel="budget of each unit, % of tokens", xticks=[20, 40, 60, 80]
        )
    panels[0].set_ylabel("tokens that some unit holds, %")
    panels[0].plot([], [], color="#595959", marker="o", label="measured")
    panels[0].plot([], [], color="#595959", marker="x", ls="--", label="synthetic")
    panels[0].plot([], [], color="#595959", lw=0.8, label="one set for all")
    figure.legend(loc="outside lower center", ncols=7, columnspacing=1.0)
    save(figure, path)


def levels() -> str:
    """Return a markdown table: how alike the scores of layers are, by their distance, means over the captures."""
    sides = []
    for side in ("measured", "synthetic"):
        found = []
        for ordinal, path in enumerate(sorted(SHARED.glob("*.npz"))):
            with np.load(path) as archive:
                scores = archive["prefill_score_layer"].astype(float)
            if side == "synthetic":
                scores = _drawn(request_key(1_000_000, ordinal), scores.shape[1])
            age = np.log(np.log(scores.shape[1] - 1 - np.arange(scores.shape[1])[4:-32] + 1.7))
            trend = np.stack([np.ones_like(age), age]).T
            logs = np.log(np.maximum(scores[:, 4:-32], 1e-6)).T
            rest = logs - trend @ np.linalg.lstsq(trend, logs, rcond=None)[0]
            alike = np.corrcoef(rest.T)
            found.append([rest.std(axis=0).mean(), *(np.diag(alike, d).mean() for d in (1, 2, 5, 10, 20))])
        sides.append(np.mean(found, axis=0))
    names = ["spread of the logarithm", *(f"correlation at {d} of 30 layers" for d in (1, 2, 5, 10, 20))]
    rows = [f"| {name} | {a:.2f} | {b:.2f} |" for name, a, b in zip(names, *sides, strict=True)]
    return "\n".join(["| score at the end of the prompt, by layer | measured | synthetic |", "|---|---|---|", *rows])


def _drawn(key: int, prompt: int) -> NDArray[np.float64]:
    model, units = synthetic.Synthetic(), GRANULARITIES["layer"]
    cache = KVCache(30 * (-(-prompt // 16)) + 1, 16, columns=model.columns, units=units)
    rows = np.array(cache.bundle(cache.open(0, key, prompt, 1)))
    for row in rows.tolist():
        cache.sync_new_tokens(row, prompt)
    view = cache.view(rows, model=model)
    model.begin(view)
    out = view.accumulated()
    return np.array([out[s : s + n] for s, n in zip(view.start, view.n, strict=True)], float)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=float, metavar="SECONDS", default=0)
    parser.add_argument("--seeds", type=int, default=4, help="requests a capture at the end of the prompt")
    parser.add_argument("--levels", action="store_true")
    options = parser.parse_args()
    if not SHARED.is_dir():
        raise SystemExit(
            f"error: {SHARED} is absent: the measurements that this compares with are not part of vtoken-sim"
        )
    if options.levels:
        print(levels())
        return
    if options.search:
        print(search(options.search, seed=0))
        return
    table = compare(options.seeds)
    print(summary(table))
    print(f"\nmeasured / simulated, %, block size {SIZE}, mean over all captures\n\n{side_by_side(table)}")
    table.round(2).to_csv(HERE / "units.csv", index=False)
    draw(table, HERE / "units.png")


if __name__ == "__main__":
    main()
