"""Whole small runs, whose event logs an interpreter replays that shares no code with the engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.kv.blocks import Why
from sim.kv.events import EVENT, Kind, KVEventLog
from sim.kv.policies import policies
from sim.kv.reclaim import Reclaimer
from sim.kv.repack import RepackPlan
from sim.kv.replay import Replay
from sim.serving.engine import Outcome
from tests.support.serving import MS, Steps, engine, trace

FIELDS = list(EVENT.names or ())[1:]
RECLAIMERS = ("naive", "vtoken:repack_when=always", "vtoken:low_watermark=0.5,theta_f=0.1", "ideal")
COPIES = ("linear:per_token_s=0", "linear:per_token_s=20e-6", "linear:per_token_s=200e-6")
EVICTING = tuple(name for name in policies.names() if policies.get(name).evicts)

Run = tuple[Any, dict[str, Any]]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw a workload and everything of a run but for its reclaimer and its copies."""
    size = draw(st.sampled_from([4, 16, 1]))
    requests = draw(
        st.lists(st.tuples(st.integers(0, 8 * MS), st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=8)
    )
    blocks = draw(st.integers(3, 12)) * 32 // size
    options: dict[str, Any] = {
        "policy": draw(st.sampled_from(EVICTING)),
        "block_size": size,
        "blocks": blocks,
        "headroom": draw(st.integers(0, min(6, blocks - 2))),
        "max_num_seqs": draw(st.sampled_from([2, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([32, 256])),
        "reserve_full_prompt": draw(st.booleans()),
        "attention": draw(st.sampled_from(["synthetic", "uniform"])),
    }
    budget = draw(st.sampled_from([0.3, 0.5, 0.8, 4, 24]))
    options |= {"budget": budget} if budget < 1 else {"budget_tokens": int(budget)}
    return trace(*sorted(requests)), options


def lawful(source: Any, options: dict[str, Any]) -> tuple[Outcome, Counter[str]]:
    """Run it, replay its events, compare with the counts, and say what happened."""
    run = engine(source, logging=True, observer=Steps(20_000), **options)
    outcome = run.run()
    log = outcome.events
    assert log is not None
    replay = Replay.of(log)
    assert not replay.holders
    assert not replay.plans
    assert run.cache.pool.free_blocks == run.cache.pool.usable_blocks

    summary, requests, records = outcome.summary, outcome.requests, log.records
    assert summary["finished"] + summary["refused"] == summary["requests"] == len(source)
    done = requests["status"] == "finished"
    assert (requests["output_tokens"][done] == source.output_tokens[done]).all()
    kinds = Counter(records["kind"].tolist())
    freed = Counter(records["b"][records["kind"] == Kind.FREE].tolist())
    assert kinds[Kind.FINISH] == summary["finished"]
    assert kinds[Kind.EVICT] == summary["tokens_evicted"]
    assert kinds[Kind.COMMIT] == summary["repacks_committed"]
    assert kinds[Kind.CANCEL] == summary["repacks_cancelled"]
    assert freed[Why.DEATH] == summary["blocks_freed_by_death"]
    if options["reclaimer"] != "ideal":
        assert kinds[Kind.MOVE] == summary["tokens_moved"]
        # A destination that nobody needed any more comes back as a cancelled one.
        assert freed[Why.REPACK] >= summary["blocks_freed_by_repack"] or not summary["repacks_committed"]

    happened: Counter[str] = Counter()
    happened["preempted"] = summary["preemptions"]
    happened["committed"] = summary["repacks_committed"]
    happened["refused"] = summary["refused"]
    ended = ""
    planned: dict[int, int] = {}
    moved = 0
    for _, kind, _, a, b in records.tolist():
        if kind in (Kind.FINISH, Kind.PREEMPT):
            ended = Kind(kind).name
        elif kind == Kind.DEFER:
            happened[f"{ended} mid-copy"] += 1
        elif kind == Kind.PLAN:
            planned[a] = b
        elif kind == Kind.MOVE:
            moved += 1
        elif kind == Kind.COMMIT:
            happened["stale tokens"] += planned[a] - moved
            moved = 0
    return outcome, happened


@settings(max_examples=250, derandomize=True)
@given(runs(), st.sampled_from(RECLAIMERS), st.sampled_from(COPIES))
def test_every_run_is_lawful(run: Run, reclaimer: str, copy: str):
    source, options = run
    lawful(source, options | {"reclaimer": reclaimer, "copy": copy})


BATCH = tuple((0, 40 + 7 * k, 12 + 5 * k) for k in range(8))


@pytest.mark.parametrize("policy", [name for name in EVICTING if name != "streaming_llm"])
@pytest.mark.parametrize("copy", COPIES[1:])
def test_what_is_hard_does_happen(policy: str, copy: str):
    """Finish and death while a copy is under way, and preemption: fixed cases, so that none is missed by chance."""
    seen: Counter[str] = Counter()
    for blocks, size in ((26, 4), (50, 4), (100, 4), (120, 1), (14, 16)):
        for budget in (0.3, 0.8):
            _, happened = lawful(
                trace(*BATCH),
                {
                    "policy": policy, "reclaimer": RECLAIMERS[1], "copy": copy, "blocks": blocks, "block_size": size,
                    "headroom": max(1, blocks // 10), "budget": budget, "attention": "synthetic",
                },
            )  # fmt: skip
            seen += happened
    for what in ("preempted", "committed", "FINISH mid-copy", "stale tokens"):
        assert seen[what] > 0, f"no run had: {what} ({dict(seen)})"


class Latest(Reclaimer):
    """Repacks the latest request, into one block: the one who is preempted first."""

    needs_headroom = True

    def after_step(self, cache: Any, rows: Any, pressure: Any, busy: bool) -> list[RepackPlan]:  # noqa: ARG002
        for row in () if busy else rows[::-1].tolist():
            plan = cache.plan_repack(row, 1)
            if plan is not None:
                return [plan]
        return []


@pytest.mark.parametrize("policy", ["random", "h2o"])
def test_preemption_mid_copy(policy: str):
    """A long prompt in chunks of 8 blocks, of which the small repack under way brings back too few."""
    seen: Counter[str] = Counter()
    for blocks in range(120, 144, 3):
        _, happened = lawful(
            trace((0, 300, 5), *[(0, 24, 60)] * 8),
            {
                "policy": policy, "reclaimer": Latest(), "copy": "linear:per_token_s=200e-6,base_s=0.004",
                "blocks": blocks, "block_size": 4, "headroom": 2, "budget": 0.5, "long_prefill_token_threshold": 32,
            },
        )  # fmt: skip
        seen += happened
    assert seen["PREEMPT mid-copy"] > 0, dict(seen)


def holdings(log: KVEventLog) -> dict[tuple[int, int], int]:
    """Return the blocks that each request holds when it has written so many tokens, at the step that reads them."""
    replay = Replay(log.block_size, log.num_blocks)
    held: dict[tuple[int, int], int] = {}
    wrote: set[int] = set()
    for kind, req, a, b in log.records[FIELDS].tolist():
        replay.apply([(kind, req, a, b)])
        if kind == Kind.APPEND:
            wrote.add(req)
        elif kind == Kind.STEP:
            for number in wrote:
                request = replay.requests[number]
                held[number, request.length] = len(request.table)
            wrote.clear()
    return held


@settings(max_examples=60, derandomize=True)
@given(runs(), st.sampled_from(RECLAIMERS[:3]), st.sampled_from(COPIES))
def test_ideal_is_never_beaten_and_everybody_sees_the_same_deaths(run: Run, reclaimer: str, copy: str):
    """Request by request and token by token, as long as nothing is preempted: here in a pool with room for all."""
    source, options = run
    options = options | {"blocks": 4000, "headroom": 50, "copy": copy}
    logs = []
    for name in (reclaimer, "ideal"):
        outcome, happened = lawful(source, options | {"reclaimer": name})
        assert not happened["preempted"]
        assert outcome.events is not None
        logs.append(outcome.events)
    real, ideal = (holdings(log) for log in logs)
    assert real.keys() == ideal.keys()
    assert all(ideal[key] <= real[key] for key in real)
    deaths = [sorted(log.records[["req", "a"]][log.records["kind"] == Kind.EVICT].tolist()) for log in logs]
    assert deaths[0] == deaths[1]


def test_holdings_are_read_off_correctly():
    """A prompt of 8 in blocks of 4 and three outputs, nothing evicted: 2 blocks, then 3."""
    outcome, _ = lawful(trace((0, 8, 3)), {"reclaimer": "naive", "policy": "random", "block_size": 4, "budget": 1.0})
    assert outcome.events is not None
    assert holdings(outcome.events) == {(0, 8): 2, (0, 9): 3, (0, 10): 3}
    assert np.array(list(holdings(outcome.events).values())).max() == 3
