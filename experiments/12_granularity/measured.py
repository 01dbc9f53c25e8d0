"""Put what layers and heads left of a real model's blocks beside what the simulator leaves.

python experiments/12_granularity/measured.py [CAPTURES]: writes measured.csv and freed.png beside it. CAPTURES is
a folder with ``*.npz`` and ``fragmentation.parquet``; ../shared/attention when not given.

Each request runs through the engine alone, as in any other run, with the lengths of its capture, under two kinds of
block tables. *Recorded* replays the capture: its scores at the end of the prompt by layer, and the tokens that H2O held
by layer after the last step. *Synthetic* is the default attention.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.kv.policies import policies
from sim.kv.policies.base import EvictionPolicy
from sim.kv.policies.h2o import H2O
from sim.kv.view import View
from sim.study.config import SimConfig
from sim.study.plots.style import new_figure, policy_colour, save, styled
from sim.study.run import build_engine

HERE = Path(__file__).parent
SHARED = Path("../shared/attention")
SIZE, EVERY, SEEDS = 16, 32, 2
GRANULARITIES = {"layer": "per_layer", "kvhead": "per_head"}
TABLES = {"shared": ("union_live", "u_dead", "u_reclaim"), "per_unit": ("live", "dead", "reclaim")}
MEASURES = ("live", "dead", "reclaim")
"""Tokens that live somewhere under the table, of all; blocks that are free; blocks that a repack would win. In %."""
POLICIES = {"h2o": "h2o", "snapkv": "snapkv:pool=7", "random": "random"}
BUDGETS = (0.2, 0.4, 0.6, 0.8)
WHEN = ("prompt end", "decode", "last step")
KEYS = ["policy", "granularity", "budget", "tables", "when"]


@policies.register("h2o_prompt")
@dataclass(frozen=True, slots=True)
class PromptH2O(H2O):
    """H2O at the end of the prompt alone: a capture has no layer's attention behind it."""

    prompt_only: ClassVar[bool] = True


@policies.register("h2o_kept")
@dataclass(frozen=True)
class Kept(EvictionPolicy):
    """Keeps what a capture says that H2O held by layer after its last step, in a prompt as long as the capture."""

    prompt_only: ClassVar[bool] = True

    path: str
    budget: float

    def select(self, view: View, excess: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Drop the others."""
        del excess
        with np.load(self.path) as capture:
            kept = np.unpackbits(
                capture["kept_h2o_layer"][int(np.argmin(abs(capture["ratios"] - self.budget)))], axis=1
            )
        victims = [
            start + np.flatnonzero(kept[unit, view.position[start : start + n]] == 0)
            for unit, start, n in zip(view.unit, view.start, view.n, strict=True)
        ]
        return np.concatenate(victims), np.array([len(each) for each in victims])


class Look:
    """Notes, as an observer, what is left of the blocks at the end of the prompt and every 32nd decode step."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.seen: list[tuple[float, ...]] = []

    def scheduled(self, engine: Any) -> None:
        """Do nothing: the step's tokens have no results yet."""

    def applied(self, engine: Any, finished: int) -> None:
        """Look at each table of the request."""
        cache = engine.cache
        if finished or (int(cache.store.s.rows[0]["computed"]) - self.prompt) % EVERY:
            return
        found = []
        for row in cache.bundle(0):
            live, length = (int(cache.store.s.rows[row][name]) for name in ("live", "computed"))
            held, all_ = len(cache.block_table(row)), -(-length // SIZE)
            found.append((live / length, 1 - held / all_, (held - -(-live // SIZE)) / all_))
        self.seen.append(tuple(100 * np.mean(found, axis=0)))


def leave(
    policy: str, granularity: str, tables: str, share: float, prompt: int, steps: int, **fields: Any
) -> list[Any]:
    """Serve one request, and return the measures at the end of the prompt, and the mean over decode if there is any."""
    config = SimConfig(
        trace=f"poisson:rate=1,n=1,prompt={prompt},output={steps + 2}",
        model="smollm2-135m",
        kv_blocks=(prompt + steps) // SIZE + 3,
        policy=policy,
        budget=share,
        reclaimer="naive",
        granularity=GRANULARITIES[granularity],
        block_tables=tables,
        **fields,
    )
    look = Look(prompt)
    build_engine(config, observer=look).run()
    return [look.seen[0], np.mean(look.seen[1:], axis=0)] if look.seen[1:] else [look.seen[0]]


def lengths(captures: Path) -> dict[Path, tuple[int, int]]:
    """Return prompt and generated tokens of each capture."""
    found = {}
    for path in sorted(captures.glob("*.npz")):
        with np.load(path) as capture:
            found[path] = int(capture["P"]), int(capture["G"])
    return found


def measured(captures: Path) -> pd.DataFrame:
    """Return a row a policy, granularity, budget, kind of tables, moment and measure: means over the captures, in %."""
    frame = pd.read_parquet(captures / "fragmentation.parquet")
    chosen = frame.cap.isin([path.stem for path in lengths(captures)]) & frame.pol.isin(POLICIES)
    frame = frame[chosen & frame.gran.isin(GRANULARITIES) & (frame.bs == SIZE)]
    frame = frame.rename(columns={"pol": "policy", "gran": "granularity", "ratio": "budget"})
    last = frame[frame.when == frame.groupby(["cap", "policy"]).when.transform("max")]
    parts = []
    for when, rows in zip(WHEN, (frame[frame.when == 0], frame[frame.when > 0], last[last.when > 0]), strict=True):
        for tables, columns in TABLES.items():
            means = rows.groupby([*KEYS[:3], "cap"])[list(columns)].mean().groupby(KEYS[:3]).mean() * 100
            parts.append(means.set_axis(MEASURES, axis=1).reset_index().assign(tables=tables, when=when))
    return pd.concat(parts).set_index(KEYS)


def recorded(captures: Path) -> Iterator[tuple[Any, ...]]:
    """Yield what replays of the captures leave, by layer: what they know."""
    for path, (prompt, generated) in lengths(captures).items():
        for share in BUDGETS:
            for tables in TABLES:
                fields = {"attention": f"recorded:path={path}"}
                for name, policy in (("h2o", "h2o_prompt"), ("snapkv", POLICIES["snapkv"])):
                    (end,) = leave(policy, "layer", tables, share, prompt, 1, **fields)
                    yield name, "layer", share, tables, WHEN[0], *end
                policy = f"h2o_kept:path={path},budget={share}"
                (end,) = leave(policy, "layer", tables, share, prompt + generated, 1)
                yield "h2o", "layer", share, tables, WHEN[2], *end


def synthetic(
    captures: Path, names: Iterable[str] = tuple(POLICIES), budgets: Iterable[float] = BUDGETS
) -> Iterator[tuple[Any, ...]]:
    """Yield what synthetic attention leaves."""
    for prompt, generated in lengths(captures).values():
        for granularity in GRANULARITIES:
            for share in budgets:
                for tables in TABLES:
                    for name in names:
                        for seed in range(SEEDS):
                            decode = 0 if name == "snapkv" or seed else generated  # one request says enough of decode
                            got = leave(POLICIES[name], granularity, tables, share, prompt, decode, seed=seed)
                            for when, values in zip(WHEN, got, strict=False):
                                yield name, granularity, share, tables, when, *values


def compare(captures: Path) -> pd.DataFrame:
    """Return measured, recorded and synthetic side by side, one row a number."""

    def means(rows: Iterator[tuple[Any, ...]]) -> pd.DataFrame:
        return pd.DataFrame(rows, columns=[*KEYS, *MEASURES]).groupby(KEYS).mean()

    sides = {
        "measured": measured(captures),
        "recorded": means(recorded(captures)),
        "synthetic": means(synthetic(captures)),
    }
    table = pd.concat({name: side.stack() for name, side in sides.items()}, axis=1)
    return table.rename_axis([*KEYS, "measure"]).dropna(subset=["measured"]).dropna(thresh=2)


def markdown(table: pd.DataFrame) -> str:
    """Return the rows at budgets of 20 and 40 %: measured / recorded / synthetic."""
    lines = ["| policy, budget | units | tables | when | tokens alive | blocks dead | reclaimable |", "|---" * 7 + "|"]
    for (policy, unit, share, tables, when), rows in table.groupby(level=KEYS, sort=True):
        if share <= 0.4 and policy != "random":
            cells = [
                " / ".join(
                    "-" if np.isnan(value) else f"{value:.0f}" for value in rows.xs(measure, level="measure").iloc[0]
                )
                for measure in MEASURES
            ]
            lines.append(f"| {policy} {100 * share:.0f} | {unit} | {tables} | {when} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@styled
def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw the blocks that are free without moving anything, by budget: one set for all is what experiment 00 shows."""
    figure = new_figure(9.0, 3.6)
    panels = figure.subplots(1, 4, sharey=True)
    looks = {"measured": ("-", "o"), "recorded": ("", "s"), "synthetic": ("--", "x")}
    places = [(unit, tables) for tables in TABLES for unit in GRANULARITIES]
    for axes, (unit, tables) in zip(panels, places, strict=True):
        for policy in POLICIES:
            where = (policy, unit, tables, WHEN[0], "dead")
            dead = table.xs(where, level=["policy", "granularity", "tables", "when", "measure"])
            for side, (line, marker) in looks.items():
                colour = policy_colour(policy)
                fill = "none" if marker == "s" else "full"
                options: dict[str, Any] = {"color": colour, "ls": line, "marker": marker, "fillstyle": fill}
                axes.plot(100 * dead.index, dead[side], markersize=8 if marker == "s" else 4, **options)
        who = "30 layers" if unit == "layer" else "90 KV heads"
        axes.set_title(f"{who}, {'one table' if tables == 'shared' else 'own tables'}")
        axes.set(xlabel="budget of each unit, %", xticks=[20, 40, 60, 80])
    panels[0].set_ylabel("blocks free without a copy, %")
    for policy in POLICIES:
        panels[0].plot([], [], color=policy_colour(policy), label=policy)
    for side, (line, marker) in looks.items():
        fill = "none" if marker == "s" else "full"
        panels[0].plot([], [], color="black", ls=line, marker=marker, fillstyle=fill, label=side)
    figure.legend(loc="outside lower center", ncols=6)
    save(figure, path)


def main() -> None:
    """Write the table and the picture, and print what README.md quotes."""
    captures = Path(sys.argv[1]) if sys.argv[1:] else SHARED
    if not (captures / "fragmentation.parquet").is_file():
        sys.exit(f"{captures}: captures of attention are not part of vtoken-sim: name the folder that has them")
    table = compare(captures)
    table.round(2).reset_index().to_csv(HERE / "measured.csv", index=False)
    print(markdown(table))
    for side in ("recorded", "synthetic"):
        off = (table[side] - table["measured"]).abs()
        worst = off.groupby(level=["policy", "granularity", "tables", "when"]).max()
        print(f"\n{side}: largest difference, points\n{worst}")
    draw(table, HERE / "freed.png")


if __name__ == "__main__":
    main()
