"""Whole small runs in which a request has several rows, or its units share one: every step recounted, the log replayed.

A unit of a request is a sequence of the log, so the interpreter needs not know what a unit is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.replay import Replay
from sim.kv.state import H
from sim.kv.units import Units
from sim.serving.ballots import Ballots
from sim.serving.engine import Engine, Outcome
from tests.property.test_engine_events import COPIES, EVICTING, RECLAIMERS
from tests.support.serving import MS, Steps, alive, engine, recount, trace

CUTS = (Units(2), Units(3), Units(2, 2))
HYBRID = (
    Units(windows=(6, 0), weights=(1, 1)),
    Units(windows=(17, 17, 0), weights=(3, 2, 3)),
    Units(windows=(1, 0, 0), weights=(4, 4, 3)),
)
IN_ORDER = tuple(name for name in RECLAIMERS if not name.startswith("reuse") and "fill" not in name
                 and "scattered" not in name)  # fmt: skip
SAME = ("length", "computed", "sched", "produced", "target", "decode_from", "flying", "ahead")

Run = tuple[Any, dict[str, Any]]


class Judge(Steps):
    """Recounts the cache, and compares the rows of each request, around every step."""

    def __init__(self, ballots: bool = False) -> None:
        super().__init__(5000)
        self.seen: Counter[str] = Counter()
        self._ballots = ballots

    def scheduled(self, run: Engine) -> None:
        super().scheduled(run)
        self._check(run)
        rows = run.cache.store.s.rows
        running = run.scheduler.running[: run.scheduler.num_running]
        for row, unit in zip(running.tolist(), run.cache.units.window_of[running % run.cache.units.count], strict=True):
            if unit:
                # What a query to come sees, and what was given to the steps on their way.
                record = rows[row]
                on_their_way = int(record["sched"]) + sum(batch.tokens for batch in run.scheduler.in_flight)
                assert record["live"] >= min(record["computed"], unit - 1 + record["sched"])
                if record["sched"]:
                    assert record["live"] <= unit - 1 + on_their_way
                self.seen["window"] += int(record["evicted"] > 0)

    def applied(self, run: Engine, finished: int) -> None:
        del finished
        self._check(run)
        if run._ballots is not None:
            self._count_votes(run.cache, run._ballots)

    def _check(self, run: Engine) -> None:
        recount(run.cache)
        units, rows = run.cache.units.count, run.cache.store.s.rows
        running = run.scheduler.running[: run.scheduler.num_running].reshape(-1, units)
        assert running[:, 0].tolist() == list(run.scheduler.states)
        assert (running == running[:, :1] + np.arange(units)).all()
        assert not (running[:, 0] % units).any()
        for name in SAME:
            assert (rows[name][running] == rows[name][running[:, :1]]).all(), name
        self.seen["apart"] += int((rows["blocks"][running] != rows["blocks"][running[:, :1]]).any())

    def _count_votes(self, cache: KVCache, ballots: Ballots) -> None:
        held = 0
        for row, first in enumerate(ballots._first.tolist()):
            if first < 0:
                continue
            held += 1
            known, theirs_too = int(ballots.store.s.rows[first]["computed"]), cache.store.s.rows[row]
            assert known <= theirs_too["computed"] - theirs_too["sched"], "a token that is not computed yet"
            votes = Counter(position for unit in ballots.bundle(first) for position in alive(ballots, unit))
            theirs = [position for position in alive(cache, row) if position < known]
            assert theirs == sorted(votes)
            start = int(cache.store.s.rows[row]["start"])
            dropped = cache.store.s.columns[0, start : start + len(theirs)].tolist()
            assert dropped == [ballots.units.count - votes[position] for position in theirs]
            self.seen["split"] += any(dropped)
        assert len(ballots._free_rows) * ballots.units.count + held * ballots.units.count == len(ballots.store.s.rows)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw a workload and everything of a run but for units, reclaimer and copies."""
    size = draw(st.sampled_from([4, 16, 1]))
    requests = draw(
        st.lists(st.tuples(st.integers(0, 8 * MS), st.integers(1, 70), st.integers(1, 30)), min_size=1, max_size=6)
    )
    options: dict[str, Any] = {
        "block_size": size,
        "blocks": draw(st.integers(4, 20)) * 32 // size,
        "headroom": draw(st.integers(0, 5)),
        "max_num_seqs": draw(st.sampled_from([2, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([16, 256])),
        "reserve_full_prompt": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "attention": draw(st.sampled_from(["synthetic", "uniform"])),
    }
    budget = draw(st.sampled_from([0.3, 0.6, 12]))
    options |= {"budget": budget} if budget < 1 else {"budget_tokens": int(budget)}
    return trace(*sorted(requests)), options


def lawful(source: Any, options: dict[str, Any]) -> tuple[Outcome, Counter[str]]:
    """Run, replay the log, and compare it with the summary; return what happened too."""
    judge = Judge()
    run = engine(source, logging=True, observer=judge, **options)
    outcome = run.run()
    log = outcome.events
    assert log is not None
    replay = Replay.of(log)
    assert not replay.holders
    assert not replay.plans
    assert run.cache.pool.free_blocks == run.cache.pool.usable_blocks
    assert not run.scheduler.states
    assert run.scheduler.num_running == 0

    units, summary = run.cache.units.count, outcome.summary
    assert summary["finished"] + summary["refused"] == summary["requests"] == len(source)
    kinds = Counter(log.records["kind"].tolist())
    assert kinds[Kind.FINISH] == units * summary["finished"]
    assert kinds[Kind.EVICT] == pytest.approx(units * summary["tokens_evicted"])
    assert sum(outcome.requests["tokens_evicted"]) == pytest.approx(summary["tokens_evicted"])
    assert kinds[Kind.PREEMPT] >= units * summary["preemptions"]
    assert kinds[Kind.PREEMPT] % units == 0
    steps = outcome.steps
    used = steps["used_blocks"] + steps["free_blocks"]
    assert used == pytest.approx(run.cache.pool.usable_blocks / units)
    if run._ballots is not None:
        assert (run._ballots._first < 0).all()
        assert run._ballots.store.s.header[H.IN_TABLES] == 0
    judge.seen["preempted"] = summary["preemptions"]
    judge.seen["committed"] = summary["repacks_committed"]
    judge.seen["reused"] = kinds[Kind.REUSE]
    return outcome, judge.seen


@settings(max_examples=120, derandomize=True)
@given(runs(), st.sampled_from(CUTS), st.sampled_from(EVICTING), st.sampled_from(RECLAIMERS), st.sampled_from(COPIES))
def test_every_run_with_tables_per_unit_is_lawful(run: Run, units: Units, policy: str, reclaimer: str, copy: str):
    source, options = run
    options["blocks"] *= units.count
    lawful(source, options | {"units": units, "policy": policy, "reclaimer": reclaimer, "copy": copy})


@settings(max_examples=80, derandomize=True)
@given(runs(), st.sampled_from(CUTS), st.sampled_from(EVICTING), st.sampled_from(RECLAIMERS), st.sampled_from(COPIES))
def test_every_run_with_one_table_for_all_units_is_lawful(
    run: Run, units: Units, policy: str, reclaimer: str, copy: str
):
    source, options = run
    options |= {"units": units, "one_table": True}
    lawful(source, options | {"policy": policy, "reclaimer": reclaimer, "copy": copy})


@settings(max_examples=80, derandomize=True)
@given(runs(), st.sampled_from(HYBRID), st.sampled_from(EVICTING), st.sampled_from(IN_ORDER), st.sampled_from(COPIES))
def test_every_run_with_windows_is_lawful(run: Run, units: Units, policy: str, reclaimer: str, copy: str):
    source, options = run
    options["blocks"] *= units.count
    lawful(source, options | {"units": units, "policy": policy, "reclaimer": reclaimer, "copy": copy})


@settings(max_examples=40, derandomize=True)
@given(runs(), st.sampled_from([*HYBRID, *CUTS, Units(windows=(5,))]))
def test_every_run_without_eviction_is_lawful(run: Run, units: Units):
    source, options = run
    lawful(source, options | {"units": units, "policy": "full"})


BATCH = tuple((0, 40 + 7 * k, 12 + 5 * k) for k in range(8))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"units": Units(2, 2), "policy": "h2o"}, {"apart", "preempted", "committed"}),
        ({"units": Units(3), "policy": "random", "one_table": True}, {"split", "preempted", "committed"}),
        ({"units": HYBRID[1], "policy": "h2o"}, {"apart", "window", "preempted", "committed"}),
        ({"units": Units(2), "policy": "random", "reclaimer": "reuse"}, {"apart", "reused"}),
    ],
)
def test_what_is_hard_does_happen(more: dict[str, Any], expected: set[str]):
    """Fixed cases, so that nothing is missed by chance."""
    seen: Counter[str] = Counter()
    for blocks, budget, late in ((36, 0.5, False), (36, 0.95, True), (50, 0.95, False)):
        options = {
            "reclaimer": "vtoken:low_watermark=0.5,theta_f=0.1", "copy": COPIES[1], "block_size": 4, "budget": budget,
            "blocks": blocks * (1 if "one_table" in more else more["units"].count), "headroom": 4,
            "attention": "synthetic", "async_scheduling": late,
        }  # fmt: skip
        seen += lawful(trace(*BATCH), options | more)[1]
    assert {what for what in expected if not seen[what]} == set(), seen


def test_a_request_stalls_while_any_of_its_units_is_copied():
    options = {
        "reclaimer": "stall:repack_when=always", "policy": "random", "units": Units(3), "block_size": 4, "budget": 0.5,
        "blocks": 300, "headroom": 30, "copy": COPIES[2],
    }  # fmt: skip
    run = engine(trace(*BATCH), logging=True, observer=Judge(), **options)
    log = run.run().events
    assert log is not None
    copying: Counter[int] = Counter()
    others = 0
    for _, kind, req, _, _ in log.records.tolist():
        if kind == Kind.PLAN:
            copying[req // 3] += 1
        elif kind in (Kind.COPIED, Kind.CANCEL):
            copying[req // 3] -= copying[req // 3] > 0
        elif kind == Kind.APPEND and +copying:
            assert not copying[req // 3]
            others += 1
    assert others > 20
