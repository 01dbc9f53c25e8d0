"""New tokens in dead slots, and copies into them."""

import numpy as np
import pytest

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.holes import holes_of
from sim.kv.prefix import PrefixCache
from sim.kv.replay import Replay
from sim.kv.state import H
from tests.support.serving import alive, engine, fill, keep_only, recount, trace


def reusing(tokens: int, blocks: int = 30) -> tuple[KVCache, int]:
    cache = KVCache(blocks, 4, columns=("mark",), logging=True)
    cache.reuse_slots()
    return cache, fill(cache, tokens)


def test_a_new_token_goes_into_the_fullest_block_that_has_a_hole():
    cache, row = reusing(14)
    cache.evict_tokens(row, [0, 1, 6, 9, 10])  # two, one and two holes; the tail of two has none
    assert holes_of(cache.store.s, row) == 5
    free = cache.pool.free_blocks
    for position, slot in ((14, (2, 2)), (15, (3, 2)), (16, (3, 1)), (17, (1, 1)), (18, (1, 0)), (19, (4, 2))):
        cache.sync_new_tokens(row, 1)
        assert cache.lookup(row, position) == slot
        recount(cache)
    assert holes_of(cache.store.s, row) == 0
    assert cache.pool.free_blocks == free
    assert int(cache.store.s.rows["written"][row]) == 15  # slots that a kernel reads: holes are among them already
    assert alive(cache, row) == [2, 3, 4, 5, 7, 8, *range(11, 20)]
    Replay.of(cache.event_log())


def test_who_evicts_as_much_as_it_writes_never_takes_a_block():
    cache, row = reusing(32)
    table = cache.block_table(row)
    draw = np.random.default_rng(0)
    for _ in range(500):
        cache.evict_tokens(row, [draw.choice(alive(cache, row)[:-1])])
        cache.sync_new_tokens(row, 1)
        assert set(cache.block_table(row)) <= set(table)
    recount(cache)
    assert len(alive(cache, row)) == 32
    assert len(cache.block_table(row)) == 8
    Replay.of(cache.event_log())


def test_a_block_that_dies_whole_takes_its_holes_along():
    cache, row = reusing(13)
    cache.evict_tokens(row, [0, 4, 5, 6, 7])
    assert holes_of(cache.store.s, row) == 1
    assert cache.block_table(row) == [1, 3, 4]
    cache.evict_tokens(row, [12])
    assert cache.block_table(row) == [1, 3]
    recount(cache)
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 13) == (1, 0)
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 14) == (4, 0)  # the block that was freed last
    recount(cache)


def test_several_tokens_come_in_order_or_not_at_all():
    """Before anything is out of order they may, behind the last slot; afterwards only one by one."""
    cache, row = reusing(8)
    cache.evict_tokens(row, [1])
    cache.sync_new_tokens(row, 2)
    assert cache.lookup(row, 8) == (3, 0)
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 10) == (1, 1)
    events = len(cache.event_log())
    with pytest.raises(InputError, match="2 tokens at once for a request whose tokens are out of order"):
        cache.sync_new_tokens(row, 2)
    assert len(cache.event_log()) == events
    cache.sync_new_tokens(row, 1)
    # Recomputed it is in order again.
    cache.close(row, Kind.PREEMPT, 11)
    row = fill(cache, 12)
    cache.sync_new_tokens(row, 3)
    assert [cache.lookup(row, p) for p in (12, 14)] == [(cache.block_table(row)[3], 0), (cache.block_table(row)[3], 2)]
    recount(cache)
    Replay.of(cache.event_log())


def test_without_a_reclaimer_that_asks_for_it_dead_slots_stay_dead():
    cache = KVCache(30, 4)
    row = fill(cache, 8)
    cache.evict_tokens(row, [1])
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 8) == (3, 0)


def test_a_hole_that_a_copy_reads_is_left_alone_until_the_fence():
    cache, row = reusing(17)
    keep_only(cache, row, [0, 4, 8, 12, 13, 14, 16])
    plan = cache.plan_repack(row, 1)
    assert plan is not None
    assert plan.sources.tolist() == [1, 2, 3]
    assert holes_of(cache.store.s, row) == 1
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 17) == (4, 3)
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 18) == (5, 1)
    recount(cache)
    assert cache.apply_moves(plan) == 2
    assert holes_of(cache.store.s, row) == 1  # of the destination, whose last slot holds nothing
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 19) == (int(plan.destinations[0]), 3)
    recount(cache)
    Replay.of(cache.event_log())


def test_a_plan_that_is_dropped_gives_its_holes_back():
    cache, row = reusing(17)
    keep_only(cache, row, [0, 4, 5, 6, 7, 8, 9, 10, 11, 16])
    plan = cache.plan_scattered(row, 3)
    assert plan is None, "one token alone frees nothing"
    cache.evict_tokens(row, [4, 5, 8, 9])
    plan = cache.plan_scattered(row, 3)
    assert plan is not None
    assert (plan.sources.tolist(), plan.tokens) == ([1, 2], 3)
    assert holes_of(cache.store.s, row) == 2
    cache.evict_tokens(row, [0])  # a block dies by itself: nothing is to be won any more
    assert cache.apply_moves(plan) == 0
    assert plan.cancelled
    assert holes_of(cache.store.s, row) == 4
    recount(cache)
    Replay.of(cache.event_log())


def test_what_the_prefix_cache_knows_is_never_written_to():
    cache = KVCache(30, 4, logging=True)
    cache.reuse_slots()
    prefix = PrefixCache(cache.store)
    row = fill(cache, 8)
    prefix.publish(cache.block_table(row)[:1], [77])
    cache.evict_tokens(row, [1, 5])
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 8) == (2, 1)
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 9) == (3, 0)
    assert cache.plan_fill(row) is None
    recount(cache)
    cache.evict_tokens(row, [0, 2, 3, 4])  # now it is let go of, and there is a hole elsewhere
    assert cache.block_table(row) == [2, 3]
    recount(cache)


def test_filling_moves_the_tokens_of_the_least_used_blocks_into_the_fullest():
    cache = KVCache(30, 4, logging=True)
    row = fill(cache, 22)
    keep_only(cache, row, [0, 4, 5, 8, 12, 13, 14, 16, 17, 18, 19, 20])  # 1, 2, 1, 3, 4 and a tail
    plan = cache.plan_fill(row, most_gain=2)
    assert plan is not None
    assert (plan.sources.tolist(), plan.targets.tolist()) == ([1, 3], [4, 2])
    assert plan.position.tolist() == [0, 8]
    assert plan.to_slot.tolist() == [19, 10]
    assert len(plan.destinations) == 0
    free = cache.pool.free_blocks
    recount(cache)
    assert cache.apply_moves(plan) == 2
    assert cache.pool.free_blocks == free + 2
    assert cache.block_table(row) == [2, 4, 5, 6]
    assert [cache.lookup(row, p) for p in (0, 8, 12)] == [(4, 3), (2, 2), (4, 0)]
    assert cache.store.s.header[H.FREED_BY_REPACK] == cache.store.s.header[H.MOVED] == 2
    recount(cache)
    Replay.of(cache.event_log())
    with pytest.raises(InputError, match="out of order"):
        cache.sync_new_tokens(row, 2)


@pytest.mark.parametrize("reuses", [False, True])
def test_a_target_that_dies_whole_while_it_is_filled_stays_until_the_fence(reuses: bool):
    cache = KVCache(30, 4, logging=True)
    if reuses:
        cache.reuse_slots()
    row = fill(cache, 13)
    keep_only(cache, row, [0, 4, 5, 8, 9, 10, 12])
    plan = cache.plan_fill(row)
    assert plan is not None
    assert (plan.sources.tolist(), plan.targets.tolist()) == ([1], [3])
    free = cache.pool.free_blocks
    cache.evict_tokens(row, [0, 8, 9, 10])
    assert cache.pool.free_blocks == free
    assert cache.apply_moves(plan) == 0  # the only source died by itself
    assert cache.block_table(row) == [2, 4]
    assert cache.pool.free_blocks == free + 2
    recount(cache)
    Replay.of(cache.event_log())


@pytest.mark.parametrize(
    "damage",
    ["two tokens into one slot", "a slot that is taken", "a block of its own that is no target", "order", "too few"],
)
def test_a_filler_that_is_refused_changes_nothing(damage: str):
    cache = KVCache(30, 4, logging=True)
    row = fill(cache, 17)
    keep_only(cache, row, [0, 1, 4, 5, 8, 9, 12, 13, 16])
    plan = cache.plan_fill(row, most_gain=1)
    assert plan is not None
    (target,) = plan.targets.tolist()
    if damage == "two tokens into one slot":
        plan.to_slot[1] = plan.to_slot[0]
    elif damage == "a slot that is taken":
        plan.to_slot[0] = target * 4
    elif damage == "a block of its own that is no target":
        plan.to_slot[0] = 5 * 4 + 1
    elif damage == "order":
        plan.position[:] = plan.position[::-1].copy()
    else:
        plan.to_slot = plan.to_slot[:-1]
    before, events = [cache.lookup(row, p) for p in range(17)], len(cache.event_log())
    with pytest.raises(InputError, match="does not move tokens into blocks set aside for it"):
        cache.apply_moves(plan)
    assert [cache.lookup(row, p) for p in range(17)] == before
    assert len(cache.event_log()) == events


@pytest.mark.parametrize("kind", [Kind.PREEMPT, Kind.FINISH])
def test_leaving_while_a_copy_fills_holes_returns_both_sides_behind_the_fence(kind: Kind):
    cache = KVCache(30, 4, logging=True)
    row = fill(cache, 17)
    keep_only(cache, row, [0, 4, 5, 8, 9, 10, 12, 13, 14, 15, 16])
    plan = cache.plan_fill(row)
    assert plan is not None
    assert (plan.sources.tolist(), plan.targets.tolist()) == ([1], [3])
    cache.cancel(plan)
    cache.close(row, kind, 0)
    assert cache.coming_back([plan]) == 2
    assert not {1, 3} & set(cache.pool.free_order())
    assert {2, 4, 5} <= set(cache.pool.free_order())
    recount(cache)
    cache.apply_moves(plan)
    assert cache.pool.free_blocks == cache.pool.usable_blocks
    recount(cache)
    Replay.of(cache.event_log())


def test_what_a_step_reads_does_not_grow_with_tokens_in_holes():
    """One request at its budget of 32: with reuse attention reads 32 slots in each step, without ever more."""

    class Reads:
        def __init__(self) -> None:
            self.slots: list[int] = []

        def scheduled(self, run: object) -> None:
            self.slots.append(int(run.scheduler.work[2]))  # type: ignore[attr-defined]

        def applied(self, run: object, finished: int) -> None:
            pass

    read = {}
    for reclaimer in ("reuse", "naive", "ideal"):
        reads = Reads()
        options = {"policy": "random", "budget_tokens": 32, "block_size": 8, "reclaimer": reclaimer}
        engine(trace((0, 32, 40)), observer=reads, **options).run()
        read[reclaimer] = reads.slots
    assert read["reuse"] == [32, 33] + [33] * 38
    assert read["ideal"] == [32] + [33] * 39
    assert read["naive"][-1] > 50


@pytest.mark.parametrize("reclaimer", ["reuse", "reuse+vtoken"])
def test_a_run_without_a_log_is_the_same_run(reclaimer: str):
    """Without one, tokens go into holes by a shorter way."""
    ends = []
    for logging in (False, True):
        options = {"policy": "random", "budget": 0.4, "block_size": 8, "reclaimer": reclaimer, "blocks": 90}
        run = engine(trace(*[(0, 90, 70)] * 6), copy="linear:per_token_s=2e-5", logging=logging, **options)
        outcome = run.run()
        recount(run.cache)
        assert outcome.summary["tokens_evicted"] > 200
        ends.append({key: value for key, value in outcome.summary.items() if key != "wall_s"})
    assert ends[0] == ends[1]
