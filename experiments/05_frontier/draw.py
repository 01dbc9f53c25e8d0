"""Draw the pictures of this experiment, and write the table of differences, from the searches' answers beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from sim.serving.hardware import get_hardware
from sim.serving.memory import kv_blocks
from sim.serving.models import get_model
from sim.study.plots import style

HERE = Path(__file__).parent
S = 16
ROWS = (("llama-3.1-8b", 0.35), ("llama-3.1-8b", 0.50), ("qwen2.5-14b", 0.50))
ROW_LOOKS = (("#0072B2", "o"), ("#08306B", "s"), ("#6BAED6", "^"))  # shades of the colour of the one policy, h2o
SYSTEMS = {
    ("full", "none"): "full retention (native vLLM)",
    ("h2o", "naive"): "naive",
    ("h2o", "vtoken"): "vtoken, theta_f 0.25",
    ("h2o", "vtoken:theta_f=0"): "vtoken, theta_f 0",
    ("h2o", "ideal"): "ideal",
}


def usable(model: str, share: float) -> int:
    """Return the blocks that requests can have: block 0 is never handed out."""
    return kv_blocks(get_model(model), get_hardware("h100"), S, share) - 1


def closed_form(blocks: int, length: int, policy: str, reclaimer: str, theta_f: float, budget: float = 0.5) -> int:
    """Return how often the footprint at a request's end goes into the pool.

    The last token is never written. A pool that may not be repacked below a fragmentation of ``theta_f`` is never
    fuller of living tokens than 1 - theta_f, and headroom is not for requests.
    """
    if policy == "full" or reclaimer == "naive":
        return blocks // math.ceil((length - 1) / S)
    kept = math.ceil((math.ceil(budget * (length - 2)) + 1) / S)
    if reclaimer == "ideal":
        return blocks // kept
    headroom = max(1, (blocks + 1) // 50)
    return int((1 - theta_f) * (blocks - headroom) / kept)


def theta_of(row: pd.Series) -> float:
    return 0.0 if row["reclaimer"].endswith("theta_f=0") else float(row["theta_f"])


def length_of(trace: str) -> int:
    parts = dict(part.split("=", 1) for part in trace.partition(":")[2].split(","))
    return int(parts["prompt"]) + int(parts["output"])


def differences(answers: pd.DataFrame, paper: pd.DataFrame, rows: Sequence[tuple[str, float]] = ROWS) -> pd.DataFrame:
    """Return the table: the paper's figures, ours, and what the closed form says."""
    lines = []
    for (model, share), told in zip(ROWS, paper.itertuples(), strict=True):
        if (model, share) not in rows:
            continue
        ours = answers[(answers["model"] == model) & (answers["gpu_memory_utilization"] == share)]
        blocks = usable(model, share)
        for (policy, reclaimer), name in SYSTEMS.items():
            row = ours[(ours["policy"] == policy) & (ours["reclaimer"] == reclaimer)].iloc[0]
            expected = {"none": told.native_or_naive, "naive": told.native_or_naive, "ideal": None}
            figure = expected.get(reclaimer, told.vtoken)
            found = int(row["max_concurrency"])
            lines.append(
                {
                    "model": model,
                    "share of memory": share,
                    "pool tokens": blocks * S,
                    "system": name,
                    "paper": figure,
                    "ours": found,
                    "difference": None if figure is None else found - figure,
                    "closed form": closed_form(blocks, length_of(row["trace"]), policy, reclaimer, theta_of(row)),
                }
            )
    return pd.DataFrame(lines)


def shares(paper: pd.DataFrame) -> list[tuple[float, float]]:
    """Return bounds of a vToken request's footprint as a share of a native one's, a pair for each of the paper's rows.

    If footprints are what limits, N fit and N + 1 do not: pool / (N + 1) < footprint <= pool / N. The pool, which is
    our estimate, is the same on both sides and cancels.
    """
    return [
        (row.native_or_naive / (row.vtoken + 1), (row.native_or_naive + 1) / row.vtoken) for row in paper.itertuples()
    ]


@style.styled
def draw_lengths(lengths: pd.DataFrame, paper: pd.DataFrame) -> None:
    axes = style.axes_or_new(None, 7.4, 3.9)
    model, share = ROWS[0]
    for (policy, reclaimer), name in SYSTEMS.items():
        rows = lengths[(lengths["policy"] == policy) & (lengths["reclaimer"] == reclaimer)]
        rows = rows.assign(tokens=rows["trace"].map(length_of)).sort_values("tokens")
        look = {"color": style.policy_colour(policy), "linestyle": style.reclaimer_line(reclaimer)}
        if reclaimer == "none":  # where it is hidden by naive's points, around them
            look |= {"markersize": 9, "fillstyle": "none"}
        axes.plot(rows["tokens"], rows["max_concurrency"], marker=style.reclaimer_marker(reclaimer), label=name, **look)
    first = paper.iloc[0]
    points = [first["native_or_naive"], first["vtoken"]]
    axes.plot([16384, 16384], points, "k*", markersize=12, linestyle="none", label="paper: native, vToken (5, 8)")
    axes.set(
        xlabel="tokens of a request (4,096 of them prompt)",
        ylabel="requests that decode together",
        title=f"{model}, {share:g} of an H100: {usable(model, share) * S:,} tokens of KV cache",
        ylim=(0, None),
    )
    axes.set_xticks(sorted(set(lengths["trace"].map(length_of))))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    style.legend_beside(axes)
    style.save(axes.figure, HERE / "lengths.png")


@style.styled
def draw_theta(theta: pd.DataFrame, paper: pd.DataFrame) -> None:
    axes = style.axes_or_new(None, 7.4, 3.9)
    for (model, share), told, (colour, marker) in zip(ROWS, paper.itertuples(), ROW_LOOKS, strict=True):
        rows = theta[(theta["model"] == model) & (theta["gpu_memory_utilization"] == share)].sort_values("theta_f")
        label = f"{model}, {share:g}"
        axes.plot(rows["theta_f"], rows["max_concurrency"], color=colour, marker=marker, label=label)
        axes.axhline(told.vtoken, color=colour, linestyle=":", linewidth=1.2, label=f"paper: {told.vtoken}")
    axes.set(
        xlabel="theta_f: fragmentation above which vtoken repacks",
        ylabel="requests that decode together",
        title="Requests of 4k + 12k tokens, half of the tokens kept",
        ylim=(0, None),
    )
    style.legend_beside(axes)
    style.save(axes.figure, HERE / "theta.png")


def changed(row: pd.Series, base: pd.Series) -> str:
    """Say which assumption a row of the sensitivity changes."""
    fields = [name for name in base.index if name not in NOT_SETTINGS]
    parts = []
    for name in fields:
        value = row[name]
        if value == base[name] or (pd.isna(value) and pd.isna(base[name])):
            continue
        if name == "trace":
            value = str(value).partition("n=400,")[2]
            parts.append(value.replace("prompt=", "").replace(",output=", " + ") + " tokens")
        else:
            number = isinstance(value, float) and not pd.isna(value)
            parts.append(f"{name} {value:g}" if number else f"{name} {value}")
    return ", ".join(parts) or "as in rows.toml"


NOT_SETTINGS = {
    "label",
    "max_concurrency",
    "fails",
    "outside",
    "monotone",
    "vs_naive",
    "probes",
    "error",
}


@style.styled
def draw_sensitivity(rows: pd.DataFrame, told: int) -> None:
    base = rows.iloc[0]
    labels = [changed(row, base) for _, row in rows.iterrows()]
    axes = style.axes_or_new(None, 7.4, 0.2 * len(rows) + 1.0)
    places = range(len(rows), 0, -1)
    colours = [style.policy_colour(policy) for policy in rows["policy"]]
    axes.barh(list(places), rows["max_concurrency"], color=colours, height=0.7)
    for place, value in zip(places, rows["max_concurrency"], strict=True):
        axes.text(value + 0.15, place, f"{value:.0f}", va="center", fontsize=8)
    axes.axvline(told, color="k", linestyle=":", label=f"paper: {told}")
    axes.set_yticks(list(places), labels, fontsize=8)
    axes.set(xlabel="requests that decode together (vtoken)", title="One assumption changed at a time")
    axes.margins(y=0.01)
    axes.legend(loc="lower right")
    style.save(axes.figure, HERE / "sensitivity.png")


def main() -> None:
    paper = pd.read_csv(HERE / "paper.csv")
    rows, lengths, sensitivity = (pd.read_csv(HERE / f"{name}.csv") for name in ("rows", "lengths", "sensitivity"))
    table = differences(rows, paper)
    table.to_csv(HERE / "differences.csv", index=False)
    theta = pd.concat([pd.read_csv(HERE / "theta.csv"), rows[rows["reclaimer"].str.startswith("vtoken")]])
    theta = theta.assign(theta_f=theta.apply(theta_of, axis=1))
    print(table.to_string(index=False))
    for (model, share), (low, high) in zip(ROWS, shares(paper), strict=True):
        print(f"{model}, {share:g}: a vToken request holds {low:.3f} to {high:.3f} of what a native one does")
    draw_lengths(lengths, paper)
    draw_theta(theta, paper)
    draw_sensitivity(sensitivity, int(paper["vtoken"].iloc[0]))


if __name__ == "__main__":
    main()
