"""Blocks that several requests read: who may drop, move or free what (docs/adr/0006-shared-blocks.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from sim import SimConfig, simulate
from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.prefix import PrefixCache
from sim.kv.reclaim import Pressure, reclaimers
from sim.kv.replay import Replay
from sim.kv.state import H
from tests.support.serving import MS, admit, alive, engine, fill, keep_only, recount, same_prompts, trace


class Shared:
    """Requests whose first ``blocks`` blocks of 4 are the same, with ``own`` tokens each behind them."""

    def __init__(self, readers: int = 2, blocks: int = 5, own: int = 1, pool: int = 100, headroom: int = 0) -> None:
        self.cache = KVCache(pool, 4, headroom_blocks=headroom, logging=True)
        self.prefix = PrefixCache(self.cache.store)
        self.length = 4 * blocks + own
        self.blocks = list(range(1, blocks + 1))
        self.rows = [fill(self.cache, self.length, 0)]
        self.prefix.publish(self.blocks, range(blocks))
        for ordinal in range(1, readers):
            self.join(ordinal)
        self.ready()

    def join(self, ordinal: int) -> int:
        row = admit(self.cache, ordinal, self.length)
        self.prefix.forget_taken()
        hits = self.prefix.find(range(len(self.blocks)))
        self.cache.share_blocks(row, hits)
        self.cache.sync_new_tokens(row, self.length - 4 * len(hits))
        self.rows.append(row)
        return row

    def ready(self) -> None:
        self.cache.store.s.rows["decode_from"][self.rows] = self.length

    def thin(self, *rows: int, every: int = 4) -> None:
        """Keep one token of each ``every``, and all behind the shared blocks."""
        for row in rows or self.rows:
            living = alive(self.cache, row)
            keep_only(self.cache, row, [p for p in living if p % every == 0 or p >= 4 * len(self.blocks)])

    def of(self, field: str, blocks: Iterable[int] | None = None) -> list[int]:
        return self.cache.store.s.blocks[field][list(self.blocks if blocks is None else blocks)].tolist()

    def header(self, index: int) -> int:
        return int(self.cache.store.s.header[index])

    def judged(self) -> Replay:
        recount(self.cache)
        return Replay.of(self.cache.event_log(), lambda *_: True)

    def close(self, row: int, kind: Kind = Kind.FINISH) -> None:
        self.cache.close(row, kind, self.length)
        self.rows.remove(row)


def test_an_eviction_is_the_affair_of_one_request():
    shared = Shared()
    first, second = shared.rows
    cache = shared.cache
    live = shared.header(H.LIVE)
    cache.evict_tokens(first, [0, 1, 5])
    assert cache.lookup(first, 0) is None
    assert cache.lookup(second, 0) == (1, 0)
    assert shared.header(H.LIVE) == live, "the slots still hold tokens that are alive for the other one"
    cache.evict_tokens(second, [0, 2])
    assert shared.header(H.LIVE) == live - 1
    assert shared.of("live") == [3, 4, 4, 4, 4]
    shared.judged()


def test_a_request_lets_go_of_a_block_when_its_own_tokens_are_dead_and_the_last_reader_frees_it():
    shared = Shared()
    first, second = shared.rows
    cache = shared.cache
    free = cache.pool.free_blocks
    cache.evict_tokens(first, [4, 5, 6, 7])
    assert cache.block_table(first)[:4] == [1, 3, 4, 5]
    assert shared.of("ref") == [2, 1, 2, 2, 2]
    assert cache.pool.free_blocks == free
    assert shared.header(H.FREED_BY_DEATH) == 0
    shared.judged()
    cache.evict_tokens(second, [4, 5, 6, 7])
    assert cache.pool.free_blocks == free + 1
    assert shared.header(H.FREED_BY_DEATH) == 1
    assert cache.pool.free_order()[-1] == 2, "its contents are the last to be overwritten"
    shared.judged()


def test_a_hit_gives_full_live_blocks_whatever_others_have_evicted():
    shared = Shared(readers=1)
    cache = shared.cache
    cache.evict_tokens(shared.rows[0], [0, 1, 4, 5, 6, 7])
    third = shared.join(1)
    assert cache.block_table(third)[:5] == [1, 2, 3, 4, 5]
    assert alive(cache, third) == list(range(21))
    assert shared.of("live") == [4] * 5
    shared.judged()
    shared.close(third)
    assert shared.of("live")[0] == 2, "what it alone kept alive is dead again"
    shared.judged()


def test_skip_plans_around_shared_blocks():
    """Two private blocks before a shared one, and two behind it: each run by itself, never across."""
    shared = Shared(readers=2, blocks=5)
    first, second = shared.rows
    cache = shared.cache
    shared.thin(first)
    assert cache.plan_repack(first, 10) is None, "all of them are shared"
    cache.evict_tokens(second, [p for p in range(20) if p // 4 != 2])
    assert shared.of("tables") == [1, 1, 2, 1, 1]
    plan = cache.plan_repack(first, 10)
    assert plan is not None
    assert plan.sources.tolist() == [1, 2]
    assert cache.apply_moves(plan) == 1
    assert cache.block_table(first)[1:4] == [3, 4, 5]
    # The sources hold what they held: another request finds all of it.
    third = shared.join(2)
    assert cache.block_table(third)[:5] == [1, 2, 3, 4, 5]
    shared.judged()


def test_a_source_may_be_shared_while_the_copy_runs():
    """Six sources into two; two of them are somebody else's too by the time of the fence: two blocks are still won."""
    shared = Shared(readers=1, blocks=6)
    (first,) = shared.rows
    cache = shared.cache
    shared.thin()
    plan = cache.plan_repack(first, 10)
    assert plan is not None
    assert (len(plan.sources), len(plan.destinations)) == (6, 2)
    second = shared.join(1)
    cache.evict_tokens(second, range(8, 24))
    assert cache.coming_back([plan]) == 4
    free = cache.pool.free_blocks
    assert cache.apply_moves(plan) == 2
    assert not plan.cancelled
    assert cache.pool.free_blocks == free + 4
    assert cache.block_table(second)[:2] == [1, 2]
    assert alive(cache, second) == [*range(8), 24]
    shared.judged()


def test_a_plan_whose_sources_were_all_shared_meanwhile_wins_nothing():
    shared = Shared(readers=1, blocks=5)
    (first,) = shared.rows
    cache = shared.cache
    shared.thin()
    plan = cache.plan_repack(first, 10)
    assert plan is not None
    shared.join(1)
    assert cache.coming_back([plan]) == 0
    assert cache.apply_moves(plan) == 0
    assert plan.cancelled
    assert cache.block_table(first)[:5] == [1, 2, 3, 4, 5]
    shared.judged()


@pytest.mark.parametrize("kind", [Kind.FINISH, Kind.PREEMPT])
def test_sources_of_a_request_that_left_stay_with_the_copy_and_with_other_readers(kind: Kind):
    shared = Shared(readers=1, blocks=4)
    (first,) = shared.rows
    cache = shared.cache
    shared.thin()
    plan = cache.plan_repack(first, 10)
    assert plan is not None
    second = shared.join(1)
    cache.cancel(plan)
    shared.close(first, kind)
    assert (shared.of("ref"), shared.of("tables")) == ([2] * 4, [1] * 4)
    recount(cache)
    cache.evict_tokens(second, range(8))
    assert shared.of("ref") == [1, 1, 2, 2]
    assert not {1, 2} & set(cache.pool.free_order()), "the copy still reads them"
    cache.store.s.rows["decode_from"][second] = 17
    cache.evict_tokens(second, [p for p in range(8, 16) if p % 4])
    assert cache.plan_repack(second, 10) is None, "no two copies over one block"
    assert cache.coming_back([plan]) == len(plan.destinations) + 2
    free = cache.pool.free_blocks
    assert cache.apply_moves(plan) == 0
    assert cache.pool.free_blocks == free + len(plan.destinations) + 2
    shared.judged()


def test_a_group_copies_out_where_its_copies_take_less_than_the_run():
    """Five shared blocks, of which two readers need a quarter each: 2 + 2 blocks."""
    shared = Shared(readers=2, blocks=5)
    cache = shared.cache
    rows = np.array(shared.rows)
    assert cache.plan_copy_out(rows, 10) == [], "all is alive: ten blocks for five"
    shared.thin()
    before = [alive(cache, row) for row in shared.rows]
    plans = cache.plan_copy_out(rows, 10)
    assert [plan.sources.tolist() for plan in plans] == [shared.blocks] * 2
    assert [plan.gain for plan in plans] == [3, -2]
    assert cache.coming_back(plans) == 5
    recount(cache)
    free = cache.pool.free_blocks
    assert sum(cache.apply_moves(plan) for plan in plans) == 1
    assert cache.pool.free_blocks == free + 5
    assert shared.header(H.FREED_BY_REPACK) == 1
    assert [alive(cache, row) for row in shared.rows] == before
    assert [len(cache.block_table(row)) for row in shared.rows] == [3, 3]
    assert not set(cache.block_table(rows[0])) & set(cache.block_table(rows[1]))
    assert shared.of("cached") == [1] * 5
    assert not cache.store.s.blocks["cached"][cache.block_table(rows[0])].any(), "a destination is never published"
    third = shared.join(2)
    assert cache.block_table(third)[:5] == shared.blocks
    shared.judged()


def test_with_more_readers_the_same_run_is_worth_nothing():
    """Three readers take 3 * 2 blocks for five."""
    shared = Shared(readers=3, blocks=5)
    shared.thin()
    assert shared.cache.plan_copy_out(np.array(shared.rows), 100) == []


def test_only_all_readers_together_copy_out():
    shared = Shared(readers=2, blocks=5)
    shared.thin()
    rows = np.array(shared.rows)
    assert shared.cache.plan_copy_out(rows[:1], 100) == [], "the other one does not run"
    shared.cache.store.s.rows["decode_from"][rows[1]] = 0
    assert shared.cache.plan_copy_out(rows, 100) == [], "its prompt is not complete"
    shared = Shared(readers=3, blocks=8)
    shared.thin()
    rows = np.array(shared.rows)
    assert shared.cache.plan_copy_out(rows[:2], 100) == [], "two of three would take four blocks for eight"
    assert len(shared.cache.plan_copy_out(rows, 100)) == 3


def test_nobody_copies_out_of_what_a_copy_still_reads_for_a_request_that_left():
    shared = Shared(readers=1, blocks=8)
    cache = shared.cache
    shared.thin()
    plan = cache.plan_repack(shared.rows[0], 1)
    assert plan is not None
    assert plan.sources.tolist() == [1, 2, 3, 4]
    shared.join(1)
    shared.join(2)
    shared.ready()
    shared.thin()
    cache.cancel(plan)
    shared.close(plan.row)
    assert (shared.of("ref"), shared.of("tables")) == ([3] * 4 + [2] * 4, [2] * 8)
    plans = cache.plan_copy_out(np.array(shared.rows), 100)
    assert [copy.sources.tolist() for copy in plans] == [[5, 6, 7, 8]] * 2
    for copy in (plan, *plans):
        cache.apply_moves(copy)
    plans = cache.plan_copy_out(np.array(shared.rows), 100)
    assert [copy.sources.tolist() for copy in plans] == [[1, 2, 3, 4]] * 2
    shared.judged()


def test_a_group_takes_no_more_destinations_than_there_are():
    shared = Shared(readers=2, blocks=12)
    shared.thin()
    plans = shared.cache.plan_copy_out(np.array(shared.rows), 4)
    assert sum(len(plan.destinations) for plan in plans) <= 4
    assert sum(plan.gain for plan in plans) > 0
    assert len(plans[0].sources) == 8


def test_the_part_that_most_readers_have_left_is_taken():
    """Of the last four blocks everything is alive: they stay shared."""
    shared = Shared(readers=2, blocks=9)
    for row in shared.rows:
        keep_only(shared.cache, row, [p for p in alive(shared.cache, row) if p % 4 == 0 or p >= 20])
    plans = shared.cache.plan_copy_out(np.array(shared.rows), 100)
    assert plans[0].sources.tolist() == [1, 2, 3, 4, 5]


def test_a_group_is_dropped_whole_when_somebody_joins_meanwhile():
    shared = Shared(readers=2, blocks=5)
    cache = shared.cache
    shared.thin()
    plans = cache.plan_copy_out(np.array(shared.rows), 10)
    third = shared.join(2)
    assert cache.coming_back(plans) == 0
    cache.evict_tokens(shared.rows[0], [0])
    assert cache.block_table(shared.rows[0])[:5] == shared.blocks, "a copy reads it for this request"
    free = cache.pool.free_blocks
    assert [cache.apply_moves(plan) for plan in plans] == [0, 0]
    assert cache.pool.free_blocks == free + 4
    assert [cache.block_table(row)[:5] for row in shared.rows[1:]] == [shared.blocks] * 2
    assert cache.block_table(shared.rows[0])[:4] == shared.blocks[1:], "none of its tokens lives in the first"
    assert cache.store.s.rows["plan"][third] == -1
    shared.judged()


@pytest.mark.parametrize("kind", [Kind.FINISH, Kind.PREEMPT])
@pytest.mark.parametrize("who", [0, 1])
def test_a_group_goes_on_without_a_reader_that_left(who: int, kind: Kind):
    shared = Shared(readers=2, blocks=5)
    cache = shared.cache
    shared.thin()
    plans = cache.plan_copy_out(np.array(shared.rows), 10)
    cache.cancel(plans[who])
    shared.close(plans[who].row, kind)
    assert cache.coming_back(plans) == 5 + 2
    free = cache.pool.free_blocks
    assert sum(cache.apply_moves(plan) for plan in plans) == 3
    assert cache.pool.free_blocks == free + 5 + 2
    shared.judged()


def test_a_group_that_wins_nothing_any_more_is_dropped_whole():
    """Two sources die for everybody while the copy runs: they would go without it, and three for four is a loss."""
    shared = Shared(readers=2, blocks=5)
    cache = shared.cache
    shared.thin()
    plans = cache.plan_copy_out(np.array(shared.rows), 10)
    for row in shared.rows:
        cache.evict_tokens(row, [0, 4])
    assert [len(cache.block_table(row)) for row in shared.rows] == [6, 6], "a copy reads them"
    assert [cache.apply_moves(plan) for plan in plans] == [0, 0]
    assert all(plan.cancelled for plan in plans)
    assert [cache.block_table(row)[:3] for row in shared.rows] == [[3, 4, 5]] * 2
    assert shared.header(H.FREED_BY_DEATH) == 2
    shared.judged()


def test_vtoken_copies_out_only_if_told_to():
    for option, planned in (("skip", 0), ("copy_out", 2)):
        shared = Shared(readers=2, blocks=5, headroom=10)
        shared.thin()
        vtoken = reclaimers.build(f"vtoken:repack_when=always,shared_blocks={option}")
        plans = vtoken.after_step(shared.cache, np.array(shared.rows), Pressure(2, 0), False)
        assert len(plans) == planned
    with pytest.raises(InputError, match="shared_blocks"):
        reclaimers.build("vtoken:shared_blocks=move")


def test_ideal_leaves_shared_blocks_alone_and_packs_what_lies_between():
    shared = Shared(readers=2, blocks=5)
    first, second = shared.rows
    cache = shared.cache
    cache.evict_tokens(second, [p for p in range(20) if p // 4 != 2])
    shared.thin(first)
    cache.sync_new_tokens(first, 6)
    cache.evict_tokens(first, [21, 22, 24])
    cache.pack(np.array([first]))
    table = cache.block_table(first)
    assert len(table) == 1 + 1 + 2, "two blocks into one, the shared one, and five blocks of seven tokens into two"
    assert table[1] == 3
    assert alive(cache, first) == [0, 4, 8, 12, 16, 20, 23, 25, 26]
    assert shared.of("cached") == [1] * 5, "what others may look for was not written over"
    assert cache.block_table(shared.join(2))[:5] == shared.blocks
    assert shared.header(H.MOVED) == 0, "the moves of ideal cost nothing and are not counted"
    shared.judged()


def test_ideal_writes_over_what_is_cached_when_there_is_no_free_block():
    shared = Shared(readers=1, blocks=5, pool=7)
    cache = shared.cache
    assert cache.pool.free_blocks == 0
    shared.thin()
    cache.pack(np.array(shared.rows))
    assert len(cache.block_table(shared.rows[0])) == 2
    shared.prefix.forget_taken()
    assert shared.prefix.find(range(5)) == []
    assert shared.prefix.find([2]) == [3], "those that it gave back are as they were"
    shared.judged()


def sharing(count: int, prompt: int = 64, output: int = 40, every_ns: int = 3 * MS) -> Any:
    """Make requests that come one by one and have all of their prompts but for the last 16 tokens in common."""
    hashes = [[1, 2, 3, 1000 + number] for number in range(count)]
    return trace(*[(k * every_ns, prompt, output) for k in range(count)], hashes=hashes)


@pytest.mark.parametrize("policy", ["random", "h2o", "scissorhands", "streaming_llm"])
@pytest.mark.parametrize("reclaimer", ["naive", "vtoken:repack_when=always", "sync", "ideal"])
def test_what_is_filled_after_an_eviction_is_never_published(policy: str, reclaimer: str):
    """Only blocks of prompts are: three that all have in common, by the first, and one that is each request's own."""
    published: list[tuple[int, int]] = []
    run = engine(
        sharing(6), policy=policy, reclaimer=reclaimer, budget=0.5, headroom=5, prefix_caching=True, logging=True
    )
    assert run.scheduler.prefix is not None
    publish = run.scheduler.prefix.publish_rows

    def watch(rows: Any, *, results: bool) -> None:
        known = run.cache.store.s.blocks["cached"].copy()
        publish(rows, results=results)
        for block in np.flatnonzero(run.cache.store.s.blocks["cached"] > known).tolist():
            (owner,) = [row for row in run.scheduler.states if block in run.cache.block_table(row)]
            published.append((run.scheduler.states[owner].ordinal, run.cache.block_table(owner).index(block)))

    run.scheduler.prefix.publish_rows = watch  # type: ignore[method-assign]
    outcome = run.run()
    assert outcome.summary["cached_tokens"] == 5 * 48
    assert outcome.summary["tokens_evicted"] > 0
    assert sorted(published) == [(0, 0), (0, 1), (0, 2), *((number, 3) for number in range(6))]
    assert outcome.events is not None
    Replay.of(outcome.events, same_prompts(sharing(6)))


def test_a_preempted_request_uses_cached_blocks_again():
    source = sharing(8, output=60, every_ns=0)
    options = {"policy": "random", "reclaimer": "naive", "budget": 0.8, "blocks": 24, "max_num_seqs": 8}
    run = engine(source, prefix_caching=True, logging=True, **options)  # type: ignore[arg-type]
    outcome = run.run()
    assert outcome.summary["preemptions"] > 0
    assert outcome.events is not None
    records = outcome.events.records
    again = records[(records["kind"] == Kind.ADMIT) & (records["b"] > 64 - records["a"])]
    assert (again["a"] > 0).any(), "none of those admitted again found a block"
    Replay.of(outcome.events, same_prompts(source))


def test_who_keeps_empty_blocks_does_not_share():
    with pytest.raises(InputError, match="keep_blocks"):
        engine(sharing(2), policy="random", reclaimer="sync:keep_blocks=4", budget=0.5, prefix_caching=True)


def run_degree(degree: int, **changes: Any) -> dict[str, Any]:
    base = {
        "trace": f"poisson:rate=30,n=48,prompt=uniform:20:60,output=100,shared_prefix=512,degree={degree}",
        "policy": "random", "budget": 0.3, "prefix_caching": True, "kv_blocks": 4000, "repack_when": "always",
    }  # fmt: skip
    return simulate(SimConfig(**(base | changes))).summary


def test_copy_out_wins_pool_blocks_at_low_degree_and_declines_at_high_degree():
    """Two readers at 0.3 need 0.6 of a run, eight need 2.4 of it."""
    skip, out = (run_degree(2, shared_blocks=option) for option in ("skip", "copy_out"))
    assert out["used_blocks_mean"] < 0.95 * skip["used_blocks_mean"]
    assert out["retained_blocks_mean"] < 0.8 * skip["retained_blocks_mean"]
    skip, out = (run_degree(8, shared_blocks=option, budget=0.6) for option in ("skip", "copy_out"))
    assert out["retained_blocks_mean"] > 0.95 * skip["retained_blocks_mean"]


def test_what_skip_wins_shrinks_with_the_degree():
    won = []
    for degree in (1, 2, 8):
        naive, vtoken = (run_degree(degree, reclaimer=reclaimer) for reclaimer in ("naive", "vtoken"))
        won.append(1 - vtoken["retained_blocks_mean"] / naive["retained_blocks_mean"])
    assert won[0] > won[1] > won[2] > 0
