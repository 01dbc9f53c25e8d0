"""What everybody waits for between two steps: a stop-the-world repack, and scoring at intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.errors import InputError
from sim.kv.events import Kind
from sim.kv.scatter import most_to_win
from sim.study.config import SimConfig
from sim.study.run import build_engine, simulate
from tests.support.serving import MS, Steps, engine, recount, trace

THIN: dict[str, Any] = {"policy": "random", "budget": 0.25, "block_size": 4, "logging": True, "reclaimer": "sync"}


def test_the_next_step_waits_for_the_copy_and_the_one_after_does_not():
    """After its prompt of 64 a request keeps 16 tokens; the copy takes 0.5 ms a token with the memory to itself."""
    outcome = engine(trace((0, 64, 6)), copy="linear:per_token_s=0.001,base_s=0.0002", **THIN).run()
    moved = int(outcome.steps["moved"][:2].sum())
    assert moved > 8
    assert outcome.steps["dt_s"].tolist() == pytest.approx([0.001, 0.001 + 0.0002 + moved * 0.0005, *[0.001] * 4])
    # Not in the step that ends with the deaths: the tokens it produced are there already.
    assert outcome.requests["ttft_s"].tolist() == [0.001]
    summary = outcome.summary
    assert (summary["repack_launches"], summary["repacks_committed"]) == (1, 1)
    assert (summary["tokens_copied"], summary["tokens_moved"]) == (moved, moved)
    assert summary["copy_time_s"] == summary["copy_delay_s"] == pytest.approx(0.0002 + moved * 0.0005)
    assert summary["makespan_s"] == pytest.approx(0.006 + summary["copy_delay_s"])


def test_the_blocks_are_free_for_who_waits_before_the_next_step():
    """The second request of 12 blocks finds room in the step behind the repack; naive eviction frees none in time."""
    options = THIN | {"blocks": 20, "copy": "linear:per_token_s=1e-5"}
    outcome = engine(trace((0, 64, 8), (0, 48, 2)), **options).run()
    assert outcome.requests["queue_s"].tolist() == [0, 0.001]
    naive = engine(trace((0, 64, 8), (0, 48, 2)), **(options | {"reclaimer": "naive"})).run()
    assert naive.requests["queue_s"][1] > 0.002


@pytest.mark.parametrize("keep_blocks", [0, 6])
@pytest.mark.parametrize("logging", [False, True])  # tokens are written by another kernel where events are kept
def test_counts_are_right_at_every_step(keep_blocks: int, logging: bool):
    class Look(Steps):
        def applied(self, engine: Any, finished: int) -> None:
            del finished
            recount(engine.cache)
            for row in engine.scheduler.running[: engine.scheduler.num_running].tolist():
                record = engine.cache.store.s.rows[row]
                assert -(-record["written"] // 4) == -(-record["live"] // 4), "packed after every step"

    requests = trace(*((k * MS, 20 + 9 * k, 60 - 3 * k) for k in range(14)))
    options = THIN | {
        "reclaimer": f"sync:keep_blocks={keep_blocks}",
        "policy": "h2o",
        "budget": 0.4,
        "logging": logging,
    }
    run = engine(requests, blocks=70, observer=Look(20_000), copy="linear:per_token_s=1e-6", **options)
    summary = run.run().summary
    assert summary["finished"] == 14
    assert summary["preemptions"] > 0
    assert run.cache.pool.free_blocks == run.cache.pool.usable_blocks


def test_a_request_that_keeps_blocks_holds_them_to_its_end():
    def held(keep_blocks: int) -> list[int]:
        options = THIN | {"reclaimer": f"sync:keep_blocks={keep_blocks}", "policy": "r_kv:buffer=8,window=2"}
        outcome = engine(trace((0, 64, 40)), budget_tokens=16, **{**options, "budget": 1.0}).run()
        return outcome.steps["used_blocks"].astype(int).tolist()

    # The prompt and eight tokens: 18 blocks. Then 16 tokens, which grow by eight each time: 4 blocks to 6.
    assert held(0) == [16, *[17] * 4, *[18] * 4, *([5] * 4 + [6] * 4) * 3, *[5] * 4, *[6] * 3]
    assert held(7) == [16, *[17] * 4, *[18] * 4, *[7] * 31]


def fill(at_once: int, tokens: int = 6) -> Any:
    options = THIN | {"reclaimer": f"reuse+vtoken:at_once={at_once}", "copy": "linear:per_token_s=0.001,base_s=0.0002"}
    return engine(trace((0, 64, tokens)), **options).run()


def test_what_a_prompt_leaves_behind_is_moved_before_the_next_step():
    """16 of 64 tokens live on in more than their 4 blocks: the next step waits for the copy, finds 4, and takes one."""
    outcome = fill(4096)
    moved = outcome.summary["tokens_moved"]
    assert 0 < moved < 16
    assert outcome.steps["used_blocks"].tolist() == [16, *[5] * 5]
    assert outcome.steps["dt_s"].tolist() == pytest.approx([0.001, 0.001 + 0.0002 + moved * 0.0005, *[0.001] * 4])
    assert outcome.summary["copy_delay_s"] == outcome.summary["copy_time_s"]
    assert (outcome.summary["repack_launches"], outcome.summary["tokens_copied"]) == (1, moved)


def test_where_little_is_to_be_moved_not_one_block_is_left_to_win():
    class Look(Steps):
        seen = 0

        def applied(self, engine: Any, finished: int) -> None:
            del finished
            state, rows = engine.cache.store.s, engine.scheduler.running[: engine.scheduler.num_running]
            assert most_to_win(state, rows, np.empty(len(rows), np.int64)) == 0
            assert not engine.scheduler.plans, "nothing is copied beside a step"
            self.seen += len(rows)

    requests = trace(*((k * MS, 20 + 9 * k, 60 - 3 * k) for k in range(14)))
    look, options = Look(20_000), THIN | {"reclaimer": "reuse+vtoken", "policy": "h2o", "budget": 0.4}
    run = engine(requests, blocks=400, observer=look, copy="linear:per_token_s=1e-6", **options)
    summary = run.run().summary
    assert summary["repacks_committed"] > 3
    assert look.seen > 100


def test_all_goes_beside_the_steps_if_nobody_is_to_wait():
    """The blocks come back when the copy is complete, and nothing is copied twice."""
    outcome, waited = fill(0, 30), fill(4096, 30)
    assert outcome.steps["used_blocks"][1] > 5
    assert outcome.steps["used_blocks"][-1] == waited.steps["used_blocks"][-1]
    assert outcome.summary["tokens_copied"] == waited.summary["tokens_copied"]


def test_what_is_too_much_to_wait_for_goes_beside_the_steps():
    """Three tokens at once: what they free is free in the next step, and what is left takes a launch of its own."""
    outcome, none = fill(3, 30), fill(0, 30)
    assert 5 < outcome.steps["used_blocks"][1] < none.steps["used_blocks"][1]
    assert outcome.steps["dt_s"][1] <= 0.001 + 0.0002 + 3 * 0.0005 + 0.001
    assert outcome.summary["repack_launches"] > none.summary["repack_launches"]
    assert outcome.steps["used_blocks"][-1] == none.steps["used_blocks"][-1]


@pytest.mark.parametrize("more", ["when=pressure", "layout=ordered", "layout=scattered"])
def test_order_and_pressure_are_left_to_the_copy_stream(more: str):
    summaries = []
    for at_once in (0, 4096):
        options = THIN | {"reclaimer": f"reuse+vtoken:{more},at_once={at_once}", "copy": "linear:per_token_s=1e-5"}
        summaries.append(engine(trace((0, 64, 30), (0, 64, 30)), headroom=3, blocks=44, **options).run().summary)
        del summaries[-1]["wall_s"]
    assert summaries[0] == summaries[1]


def test_tokens_to_move_at_once_are_counted():
    with pytest.raises(InputError, match=r"reuse\+vtoken: at_once: expected 0 or more tokens, got -1"):
        fill(-1)


# -- scoring -----------------------------------------------------------------------------------------------------------

BASE = {
    "trace": "poisson:rate=1e6,n=1,prompt=700,output=400",
    "model": "qwen2.5-math-7b",
    "policy": "r_kv",
    "budget_tokens": 256,
    "reclaimer": "sync",
}


def steps(**changes: Any) -> np.ndarray:
    return simulate(SimConfig(**(BASE | changes))).steps["dt_s"]


def test_scoring_at_intervals_is_paid_in_the_step_behind_the_round():
    """Rounds behind the steps that computed generated tokens 128, 256 and 384, over 828 and twice 384 live tokens."""
    free = steps(step_cost="roofline:score_pair_bytes=0")
    dear = steps(step_cost="roofline:score_step_s=0.002,score_request_s=0.03,score_pair_bytes=100")
    longer = dear - free
    layers, kv_heads = 28, 4
    pair_s = 100 * layers * kv_heads / 3.35e12
    want = np.full(400, 0.002)
    want[0] = 0  # nothing has been done before the first step
    for step, live in ((129, 828), (257, 384), (385, 384)):
        want[step] += 0.03 + live**2 * pair_s
    assert longer == pytest.approx(want, abs=2e-9)


def test_who_scores_at_intervals_does_not_read_keys_again_in_every_step():
    assert (steps(score_reads=0.0) == steps(score_reads=5.0)).all()
    assert (steps(policy="h2o", score_reads=0.0) < steps(policy="h2o", score_reads=5.0)).all()


def test_a_step_cost_that_knows_of_no_scoring_has_it_for_nothing():
    assert set(steps(step_cost="linear:base_s=0.01,per_token_s=0", copy_cost="linear:per_token_s=0").tolist()) == {0.01}


def test_a_policy_that_compares_keys_needs_some(tmp_path: Any):
    path = tmp_path / "capture.npz"
    np.savez(path, P=2, G=1, attn_u8=np.full((1, 3), 200, np.uint8), prefill_score_global=np.ones(2))
    with pytest.raises(
        InputError, match=r"policy 'r_kv' needs cosines of keys, which attention 'recorded' does not have"
    ):
        build_engine(SimConfig(**(BASE | {"attention": f"recorded:{path}"})))


def test_a_repack_of_all_is_no_plan():
    outcome = engine(trace((0, 64, 4)), copy="linear:per_token_s=0", **THIN).run()
    assert outcome.events is not None
    kinds = outcome.events.records["kind"]
    assert (kinds == Kind.PACK).sum() == 1
    assert not np.isin(kinds, [Kind.PLAN, Kind.COMMIT, Kind.COPIED]).any()
