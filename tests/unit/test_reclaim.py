from __future__ import annotations

import numpy as np
import pytest

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.reclaim import Pressure, reclaimers
from sim.kv.repack import RepackPlan
from sim.kv.state import H
from tests.support.serving import alive, fill, keep_only, recount

CALM = Pressure(running=0, wanted_blocks=0)


def thin(*living: int, blocks: int = 101, headroom: int = 10) -> tuple[KVCache, np.ndarray]:
    """Make requests of 10 full blocks of 4 and a tail of one token, with this many live tokens in each full block."""
    cache = KVCache(blocks, 4, headroom_blocks=headroom)
    rows = []
    for number, live in enumerate(living):
        row = fill(cache, 41, number)
        keep_only(cache, row, [p for p in range(41) if p % 4 < live or p == 40])
        cache.store.s.rows[row]["decode_from"] = 41
        rows.append(row)
    return cache, np.array(rows, np.int64)


def ask(cache: KVCache, rows: np.ndarray, spec: str, pressure: Pressure = CALM, busy: bool = False) -> list[RepackPlan]:
    return reclaimers.build(spec).after_step(cache, rows, pressure, busy)


@pytest.mark.parametrize("name", ["none", "naive"])
def test_who_moves_nothing_plans_nothing(name: str):
    cache, rows = thin(1, 1)
    assert ask(cache, rows, name, Pressure(2, 50)) == []


def test_ideal_packs_every_request_at_once():
    cache, rows = thin(1, 3, 4)
    assert ask(cache, rows, "ideal") == []
    assert [len(cache.block_table(row)) for row in rows.tolist()] == [3, 8, 11]
    recount(cache)


def test_sync_packs_in_place_and_needs_no_free_block():
    """Two thin requests and a dense one fill the pool to its last block: 24 of 33 blocks come back."""
    cache, rows = thin(1, 1, 4, blocks=34, headroom=0)
    assert cache.pool.free_blocks == 0
    tables = [cache.block_table(row) for row in rows.tolist()]
    living = [alive(cache, row) for row in rows.tolist()]
    # Of each thin one's eleven tokens all but the first lie elsewhere afterwards.
    assert reclaimers.build("sync").repack_now(cache, rows) == (2, 20)
    assert [cache.block_table(row) for row in rows.tolist()] == [tables[0][:3], tables[1][:3], tables[2]]
    assert [alive(cache, row) for row in rows.tolist()] == living
    assert cache.pool.free_blocks == 16
    assert cache.store.s.rows["moved"][rows].tolist() == [10, 10, 0]
    assert cache.store.s.header[H.MOVED] == 20
    recount(cache)
    assert reclaimers.build("sync").repack_now(cache, rows) == (0, 0)


def test_sync_moves_nothing_that_wins_no_block():
    """Thirteen tokens in four blocks of 4: three of them dead leave ten, for three; two leave eleven, for three too."""
    cache = KVCache(20, 4)
    row = fill(cache, 13)
    rows = np.array([row])
    cache.store.s.rows["decode_from"][row] = 13
    keep_only(cache, row, [p for p in range(13) if p not in (1, 5)])
    assert reclaimers.build("sync").repack_now(cache, rows) == (1, 10)
    assert len(cache.block_table(row)) == 3
    cache.sync_new_tokens(row, 1)
    keep_only(cache, row, [p for p in alive(cache, row) if p != 2])
    assert reclaimers.build("sync").repack_now(cache, rows) == (0, 0)


def test_sync_keeps_blocks_for_the_tokens_to_come():
    cache, rows = thin(1, 1, blocks=45, headroom=0)
    cache.store.s.header[H.KEPT] = 5
    policy = reclaimers.build("sync:keep_blocks=5")
    tables = [cache.block_table(row) for row in rows.tolist()]
    assert policy.repack_now(cache, rows)[0] == 2
    assert [cache.block_table(row) for row in rows.tolist()] == [table[:5] for table in tables]
    recount(cache)
    row = int(rows[0])
    free = cache.pool.free_blocks
    cache.sync_new_tokens(row, 9)  # eleven live tokens and nine new ones are what five blocks hold
    assert cache.pool.free_blocks == free
    slots = [block * 4 + offset for block in tables[0][:5] for offset in range(4)]
    assert [cache.lookup(row, p) for p in alive(cache, row)] == [divmod(slot, 4) for slot in slots]
    recount(cache)
    keep_only(cache, row, alive(cache, row)[:2])  # blocks without a live token stay, too
    assert cache.block_table(row) == tables[0][:5]
    assert policy.repack_now(cache, rows) == (1, 0)
    recount(cache)
    cache.sync_new_tokens(row, 19)
    assert cache.block_table(row)[:5] == tables[0][:5]
    assert len(cache.block_table(row)) == 6
    recount(cache)


def test_vtoken_rests_while_there_is_room():
    cache, rows = thin(1, 1)
    assert ask(cache, rows, "vtoken") == []


def test_vtoken_rests_while_fragmentation_is_below_its_threshold():
    cache, rows = thin(3, 3, blocks=33)
    assert cache.pool.available_blocks == 0
    assert ask(cache, rows, "vtoken:theta_f=0.5") == []
    assert len(ask(cache, rows, "vtoken:theta_f=0.2")) == 2


def test_vtoken_repacks_those_with_most_to_gain_first():
    cache, rows = thin(3, 1, 2, blocks=45)
    plans = ask(cache, rows, "vtoken")
    assert plans[0].ordinal == 1
    assert [plan.gain for plan in plans] == sorted((plan.gain for plan in plans), reverse=True)
    recount(cache)


def test_vtoken_stops_when_it_has_won_back_enough():
    """Below 5 % of 100 free: it wants 10, and the first plan wins 7, the second 7."""
    cache, rows = thin(*[1] * 8, headroom=12)
    assert cache.pool.available_blocks == 0
    plans = ask(cache, rows, "vtoken:low_watermark=0.05")
    assert [plan.gain for plan in plans] == [7, 7]
    cache, rows = thin(*[1] * 8, headroom=12)
    assert len(ask(cache, rows, "vtoken:repack_when=always")) == 4  # 12 destinations, 3 each


def test_blocks_asked_for_in_vain_are_pressure_however_many_are_free():
    """An admission fell 3 blocks short although much more than the watermark is free: a long prompt waits."""
    cache, rows = thin(1, 1)
    assert cache.pool.available_blocks > 2 * 0.1 * 100
    plans = ask(cache, rows, "vtoken", Pressure(running=2, wanted_blocks=3))
    assert [plan.gain for plan in plans] == [7]


def test_one_launch_at_a_time():
    cache, rows = thin(1, 1, blocks=33)
    assert ask(cache, rows, "vtoken:repack_when=always", busy=True) == []


def test_destinations_leave_the_running_requests_their_next_block():
    """Of 30 free blocks 10 are headroom; 25 requests run, so that 5 are to spare: the headroom is more."""
    cache, rows = thin(1, 1, 1, 1, 1, 1, blocks=97)
    assert cache.pool.free_blocks == 30
    plans = ask(cache, rows, "vtoken:repack_when=always", Pressure(running=25, wanted_blocks=0))
    assert sum(len(plan.destinations) for plan in plans) == 10
    cache, rows = thin(1, 1, 1, 1, 1, 1, blocks=97)
    plans = ask(cache, rows, "vtoken:repack_when=always", Pressure(running=15, wanted_blocks=0))
    assert sum(len(plan.destinations) for plan in plans) == 15


def test_a_prompt_under_way_is_left_alone():
    cache, rows = thin(1, 1, blocks=33)
    cache.store.s.rows["decode_from"][rows[0]] = 0
    plans = ask(cache, rows, "vtoken:repack_when=always")
    assert [plan.ordinal for plan in plans] == [1]


@pytest.mark.parametrize(
    "spec",
    [
        "vtoken:theta_f=1.5",
        "vtoken:theta_f=-1",
        "vtoken:low_watermark=2",
        "vtoken:repack_when=never",
        "sync:keep_blocks=-1",
    ],
)
def test_parameters_that_mean_nothing_are_refused(spec: str):
    with pytest.raises(InputError, match=spec.partition(":")[0]):
        reclaimers.build(spec)
