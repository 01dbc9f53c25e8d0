"""Turn served.csv, layers.csv and models.csv into tables.md, served.png and models.png.

python experiments/12_granularity/report.py
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from sim.study.plots.style import new_figure, policy_colour, save, styled

HERE = Path(__file__).parent
PLACES = {
    ("shared", ""): "one set",
    ("per_layer", "per_unit"): "layers, own tables",
    ("per_head", "per_unit"): "heads, own tables",
    ("per_layer", "shared"): "layers, one table",
    ("per_head", "shared"): "heads, one table",
}
POLICIES = ("h2o", "snapkv", "pyramidkv", "ada_kv", "random", "streaming_llm")
RECLAIMERS = ("naive", "vtoken:repack_when=always", "reuse+vtoken", "ideal")


def load(name: str) -> pd.DataFrame:
    """Read a table; copies are of 1,000 output tokens, and launches of 1,000 steps."""
    table = pd.read_csv(HERE / f"{name}.csv", keep_default_na=False)
    table["copied"] = 1000 * table["tokens_copied"] / table["output_tokens"]
    table["launches"] = 1000 * table["repack_launches"] / table["steps"]
    return table


def cells(rows: pd.DataFrame, column: str, form: str, order: tuple[str, ...] = RECLAIMERS) -> str:
    """Return a column's values by reclaimer, slashes between them, a dash where there is none."""
    values = rows.set_index("reclaimer")[column]
    return " / ".join(format(values[name], form) if name in values.index else "-" for name in order)


def served(table: pd.DataFrame) -> str:
    """Return a row a policy and place."""
    full = table[table["policy"] == "full"].iloc[0]
    lines = [
        f"Full retention: {full['retained_blocks_mean']:.1f} blocks a request, "
        f"{full['requests_per_s']:.2f} requests/s, p95 {full['e2e_p95_s']:.1f} s, "
        f"{full['block_table_bytes']:,.0f} bytes of tables a step.\n",
        "| policy | who decides, tables | blocks | requests/s | p95, s | copied | launches a 1,000 steps | "
        "tail, % of slots | table kB a step |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    table = table[table["table_us"] > 0].assign(
        tail=100 * table["tail_slack_mean"], table_kb=table["block_table_bytes"] / 1e3
    )
    for policy in POLICIES:
        for (granularity, tables), name in PLACES.items():
            where = (table["policy"] == policy) & (table["granularity"] == granularity)
            rows = table[where & (table["block_tables"] == tables)]
            if len(rows):
                columns = (("retained_blocks_mean", ".1f"), ("requests_per_s", ".2f"), ("e2e_p95_s", ".1f"))
                columns += (("copied", ",.0f"), ("launches", ".0f"), ("tail", ".1f"), ("table_kb", ",.0f"))
                values = " | ".join(cells(rows, column, form) for column, form in columns)
                lines.append(f"| `{policy}` | {name} | {values} |")
    return "\n".join(lines)


def tables_cost(table: pd.DataFrame) -> str:
    """Return what writing tables takes, H2O."""
    lines = [
        "| workload | tables of | reclaimer | requests/s: one table | own, 0.6 us | own, 0 us |",
        "|---|---|---|---:|---:|---:|",
    ]
    table = table[(table["policy"] == "h2o") & (table["block_tables"] != "shared")]
    for workload in ("azure", "mooncake"):
        for granularity in ("per_layer", "per_head"):
            for reclaimer in ("naive", "reuse+vtoken"):
                rows = table[(table["workload"] == workload) & (table["reclaimer"] == reclaimer)]
                one = rows[rows["granularity"] == "shared"]["requests_per_s"].iloc[0]
                own = rows[rows["granularity"] == granularity].set_index("table_us")["requests_per_s"]
                lines.append(
                    f"| {workload} | {granularity} | {reclaimer} | {one:.2f} | {own[0.6]:.2f} | {own[0.0]:.2f} |"
                )
    return "\n".join(lines)


def layers(table: pd.DataFrame) -> str:
    """Return blocks by the number of layers that are simulated."""
    counts = sorted(table["simulated_layers"].unique())
    lines = [
        "| policy | granularity | tables | " + " | ".join(map(str, counts)) + " |",
        "|---|---|---|" + "---:|" * len(counts),
    ]
    for (policy, granularity, tables), rows in table.groupby(["policy", "granularity", "block_tables"]):
        values = rows.set_index("simulated_layers")["retained_blocks_mean"]
        lines.append(
            f"| {policy} | {granularity} | {tables} | " + " | ".join(f"{values[n]:.1f}" for n in counts) + " |"
        )
    return "\n".join(lines)


def models(table: pd.DataFrame) -> str:
    """Return a row a model: full retention, then H2O under each reclaimer."""
    order = ("none", "naive", "page", "vtoken:repack_when=always", "reuse+vtoken", "ideal")
    lines = ["| workload | model | blocks | requests/s | p95, s |", "|---|---|---:|---:|---:|"]
    for (workload, model), rows in table.groupby(["workload", "model"], sort=False):
        columns = (("retained_blocks_mean", ".1f"), ("requests_per_s", ".2f"), ("e2e_p95_s", ".1f"))
        values = " | ".join(cells(rows, column, form, order) for column, form in columns)
        lines.append(f"| {workload} | {model} | {values} |")
    return "\n".join(lines)


@styled
def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw blocks and requests a second under reuse+vtoken (bars) and naive (ticks), for each place and policy."""
    figure = new_figure(11.0, 6.4)
    what = (("retained_blocks_mean", "blocks held by a request"), ("requests_per_s", "requests served a second"))
    for row, workload in enumerate(("azure", "mooncake")):
        some = table[(table["workload"] == workload) & (table["table_us"] > 0)]
        full = some[some["policy"] == "full"].iloc[0]
        for at, (column, label) in enumerate(what):
            axes = figure.add_subplot(2, 2, 2 * row + at + 1)
            for group, (granularity, tables) in enumerate(PLACES):
                for k, policy in enumerate(POLICIES):
                    where = (some["granularity"] == granularity) & (some["block_tables"] == tables)
                    rows = some[where & (some["policy"] == policy)].set_index("reclaimer")
                    if len(rows):
                        x = group + 0.13 * (k - 2.5)
                        axes.bar(x, rows[column]["reuse+vtoken"], 0.12, color=policy_colour(policy))
                        axes.plot([x - 0.06, x + 0.06], [rows[column]["naive"]] * 2, color="black", lw=1.4)
            axes.axhline(full[column], color="#595959", ls=":", lw=1)
            axes.set_xticks(range(len(PLACES)), [name.replace(", ", ",\n") for name in PLACES.values()], fontsize=8)
            axes.set_ylabel(label)
            axes.set_title("Azure conversation" if workload == "azure" else "Mooncake conversation")
    for policy in POLICIES:
        axes.bar([0], [0], 0.1, color=policy_colour(policy), label=policy)
    axes.plot([], [], color="black", lw=1.4, label="naive (bars: reuse+vtoken)")
    axes.plot([], [], color="#595959", ls=":", label="full retention")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=8)
    save(figure, path)


def main() -> None:
    """Write the tables and the picture."""
    table = load("served")
    slashes = "With slashes: `naive` / `vtoken`, always / `reuse+vtoken` / `ideal`. Copied: for 1,000 output tokens."
    parts = [f"# Tables\n\n{slashes}\n"]
    for workload, title in (("azure", "Azure conversation"), ("mooncake", "Mooncake conversation")):
        parts.append(f"## {title}\n\n{served(table[table['workload'] == workload])}\n")
    parts.append(f"## Time of tables, H2O\n\n{tables_cost(table)}\n")
    parts.append(f"## Blocks by layers simulated, `reuse+vtoken`\n\n{layers(load('layers'))}\n")
    order = "Full retention / H2O with `naive` / `page` / `vtoken`, always / `reuse+vtoken` / `ideal`."
    parts.append(f"## Models\n\n{order}\n\n{models(load('models'))}\n")
    (HERE / "tables.md").write_text("\n".join(parts))
    draw(table, HERE / "served.png")


if __name__ == "__main__":
    main()
