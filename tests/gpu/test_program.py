"""A log read as a program gives the device exactly what the engine priced, and copies exactly what it planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_validate import program
from gpu_validate.program import Fence, InPlace, Launch, Program, StepWork
from sim.errors import InputError
from sim.kv.blocks import Why
from sim.kv.events import EVENT, Kind, KVEventLog
from sim.kv.repack import RepackPlan
from sim.kv.replay import Replay
from tests.property.test_engine_events import BATCH, COPIES, EVICTING, RECLAIMERS, SHARING, Run, runs
from tests.support.replay import Driver
from tests.support.serving import MS, Steps, engine, trace


@dataclass
class Truth(Steps):
    """What the engine knew when each step was scheduled."""

    most: int = 20_000
    prices: list[tuple[int, ...]] = field(default_factory=list)
    batches: list[dict[int, tuple[int, int, list[int], list[int]]]] = field(default_factory=list)
    """By request: tokens to compute, written slots, block table, slots of the tokens."""
    plans: dict[int, RepackPlan] = field(default_factory=dict)

    def scheduled(self, engine: Any) -> None:
        super().scheduled(engine)
        scheduler, cache = engine.scheduler, engine.cache
        s = cache.store.s
        rows = s.rows
        batch = {}
        for row in scheduler.running[: scheduler.num_running].tolist():
            if rows[row]["sched"]:
                table = cache.block_table(row)
                tokens, end = int(rows[row]["sched"]), int(rows[row]["start"] + rows[row]["live"])
                new = s.slot[end - tokens : end].tolist() if rows[row]["tracked"] else []
                batch[int(rows[row]["ordinal"])] = tokens, int(rows[row]["written"]), table, new
        self.batches.append(batch)

    @classmethod
    def watching(cls, run: Any) -> Truth:
        truth = run._observer
        price, plan = run.step_cost.step_ns, run.cache.repacker.make

        class Cost:
            def step_ns(self, *work: int) -> tuple[int, int]:
                truth.prices.append(work)
                return price(*work)

        def keep(*arguments: Any, **more: Any) -> RepackPlan:
            made = plan(*arguments, **more)
            truth.plans[made.number] = made
            return made

        run.step_cost, run.cache.repacker.make = Cost(), keep
        return truth


def played(source: Any, options: dict[str, Any]) -> tuple[Truth, list[StepWork], Program, KVEventLog]:
    run = engine(source, logging=True, observer=Truth(), **options)
    truth = Truth.watching(run)
    log = run.run().events
    assert log is not None
    program = Program(log, live=True, audit_every=1)
    return truth, list(program), program, log


def actions(works: list[StepWork], program: Program) -> tuple[dict[int, tuple[list[int], list[int]]], list[int], int]:
    """Return the slots that each plan copies, the plans in the order of their fences, and the moves in place."""
    copied: dict[int, tuple[list[int], list[int]]] = {}
    fenced: list[int] = []
    in_place = 0
    for action in [action for work in works for action in work.before] + program.tail:
        if isinstance(action, Launch):
            first = 0
            for number, count in zip(action.plans, action.counts, strict=True):
                part = slice(first, first + count)
                copied[number] = action.source[part].tolist(), action.target[part].tolist()
                first += count
            assert first == len(action.source) == len(action.target)
        elif isinstance(action, Fence):
            assert set(action.plans) <= copied.keys()
            fenced += action.plans
        else:
            assert isinstance(action, InPlace)
            in_place += len(action.source)
    return copied, fenced, in_place


def agree(truth: Truth, works: list[StepWork], program: Program, log: KVEventLog) -> None:
    assert [(w.tokens, w.seqs, w.kv_read_tokens, w.attention_pairs) for w in works] == truth.prices
    for work, batch in zip(works, truth.batches, strict=True):
        assert work.reqs.tolist() == list(batch)
        ends = np.cumsum(work.query_tokens)
        for row, (tokens, written, table, new) in enumerate(batch.values()):
            assert work.query_tokens[row] == tokens
            assert work.lengths[row] == written
            assert work.block_table[row, : len(table)].tolist() == table
            assert not work.block_table[row, len(table) :].any()
            mine = slice(ends[row] - tokens, ends[row])
            index = np.arange(written - tokens, written)
            behind = np.array(table)[index // log.block_size] * log.block_size + index % log.block_size
            assert work.slots[mine].tolist() == (new or behind.tolist())
            assert (np.diff(work.positions[mine]) == 1).all()
            assert (work.writers[mine] == work.reqs[row]).all()
    copied, fenced, in_place = actions(works, program)
    planned = {n: (p.from_slot.tolist(), p.to_slot.tolist()) for n, p in truth.plans.items() if p.tokens}
    assert copied == planned
    assert sorted(fenced) == sorted(planned)
    facts = program.check()
    kinds = log.records["kind"]
    assert facts.events == len(log)
    assert (facts.steps, facts.last_step) == (len(works), works[-1].step if works else -1)
    assert facts.tokens_written == sum(w.tokens for w in works)
    assert facts.tokens_planned == sum(p.tokens for p in truth.plans.values())
    assert facts.tokens_moved_in_place == in_place
    assert facts.tokens_moved == (kinds == Kind.MOVE).sum()
    assert facts.max_seqs == max(w.seqs for w in works)
    assert facts.max_blocks == max(w.block_table.shape[1] for w in works)
    assert facts.max_tokens == max(w.tokens for w in works)


NOTHING_DIES = {"policy": "full", "budget": 1.0, "budget_tokens": 0}


@settings(max_examples=120, derandomize=True)
@given(runs(), st.sampled_from(["none", *RECLAIMERS, *SHARING]), st.sampled_from(COPIES))
def test_a_program_gives_what_the_engine_priced_and_planned(run: Run, reclaimer: str, copy: str):
    source, options = run
    options = options | {"reclaimer": reclaimer, "copy": copy}
    if "keep_blocks" in reclaimer:
        options["prefix_caching"] = False
    if reclaimer == "none":
        options |= NOTHING_DIES
    truth, works, program, log = played(source, options)
    if works:
        agree(truth, works, program, log)
    else:  # every request was refused
        assert not len(log)


@pytest.mark.parametrize("policy", [*EVICTING, "full"])
@pytest.mark.parametrize("late", [False, True])
def test_every_policy_under_pressure(policy: str, late: bool):
    seen: set[str] = set()
    for blocks, budget in ((26, 0.3), (26, 0.8), (50, 0.8), (70, 0.8)):
        options: dict[str, Any] = {
            "policy": policy, "reclaimer": "none" if policy == "full" else RECLAIMERS[1], "copy": COPIES[2],
            "blocks": blocks, "block_size": 4, "headroom": 4, "budget": budget, "attention": "synthetic",
            "async_scheduling": late, "max_num_batched_tokens": 32,
        }  # fmt: skip
        truth, works, program, log = played(trace(*BATCH), options)
        agree(truth, works, program, log)
        seen |= {Kind(kind).name for kind in np.unique(log.records["kind"])}
        seen |= {"mixed" for work in works if work.decode.any() and not work.decode.all()}
    assert {"PREEMPT", "mixed"} <= seen
    assert policy not in ("random", "h2o") or {"COMMIT", "CANCEL", "DEFER"} <= seen


OUT_OF_ORDER = [name for name in RECLAIMERS if name.startswith("reuse") or "layout=" in name]


@pytest.mark.parametrize("reclaimer", OUT_OF_ORDER)
def test_tokens_out_of_order(reclaimer: str):
    """Tokens in holes, copies into holes, and copies out of blocks in which logical and physical order differ."""
    seen: set[str] = set()
    for late in (False, True):
        for blocks, prefixes in ((40, False), (90, False), (90, True)):
            options: dict[str, Any] = {
                "policy": "random", "reclaimer": reclaimer, "copy": COPIES[2], "blocks": blocks, "block_size": 4,
                "headroom": 4, "budget": 0.5, "async_scheduling": late, "max_num_batched_tokens": 64,
            }  # fmt: skip
            hashes = [[100 * (k // 2) + i for i in range(5)] for k in range(len(BATCH))] if prefixes else None
            source = trace(*BATCH, hashes=hashes, hash_tokens=8)
            truth, works, program, log = played(source, options | {"prefix_caching": prefixes})
            agree(truth, works, program, log)
            seen |= {Kind(kind).name for kind in np.unique(log.records["kind"])}
            plans = [plan.from_slot.tolist() for plan in truth.plans.values()]
            seen |= {"unsorted" for slots in plans if slots != sorted(slots)}
            launches = [action for work in works for action in work.before if isinstance(action, Launch)]
            seen |= {"filled" for launch in launches if len(launch.listed)}
    wanted = {"COMMIT"} if reclaimer != "reuse" else set()
    wanted |= {"unsorted"} if "reuse+" in reclaimer or "always" in reclaimer else set()
    wanted |= {"REUSE"} if "reuse" in reclaimer else set()
    wanted |= {"TARGET", "filled"} if "fill" in reclaimer or reclaimer == "reuse+vtoken" else set()
    assert wanted <= seen


def test_plans_of_any_order_of_calls():
    """Many in flight at once, in groups of which each reader copies its own tokens out of the same blocks."""
    groups = apart = 0
    for seed in range(60):
        size, blocks = ((4, 60), (2, 100), (8, 40))[seed % 3]
        driver = Driver(seed, size=size, blocks=blocks, steps=25, disorder=seed >= 40)
        program = Program(driver.log)
        works = list(program)
        records = driver.log.records
        assert [work.tokens for work in works] == records["b"][records["kind"] == Kind.STEP].tolist()
        pairs = [zip(work.writers.tolist(), work.positions.tolist(), strict=True) for work in works]
        written = [pair for each in pairs for pair in each]
        appends = records[records["kind"] == Kind.APPEND].tolist()
        reused = [(req, a) for _, _, req, a, _ in records[records["kind"] == Kind.REUSE].tolist()]
        assert sorted(written) == sorted([(req, a + k) for _, _, req, a, b in appends for k in range(b)] + reused)
        copied, fenced, _ = actions(works, program)
        assert copied == {p.number: (p.from_slot.tolist(), p.to_slot.tolist()) for p in driver.made if p.tokens}
        assert sorted(fenced) == sorted(copied)
        for plan in driver.made:
            if plan.group is not None and plan.group.plans[0] is not plan:
                groups += 1
                apart += plan.from_slot.tolist() != plan.group.plans[0].from_slot.tolist()
    assert groups >= apart > 3


def test_live_tokens_are_those_that_have_not_died():
    source = trace((0, 30, 20), (2 * MS, 30, 25), hashes=[[1, 2, 3], [1, 2, 4]], hash_tokens=8)
    options = {
        "policy": "random", "reclaimer": SHARING[0], "copy": COPIES[1], "budget": 0.4, "block_size": 4, "headroom": 10,
        "prefix_caching": True, "blocks": 200,
    }  # fmt: skip
    _, works, _, log = played(source, options)
    assert (log.records["kind"] == Kind.SHARE).any()
    deaths = {(req, a) for _, kind, req, a, _ in log.records.tolist() if kind == Kind.EVICT}
    seen: set[tuple[int, int]] = set()
    for work in works:
        assert work.live is not None
        assert work.audit is not None
        mask = work.live_mask(4)
        assert (mask.sum(1) == np.bincount(work.live.rows, minlength=work.seqs)).all()
        for row, length in enumerate(work.lengths.tolist()):
            assert not mask[row, length:].any()
            mine = work.live.slots[work.live.rows == row]
            listed = work.block_table[row][np.arange(length) // 4] * 4 + np.arange(length) % 4
            assert sorted(mine.tolist()) == sorted(listed[mask[row, :length]].tolist())
        assert set(work.live.slots.tolist()) <= set(work.audit.slots.tolist())
        alive = {(int(work.reqs[r]), int(p)) for r, p in zip(work.live.rows, work.live.positions, strict=True)}
        seen |= alive
    # Whoever shares a prefix reads what another request wrote.
    last = works[-1].live
    assert last is not None
    assert deaths <= seen
    written = {(r, p) for w in works for r, p in zip(w.writers.tolist(), w.positions.tolist(), strict=True)}
    read = {
        (w, p) for work in works for w, p in zip(work.live.writers.tolist(), work.live.positions.tolist(), strict=True)
    }
    assert read == written
    assert any((work.live.writers != work.reqs[work.live.rows]).any() for work in works if work.live is not None)


Event = tuple[int, int, int, int, int]


def log_of(*events: tuple[int, int, int, int]) -> KVEventLog:
    return KVEventLog(np.array([(0, *event) for event in events], EVENT), 4, 10)


WRITTEN = ((Kind.ADMIT, 0, 0, 6), (Kind.ALLOC, 0, 1, 0), (Kind.ALLOC, 0, 2, 0), (Kind.APPEND, 0, 0, 6))
STEP = (Kind.STEP, -1, 0, 6)
THINNED = (*WRITTEN, STEP, *((Kind.EVICT, 0, p, 4 + p) for p in (1, 2)))
PLANNED = (*THINNED, (Kind.PLAN, 0, 0, 2), (Kind.SOURCE, 0, 1, 0), (Kind.RESERVE, 0, 3, 0))
COPIED = (*PLANNED, (Kind.COPIED, 0, 0, 0))
REUSED = (*THINNED, (Kind.REUSE, 0, 6, 6))
AIMED = (
    *((Kind.ADMIT, 0, 0, 12), (Kind.ALLOC, 0, 1, 0), (Kind.ALLOC, 0, 2, 0), (Kind.ALLOC, 0, 3, 0)),
    *((Kind.APPEND, 0, 0, 12), (Kind.STEP, -1, 0, 12), (Kind.EVICT, 0, 1, 5), (Kind.EVICT, 0, 6, 10)),
    *((Kind.EVICT, 0, p, 4 + p) for p in (8, 9)),
    *((Kind.PLAN, 0, 0, 2), (Kind.SOURCE, 0, 3, 0), (Kind.TARGET, 0, 2, 0)),
)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (WRITTEN, r"truncated: it ends within the step behind step -1, after 4 events"),
        ((*WRITTEN[:3], STEP), r"event 3 \(STEP .*: 0 tokens were written for it"),
        ((*WRITTEN, (Kind.STEP, -1, 0, 7)), r"6 tokens were written for it"),
        ((*WRITTEN, STEP, (Kind.STEP, -1, 0, 0)), r"step 0 was before it"),
        ((*WRITTEN, (Kind.EVICT, 0, 0, 4), STEP), r"event 4 \(EVICT\): not between the tokens of a step and its STEP"),
        ((*THINNED, (Kind.MOVE, 0, 8, 4)), r"slot 4 holds a live token"),
        ((*THINNED, (Kind.PLAN, 0, 0, 3), *PLANNED[8:]), r"2 tokens are alive in its sources, planned were 3"),
        ((*PLANNED, (Kind.RESERVE, 0, 4, 0)), r"destinations enough"),
        ((*PLANNED[:-1], (Kind.COPIED, 0, 0, 0)), r"destinations, or targets, were never all set aside"),
        ((*COPIED, (Kind.MOVE, 0, 7, 12)), r"the copy brought the token of slot 4 there"),
        ((*REUSED, (Kind.APPEND, 0, 7, 1)), r"a token of this step went into a dead slot"),
        ((*THINNED, (Kind.APPEND, 0, 6, 1), (Kind.REUSE, 0, 7, 6)), r"it wrote a token in this step: only one"),
        ((*REUSED, (Kind.EVICT, 0, 0, 4)), r"event 8 \(EVICT\): not between the tokens of a step and its STEP"),
        ((*REUSED, (Kind.TARGET, 0, 1, 0)), r"event 8 \(TARGET\): not between the tokens of a step and its STEP"),
        ((*AIMED, (Kind.COPIED, 0, 0, 0)), r"destinations, or targets, were never all set aside"),
        ((*AIMED, (Kind.RESERVE, 0, 4, 0)), r"its plan has destinations enough"),
        ((*AIMED[:-1], (Kind.RESERVE, 0, 4, 0), (Kind.TARGET, 0, 2, 0)), r"its plan has destinations"),
        ((*AIMED, (Kind.TARGET, 0, 1, 0), (Kind.ALLOC, 0, 4, 0), (Kind.TARGET, 0, 4, 0)), r"has dead slots enough"),
        ((*AIMED, (Kind.TARGET, 0, 1, 0), (Kind.REUSE, 0, 12, 10)), r"block 2 is being copied"),
        (((99, 0, 0, 0),), r"event 0 \(unknown kind 99"),
        ((), r"no step in 0 events"),
    ],
)  # fmt: skip
def test_what_is_no_program_is_refused(events: tuple[Any, ...], message: str):
    with pytest.raises(InputError, match=message):
        Program(log_of(*events)).check()


def test_a_plan_by_hand():
    program = Program(log_of(*COPIED, (Kind.CANCEL, 0, 0, 0), (Kind.FREE, 0, 3, Why.CANCEL)))
    (work,) = program
    assert work.before == []
    launch, fence = program.tail
    assert isinstance(launch, Launch)
    assert (launch.plans, launch.counts) == ((0,), (2,))
    assert launch.source.tolist() == [4, 7]
    assert launch.target.tolist() == [12, 13]
    assert fence == Fence((0,))


def test_a_token_in_a_hole_by_hand():
    """It is written, and what the kernel reads stays the same."""
    first, second = Program(log_of(*REUSED, (Kind.STEP, -1, 1, 1)), live=True)
    assert second.lengths.tolist() == first.lengths.tolist() == [6]
    assert (second.slots.tolist(), second.positions.tolist(), second.writers.tolist()) == ([6], [6], [0])
    assert second.live_mask(4).tolist() == [[True, False, True, True, True, True]]


def test_a_copy_into_dead_slots_by_hand():
    """In logical order, into the dead slots of the targets one after the other; the targets stay listed."""
    aimed = (*AIMED, (Kind.TARGET, 0, 1, 0), (Kind.COPIED, 0, 0, 0), (Kind.MOVE, 0, 14, 10), (Kind.MOVE, 0, 15, 5))
    program = Program(log_of(*aimed, (Kind.COMMIT, 0, 0, 2), (Kind.FREE, 0, 3, Why.REPACK)))
    list(program)
    launch, fence = program.tail
    assert isinstance(launch, Launch)
    assert launch.source.tolist() == [14, 15]
    assert launch.target.tolist() == [10, 5]
    assert launch.listed.tolist() == [2, 1]
    assert fence == Fence((0,))


def test_a_copy_into_dead_slots_that_wins_nothing_leaves_no_plan():
    log = log_of(*AIMED, (Kind.TARGET, 0, 1, 0), (Kind.COPIED, 0, 0, 0), (Kind.CANCEL, 0, 0, 0))
    program = Program(log)
    list(program)
    assert [type(action) for action in program.tail] == [Launch, Fence]
    assert not Replay.of(log).plans


def test_packing_twice_between_two_steps_makes_two_actions():
    packs = ((Kind.MOVE, 0, 7, 5), (Kind.MOVE, 0, 8, 6), (Kind.MOVE, 0, 9, 7))
    again = ((Kind.EVICT, 0, 0, 4), (Kind.MOVE, 0, 5, 4), (Kind.MOVE, 0, 6, 5), (Kind.MOVE, 0, 7, 6))
    program = Program(log_of(*THINNED, *packs, (Kind.PACK, 0, 4, 0), *again))
    list(program)
    first, second = program.tail
    assert isinstance(first, InPlace)
    assert isinstance(second, InPlace)
    assert first.source.tolist() == [7, 8, 9]
    assert second.target.tolist() == [4, 5, 6]


def test_memory_is_bounded_by_what_is_alive(monkeypatch: pytest.MonkeyPatch):
    """A hundred requests, few at a time, leave no more behind than one; some of them end while a copy is under way."""
    source = trace(*((k * 20 * MS, 40, 16 + k % 7) for k in range(100)))
    options = {"policy": "random", "budget": 0.4, "reclaimer": RECLAIMERS[1], "copy": "linear:per_token_s=200e-6"}
    log = engine(source, headroom=5, block_size=4, blocks=60, logging=True, **options).run().events
    assert log is not None
    assert (log.records["kind"] == Kind.CANCEL).sum() > 10
    held: list[int] = []
    recorders: list[program._Recorder] = []

    class Watched(program._Recorder):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            recorders.append(self)

        def begin_step(self) -> None:
            held.append(sum(map(len, (self.requests, self.plans, self.tokens, self._targets, self._copies))))
            super().begin_step()
            assert not self._actions

    monkeypatch.setattr(program, "_Recorder", Watched)
    Program(log).check()
    (recorder,) = recorders
    assert max(held) < 250
    for left in (recorder.requests, recorder.plans, recorder._targets, recorder._copies, recorder._reads):
        assert not left
    assert len(recorder.contents) <= 240
    assert len(recorder._ended) == 1
