from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from sim.errors import InputError
from sim.kv.events import Kind
from sim.kv.replay import Replay
from sim.rng import stream
from sim.serving.engine import Engine, Outcome
from sim.study.config import SimConfig
from sim.study.run import build_engine, simulate
from sim.workload.trace import Trace
from tests.support.serving import MS, Steps, engine, recorded, recount, trace

ALWAYS = "vtoken:repack_when=always"


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def times(outcome: Outcome, kind: Kind) -> list[int]:
    assert outcome.events is not None
    records = outcome.events.records
    return records["time_ns"][records["kind"] == kind].tolist()


def digest(outcome: Outcome) -> str:
    """Name everything that a run gave but for how long it took."""
    total = hashlib.sha256()
    for columns in (outcome.requests, outcome.steps, outcome.liveness):
        for name, column in columns.items():
            total.update(name.encode())
            total.update(str(column.tolist()).encode() if column.dtype == object else column.tobytes())
    total.update(b"" if outcome.events is None else outcome.events.records.tobytes())
    total.update(str({name: value for name, value in outcome.summary.items() if name != "wall_s"}).encode())
    return total.hexdigest()


def busy(requests: int = 40) -> Trace:
    """Return requests that arrive faster than they are served."""
    draw = stream(3, "test_engine")
    arrival = np.cumsum(draw.exponential(2 * MS, requests)).astype(int)
    return trace(*zip(arrival.tolist(), draw.integers(1, 200, requests), draw.integers(1, 60, requests), strict=True))


# -- closed forms of single requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "output", "budget"),
    [(1, 1, 8192), (1, 2, 8192), (100, 7, 8192), (1000, 20, 256), (1024, 3, 256), (1, 5, 1)],
)
def test_a_lone_request_takes_what_its_steps_take(prompt: int, output: int, budget: int):
    arrival = 123_456_789
    base, each = 8_000_000, 20_017
    outcome = engine(
        trace((arrival, prompt, output)), max_num_batched_tokens=budget,
        step="linear:base_s=0.008,per_token_s=0.000020017",
    ).run()  # fmt: skip
    chunks = -(-prompt // budget)
    first = chunks * base + prompt * each
    row = {name: column[0] for name, column in outcome.requests.items()}
    assert ns(row["queue_s"]) == 0
    assert ns(row["ttft_s"]) == first
    assert ns(row["e2e_s"]) == first + (output - 1) * (base + each)
    assert ns(row["finish_s"]) == arrival + ns(row["e2e_s"])
    if output == 1:
        assert np.isnan(row["tpot_s"])
    else:
        assert ns(row["tpot_s"]) == base + each
    assert outcome.summary["steps"] == chunks + output - 1
    assert ns(outcome.summary["makespan_s"]) == ns(row["e2e_s"])


def test_the_makespan_counts_from_the_first_arrival():
    outcome = engine(trace((7 * MS, 10, 2), (100 * MS, 10, 2))).run()
    assert ns(outcome.summary["makespan_s"]) == 95 * MS
    assert outcome.summary["requests_per_s"] == pytest.approx(2 / 0.095)
    assert outcome.summary["output_tokens_per_s"] == pytest.approx(4 / 0.095)


def test_ttft_starts_with_the_arrival_and_not_with_the_step():
    """The second request comes 0.3 ms after a step of 1 ms began."""
    outcome = engine(trace((0, 10, 9), (3_300_000, 10, 1))).run()
    assert ns(outcome.requests["queue_s"][1]) == 700_000
    assert ns(outcome.requests["ttft_s"][1]) == 1_700_000


# -- equal times -------------------------------------------------------------------------------------------------------


def test_who_arrives_as_a_step_ends_is_in_the_next_one():
    steps, outcome, _ = recorded(trace((0, 10, 5), (2 * MS, 10, 1), (2 * MS + 1, 10, 1)))
    assert [s.running for s in steps] == [[0], [0], [0, 1], [0, 2], [0]]
    assert ns(outcome.requests["queue_s"][1]) == 0
    assert ns(outcome.requests["queue_s"][2]) == MS - 1


@pytest.mark.parametrize(
    ("copy_ns", "fence_ns"),
    [(0, 0), (1, MS), (MS - 1, MS), (MS, MS), (MS + 1, 2 * MS), (2 * MS, 2 * MS), (5 * MS, 5 * MS)],
)
def test_a_copy_that_ends_as_a_step_ends_is_complete(copy_ns: int, fence_ns: int):
    """The order at one instant does not depend on which of the two began first."""
    outcome = engine(
        trace((0, 160, 40)), policy="random", budget=0.3, reclaimer=ALWAYS, headroom=10, logging=True,
        step="linear:base_s=0.001,per_token_s=0,memory_share=0",
        copy=f"linear:per_token_s=0,base_s={copy_ns / 1e9:.9f}",
    ).run()  # fmt: skip
    planned, copied = times(outcome, Kind.PLAN), times(outcome, Kind.COPIED)
    assert len(planned) == len(copied) > 1
    assert planned[0] == MS
    last = ns(outcome.requests["finish_s"][0])
    for begin, end in zip(planned, copied, strict=True):
        assert end - begin == fence_ns or end > last


def test_at_one_instant_a_copy_ends_before_an_arrival_is_looked_at():
    """The second request fits on what the copy brings back, at the very instant at which both happen."""
    options: dict[str, Any] = {
        "policy": "random", "budget": 0.3, "reclaimer": ALWAYS, "blocks": 15, "headroom": 3,
        "step": "linear:base_s=0.001,per_token_s=0,memory_share=0", "copy": "linear:per_token_s=0,base_s=0.001",
    }  # fmt: skip
    outcome = engine(trace((0, 160, 6), (2 * MS, 64, 2)), **options).run()
    assert outcome.summary["repacks_committed"] > 0
    assert outcome.requests["queue_s"].tolist() == [0, 0]
    outcome = engine(trace((0, 160, 6), (2 * MS, 64, 2)), **(options | {"reclaimer": "naive"})).run()
    assert outcome.requests["queue_s"][1] > 0, "without the copy it has to wait"


def test_a_copy_of_which_nobody_is_left_holds_nobody_up():
    """The first request ends at 2 ms; what was copied for it goes on until 51 ms; the second comes at 10 ms."""
    outcome = engine(
        trace((0, 160, 2), (10 * MS, 100, 3)), policy="random", budget=0.3, reclaimer=ALWAYS, headroom=10,
        step="linear:base_s=0.001,per_token_s=0,memory_share=0", copy="linear:per_token_s=0,base_s=0.05", logging=True,
    ).run()  # fmt: skip
    assert outcome.summary["repacks_cancelled"] >= 1
    assert times(outcome, Kind.COPIED)[0] >= 51 * MS
    assert ns(outcome.requests["queue_s"][1]) == 0
    assert ns(outcome.requests["ttft_s"][1]) == MS
    assert ns(outcome.requests["e2e_s"][1]) == 3 * MS
    assert outcome.events is not None
    Replay.of(outcome.events)


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_copy_costs_the_steps_that_it_overlaps():
    """48 tokens of 20 us at half the bandwidth are 0.48 ms of work, which a step bound by memory pays in full."""
    options: dict[str, Any] = {"policy": "random", "budget": 0.3, "reclaimer": ALWAYS, "headroom": 10}
    source = trace((0, 160, 2))
    free = engine(source, **options, copy="linear:per_token_s=0").run()
    paid = engine(source, **options, copy="linear:per_token_s=0.00002").run()
    assert paid.summary["copy_time_s"] == pytest.approx(48 * 20e-6)
    assert ns(free.requests["e2e_s"][0]) == 2 * MS
    assert ns(paid.requests["e2e_s"][0]) == 2 * MS + 48 * 10_000
    beside = engine(
        source, **options, copy="linear:per_token_s=0.00002", step="linear:base_s=0.001,per_token_s=0,memory_share=0"
    ).run()
    assert ns(beside.requests["e2e_s"][0]) == 2 * MS, "bandwidth that the step leaves idle costs nothing"


def test_repacking_is_never_free_under_load():
    options: dict[str, Any] = {"policy": "random", "budget": 0.4, "reclaimer": ALWAYS, "headroom": 20, "blocks": 400}
    outcomes = {us: engine(busy(), **options, copy=f"linear:per_token_s={us}e-6").run() for us in (0, 2, 20)}
    assert all(outcome.summary["repacks_committed"] > 0 for outcome in outcomes.values())
    makespans = [outcomes[us].summary["makespan_s"] for us in (0, 2, 20)]
    assert makespans[0] < makespans[1] < makespans[2]


def test_repacking_is_not_free_with_the_default_costs_either():
    tight = SimConfig(
        trace="default", head=150, rate_scale=6.0, policy="random", budget=0.4, kv_blocks=1500, reclaimer="vtoken"
    )
    summary = simulate(tight).summary
    assert summary["repacks_committed"] > 0
    assert 0.1 * summary["copy_time_s"] < summary["copy_delay_s"] < summary["copy_time_s"]


@pytest.mark.parametrize(("policy", "factor"), [("h2o", 1.5), ("random", 1.0)])
def test_scores_cost_reads(policy: str, factor: float):
    """A policy that looks at attention reads half of the KV again; one that does not pays nothing."""
    asked: list[tuple[int, ...]] = []

    class Recorder:
        def step_ns(self, *work: int) -> tuple[int, int]:
            asked.append(work)
            return MS, MS

    config = SimConfig(trace="poisson:rate=1,n=1,prompt=100,output=4", policy=policy, budget=1.0, reclaimer="naive")
    run = build_engine(config)
    run.step_cost = Recorder()
    run.run()
    # Prompt: 100 tokens, 100 * 101 / 2 pairs. Then one query over 101, 102, 103 tokens.
    plain = [(100, 1, 100, 5050), *((1, 1, n, n) for n in (101, 102, 103))]
    assert asked == [(tokens, seqs, int(factor * kv), int(factor * pairs)) for tokens, seqs, kv, pairs in plain]


@pytest.mark.parametrize("reclaimer", ["none", "naive", ALWAYS])
def test_a_step_costs_few_simpy_events(reclaimer: str):
    policy = "full" if reclaimer == "none" else "random"
    run = engine(busy(), policy=policy, budget=0.4, reclaimer=reclaimer, headroom=20, copy="linear:per_token_s=5e-6")
    scheduled = 0
    schedule = run.env.schedule

    def count(*args: Any, **kwargs: Any) -> None:
        nonlocal scheduled
        scheduled += 1
        schedule(*args, **kwargs)

    run.env.schedule = count  # type: ignore[method-assign]
    outcome = run.run()
    steps = outcome.summary["steps"]
    assert scheduled / steps <= 4
    assert outcome.simpy_events / steps <= 4
    assert (outcome.summary["repack_launches"] > 10) == (reclaimer == ALWAYS)


# -- reproducible ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reclaimer", ["naive", "vtoken", "ideal"])
@pytest.mark.parametrize("policy", ["random", "h2o"])
def test_the_same_seed_gives_the_same_run(policy: str, reclaimer: str):
    def run(seed: int) -> Outcome:
        return engine(
            busy(), policy=policy, reclaimer=reclaimer, budget=0.5, blocks=20, headroom=2, seed=seed, logging=True,
            attention="synthetic", copy="linear:per_token_s=2e-5",
        ).run()  # fmt: skip

    first = run(0)
    assert digest(run(0)) == digest(first)
    assert digest(run(1)) != digest(first)
    assert first.summary["preemptions"] > 0 or reclaimer == "ideal"


def test_seed_0_is_a_seed():
    config = SimConfig(
        trace="poisson:rate=50,n=60,prompt=lognormal:mean=100:sigma=1,output=30",
        policy="random",
        budget=0.4,
        reclaimer="naive",
        step_cost="linear:base_s=0.001,per_token_s=0",
        seed=0,
    )
    first, again, other = simulate(config), simulate(config), simulate(config.replace(seed=1))
    assert (first.requests["arrival_s"] == again.requests["arrival_s"]).all()
    assert (first.requests["arrival_s"] != other.requests["arrival_s"]).any()
    assert first.config_hash != other.config_hash


def test_another_policy_leaves_the_arrivals_alone():
    config = SimConfig(trace="gamma:rate=50,cv=2,n=60,prompt=lognormal:mean=100:sigma=1,output=30",
                       step_cost="linear:base_s=0.001,per_token_s=0", reclaimer="naive")  # fmt: skip
    runs = [simulate(config.replace(policy=policy)) for policy in ("full", "random", "h2o")]
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert (runs[0].requests[name] == runs[1].requests[name]).all()
        assert (runs[0].requests[name] == runs[2].requests[name]).all()


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_requests_come_out_in_order_of_arrival_with_their_labels():
    source = Trace(np.array([0, 1, 2]), np.array([5, 5, 5]), np.array([30, 2, 10]), req_id=["c", "a", "b"])
    outcome = engine(source).run()
    assert outcome.requests["req_id"].tolist() == ["c", "a", "b"]
    assert outcome.requests["output_tokens"].tolist() == [30, 2, 10]


def test_an_empty_workload_gives_an_empty_run():
    outcome = engine(trace()).run()
    assert outcome.summary["requests"] == outcome.summary["steps"] == 0
    assert outcome.summary["makespan_s"] == 0
    assert outcome.summary["ttft_s"]["mean"] is None
    assert len(outcome.steps["step"]) == 0


def test_more_requests_than_rows_and_lists_hold_at_first():
    outcome = engine(trace(*[(0, 3, 4)] * 300), max_num_seqs=300).run()
    assert outcome.summary["peak_running"] == 300
    assert outcome.summary["finished"] == 300


def test_all_counts_are_right_at_every_step():
    class Look(Steps):
        def applied(self, engine: Engine, finished: int) -> None:
            del finished
            recount(engine.cache)

    for policy, reclaimer in (("full", "none"), ("random", "naive"), ("h2o", ALWAYS), ("scissorhands", "ideal")):
        run = engine(
            busy(25), policy=policy, reclaimer=reclaimer, budget=0.4, blocks=70, headroom=5, block_size=8,
            copy="linear:per_token_s=2e-5", observer=Look(20_000), logging=True,
        )  # fmt: skip
        outcome = run.run()
        assert outcome.summary["finished"] + outcome.summary["refused"] == 25
        assert run.cache.pool.free_blocks == run.cache.pool.usable_blocks
        assert outcome.events is not None
        Replay.of(outcome.events)


def test_the_snapshot_shows_the_repack_that_freed_most():
    outcome = engine(
        trace((0, 320, 10), (0, 64, 10)), policy="random", budget_tokens=96, reclaimer=ALWAYS, headroom=20, blocks=100,
        copy="linear:per_token_s=1e-6",
    ).run()  # fmt: skip
    snapshot = outcome.pool_snapshot
    assert snapshot is not None
    used = {side: int((snapshot[f"live_{side}"] > 0).sum()) for side in ("before", "after")}
    assert used["before"] == 20 + 4
    assert used["after"] == (6 + 1) + (4 + 1)  # each has written one more token meanwhile
    assert (snapshot["live_before"].sum(), snapshot["live_after"].sum()) == (96 + 64, 96 + 65)
    for side in ("before", "after"):
        assert set(snapshot[f"owner_{side}"].tolist()) == {-1, 0, 1}
        assert ((snapshot[f"owner_{side}"] >= 0) == (snapshot[f"live_{side}"] > 0)).all()


def test_progress_is_told_at_the_end():
    told = []
    engine(busy(5), progress=lambda *what: told.append(what)).run()
    assert told[-1][:2] == (5, 5)


def test_an_evicting_policy_needs_a_reclaimer_that_lets_tokens_die():
    with pytest.raises(InputError, match="'none' keeps every token"):
        engine(trace((0, 1, 1)), policy="random", reclaimer="none")


# -- load --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap_ns", "state"), [(20 * MS, "stable"), (12 * MS, "stable"), (5 * MS, "overloaded"), (0, "backlogged")]
)
def test_a_run_says_whether_it_kept_up(gap_ns: int, state: str):
    """One at a time, 10 ms each."""
    outcome = engine(trace(*((k * gap_ns, 10, 10) for k in range(100))), max_num_seqs=1).run()
    assert outcome.summary["load_state"] == state


def test_a_burst_that_is_worked_off_is_a_backlog():
    burst = [(0, 10, 10)] * 40 + [((k + 1) * 100 * MS, 10, 10) for k in range(10)]
    outcome = engine(trace(*burst), max_num_seqs=1).run()
    assert outcome.summary["load_state"] == "backlogged"


def test_the_clock_of_linear_is_a_sum_of_floats():
    """Ten steps of 0.1 s end at 0.9999999999999999 s: who comes at 1 s is too late for the eleventh, as in vLLM."""
    step = "linear:base_s=0.1,per_token_s=0"
    requests = engine(trace((0, 8, 30), (1000 * MS, 8, 1)), step=step).run().requests
    assert requests["ttft_s"].tolist() == pytest.approx([0.1, 0.2])
    # Three steps end at 0.30000000000000004 s.
    requests = engine(trace((0, 8, 30), (300 * MS, 8, 1)), step=step).run().requests
    assert requests["ttft_s"].tolist() == pytest.approx([0.1, 0.1])
