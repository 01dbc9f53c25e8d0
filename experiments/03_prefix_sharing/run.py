"""Prefix sharing meets eviction: run every setting and write table.csv and shares.csv.

``python experiments/03_prefix_sharing/run.py [POLICY ...]``; without a policy everything, about ten minutes on one idle
core; with some their rows of table.csv alone.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sim import SimConfig
from sim.kv.state import H
from sim.serving.engine import Engine
from sim.study.run import build_engine

HERE = Path(__file__).parent
DEGREES = (1, 2, 4, 8)
POLICIES = ("random", "h2o", "scissorhands")
BUDGETS = (0.3, 0.5)
RECLAIMERS = ("naive", "pressure skip", "pressure copy_out", "always skip", "always copy_out", "ideal")
POOLS = {"tight": 2000, "ample": 30_000}
PREFIXES = (256, 512, 1024, 1536, 2048)
"""Tokens of a prompt of 2,448 (on average) that are shared."""
TRACE = "poisson:rate=16,n=192,prompt=uniform:{}:{},output=uniform:200:400,shared_prefix={},degree={}"
MEASURED = (
    "retained_blocks_mean", "over_retention_mean", "used_blocks_mean", "used_blocks_peak", "mean_running",
    "fragmentation_mean", "requests_per_s", "output_tokens_per_s", "preemptions", "cached_tokens", "tokens_copied",
    "copy_time_s", "blocks_freed_by_death", "blocks_freed_by_repack", "repacks_committed",
)  # fmt: skip


class Holdings:
    """Mean over time of the blocks in tables, each once, and of what requests would hold that shared nothing."""

    def __init__(self) -> None:
        self.sums = np.zeros(2)
        self.now = np.zeros(2)
        self.last_ns = 0
        self.time_ns = 0

    def scheduled(self, engine: Engine) -> None:
        """Weigh what was held since the last schedule by the time since then."""
        self.sums += self.now * (engine.now_ns - self.last_ns)
        self.time_ns += engine.now_ns - self.last_ns
        self.last_ns = engine.now_ns
        s, scheduler = engine.cache.store.s, engine.scheduler
        live = s.rows["live"][scheduler.running[: scheduler.num_running]]
        self.now = np.array([s.header[H.IN_TABLES], (-(-live // s.block_size)).sum()], float)

    def applied(self, engine: Engine, finished: int) -> None:
        """Nothing to see: the next schedule follows at once."""


def config(pool: str, degree: int, policy: str, budget: float, reclaimer: str, prefix: int) -> SimConfig:
    """Return the configuration of one row."""
    when, _, shared = reclaimer.partition(" ")
    options: dict[str, Any] = {"reclaimer": when}
    if shared:
        options = {"reclaimer": "vtoken", "repack_when": when, "shared_blocks": shared}
    return SimConfig(
        trace=TRACE.format(2248 - prefix, 2648 - prefix, prefix, degree),
        kv_blocks=POOLS[pool],
        policy=policy,
        budget=budget,
        prefix_caching=True,
        step_cost="roofline",
        **options,
    )


def row(
    pool: str, degree: int, policy: str, budget: float, reclaimer: str, prefix: int = 2048
) -> dict[str, str | int | float]:
    """Run one setting."""
    holdings = Holdings()
    summary = build_engine(config(pool, degree, policy, budget, reclaimer, prefix), observer=holdings).run().summary
    in_tables, alone = holdings.sums / holdings.time_ns
    out = {"pool": pool, "prefix": prefix, "degree": degree, "policy": policy, "budget": budget, "reclaimer": reclaimer}
    out |= {name: summary[name] for name in MEASURED}
    out |= {"table_blocks_mean": in_tables, "packed_alone_blocks_mean": alone}
    print(*out.values(), flush=True)
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in out.items()}


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a table."""
    rows = list(rows)
    with (HERE / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Run what is asked for, and write the tables."""
    wanted = sys.argv[1:]
    kept: list[dict[str, Any]] = []
    if wanted:
        with (HERE / "table.csv").open() as file:
            kept = [row for row in csv.DictReader(file) if row["policy"] not in wanted]
    else:
        settings = product(BUDGETS, PREFIXES, ("naive", "always skip"))
        write("shares.csv", (row("ample", 8, "random", b, r, p) for b, p, r in settings))
    new = [
        row(pool, degree, policy, budget, reclaimer)
        for policy, pool, budget, degree, reclaimer in product(wanted or POLICIES, POOLS, BUDGETS, DEGREES, RECLAIMERS)
        # There is no pressure where memory is ample.
        if not (pool == "ample" and reclaimer.startswith("pressure"))
    ]
    write("table.csv", sorted(kept + new, key=lambda row: POLICIES.index(row["policy"])))


if __name__ == "__main__":
    main()
