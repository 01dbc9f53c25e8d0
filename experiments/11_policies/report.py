"""Turn the four sweeps and kept.csv into this page's tables and pictures.

python experiments/11_policies/report.py: reads azure.csv, mooncake.csv, reasoning.csv, agentic.csv (``vtoken results
OUT --csv``) and kept.csv (kept.py) beside it, and the measured perplexities; writes tables.md, held.png, budgets.png,
served.png and kept.png there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from sim.study.plots.style import base_name, new_figure, policy_colour, policy_marker, reclaimer_marker, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent
PERPLEXITIES = HERE.parents[2] / "shared" / "attention" / "ppl.json"
WORKLOADS = {
    "azure": "Azure conversation",
    "mooncake": "Mooncake conversation",
    "reasoning": "ServeGen reasoning",
    "agentic": "Weka agentic, prefix cache",
}
POLICIES = (
    "random",
    "knorm",
    "keyformer",
    "h2o",
    "tova",
    "scissorhands",
    "keydiff",
    "r_kv",
    "expected_attention",
    "snapkv",
    "streaming_llm",
    "paged_eviction",
)
RECLAIMERS = ("naive", "vtoken", "reuse+vtoken", "page", "ideal")
SHOWN = 0.3
"""The budget of pictures that show one."""
MEASURED = {
    "h2o_global": "h2o",
    "scissor_layer": "scissorhands:history=400,threshold=0",
    "tova_layer": "tova",
    "streaming": "streaming_llm",
    "random": "random",
    "random_sr": "random, 4 sinks, half recent",
}
"""What perplexity was measured of, and the same rule in kept.csv."""


def load(name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read one sweep, everything as a percentage of full retention's; and apart, the runs with scores for nothing."""
    table = pd.read_csv(HERE / f"{name}.csv")
    full = table[table["policy"] == "full"].iloc[0]
    for column, base in (("held", "retained_blocks_mean"), ("served", "requests_per_s"), ("p95", "e2e_s_p95")):
        table[column] = 100 * table[base] / full[base]
    table["copied"] = 1000 * table["tokens_copied"] / table["output_tokens"]
    free = (table["score_reads"] == 0) | table["step_cost"].str.contains("score_pair_bytes=0")
    return table[~free], table[free]


def cell(table: pd.DataFrame, policy: str, budget: float, reclaimer: str, column: str) -> float:
    """Return one figure of one run; NaN if it was not made."""
    rows = table[(table["policy"] == policy) & (table["budget"] == budget) & (table["reclaimer"] == reclaimer)]
    return float(rows[column].iloc[0]) if len(rows) else float("nan")


def markdown(table: pd.DataFrame, free: pd.DataFrame, budget: float) -> str:
    """Return a row a policy: what it holds, what reclaiming wins, what deciding costs."""
    lines = [
        "| policy | over-retention, naive | blocks held, % of full: naive / vtoken / reuse+vtoken / page / ideal | "
        "requests/s, % of full: naive / vtoken / reuse+vtoken / page / ideal | "
        "p95 latency, % of full: naive / reuse+vtoken | copied a 1,000 output tokens: vtoken / reuse+vtoken | "
        "requests/s if scores were free, reuse+vtoken |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for policy in POLICIES:

        def of(column: str, *names: str, policy: str = policy) -> str:
            return " / ".join(f"{cell(table, policy, budget, name, column):,.0f}" for name in names)

        paid = cell(free, policy, budget, "reuse+vtoken", "served")
        lines.append(
            f"| `{policy}` | {cell(table, policy, budget, 'naive', 'over_retention_mean'):.2f} | "
            f"{of('held', *RECLAIMERS)} | {of('served', *RECLAIMERS)} | {of('p95', 'naive', 'reuse+vtoken')} | "
            f"{of('copied', 'vtoken', 'reuse+vtoken')} | {'' if np.isnan(paid) else f'{paid:.0f}'} |"
        )
    quest = (f"{cell(table, 'quest', budget, 'none', column):.0f}" for column in ("held", "served", "p95"))
    return "\n".join([*lines, "| `quest` | 1.00 | {} | {} | {} | | |".format(*quest)])


def summary(tables: dict[str, pd.DataFrame], frees: dict[str, pd.DataFrame]) -> str:
    """Return a row a policy, a cell the four workloads: what naive holds, what reclaiming changes, what scores cost."""
    lines = [
        "| policy | naive: blocks held / needed | `reuse+vtoken` against naive, %: blocks | requests/s | p95 latency | "
        "requests/s that scores cost, % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for policy in POLICIES:
        cells: list[list[str]] = [[] for _ in range(5)]
        for name, table in tables.items():
            cells[0].append(f"{cell(table, policy, SHOWN, 'naive', 'over_retention_mean'):.2f}")
            for k, column in enumerate(("held", "served", "p95"), start=1):
                naive, ours = (cell(table, policy, SHOWN, which, column) for which in ("naive", "reuse+vtoken"))
                cells[k].append(f"{round(100 * (ours / naive - 1)):+d}")
            paid = cell(frees[name], policy, SHOWN, "reuse+vtoken", "served")
            cost = 100 * (1 - cell(table, policy, SHOWN, "reuse+vtoken", "served") / paid)
            cells[4].append("" if np.isnan(paid) else f"{cost:.0f}")
        lines.append(f"| `{policy}` | " + " | ".join(" / ".join(part).strip(" /") for part in cells) + " |")
    return "\n".join(lines)


def label_ends(axes: Axes, ends: dict[str, float], least: float) -> None:
    """Write each policy's name behind the end of its line, at least ``least`` apart."""
    at = -np.inf
    for policy, y in sorted(ends.items(), key=lambda item: item[1]):
        at = max(y, at + least)
        axes.annotate(
            policy,
            (1.0, y),
            (1.03, at),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            fontsize=7,
            va="center",
            color=policy_colour(policy),
        )


@styled
def draw_held(tables: dict[str, pd.DataFrame]) -> None:
    """Draw the blocks that each policy holds under each reclaimer."""
    figure = new_figure(11.0, 8.0)
    for at, (name, table) in enumerate(tables.items()):
        axes = figure.add_subplot(2, 2, at + 1)
        for y, policy in enumerate(POLICIES):
            held = [cell(table, policy, SHOWN, reclaimer, "held") for reclaimer in RECLAIMERS]
            axes.plot([min(held), max(held)], [y, y], color="#BBBBBB", linewidth=1, zorder=1)
            for reclaimer, x in zip(RECLAIMERS, held, strict=True):
                filled = policy_colour(policy) if reclaimer != "ideal" else "none"
                axes.scatter(
                    x,
                    y,
                    marker=reclaimer_marker(reclaimer),
                    facecolors=filled,
                    edgecolors=policy_colour(policy),
                    s=70 if reclaimer in ("ideal", "reuse+vtoken") else 30,
                    linewidths=0.9,
                    zorder=2,
                )
        axes.set_yticks(range(len(POLICIES)), POLICIES, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 105)
        axes.set_title(WORKLOADS[name])
        axes.set_xlabel(f"blocks a request holds, % of full retention; {SHOWN:g} of the tokens kept")
    for reclaimer in RECLAIMERS:
        face = "none" if reclaimer == "ideal" else "black"
        axes.scatter(
            [], [], marker=reclaimer_marker(reclaimer), facecolors=face, edgecolors="black", s=40, label=reclaimer
        )
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(RECLAIMERS), fontsize=8)
    save(figure, HERE / "held.png")


@styled
def draw_budgets(tables: dict[str, pd.DataFrame]) -> None:
    """Draw how many times the dense number of blocks each policy holds, by budget, when nothing is moved."""
    figure = new_figure(11.0, 7.5)
    for at, (name, table) in enumerate(tables.items()):
        axes = figure.add_subplot(2, 2, at + 1)
        ends = {}
        for policy in POLICIES:
            rows = table[(table["policy"] == policy) & (table["reclaimer"] == "naive")].sort_values("budget")
            look = {"color": policy_colour(policy), "marker": policy_marker(policy)}
            axes.plot(rows["budget"], rows["over_retention_mean"], markersize=5, linewidth=1.1, **look)
            ends[policy] = float(rows["over_retention_mean"].iloc[0])
        axes.set_xlim(0.72, 0.18)
        low, high = axes.get_ylim()
        label_ends(axes, ends, (high - low) / 24)
        axes.set_xticks([0.7, 0.5, 0.3, 0.2])
        axes.set_title(WORKLOADS[name])
        axes.set_xlabel("share of the tokens kept")
        axes.set_ylabel("blocks held / blocks needed, naive")
    save(figure, HERE / "budgets.png")


@styled
def draw_served(tables: dict[str, pd.DataFrame], frees: dict[str, pd.DataFrame]) -> None:
    """Draw requests served a second against full retention: what reclaiming wins, and what deciding costs."""
    figure = new_figure(11.0, 8.0)
    for at, (name, table) in enumerate(tables.items()):
        axes = figure.add_subplot(2, 2, at + 1)
        for y, policy in enumerate(POLICIES):
            naive, ours = (cell(table, policy, SHOWN, reclaimer, "served") for reclaimer in ("naive", "reuse+vtoken"))
            paid = cell(frees[name], policy, SHOWN, "reuse+vtoken", "served")
            colour = policy_colour(policy)
            axes.plot([naive, ours], [y, y], color=colour, linewidth=2.5, zorder=1, solid_capstyle="butt")
            axes.scatter(naive, y, marker=reclaimer_marker("naive"), color=colour, s=28, zorder=2)
            axes.scatter(ours, y, marker=reclaimer_marker("reuse+vtoken"), color=colour, s=90, zorder=2)
            axes.scatter(paid, y, marker="|", color=colour, s=80, zorder=2)
            axes.plot([ours, paid], [y, y], color=colour, linewidth=0.9, linestyle=":", zorder=1)
        axes.axvline(100, color="black", linewidth=0.8)
        axes.axvline(cell(table, "quest", SHOWN, "none", "served"), color="#888888", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(POLICIES)), POLICIES, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(WORKLOADS[name])
        axes.set_xlabel(f"requests/s, % of full retention; {SHOWN:g} of the tokens kept")
    looks = (("naive", "o", 28), ("reuse+vtoken", "*", 90), ("the same, were scores free", "|", 80))
    for label, marker, size in looks:
        axes.scatter([], [], marker=marker, color="black", s=size, label=label)
    axes.plot([], [], color="black", linewidth=0.8, label="full retention")
    axes.plot([], [], color="#888888", linewidth=0.8, linestyle="--", label="quest")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8)
    save(figure, HERE / "served.png")


def agreement(kept: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each rule and budget that has both: attention kept, and by how much the text got less likely."""
    measured = pd.DataFrame(json.loads(PERPLEXITIES.read_text(encoding="utf-8")))
    full = measured[measured["pol"] == "full"].set_index("text")["nll"]
    measured["worse"] = measured["nll"] - measured["text"].map(full)
    measured = measured[measured["pol"].isin(MEASURED)].rename(columns={"ratio": "budget"})
    copying = measured["text"] == "copy"
    keys = ["pol", "budget"]
    worse = pd.DataFrame(
        {
            "plain": measured[~copying].groupby(keys)["worse"].mean(),
            "copying": measured[copying].groupby(keys)["worse"].mean(),
        }
    ).reset_index()
    worse["policy"] = worse["pol"].map(MEASURED)
    mean = kept[kept["reclaimer"] == "naive"].groupby(["policy", "budget"])[["kept", "kept_p05", "kept_far"]].mean()
    return worse.merge(mean.reset_index(), on=["policy", "budget"])


def correlations(both: pd.DataFrame) -> str:
    """Return the rank correlations between attention kept and what was lost, over all and inside each budget."""
    lines = [
        "| attention kept | text | all | 20 % | 40 % | 60 % | 80 % | all but `random` |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    measures = {"kept": "all", "kept_p05": "worst 5 % of queries", "kept_far": "far", "budget": "none: tokens kept"}
    for measure, title in measures.items():
        for text in ("plain", "copying"):
            parts = [both, *(both[both["budget"] == budget] for budget in (0.2, 0.4, 0.6, 0.8))]
            parts.append(both[both["policy"] != "random"])
            cells = [
                f"{spearmanr(-part[measure], part[text]).statistic:.2f}" if part[measure].nunique() > 1 else ""
                for part in parts
            ]
            lines.append(f"| {title} | {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kept_table(kept: pd.DataFrame) -> str:
    """Return a row a policy: attention kept by whom it drops token by token, and whole blocks at a time."""
    mean = kept.groupby(["policy", "reclaimer", "budget"])[["kept", "kept_far", "live"]].mean()
    budgets = (0.2, 0.3, 0.5, 0.7)
    lines = [
        "| policy | tokens alive, % | attention kept, % | of the far part | whole blocks (`page`): attention kept | "
        "of the far part |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    pinned = ("paged_eviction, first block pinned", "scissorhands, first block pinned")
    for policy in (*POLICIES, "random, 4 sinks, half recent", *pinned):
        cells = []
        for reclaimer, columns in (("naive", ("live", "kept", "kept_far")), ("page", ("kept", "kept_far"))):
            for column in columns:
                there = (policy, reclaimer, budgets[0]) in mean.index
                values = (f"{100 * mean.loc[(policy, reclaimer, budget), column]:.0f}" for budget in budgets)
                cells.append(" / ".join(values) if there else "")
        lines.append(f"| `{policy}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@styled
def draw_kept(kept: pd.DataFrame, both: pd.DataFrame) -> None:
    """Draw attention kept against tokens alive, and against what a closed loop lost."""
    figure = new_figure(12.0, 4.6)
    axes = figure.add_subplot(1, 2, 1)
    mean = kept[kept["reclaimer"] == "naive"].groupby(["policy", "budget"])[["live", "kept"]].mean()
    for policy in POLICIES:
        rows = mean.loc[policy]
        look = {"color": policy_colour(policy), "marker": policy_marker(policy)}
        axes.plot(100 * rows["live"], 100 * rows["kept"], label=policy, markersize=5, linewidth=1.0, **look)
    axes.set_xlabel("tokens alive, % (budgets 0.2 to 0.8)")
    axes.set_ylabel("attention of the full cache on them, %")
    axes.set_title("Attention kept, seven captures of SmolLM2-135M")
    axes.legend(loc="lower right", fontsize=7, ncols=2)
    axes = figure.add_subplot(1, 2, 2)
    for policy, rows in both.groupby("policy"):
        name = base_name(str(policy))
        colour, marker = policy_colour(name), policy_marker(name)
        if name == "random, 4 sinks, half recent":
            colour, marker = policy_colour("random"), "x"
        lost = 100 * (1 - rows["kept_far"])
        axes.plot(lost, rows["copying"], color=colour, marker=marker, markersize=5, linewidth=0.8, label=name)
        axes.plot(lost, rows["plain"], color=colour, marker=marker, markersize=5, linewidth=0.8, linestyle=":")
    axes.plot([], [], color="black", linewidth=0.8, label="copying a document")
    axes.plot([], [], color="black", linewidth=0.8, linestyle=":", label="plain text")
    axes.set_xlabel("far attention lost, %")
    axes.set_ylabel("nats a token worse than the full cache")
    axes.set_title("Against measured perplexity, closed loop")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    save(figure, HERE / "kept.png")


def main() -> None:
    """Write the tables and draw the pictures."""
    loaded = {name: load(name) for name in WORKLOADS}
    tables, frees = ({name: pair[k] for name, pair in loaded.items()} for k in (0, 1))
    kept = pd.read_csv(HERE / "kept.csv")
    both = agreement(kept)
    head = f"## {SHOWN:g} of the tokens kept: {', '.join(WORKLOADS.values())}\n\n{summary(tables, frees)}\n"
    parts = [
        f"## {title}, {budget:g} of the tokens kept\n\n{markdown(tables[name], frees[name], budget)}\n"
        for name, title in WORKLOADS.items()
        for budget in (0.2, 0.3, 0.5, 0.7)
    ]
    parts.append(f"## Attention kept, budgets 0.2 / 0.3 / 0.5 / 0.7\n\n{kept_table(kept)}\n")
    parts.append(f"## Rank correlation of attention lost with perplexity\n\n{correlations(both)}\n")
    (HERE / "tables.md").write_text("# All workloads and budgets\n\n" + "\n".join([head, *parts]))
    draw_held(tables)
    draw_budgets(tables)
    draw_served(tables, frees)
    draw_kept(kept, both)


if __name__ == "__main__":
    main()
