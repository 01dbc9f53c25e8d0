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
from sim.kv.reclaim import Reclaimer, reclaimers
from sim.kv.repack import RepackPlan
from sim.kv.replay import Replay
from sim.serving.engine import Outcome
from tests.support.serving import MS, Steps, engine, same_prompts, trace

FIELDS = list(EVENT.names or ())[1:]
RECLAIMERS = (
    "naive",
    "vtoken:repack_when=always",
    "vtoken:low_watermark=0.5,theta_f=0.1",
    "sync",
    "sync:keep_blocks=3",
    "stall:repack_when=always",
    "vtoken:repack_when=always,layout=scattered",
    "vtoken:low_watermark=0.5,theta_f=0.1,layout=scattered,plan=gain",
    "vtoken:repack_when=always,layout=fill",
    "vtoken:low_watermark=0.9,theta_f=0,layout=fill,plan=gain,copy_budget=0.1",
    "vtoken:repack_when=always,plan=gain,copy_budget=0.2",
    "reuse",
    "reuse+vtoken",
    "reuse+vtoken:layout=scattered",
    "reuse+vtoken:when=pressure,low_watermark=0.9,theta_f=0,layout=ordered,plan=gain",
    "page",
    "ideal",
)
SHARING = ("vtoken:repack_when=always,shared_blocks=copy_out", "vtoken:shared_blocks=copy_out,low_watermark=0.9")
COPIES = ("linear:per_token_s=0", "linear:per_token_s=20e-6", "linear:per_token_s=200e-6")
SHORT = {
    "r_kv": "r_kv:buffer=6,window=3",
    "keydiff": "keydiff:every=6",
    "paged_eviction": "paged_eviction:block_size=5",
}
"""So that a policy which waits for some tokens before it evicts has its turn in a short run."""
EVICTING = tuple(
    SHORT.get(name, name) for name in policies.names() if policies.get(name).evicts and not policies.get(name).splits
)

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
        "async_scheduling": draw(st.booleans()),
        "attention": draw(st.sampled_from(["synthetic", "uniform"])),
    }
    hashes = None
    if draw(st.booleans()):
        options["prefix_caching"] = True
        prefixes = draw(st.lists(st.integers(0, 2), min_size=len(requests), max_size=len(requests)))
        # Of the prompt the last hashed span may be shorter, or tokens behind it may have no hash.
        covered = draw(st.lists(st.integers(0, 12), min_size=len(requests), max_size=len(requests)))
        hashes = [[100 * p + k for k in range(n)] for p, n in zip(prefixes, covered, strict=True)]
    budget = draw(st.sampled_from([0.3, 0.5, 0.8, 4, 24]))
    options |= {"budget": budget} if budget < 1 else {"budget_tokens": int(budget)}
    return trace(*sorted(requests), hashes=hashes, hash_tokens=8), options


def lawful(source: Any, options: dict[str, Any]) -> tuple[Outcome, Counter[str]]:
    """Run it, replay its events, compare with the counts, and say what happened."""
    run = engine(source, logging=True, observer=Steps(20_000), **options)
    outcome = run.run()
    log = outcome.events
    assert log is not None
    replay = Replay.of(log, same_prompts(source))
    assert not replay.holders
    assert not replay.plans
    sharing = options.get("prefix_caching", False)
    assert run.cache.pool.free_blocks == run.cache.pool.usable_blocks

    summary, requests, records = outcome.summary, outcome.requests, log.records
    assert summary["finished"] + summary["refused"] == summary["requests"] == len(source)
    done = requests["status"] == "finished"
    assert (requests["output_tokens"][done] == source.output_tokens[done]).all()
    kinds = Counter(records["kind"].tolist())
    freed = Counter(records["b"][records["kind"] == Kind.FREE].tolist())
    assert kinds[Kind.FINISH] == summary["finished"]
    assert kinds[Kind.EVICT] == summary["tokens_evicted"]
    repacked = Kind.PACK if str(options["reclaimer"]).startswith("sync") else Kind.COMMIT
    # Where prefixes are shared, the two that pack at once do it by repacks without a copy too.
    if not sharing or not str(options["reclaimer"]).startswith(("sync", "ideal")):
        assert kinds[repacked] == summary["repacks_committed"]
    assert kinds[Kind.CANCEL] == summary["repacks_cancelled"]
    # Of those who let go of a block that they shared, the last one frees it.
    assert freed[Why.DEATH] == summary["blocks_freed_by_death"] or (
        sharing and freed[Why.DEATH] > summary["blocks_freed_by_death"]
    )
    if options["reclaimer"] != "ideal":
        assert kinds[Kind.MOVE] == summary["tokens_moved"]
        # A destination that nobody needed any more comes back as a cancelled one.
        assert freed[Why.REPACK] >= summary["blocks_freed_by_repack"] or not summary["repacks_committed"]

    happened: Counter[str] = Counter()
    happened["preempted"] = summary["preemptions"]
    happened["committed"] = summary["repacks_committed"]
    happened["refused"] = summary["refused"]
    happened["shared"] = kinds[Kind.SHARE]
    happened["copied out"] = kinds[Kind.GROUP]
    happened["reused"] = kinds[Kind.REUSE]
    happened["filled"] = kinds[Kind.TARGET]
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
@given(runs(), st.sampled_from(RECLAIMERS + SHARING), st.sampled_from(COPIES))
def test_every_run_is_lawful(run: Run, reclaimer: str, copy: str):
    source, options = run
    if "keep_blocks" in reclaimer:
        options["prefix_caching"] = False
    lawful(source, options | {"reclaimer": reclaimer, "copy": copy})


def test_every_reclaimer_is_tried():
    """But for ``none``, under which nothing dies, and ``token``, which is ``naive`` at block size 1."""
    tried = {name.partition(":")[0] for name in RECLAIMERS}
    assert tried | {"none", "token"} == set(reclaimers.names())


@settings(max_examples=20, derandomize=True)
@given(runs())
def test_pages_of_one_token_need_no_reclaimer(run: Run):
    source, options = run
    options["block_size"], options["blocks"] = 1, options["blocks"] * options["block_size"]
    ends = [lawful(source, options | {"reclaimer": name})[0] for name in ("token", "naive", "ideal")]
    assert ends[0].events is not None
    assert all(end.events is not None and (end.events.records == ends[0].events.records).all() for end in ends[1:2])
    held = [holdings(end.events) for end in ends if end.events is not None]
    if not ends[0].summary["preemptions"]:
        assert held[0] == held[2]


BATCH = tuple((0, 40 + 7 * k, 12 + 5 * k) for k in range(8))


# With the others not all of it comes about in these cases: they drop runs, have turns, or leave decode alone.
@pytest.mark.parametrize("policy", ["random", "h2o", "scissorhands", "tova", "keyformer"])
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


@pytest.mark.parametrize("policy", ["random", "h2o"])
@pytest.mark.parametrize("reclaimer", [RECLAIMERS[1], SHARING[0], "sync", "ideal"])
def test_what_is_hard_about_sharing_does_happen(policy: str, reclaimer: str):
    """Pairs with 48 tokens in common, in pools in which they do not all fit."""
    requests = [(2 * MS * k, 56 + k % 5, 50 + 7 * k % 40) for k in range(16)]
    source = trace(*requests, hashes=[[100 * (k // 2) + i for i in range(6)] for k in range(16)], hash_tokens=8)
    seen: Counter[str] = Counter()
    for blocks in (22, 40, 150):
        _, happened = lawful(
            source,
            {
                "policy": policy, "reclaimer": reclaimer, "copy": COPIES[2], "blocks": blocks, "block_size": 4,
                "headroom": blocks // 10, "budget": 0.25, "prefix_caching": True, "attention": "synthetic",
            },
        )  # fmt: skip
        seen += happened
    wanted = {"preempted", "shared"}
    if reclaimer.startswith("vtoken"):
        wanted |= {"committed", "FINISH mid-copy"}
    if "copy_out" in reclaimer:
        wanted.add("copied out")
    assert all(seen[what] for what in wanted), dict(seen)


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
        if kind in (Kind.APPEND, Kind.REUSE):
            wrote.add(req)
        elif kind == Kind.STEP:
            for number in wrote:
                request = replay.requests[number]
                held[number, request.length] = len(request.table)
            wrote.clear()
    return held


SAME_DEATHS = tuple(name for name in RECLAIMERS if name != "page")


@settings(max_examples=120, derandomize=True)
@given(runs(), st.sampled_from(SAME_DEATHS[:-1]), st.sampled_from(COPIES))
def test_ideal_is_never_beaten_and_everybody_sees_the_same_deaths(run: Run, reclaimer: str, copy: str):
    """Request by request and token by token, as long as nothing is preempted: here in a pool with room for all."""
    source, options = run
    # Who shares with whom depends on the clock, which copies slow down.
    options = options | {"blocks": 4000, "headroom": 50, "copy": copy, "prefix_caching": False}
    logs = []
    for name in (reclaimer, "ideal"):
        outcome, happened = lawful(source, options | {"reclaimer": name})
        assert not happened["preempted"]
        assert outcome.events is not None
        logs.append(outcome.events)
    # Where a prompt is cut into chunks depends on the clock, too.
    real, ideal = (
        {key: held for key, held in holdings(log).items() if key[1] >= source.prompt_tokens[key[0]]} for log in logs
    )
    assert real.keys() == ideal.keys()
    assert all(ideal[key] <= real[key] for key in real)
    deaths = [sorted(log.records[["req", "a"]][log.records["kind"] == Kind.EVICT].tolist()) for log in logs]
    assert deaths[0] == deaths[1]


@pytest.mark.parametrize("policy", ["random", "h2o", "scissorhands"])
@pytest.mark.parametrize("budget", [{"budget": 0.4}, {"budget_tokens": 40}])
@pytest.mark.parametrize("name", SAME_DEATHS[1:-1])
def test_nobody_holds_more_than_naive_by_and_large(name: str, budget: dict[str, Any], policy: str):
    """Block by block it may happen: tokens that moved together need not die together."""
    source = trace(*[(0, 60 + 37 * k, 150) for k in range(6)])
    options = budget | {"policy": policy, "attention": "synthetic", "blocks": 2000, "block_size": 8, "headroom": 20}
    totals = {}
    for reclaimer in (name, "naive", "ideal"):
        outcome, _ = lawful(source, options | {"reclaimer": reclaimer, "copy": COPIES[1]})
        assert outcome.events is not None
        totals[reclaimer] = sum(holdings(outcome.events).values())
    assert totals["ideal"] <= totals[name] <= totals["naive"]
    # In a pool with so much room only those act that do so without pressure.
    acts = "always" in name or name.startswith(("sync", "reuse"))
    assert not acts or totals[name] < totals["naive"]


@pytest.mark.parametrize("policy", ["random", "h2o", "scissorhands"])
def test_reuse_copies_nothing_while_a_budget_of_tokens_is_full(policy: str):
    """A prompt within the budget, so that it leaves nothing behind: then each token that comes takes the place of one.

    The request never holds more than one block above its budget, and not one token is moved.
    """
    source = trace(*[(0, 60, 400)] * 3)
    options = {"policy": policy, "attention": "synthetic", "budget_tokens": 64, "block_size": 8, "blocks": 500}
    outcome, happened = lawful(source, options | {"reclaimer": "reuse+vtoken", "headroom": 20})
    assert outcome.events is not None
    assert max(holdings(outcome.events).values()) == 64 // 8 + 1
    assert happened["reused"] > 3 * 300
    assert outcome.summary["tokens_moved"] == 0
    vtoken, _ = lawful(source, options | {"reclaimer": "vtoken:repack_when=always", "headroom": 20})
    assert vtoken.summary["tokens_moved"] > 1000


def test_who_is_repacked_stalls_and_the_others_go_on():
    """One copy takes eleven steps; whoever is in it computes no token meanwhile, and the others one a step."""
    source = trace(*[(0, 64, 60)] * 4)
    options = {
        "policy": "random", "budget": 0.3, "block_size": 8, "blocks": 200, "headroom": 8, "logging": True,
        "copy": "linear:per_token_s=0,base_s=0.0105",
    }  # fmt: skip
    for reclaimer, stalls in (("stall:repack_when=always", True), ("vtoken:repack_when=always", False)):
        log = engine(source, observer=Steps(2000), **options, reclaimer=reclaimer).run().events
        assert log is not None
        Replay.of(log)
        copying: set[int] = set()
        beside, idle = 0, 0
        for kind, req, _, _ in log.records[FIELDS].tolist():
            if kind == Kind.PLAN:
                copying.add(req)
            elif kind in (Kind.COPIED, Kind.CANCEL):
                copying.discard(req)
            elif kind in (Kind.APPEND, Kind.REUSE) and copying:
                beside += 1
                idle += req in copying
        assert beside > 20
        assert (idle == 0) == stalls


def test_holdings_are_read_off_correctly():
    """A prompt of 8 in blocks of 4 and three outputs, nothing evicted: 2 blocks, then 3."""
    outcome, _ = lawful(trace((0, 8, 3)), {"reclaimer": "naive", "policy": "random", "block_size": 4, "budget": 1.0})
    assert outcome.events is not None
    assert holdings(outcome.events) == {(0, 8): 2, (0, 9): 3, (0, 10): 3}
    assert np.array(list(holdings(outcome.events).values())).max() == 3
