"""Where another reclaimer is better than the paper's, on the same set-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.study.paper.claims import P95, RETAINED, THROUGHPUT, native_limit, sla_gains
from sim.study.paper.evidence import Evidence, figure, grouped
from sim.study.paper.setups import ALWAYS, OURS, SYSTEMS, VTOKEN

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["beyond", "frontier_table", "head_to_head", "sla_table"]

LEVEL = 0.005
COPIED = "copied_per_output_token"


def beyond(evidence: Evidence) -> pd.DataFrame:
    """Return one row a world and reclaimer: mean changes against naive over the set-ups, and the copies they took.

    Of the worlds with ``ideal`` this is the bound.
    """
    import pandas as pd

    table = evidence.part("main")
    table = table[table["policy"] != "full"]
    table = table.assign(**{COPIED: table["tokens_copied"] / table["output_tokens"]})
    rows = []
    by = ["lengths", "memory", "load", "reclaimer"]
    for (lengths, memory, load, reclaimer), group in grouped(table, by):
        if reclaimer == "naive":
            continue
        row = {"lengths": lengths, "memory": memory, "load": load, "reclaimer": reclaimer}
        for name, column in (("blocks", RETAINED), ("requests_per_s", THROUGHPUT), ("e2e_p95", P95), (COPIED, COPIED)):
            found = figure(group, column)
            row |= {name: found.mean, f"{name}_spread": found.half}
        rows.append(row)
    return pd.DataFrame(rows)


def head_to_head(evidence: Evidence) -> pd.DataFrame:
    """Return how often (of how many paired runs) reuse+vtoken is better and worse than vtoken, by figure.

    Differences of less than half a per cent are neither.
    """
    import pandas as pd

    table = evidence.part("main")
    keys = ["model", "memory", "lengths", "load", "policy", "ratio", "seed"]
    columns = {
        "blocks a request": ("retained_blocks_mean", -1),
        "requests a second": ("requests_per_s", 1),
        "p95 latency": ("e2e_s_p95", -1),
    }
    rows = []
    ours = table[table["reclaimer"] == OURS].set_index(keys)
    for against in (VTOKEN, ALWAYS):
        other = table[table["reclaimer"] == against].set_index(keys)
        for name, (column, better) in columns.items():
            ratio = (ours[column] / other[column] - 1).dropna()
            gain = ratio * better
            rows.append({
                "figure": name, "against": against, "pairs": len(gain), "better": int((gain > LEVEL).sum()),
                "worse": int((gain < -LEVEL).sum()), "median": float(ratio.median()),
                "best": float(better * gain.max()), "worst": float(better * gain.min()),
            })  # fmt: skip
    return pd.DataFrame(rows)


def frontier_table(evidence: Evidence) -> pd.DataFrame:
    """Return how many requests fit: a row for each row of the paper's, policy and ratio; a column a reclaimer."""
    import pandas as pd

    rows: dict[tuple[str, float, str, float], dict[str, object]] = {}
    for row, limit in evidence.frontier:
        server = row.server
        if limit.policy == "full":
            continue
        key = server.model, server.memory, limit.policy, limit.ratio
        about = {"model": server.model, "memory": server.memory, "paper": f"{row.native} -> {row.vtoken}"}
        about |= {"policy": limit.policy, "evicting": limit.ratio}
        rows.setdefault(key, {**about, "native": native_limit(evidence, row)})[limit.reclaimer] = limit.value
    return pd.DataFrame(list(rows.values()))


def sla_table(evidence: Evidence) -> pd.DataFrame:
    """Return how many times naive's highest rate each reclaimer holds: a row a search."""
    import pandas as pd

    gains = {name: {(about, what): gain for about, what, gain in sla_gains(evidence, name)} for name in SYSTEMS[1:]}
    return pd.DataFrame([
        {"model": about[0].model, "memory": about[0].memory, "lengths": about[1], "load": about[2], "eviction": what}
        | {name: gains[name].get((about, what)) for name in gains}
        for about, what in gains[VTOKEN]
    ])  # fmt: skip
