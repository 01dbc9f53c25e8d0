"""Who decides alone, where the answer is known: units that agree, units that choose by lot, and one unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.kv.units import Units
from sim.study.config import SimConfig
from sim.study.run import build_engine
from tests.support.serving import Steps, alive, engine, trace

RUN = SimConfig(
    trace="gamma:rate=40,cv=2,n=25,prompt=uniform:20:400,output=uniform:5:80",
    model="smollm2-135m",
    budget=0.4,
    kv_blocks=90,
    step_cost="linear:base_s=0.008,per_token_s=2e-5",
    copy_cost="linear:base_s=1e-5,per_token_s=2e-5",
    table_us=0.0,
)
RECLAIMERS = ("naive", "ideal", "sync", "page", "reuse", "reuse+vtoken:at_once=8", "vtoken:repack_when=always",
              "stall:repack_when=always", "vtoken:repack_when=always,layout=fill")  # fmt: skip
NEW = ("tables_per_request", "block_table_bytes", "wall_s", "repacks_committed", "repacks_cancelled")


def outcome(config: SimConfig) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    run = build_engine(config).run()
    summary = {name: value for name, value in run.summary.items() if name not in NEW}
    return summary, run.requests, run.steps, run.liveness


def assert_equal(one: SimConfig, other: SimConfig) -> None:
    """Compare everything that is measured, exactly."""
    (summary, *columns), (their_summary, *their_columns) = outcome(one), outcome(other)
    assert summary == their_summary
    assert summary["preemptions"] > 0 or summary["tokens_evicted"] > 0
    for ours, theirs in zip(columns, their_columns, strict=True):
        assert list(ours) == list(theirs)
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.parametrize("block_tables", ["per_unit", "shared"])
@pytest.mark.parametrize("reclaimer", RECLAIMERS)
def test_units_that_agree_are_as_one(reclaimer: str, block_tables: str):
    """StreamingLLM looks at positions alone: every layer keeps the same tokens, in the same blocks."""
    config = RUN.replace(policy="streaming_llm", reclaimer=reclaimer)
    assert_equal(config, config.replace(granularity="per_layer", simulated_layers=3, block_tables=block_tables))


@pytest.mark.parametrize("policy", ["full", "streaming_llm"])
def test_units_that_agree_are_as_one_per_head_and_with_asynchronous_scheduling(policy: str):
    config = RUN.replace(policy=policy, reclaimer="naive", async_scheduling=True, max_num_batched_tokens=128)
    assert_equal(config, config.replace(granularity="per_head", simulated_layers=2))


@pytest.mark.parametrize("block_tables", ["per_unit", "shared"])
@pytest.mark.parametrize(("policy", "reclaimer"), [("h2o", "vtoken"), ("random", "naive"), ("scissorhands", "sync")])
def test_one_unit_is_the_whole_model(policy: str, reclaimer: str, block_tables: str):
    config = RUN.replace(policy=policy, reclaimer=reclaimer, low_watermark=0.5)
    assert_equal(config, config.replace(granularity="per_layer", simulated_layers=1, block_tables=block_tables))


class _AtTheEnd(Steps):
    """Looks at the cache when the prompt has been evicted from."""

    def __init__(self) -> None:
        super().__init__(10)
        self.union = self.each = 0.0

    def applied(self, run: Any, finished: int) -> None:
        if not finished and not self.union:
            self.union = len(alive(run.cache, int(run.scheduler.running[0])))
            ballots = run._ballots
            self.each = len(alive(ballots, int(ballots._first[run.scheduler.running[0]])))


@pytest.mark.parametrize("units", [2, 4, 8, 32])
@pytest.mark.parametrize("budget", [0.05, 0.2, 0.5])
def test_what_one_table_keeps_alive_of_random_choices(units: int, budget: float):
    """Each of U units keeps a share b by lot: a slot is free if none of them keeps it, with probability (1 - b)^U."""
    look, n = _AtTheEnd(), 20_000
    engine(
        trace((0, n, 2)), policy="random", reclaimer="naive", budget=budget, blocks=2000, units=Units(units),
        one_table=True, max_num_batched_tokens=n, observer=look,
    ).run()  # fmt: skip
    assert look.each == pytest.approx(budget * n, abs=1)
    kept = 1 - (1 - budget) ** units
    assert look.union / n == pytest.approx(kept, abs=4 * np.sqrt(kept * (1 - kept) / n) + 1 / n)


@pytest.mark.parametrize("units", [1, 4])
@pytest.mark.parametrize("budget", [0.05, 0.2])
def test_dead_blocks_where_each_unit_has_a_table(units: int, budget: float):
    """By lot, a block of S tokens dies with probability (1 - b)^S, in the table of each unit alike."""
    n, size = 20_000, 16
    run = engine(
        trace((0, n, 2)), policy="random", reclaimer="naive", budget=budget, blocks=2000 * units, units=Units(units),
        max_num_batched_tokens=n, block_size=size,
    )  # fmt: skip
    freed = run.run().summary["blocks_freed_by_death"]
    share, blocks = (1 - budget) ** size, n / size
    assert freed / blocks == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / blocks / units) + 0.002)
