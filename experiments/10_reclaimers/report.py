"""Turn the four sweeps into this page's tables and pictures.

python experiments/10_reclaimers/report.py: reads azure.csv, mooncake.csv, reasoning.csv, agentic.csv and planners.csv
beside it (``vtoken results OUT --csv``), writes tables.md, saved.png and served.png there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from sim.study.plots.style import new_figure, policy_colour, reclaimer_marker, save, styled

HERE = Path(__file__).parent
WORKLOADS = {
    "azure": "Azure conversation",
    "mooncake": "Mooncake conversation",
    "reasoning": "ServeGen reasoning",
    "agentic": "Weka agentic, prefix cache",
}
ORDER = (
    "naive",
    "page",
    "reuse",
    "vtoken",
    "vtoken:layout=fill",
    "stall",
    "vtoken:repack_when=always",
    "sync",
    "reuse+vtoken:when=pressure",
    "reuse+vtoken:at_once=0",
    "reuse+vtoken",
    "token",
    "token:attention_factor=1",
    "ideal",
)
POLICIES = ("h2o", "scissorhands", "random")
LOOKS = {
    "vtoken:layout=fill": "d",
    "vtoken:repack_when=always": "s",
    "reuse+vtoken:when=pressure": "8",
    "reuse+vtoken:at_once=0": "v",
    "token:attention_factor=1": "H",
}


def load(name: str) -> pd.DataFrame:
    """Read one sweep; blocks of one token are counted in sixteens, and everything is set against naive."""
    table = pd.read_csv(HERE / f"{name}.csv")
    table["budget"] = table["budget"].fillna(table["budget_tokens"]) if "budget_tokens" in table else table["budget"]
    table["held"] = table["retained_blocks_mean"] * np.where(table["block_size"] == 1, 1 / 16, 1)
    table["copied_per_1000"] = 1000 * table["tokens_copied"] / table["output_tokens"]
    table["slowed"] = 100 * table["copy_delay_s"] / table["makespan_s"]
    keys = ["trace", "policy", "budget"]
    naive = table[table["reclaimer"] == "naive"].set_index(keys)
    for column, base in (("held", "held"), ("served", "requests_per_s"), ("p95", "e2e_s_p95")):
        against = naive[base].reindex(pd.MultiIndex.from_frame(table[keys])).to_numpy()
        table[f"{column}_vs_naive"] = 100 * table[base] / against
    return table


def markdown(table: pd.DataFrame, order: tuple[str, ...]) -> str:
    """Return a row a reclaimer: means over policies and budgets, and the range over them where it says most."""
    lines = [
        "| reclaimer | blocks held, % of naive | over-retention | copied a 1,000 output tokens | slowed by copies, % | "
        "requests/s, % of naive | p95 latency, % of naive | preemptions |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in order:
        rows = table[table["reclaimer"] == name]
        if len(rows):
            held = rows["held_vs_naive"]
            lines.append(
                f"| `{name}` | {held.mean():.0f} ({held.min():.0f} to {held.max():.0f}) | "
                f"{rows['over_retention_mean'].mean():.2f} | {rows['copied_per_1000'].mean():,.0f} "
                f"({rows['copied_per_1000'].min():,.0f} to {rows['copied_per_1000'].max():,.0f}) | "
                f"{rows['slowed'].mean():.2f} | {rows['served_vs_naive'].mean():.0f} | "
                f"{rows['p95_vs_naive'].mean():.0f} | {rows['preemptions'].mean():.0f} |"
            )
    return "\n".join(lines)


@styled
def draw_saved(tables: dict[str, pd.DataFrame]) -> None:
    """Draw what each run holds against what it copies."""
    figure = new_figure(11.0, 7.0)
    for at, (name, table) in enumerate(tables.items()):
        axes = figure.add_subplot(2, 2, at + 1)
        for reclaimer in ORDER:
            for policy in POLICIES:
                rows = table[(table["reclaimer"] == reclaimer) & (table["policy"] == policy)]
                axes.scatter(
                    rows["copied_per_1000"],
                    rows["held_vs_naive"],
                    marker=LOOKS.get(reclaimer) or reclaimer_marker(reclaimer),
                    color=policy_colour(policy),
                    s=90 if reclaimer == "reuse+vtoken" else 32,
                    alpha=0.8,
                    linewidths=0,
                )
        axes.set_xscale("symlog", linthresh=10)
        axes.set_xlim(-2, None)
        axes.set_ylim(0, 108)
        axes.set_title(WORKLOADS[name])
        axes.set_xlabel("tokens copied for 1,000 output tokens")
        axes.set_ylabel("blocks held, % of naive")
    for reclaimer in ORDER:
        axes.scatter([], [], marker=LOOKS.get(reclaimer) or reclaimer_marker(reclaimer), color="black", label=reclaimer)
    for policy in POLICIES:
        axes.scatter([], [], marker="o", color=policy_colour(policy), label=policy)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    save(figure, HERE / "saved.png")


@styled
def draw_served(tables: dict[str, pd.DataFrame]) -> None:
    """Draw requests served a second against naive, a bar a reclaimer, its range over policies and budgets as a line."""
    figure = new_figure(11.0, 6.0)
    for at, (name, table) in enumerate(tables.items()):
        axes = figure.add_subplot(2, 2, at + 1)
        there = [reclaimer for reclaimer in ORDER if (table["reclaimer"] == reclaimer).any()]
        for y, reclaimer in enumerate(there):
            served = table.loc[table["reclaimer"] == reclaimer, "served_vs_naive"] - 100
            axes.barh(y, served.mean(), color="#0072B2" if reclaimer == "reuse+vtoken" else "#A0A0A0")
            axes.plot([served.min(), served.max()], [y, y], color="black", linewidth=1)
        axes.set_yticks(range(len(there)), there, fontsize=7)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_title(WORKLOADS[name])
        axes.set_xlabel("requests/s, % more than naive")
    save(figure, HERE / "served.png")


def main() -> None:
    """Write the tables and draw the pictures."""
    tables = {name: load(name) for name in WORKLOADS}
    parts = [f"## {WORKLOADS[name]}\n\n{markdown(table, ORDER)}\n" for name, table in tables.items()]
    planners = load("planners")
    names = tuple(dict.fromkeys(planners["reclaimer"]))
    for trace, rows in planners.groupby("trace", sort=True):
        title = "Azure conversation" if "azure" in str(trace) else "Mooncake conversation"
        parts.append(f"## Planners under pressure, {title}\n\n{markdown(rows, names)}\n")
    (HERE / "tables.md").write_text("# All workloads, means over policies and budgets\n\n" + "\n".join(parts))
    draw_saved(tables)
    draw_served(tables)


if __name__ == "__main__":
    main()
