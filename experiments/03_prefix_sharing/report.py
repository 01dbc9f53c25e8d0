"""Print the tables of the README from table.csv and shares.csv.

``python experiments/03_prefix_sharing/report.py``
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
DEGREES = ("1", "2", "4", "8")
SETTINGS = [(policy, budget) for policy in ("random", "h2o", "scissorhands") for budget in ("0.3", "0.5")]

Row = dict[str, str]


def read(name: str) -> list[Row]:
    """Read a table."""
    with (HERE / name).open() as file:
        return list(csv.DictReader(file))


def find(rows: list[Row], **setting: str) -> Row:
    """Return the one row of a setting."""
    (row,) = [row for row in rows if all(row[name] == value for name, value in setting.items())]
    return row


def in_tables(row: Row, naive: Row) -> str:
    """Return the change of the blocks in a request's table."""
    return f"{float(row['retained_blocks_mean']) / float(naive['retained_blocks_mean']) - 1:+.1%}"


def of_pool(row: Row, naive: Row) -> str:  # noqa: ARG001
    """Return the blocks of the pool for each running request."""
    return f"{float(row['table_blocks_mean']) / float(row['mean_running']):.1f}"


def rate(row: Row, naive: Row) -> str:  # noqa: ARG001
    """Return the finished requests a second."""
    return f"{float(row['requests_per_s']):.2f}"


def table(
    rows: list[Row],
    title: str,
    pool: str,
    reclaimers: Sequence[str],
    cell: Callable[[Row, Row], str],
    *,
    alone: bool = False,
) -> None:
    """Print one table: a line a policy and budget, a column a degree, in each cell the reclaimers in turn."""
    print(f"\n{title}\n\n| policy, budget | " + " | ".join(f"degree {degree}" for degree in DEGREES) + " |")
    print("|---|" + "---|" * len(DEGREES))
    for policy, budget in SETTINGS:
        cells = []
        for degree in DEGREES:
            setting = {"pool": pool, "policy": policy, "budget": budget, "degree": degree}
            naive = find(rows, **setting, reclaimer="naive")
            parts = [cell(find(rows, **setting, reclaimer=reclaimer), naive) for reclaimer in reclaimers]
            if alone:
                parts.append(f"{float(naive['packed_alone_blocks_mean']) / float(naive['mean_running']):.1f}")
            cells.append(" / ".join(parts))
        print(f"| {policy}, {budget} | " + " | ".join(cells) + " |")


def main() -> None:
    """Print everything."""
    rows = read("table.csv")
    always = ("always skip", "always copy_out", "ideal")
    table(
        rows, "Blocks in a request's table, change against naive: skip / copy_out / ideal", "ample", always, in_tables
    )
    pool = ("naive", "always skip", "always copy_out")
    title = "Blocks of the pool per running request: naive / skip / copy_out / each request copied out for itself"
    table(rows, title, "ample", pool, of_pool, alone=True)
    title = "Finished requests/s: naive / skip, copy_out under pressure / skip, copy_out always / ideal"
    table(rows, title, "tight", ("naive", "pressure skip", "pressure copy_out", *always), rate)
    print("\nBlocks in a request's table at degree 8, random, skip: change against naive")
    print("\n| shared tokens of 2,448 | budget 0.3 | budget 0.5 |\n|---|---|---|")
    shares = read("shares.csv")
    for prefix in dict.fromkeys(row["prefix"] for row in shares):
        changes = [
            in_tables(*(find(shares, prefix=prefix, budget=b, reclaimer=r) for r in ("always skip", "naive")))
            for b in ("0.3", "0.5")
        ]
        print(f"| {prefix} | " + " | ".join(changes) + " |")


if __name__ == "__main__":
    main()
