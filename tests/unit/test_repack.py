from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.replay import Replay
from sim.kv.state import H
from sim.kv.window import find_window, possible_gain
from tests.support.serving import alive, fill, keep_only, recount, same_state


def with_live(counts: Iterable[int], size: int, tail: int = 0, blocks: int = 100) -> tuple[KVCache, int]:
    """Make a request whose full blocks have these numbers of live tokens, with ``tail`` more behind them."""
    counts = list(counts)
    cache = KVCache(blocks, size, logging=True)
    row = fill(cache, len(counts) * size + tail)
    dead = [k * size + i for k, live in enumerate(counts) for i in range(size - live)]
    cache.evict_tokens(row, dead)
    return cache, row


def replayed(cache: KVCache) -> Replay:
    return Replay.of(cache.event_log())


def gain(window: list[int], size: int) -> int:
    return len(window) - -(-sum(window) // size)


@settings(max_examples=400, derandomize=True)
@given(st.data())
def test_the_window_is_the_best_of_all_windows(data: st.DataObject):
    """Most blocks freed; among those the fewest live tokens to copy; among those the first."""
    size = data.draw(st.sampled_from([1, 2, 4, 16]))
    counts = data.draw(st.lists(st.integers(1, size), min_size=1, max_size=12))
    tail = data.draw(st.integers(0, size - 1))
    most = data.draw(st.integers(0, 6))
    cache, row = with_live(counts, size, tail)
    first, last = find_window(cache.store.s, row, most)
    every = [
        (-gain(counts[i:j], size), sum(counts[i:j]), i)
        for i in range(len(counts))
        for j in range(i + 1, len(counts) + 1)
        if -(-sum(counts[i:j]) // size) <= most and gain(counts[i:j], size) > 0
    ]
    if not every:
        assert (first, last) == (0, 0)
    else:
        assert (-gain(counts[first:last], size), sum(counts[first:last]), first) == min(every)


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 3))
def test_the_gain_that_makes_one_look_is_that_of_the_whole_row(counts: list[int], tail: int):
    cache, row = with_live(counts, 4, tail)
    out = np.zeros(1, np.int64)
    assert possible_gain(cache.store.s, np.array([row]), out) == 0, "its prompt is not complete"
    cache.store.s.rows[row]["decode_from"] = 1
    assert possible_gain(cache.store.s, np.array([row]), out) == max(0, gain(counts, 4)) == out[0]
    first, last = find_window(cache.store.s, row, 1000)
    assert gain(counts[first:last], 4) == max(0, gain(counts, 4))


def test_a_repack_moves_the_living_in_order_and_frees_the_sources():
    cache, row = with_live([2, 1, 1, 4], 4)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    assert (plan.sources.tolist(), plan.destinations.tolist()) == ([1, 2, 3], [5])
    assert plan.position.tolist() == [2, 3, 7, 11]
    assert plan.to_slot.tolist() == [20, 21, 22, 23]
    recount(cache)
    assert cache.apply_moves(plan) == 2
    assert cache.block_table(row) == [5, 4]
    assert [cache.lookup(row, p) for p in (2, 3, 7, 11, 12)] == [(5, 0), (5, 1), (5, 2), (5, 3), (4, 0)]
    assert cache.store.s.header[H.FREED_BY_REPACK] == 2
    assert cache.store.s.header[H.MOVED] == 4
    recount(cache)
    assert replayed(cache).table(0) == [5, 4]


def test_until_the_fence_tokens_are_read_where_they_were():
    cache, row = with_live([1, 1, 1, 1], 4)
    before = [cache.lookup(row, p) for p in range(16)]
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    assert [cache.lookup(row, p) for p in range(16)] == before
    assert cache.block_table(row) == [1, 2, 3, 4]
    assert cache.plan_repack(row, 10) is None, "one plan a request at a time"
    assert cache.pool.free_order()[0] == 6


def test_tokens_that_died_meanwhile_stay_dead():
    cache, row = with_live([2, 2, 2, 2, 2], 4, tail=1)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    assert plan.tokens == 8  # four blocks into two: the fifth would cost copies and win nothing
    dead = plan.position[[1, 4]].tolist()
    cache.evict_tokens(row, dead)
    assert cache.apply_moves(plan) == 2
    assert not set(dead) & set(alive(cache, row))
    assert all(cache.lookup(row, p) is None for p in dead)
    assert cache.store.s.header[H.MOVED] == 6
    recount(cache)
    replayed(cache)


def test_a_destination_in_which_nothing_lives_goes_straight_back():
    cache, row = with_live([2, 2, 2, 2, 2, 2], 4, tail=3)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    assert len(plan.destinations) == 3
    cache.evict_tokens(row, plan.position[4:8])
    assert cache.apply_moves(plan) == 2  # six sources, of which two died by themselves, into two
    header = cache.store.s.header
    assert (header[H.FREED_BY_DEATH], header[H.FREED_BY_REPACK]) == (2, 2)
    assert cache.block_table(row) == [plan.destinations[0], plan.destinations[2], 7]
    assert plan.destinations[1] in cache.pool.free_order()
    recount(cache)
    replayed(cache)


def test_a_source_that_dies_whole_while_it_is_read_stays_until_the_fence():
    cache, row = with_live([1, 1, 1, 4], 4)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    assert len(plan.sources) == 3
    free = cache.pool.free_blocks
    cache.evict_tokens(row, plan.position[:1])
    assert cache.pool.free_blocks == free
    assert cache.block_table(row)[0] == 1
    recount(cache)
    cache.apply_moves(plan)
    assert 1 in cache.pool.free_order()
    recount(cache)
    replayed(cache)


def test_a_block_in_front_of_the_window_may_die_meanwhile():
    cache, row = with_live([4, 1, 1, 1, 4], 4, tail=2)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    assert plan.sources.tolist() == [2, 3, 4]
    cache.evict_tokens(row, [0, 1, 2, 3])
    assert cache.block_table(row) == [2, 3, 4, 5, 6]
    assert cache.apply_moves(plan) == 2
    assert cache.block_table(row) == [plan.destinations[0], 5, 6]
    recount(cache)
    replayed(cache)


def test_when_it_is_not_worth_it_any_more_the_layout_stays():
    """Three blocks into two; then the first dies by itself: two living sources into two destinations win nothing."""
    cache, row = with_live([1, 4, 3], 4, tail=1)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    assert (len(plan.sources), len(plan.destinations)) == (3, 2)
    cache.evict_tokens(row, plan.position[:1])
    slots = [cache.lookup(row, p) for p in alive(cache, row)]
    free = cache.pool.free_blocks
    assert cache.apply_moves(plan) == 0
    assert plan.cancelled
    assert [cache.lookup(row, p) for p in alive(cache, row)] == slots
    assert cache.block_table(row) == [2, 3, 4]
    # The two destinations, and the source that died.
    assert cache.pool.free_blocks == free + 3
    assert cache.store.s.header[H.FREED_BY_REPACK] == 0
    assert cache.store.s.header[H.FREED_BY_DEATH] == 1
    assert cache.store.s.header[H.MOVED] == 0
    recount(cache)
    replayed(cache)
    assert cache.plan_repack(row, 10) is None
    assert cache.store.s.rows[row]["plan"] == -1


def test_a_plan_of_which_everybody_died_frees_all_of_its_blocks():
    cache, row = with_live([1, 1, 4], 4)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    cache.evict_tokens(row, plan.position)
    cache.apply_moves(plan)
    assert cache.block_table(row) == [3]
    assert cache.pool.used_blocks == 1
    recount(cache)
    replayed(cache)


@pytest.mark.parametrize("meanwhile", [0, 1, 5])
def test_a_full_tail_may_be_in_the_window_and_appending_goes_on(meanwhile: int):
    cache, row = with_live([1, 1, 1], 4)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    assert plan.sources.tolist() == [1, 2, 3]
    if meanwhile:
        cache.sync_new_tokens(row, meanwhile)
    assert cache.apply_moves(plan) == 2
    recount(cache)
    replayed(cache)
    cache.sync_new_tokens(row, 2)
    (destination,) = plan.destinations.tolist()
    if meanwhile == 0:
        # The destination is the tail now, and its last slot was never written.
        assert cache.lookup(row, 12) == (destination, 3)
        assert cache.lookup(row, 13) == (cache.block_table(row)[1], 0)
    else:
        # The slot behind the moved tokens stays empty: logical order is physical order.
        assert cache.lookup(row, 12) == (cache.block_table(row)[1], 0)
    assert len(cache.block_table(row)) == 1 + -(-(meanwhile + (1 if meanwhile == 0 else 2)) // 4)
    recount(cache)
    replayed(cache)


@pytest.mark.parametrize("kind", [Kind.PREEMPT, Kind.FINISH])
def test_leaving_mid_copy_returns_both_sides_behind_the_fence(kind: Kind):
    cache, row = with_live([1, 1, 1, 4], 4)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    cache.cancel(plan)
    cache.close(row, kind, 0)
    # The copy still reads 1, 2, 3 and writes 5.
    assert not {1, 2, 3, 5} & set(cache.pool.free_order())
    assert cache.pool.used_blocks == 4
    assert cache.store.s.header[H.IN_TABLES] == 0
    recount(cache)
    other = fill(cache, 8, ordinal=1)  # may get the same row
    assert cache.apply_moves(plan) == 0
    assert cache.pool.used_blocks == 2
    assert cache.block_table(other) == [4, 6]
    assert cache.store.s.header[H.MOVED] == 0
    recount(cache)
    replayed(cache)


def damaged(what: str) -> tuple[KVCache, object]:
    cache, row = with_live([1, 1, 1, 1, 4], 2 + 2)
    other = fill(cache, 8, ordinal=1)
    keep_only(cache, other, [0, 4])
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    if what == "two tokens into one slot":
        plan.to_slot[1] = plan.to_slot[0]
    elif what == "a block that is not in the pool":
        plan.destinations[0] = 100
    elif what == "block 0":
        plan.destinations[0] = 0
    elif what == "a block that is free":
        plan.destinations[0] = cache.pool.free_order()[0]
        plan.to_slot[:] = plan.destinations[0] * 4 + np.arange(4)
    elif what == "a block of somebody else":
        plan.destinations[0] = cache.block_table(other)[0]
        plan.to_slot[:] = plan.destinations[0] * 4 + np.arange(4)
    elif what == "a block of its own":
        plan.destinations[0] = cache.block_table(row)[-1]
        plan.to_slot[:] = plan.destinations[0] * 4 + np.arange(4)
    elif what == "a block of another copy":
        second = cache.plan_repack(other, 10)
        assert second is not None
        plan.destinations[0] = second.destinations[0]
        plan.to_slot[:] = plan.destinations[0] * 4 + np.arange(4)
    elif what == "the order of tokens":
        plan.position[:] = plan.position[::-1].copy()
    elif what == "too few slots":
        plan.to_slot = plan.to_slot[:-1]
    elif what == "another number":
        plan.number += 1
    elif what == "one destination too many":
        plan.destinations = np.append(plan.destinations, np.int32(7))
    return cache, plan


@pytest.mark.parametrize(
    "what",
    [
        "two tokens into one slot",
        "a block that is not in the pool",
        "block 0",
        "a block that is free",
        "a block of somebody else",
        "a block of its own",
        "a block of another copy",
        "the order of tokens",
        "too few slots",
        "another number",
        "one destination too many",
    ],
)
def test_a_plan_that_is_refused_changes_nothing(what: str):
    cache, plan = damaged(what)
    before, events = same_state(cache), len(cache.event_log())
    with pytest.raises(InputError, match="does not move tokens into blocks set aside for it"):
        cache.apply_moves(plan)  # type: ignore[arg-type]
    assert same_state(cache) == before
    assert len(cache.event_log()) == events


def test_a_plan_takes_effect_once():
    cache, row = with_live([1, 1, 1, 1], 4)
    plan = cache.plan_repack(row, 10)
    assert plan is not None
    cache.apply_moves(plan)
    before = same_state(cache)
    with pytest.raises(InputError):
        cache.apply_moves(plan)
    assert same_state(cache) == before


def test_destinations_come_from_the_headroom_and_no_more_than_it_has():
    cache = KVCache(13, 4, headroom_blocks=2)
    row = fill(cache, 40)
    keep_only(cache, row, range(0, 40, 2))
    assert cache.pool.available_blocks == 0
    plan = cache.plan_repack(row, 2)
    assert plan is not None
    assert len(plan.destinations) == 2
    assert plan.gain == 2
    assert cache.pool.free_blocks == 0
    assert cache.apply_moves(plan) == 2
    assert cache.pool.available_blocks == 2


def test_a_dense_row_has_no_plan():
    cache, row = with_live([4, 4, 4], 4, tail=2)
    before = same_state(cache)
    assert cache.plan_repack(row, 10) is None
    assert same_state(cache) == before
