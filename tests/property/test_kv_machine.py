"""The KV cache under any order of calls, judged by an interpreter of its events that shares no code with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.events import EVENT, Kind
from sim.kv.holes import holes_of
from sim.kv.prefix import PrefixCache
from sim.kv.repack import RepackPlan
from sim.kv.replay import Replay
from sim.kv.state import H
from tests.support.serving import admit, alive, recount

FIELDS = list(EVENT.names or ())[1:]
FAMILIES = 2


class Machine(RuleBasedStateMachine):
    """Requests come, share, write, lose tokens, are repacked by copies that take as long as they like, and go.

    Requests whose numbers leave the same remainder when divided by ``FAMILIES`` consist of the same tokens.
    """

    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        size=st.sampled_from([4, 16, 2, 1]),
        blocks=st.integers(25, 100),
        headroom=st.integers(0, 4),
        prompts=st.lists(st.integers(10, 120), min_size=1, max_size=4),
        reuses=st.booleans(),
        publishes=st.sampled_from([True, False, True]),
    )
    def begin(self, size: int, blocks: int, headroom: int, prompts: list[int], reuses: bool, publishes: bool) -> None:
        self.cache = KVCache(blocks, size, columns=("mark",), headroom_blocks=headroom, logging=True)
        self.prefix = PrefixCache(self.cache.store)
        self.publishes = publishes
        if reuses:
            self.cache.reuse_slots()
        self.replay = Replay(size, blocks, lambda a, b, _: a % FAMILIES == b % FAMILIES)
        self.told = 0
        self.rows: dict[int, int] = {}  # ordinal -> row
        self.living: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        self.published: dict[int, int] = {}
        self.away: list[int] = []  # preempted
        self.plans: list[RepackPlan] = []
        self.count = 0
        for tokens in prompts:
            if self.cache.pool.available_blocks > 0:
                self.arrive(tokens)

    def _write(self, ordinal: int, tokens: int) -> None:
        row = self.rows[ordinal]
        size = self.cache.block_size
        if self.cache.store.s.rows[row]["mixed"]:
            if tokens > 1:
                with pytest.raises(InputError, match="out of order in memory"):
                    self.cache.sync_new_tokens(row, tokens)
                self.happened["several tokens refused"] += 1
            tokens = min(tokens, 1)
        if tokens == 1 and holes_of(self.cache.store.s, row):
            self._write_into_a_hole(ordinal)
            return
        tail = -int(self.cache.store.s.rows[row]["written"]) % size
        tokens = min(tokens, max(0, self.cache.pool.available_blocks) * size + tail)
        if tokens > 0:
            self.cache.sync_new_tokens(row, tokens)
            self.living[ordinal] += range(self.length[ordinal], self.length[ordinal] + tokens)
            self.length[ordinal] += tokens
            end = int(self.cache.store.s.rows[row]["start"] + self.cache.store.s.rows[row]["live"])
            marks = [1000 * ordinal + p for p in self.living[ordinal][-tokens:]]
            self.cache.store.s.columns[0, end - tokens : end] = marks
            self.prefix.forget_taken()
            if self.publishes and len(self.living[ordinal]) == self.length[ordinal]:
                self._publish(ordinal)

    def _write_into_a_hole(self, ordinal: int) -> None:
        row = self.rows[ordinal]
        free, table, position = self.cache.pool.free_blocks, self.cache.block_table(row), self.length[ordinal]
        blocks = self.cache.store.s.blocks
        fullest = max(int(blocks["live"][b]) for b in table if self._has_hole(b))
        self.cache.sync_new_tokens(row, 1)
        assert (self.cache.pool.free_blocks, self.cache.block_table(row)) == (free, table)
        found = self.cache.lookup(row, position)
        assert found is not None
        assert blocks["live"][found[0]] == fullest + 1 or self.cache.block_size != int(blocks["written"][found[0]])
        self.living[ordinal].append(position)
        self.length[ordinal] += 1
        record = self.cache.store.s.rows[row]
        self.cache.store.s.columns[0, int(record["start"] + record["live"]) - 1] = 1000 * ordinal + position
        self.happened["wrote into a hole"] += 1
        self.happened["wrote into a hole beside a copy"] += self._plan_of(ordinal) is not None

    def _has_hole(self, block: int) -> bool:
        record = self.cache.store.s.blocks[block]
        return bool(record["written"] > record["live"] and not record["cached"] and not record["busy"])

    def _publish(self, ordinal: int) -> None:
        """Publish the full blocks of a request that has evicted nothing."""
        full = self.length[ordinal] // self.cache.block_size
        table = self.cache.block_table(self.rows[ordinal])
        new = range(self.published[ordinal], full)
        self.prefix.publish(table[new.start : full], [hash((ordinal % FAMILIES, index)) for index in new])
        self.published[ordinal] = full

    def _open(self, ordinal: int, tokens: int) -> None:
        row = self.rows[ordinal] = admit(self.cache, ordinal, tokens)
        size = self.cache.block_size
        self.prefix.forget_taken()
        hits = [*self.prefix.find([hash((ordinal % FAMILIES, index)) for index in range((tokens - 1) // size)])]
        blocks = self.cache.store.s.blocks
        while sum(int(blocks["ref"][block]) == 0 for block in hits) > self.cache.pool.available_blocks:
            hits.pop()
        self.happened["shared"] += sum(int(blocks["tables"][block]) > 0 for block in hits)
        self.happened["found free"] += sum(int(blocks["ref"][block]) == 0 for block in hits)
        sources = {int(b) for plan in self.plans for b in plan.sources}
        self.happened["shared mid-copy"] += len(sources & set(hits))
        self.cache.share_blocks(row, hits)
        self.length[ordinal] = len(hits) * size
        self.living[ordinal] = list(range(len(hits) * size))
        self.published[ordinal] = len(hits)
        self.cache.store.s.rows["decode_from"][row] = tokens
        start = int(self.cache.store.s.rows["start"][row])
        marks = [1000 * ordinal + p for p in self.living[ordinal]]
        self.cache.store.s.columns[0, start : start + len(marks)] = marks
        self._write(ordinal, tokens - len(marks))

    def _plan_of(self, ordinal: int) -> RepackPlan | None:
        return next((p for p in self.plans if p.ordinal == ordinal and not p.cancelled), None)

    @precondition(lambda self: len(self.rows) < 5 and self.cache.pool.available_blocks > 0)
    @rule(tokens=st.integers(1, 90))
    def arrive(self, tokens: int) -> None:
        self._open(self.count, tokens)
        self.count += 1

    @precondition(lambda self: self.away and self.cache.pool.available_blocks > 0)
    @rule(tokens=st.integers(1, 90))
    def come_back(self, tokens: int) -> None:
        self._open(self.away.pop(0), tokens)
        self.happened["recomputed"] += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tokens=st.one_of(st.just(1), st.integers(1, 40)))
    def write(self, data: st.DataObject, tokens: int) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.rows)))
        before = self.length[ordinal]
        self._write(ordinal, tokens)
        if self._plan_of(ordinal) is not None and self.length[ordinal] > before:
            self.happened["appended mid-copy"] += 1

    @precondition(lambda self: any(len(living) > 1 for living in self.living.values()))
    @rule(data=st.data(), seed=st.integers(0, 1 << 30), share=st.sampled_from([0.6, 0.3, 0.05, 0.9]))
    def die(self, data: st.DataObject, seed: int, share: float) -> None:
        ordinal = data.draw(st.sampled_from([o for o in sorted(self.rows) if len(self.living[o]) > 1]))
        self._die(ordinal, seed, share)

    @precondition(lambda self: any(not plan.cancelled for plan in self.plans))
    @rule(data=st.data(), seed=st.integers(0, 1 << 30), share=st.sampled_from([0.3, 0.1, 0.7]))
    def die_mid_copy(self, data: st.DataObject, seed: int, share: float) -> None:
        self._die(data.draw(st.sampled_from([p.ordinal for p in self.plans if not p.cancelled])), seed, share)

    def _die(self, ordinal: int, seed: int, share: float) -> None:
        living = np.array(self.living[ordinal])
        self._kill(ordinal, living[:-1][np.random.default_rng(seed).random(len(living) - 1) < share].tolist())

    def _kill(self, ordinal: int, dead: list[int]) -> None:
        table = self.cache.block_table(self.rows[ordinal])
        listed = len(table)
        self.cache.evict_tokens(self.rows[ordinal], dead)
        self.living[ordinal] = sorted(set(self.living[ordinal]) - set(dead))
        left = set(table) - set(self.cache.block_table(self.rows[ordinal]))
        self.happened["let go of a shared block"] += int((self.cache.store.s.blocks["tables"][list(left)] > 0).sum())
        plan = self._plan_of(ordinal)
        if plan is not None and set(dead) & set(plan.position.tolist()):
            self.happened["died mid-copy"] += 1
            if len(self.cache.block_table(self.rows[ordinal])) < listed:
                self.happened["block freed beside a copy"] += 1

    @precondition(lambda self: self.rows and self.cache.pool.free_blocks > 0)
    @rule(data=st.data(), most=st.integers(1, 12), seed=st.integers(0, 1 << 30))
    def thin_out_and_plan(self, data: st.DataObject, most: int, seed: int) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.rows)))
        self._die(ordinal, seed, 0.5)
        self._plan(ordinal, most)

    @precondition(lambda self: self.rows and self.cache.pool.free_blocks > 0)
    @rule(data=st.data(), most=st.integers(1, 12))
    def plan(self, data: st.DataObject, most: int) -> None:
        self._plan(data.draw(st.sampled_from(sorted(self.rows))), most)

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(),
        gain=st.sampled_from([6, 1, 2]),
        tokens=st.sampled_from([60, 200, 9]),
        seed=st.integers(0, 1 << 30),
    )
    def thin_out_and_fill(self, data: st.DataObject, gain: int, tokens: int, seed: int) -> None:
        """Move tokens of sparse blocks into holes of others; dying goes on in both while the copy runs."""
        ordinal = data.draw(st.sampled_from(sorted(self.rows)))
        self._die(ordinal, seed, 0.4)
        busy = self._plan_of(ordinal) is not None
        free = self.cache.pool.free_blocks
        plan = self.cache.plan_fill(self.rows[ordinal], most_gain=gain, most_tokens=tokens)
        assert plan is None or not busy
        assert self.cache.pool.free_blocks == free
        if plan is not None:
            assert 0 < plan.gain == len(plan.sources) <= gain
            assert plan.tokens <= tokens
            assert not set(plan.sources.tolist()) & set(plan.targets.tolist())
            self.plans.append(plan)
            self.happened["planned to fill"] += 1

    @precondition(lambda self: self.rows and self.cache.pool.free_blocks > 0)
    @rule(data=st.data(), most=st.integers(1, 12), seed=st.integers(0, 1 << 30))
    def thin_out_and_plan_scattered(self, data: st.DataObject, most: int, seed: int) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.rows)))
        self._die(ordinal, seed, 0.5)
        self._plan(ordinal, most, scattered=True)

    def _plan(self, ordinal: int, most: int, *, scattered: bool = False) -> None:
        busy = self._plan_of(ordinal) is not None
        make = self.cache.plan_scattered if scattered else self.cache.plan_repack
        plan = make(self.rows[ordinal], most)
        assert plan is None or not busy
        if plan is not None:
            assert 0 < len(plan.destinations) <= min(most, 12)
            assert plan.gain > 0
            self.plans.append(plan)
            self.happened["planned"] += 1
            table = self.cache.block_table(self.rows[ordinal])
            at = [table.index(block) for block in plan.sources.tolist()]
            assert at == sorted(at)
            self.happened["planned with gaps"] += at[-1] - at[0] >= len(at)

    @precondition(lambda self: 0 < len(self.rows) < 5 and self.cache.pool.free_blocks > 4)
    @rule(tokens=st.integers(20, 60), most=st.integers(2, 24))
    def join_thin_out_and_copy_out(self, tokens: int, most: int) -> None:
        """Of a family with one member more leave one token in each block, so that its blocks stay shared."""
        family = min(self.rows) % FAMILIES
        self.count += (self.count - family) % FAMILIES
        self._open(self.count, tokens)
        self.count += 1
        for ordinal in sorted(self.rows):
            if ordinal % FAMILIES == family:
                self._kill(ordinal, [p for p in self.living[ordinal][:-1] if p % self.cache.block_size])
        rows = np.array([self.rows[ordinal] for ordinal in sorted(self.rows)])
        plans = self.cache.plan_copy_out(rows, most)
        if plans:
            shared = plans[0].sources
            assert (self.cache.store.s.blocks["tables"][shared] == len(plans)).all()
            assert all((plan.sources == shared).all() for plan in plans)
            assert sum(plan.gain for plan in plans) > 0
            assert sum(len(plan.destinations) for plan in plans) <= most
            self.plans += plans
            self.happened["planned to copy out"] += 1

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """Let any of the copies end; those of a group end together."""
        at = data.draw(st.integers(0, len(self.plans) - 1))
        group = self.plans[at].group
        if group is not None:
            self._land_group(group.plans)
            return
        plan = self.plans.pop(at)
        if (self.cache.store.s.blocks["ref"][plan.sources] > 1).any():
            self.cache.apply_moves(plan)
            self.happened["landed beside another reader"] += 1
            return
        cancelled = plan.cancelled
        free, headers = self.cache.pool.free_blocks, self.cache.store.s.header.copy()
        freed = self.cache.apply_moves(plan)
        died = int(self.cache.store.s.header[H.FREED_BY_DEATH] - headers[H.FREED_BY_DEATH])
        back = self.cache.pool.free_blocks - free
        if cancelled:
            assert freed == 0
            assert back == len(plan.destinations) + plan.deferred
            self.happened["a filler landed after its request left"] += len(plan.targets) > 0
            self.happened["landed after its request left"] += 1
        elif freed:
            assert back == len(plan.destinations) + freed + died
            self.happened["committed"] += 1
            self.happened["filled"] += len(plan.targets) > 0
            self.happened["a target died whole"] += len(plan.targets) > 0 and died > 0
            if self.cache.store.s.header[H.MOVED] - headers[H.MOVED] < plan.tokens:
                self.happened["committed without its dead"] += 1
        else:
            assert back == len(plan.destinations) + died
            assert self.cache.store.s.header[H.MOVED] == headers[H.MOVED]
            self.happened["not worth it any more"] += 1

    def _land_group(self, plans: Sequence[RepackPlan]) -> None:
        free = self.cache.pool.free_blocks
        left = [plan for plan in plans if not plan.cancelled]
        coming = self.cache.coming_back(plans)
        freed = sum(self.cache.apply_moves(plan) for plan in plans)
        self.plans = [plan for plan in self.plans if all(plan is not other for other in plans)]
        committed = [plan for plan in left if not plan.cancelled]
        assert len(committed) in (0, len(left))
        if committed:
            assert freed > 0
            assert self.cache.pool.free_blocks >= free + coming
            self.happened["copied out"] += 1
        else:
            self.happened["group not worth it any more"] += bool(left)

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data(), kind=st.sampled_from([Kind.FINISH, Kind.PREEMPT]))
    def leave(self, data: st.DataObject, kind: Kind) -> None:
        self._leave(data.draw(st.sampled_from(sorted(self.rows))), kind)

    @precondition(lambda self: any(not plan.cancelled for plan in self.plans))
    @rule(data=st.data(), kind=st.sampled_from([Kind.FINISH, Kind.PREEMPT]))
    def leave_mid_copy(self, data: st.DataObject, kind: Kind) -> None:
        self._leave(data.draw(st.sampled_from([p.ordinal for p in self.plans if not p.cancelled])), kind)

    def _leave(self, ordinal: int, kind: Kind) -> None:
        plan = self._plan_of(ordinal)
        if plan is not None:
            self.cache.cancel(plan)
            self.happened[f"{kind.name} mid-copy"] += 1
            self.happened["a reader left mid-copy"] += plan.group is not None
        self.cache.close(self.rows.pop(ordinal), kind, self.length[ordinal])
        del self.living[ordinal], self.length[ordinal]
        if kind == Kind.PREEMPT:
            self.away.append(ordinal)

    @precondition(lambda self: any(self._plan_of(ordinal) is None for ordinal in self.rows))
    @rule(data=st.data())
    def pack(self, data: st.DataObject) -> None:
        ordinal = data.draw(st.sampled_from([o for o in sorted(self.rows) if self._plan_of(o) is None]))
        row = self.rows[ordinal]
        if len(self.cache.store.s.holes) or self.cache.store.s.rows[row]["mixed"]:
            with pytest.raises(InputError, match="packing in place keeps the order"):
                self.cache.pack(np.array([row]))
            return
        alone = bool((self.cache.store.s.blocks["ref"][self.cache.block_table(row)] == 1).all())
        self.cache.pack(np.array([row]))
        self.happened["packed alone" if alone else "packed among shared blocks"] += 1
        if alone:
            assert len(self.cache.block_table(row)) == -(-len(self.living[ordinal]) // self.cache.block_size)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        self.cache.trim_cells(np.array([self.rows[data.draw(st.sampled_from(sorted(self.rows)))]]))

    @invariant()
    def the_oracle_agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        log = self.cache.event_log()
        self.replay.apply(log.records[FIELDS][self.told :].tolist())
        self.told = len(log)
        self.replay.check()
        recount(self.cache)
        size = self.cache.block_size
        for ordinal, row in self.rows.items():
            assert self.cache.block_table(row) == self.replay.table(ordinal)
            assert alive(self.cache, row) == self.living[ordinal] == sorted(self.replay.requests[ordinal].slots)
            slots = {p: divmod(slot, size) for p, slot in self.replay.requests[ordinal].slots.items()}
            assert {p: self.cache.lookup(row, p) for p in self.living[ordinal]} == slots
            assert int(self.cache.store.s.rows[row]["written"]) == self.replay.requests[ordinal].written
            start = int(self.cache.store.s.rows[row]["start"])
            marks = self.cache.store.s.columns[0, start : start + len(slots)]
            assert marks.tolist() == [1000 * ordinal + p for p in self.living[ordinal]]
        # Blocks in use are those in tables and those of copies under way.
        copies = {int(b) for plan in self.plans for b in plan.destinations}
        listed = {b for row in self.rows.values() for b in self.cache.block_table(row)}
        assert not copies & listed
        copies |= {int(b) for plan in self.plans if plan.cancelled for b in plan.held}
        assert {int(b) for b in np.flatnonzero(self.cache.store.s.blocks["busy"])} <= {
            int(b) for plan in self.plans for b in plan.held
        }
        assert self.cache.pool.used_blocks == len(copies | listed)
        held = {block: count for block, count in self.replay.holders.items() if count}
        assert held == {b: int(self.cache.store.s.blocks["tables"][b]) for b in listed}

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for ordinal in sorted(self.rows):
            plan = self._plan_of(ordinal)
            if plan is not None:
                self.cache.cancel(plan)
            self.cache.close(self.rows[ordinal], Kind.FINISH, 0)
        for plan in self.plans:
            self.cache.apply_moves(plan)
        self.rows, self.plans = {}, []
        self.the_oracle_agrees()
        assert not self.replay.holders
        assert self.cache.pool.free_blocks == self.cache.pool.usable_blocks


WANTED = {
    "planned", "committed", "committed without its dead", "died mid-copy", "appended mid-copy", "recomputed",
    "FINISH mid-copy", "PREEMPT mid-copy", "landed after its request left", "not worth it any more",
    "block freed beside a copy", "shared", "found free", "shared mid-copy", "let go of a shared block",
    "landed beside another reader", "planned to copy out", "copied out",
    "group not worth it any more", "a reader left mid-copy", "packed alone", "packed among shared blocks",
    "wrote into a hole", "wrote into a hole beside a copy", "several tokens refused", "planned to fill", "filled",
    "planned with gaps", "a filler landed after its request left",
}  # fmt: skip
"""What has to happen in the examples, or they show nothing."""


def test_any_order_of_calls():
    Machine.happened.clear()
    # Which examples are tried depends on the modules that happen to be loaded too: go on until all was seen.
    for number in range(16):
        run_state_machine_as_test(
            seed(number)(Machine),
            settings=settings(max_examples=100, stateful_step_count=40, deadline=None, database=None),
        )
        if all(Machine.happened[what] for what in WANTED):
            break
    assert all(Machine.happened[what] for what in WANTED), dict(Machine.happened)
