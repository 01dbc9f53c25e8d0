"""What came out, as files: tables as CSV, and a page in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.study.export import write_atomically
from sim.study.paper.beyond import beyond, frontier_table, head_to_head, sla_table
from sim.study.paper.reproduce import Reproduction
from sim.study.paper.setups import LENGTHS
from sim.study.paper.verdict import NEAR, Judgement, shown

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["claims_frame", "markdown", "worlds_frame", "write"]

HEADS = ("claim", "paper", "ours", "verdict", "holds in worlds")


def claims_frame(judgements: Iterable[Judgement]) -> pd.DataFrame:
    """Return one row a claim."""
    import pandas as pd

    return pd.DataFrame([
        {
            "claim": each.claim.key, "what": each.claim.what, "paper": each.claim.paper, "source": each.claim.source,
            "ours": each.ours, "verdict": each.verdict, "worlds": each.count, "where": each.where,
            "rule": each.claim.rule, "why": each.why,
        }
        for each in judgements
    ])  # fmt: skip


def worlds_frame(judgements: Iterable[Judgement]) -> pd.DataFrame:
    """Return one row a claim and world; figures in per cent are shares here."""
    import pandas as pd

    return pd.DataFrame([
        {
            "claim": each.claim.key, "world": world.name, "mean": world.figure.mean, "low": world.figure.low,
            "high": world.figure.high, "holds": world.holds, "setup": world.cell,
        }
        for each in judgements
        for world in each.worlds
    ])  # fmt: skip


def write(found: Reproduction, out: Path) -> list[Path]:
    """Write ``claims.csv``, ``worlds.csv``, ``beyond.csv``, ``frontier.csv``, ``sla.csv`` and ``paper.md``."""
    tables = {
        "claims.csv": claims_frame(found.judgements),
        "worlds.csv": worlds_frame(found.judgements),
        "beyond.csv": beyond(found.evidence),
        "frontier.csv": frontier_table(found.evidence),
        "sla.csv": sla_table(found.evidence),
    }
    for name, table in tables.items():
        write_atomically(out / name, table.to_csv(index=False, float_format="%.6g"))
    write_atomically(out / "paper.md", markdown(found))
    return [out / name for name in (*tables, "paper.md")]


def markdown(found: Reproduction) -> str:
    """Return the page."""
    size = found.size
    parts = [
        f"# The paper's claims, simulated ({size.name} size, {len(size.seeds)} seeds)\n",
        "Made by `vtoken reproduce`. A *world* is one choice for what the paper does not tell. A claim *holds* if it "
        "does in every world tried, *does not hold* if in none, and *cannot be said* if that depends on the world, or "
        "if it is not simulated. ± is half of the 95 % bootstrap interval over seeds. Means are alike if they differ "
        f"by no more than {NEAR:.0%} of the paper's, or their spread. Source: A abstract, B readers' digests that "
        "agree, C one digest.\n",
        _claims(found.judgements),
        "## Where it depends, and why\n",
        *[_details(each) for each in found.judgements],
        "## Beyond the paper, on the same set-ups\n",
        "`reuse+vtoken` beside `vtoken`, run by run; differences below half a per cent are neither better nor worse.\n",
        _table(head_to_head(found.evidence), percent=("median", "best", "worst")),
        "Change against naive eviction, mean over the set-ups of a world; `ideal` is the bound, where it was run, and "
        "with the first seed alone.\n",
        _beyond(beyond(found.evidence)),
        "Requests that fit together:\n",
        _table(frontier_table(found.evidence)),
        "SLA-constrained throughput, times that of naive eviction:\n",
        _table(sla_table(found.evidence)),
        "## What was run\n",
        f"Loads are shares of what a server does without eviction when all requests are there at once: "
        f"{', '.join(map(str, size.loads))}. Lengths: "
        + "; ".join(f"{name} `{text}`" for name, text in LENGTHS.items())
        + f". Requests a run: {', '.join(f'{n} {name}' for name, n in size.requests.items())}. One unknown after the "
        "other is varied on Llama-3.1-8B with 0.35 of the memory.\n",
    ]
    return "\n".join(parts)


def _claims(judgements: Sequence[Judgement]) -> str:
    rows = [
        (f"{each.claim.what} ({each.claim.source})", each.claim.paper, each.ours, f"**{each.verdict}**", each.count)
        for each in judgements
    ]
    return _lines(HEADS, rows)


def _details(judgement: Judgement) -> str:
    claim = judgement.claim
    parts = [f"**{claim.what}: {claim.paper}.** {judgement.why}"]
    if claim.rule:
        parts.append(f"Rule: {claim.rule}.")
    if judgement.where:
        parts.append(f"Holds with: {judgement.where}.")
    if claim.rule == "" and judgement.worlds:
        told = "; ".join(f"{world.name}: {shown(world.figure, claim.unit)}" for world in judgement.worlds)
        parts.append(f"Ours, in {claim.unit}: {told}.")
    return " ".join(parts) + "\n"


def _beyond(table: pd.DataFrame) -> str:
    heads = ("lengths", "memory", "load", "reclaimer", "blocks", "requests/s", "p95", "copied / output token")
    rows = []
    for row in table[table["reclaimer"] != "none"].to_dict("records"):
        changes = [_share(row[name], row[f"{name}_spread"]) for name in ("blocks", "requests_per_s", "e2e_p95")]
        rows.append((row["lengths"], f"{row['memory']:g}", str(row["load"]), row["reclaimer"], *changes,
                     f"{row['copied_per_output_token']:.2f}"))  # fmt: skip
    return _lines(heads, rows)


def _table(table: pd.DataFrame, percent: Sequence[str] = ()) -> str:
    rows = [
        tuple(_share(value) if name in percent else _plain(value) for name, value in row.items())
        for row in table.to_dict("records")
    ]
    return _lines([str(name) for name in table.columns], rows)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    return "-" if value is None else str(value)


def _share(value: float, spread: float = 0.0) -> str:
    half = round(100 * spread, 1)
    return f"{round(100 * value, 1) + 0.0:+.1f}" + (f" ±{half:.1f}" if half else "") + " %"


def _lines(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    all_rows = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in all_rows) + "\n"
