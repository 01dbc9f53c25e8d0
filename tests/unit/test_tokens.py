import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.state import H
from sim.kv.tokens import append_one, append_tokens, tail_of
from tests.support.serving import alive, fill, keep_only, recount, same_state


def test_a_token_is_found_at_its_slot_until_it_dies():
    cache = KVCache(8, 4)
    row = fill(cache, 10)
    assert [cache.lookup(row, p) for p in (0, 3, 4, 9)] == [(1, 0), (1, 3), (2, 0), (3, 1)]
    assert cache.lookup(row, 10) is None
    cache.evict_tokens(row, [4, 0])
    assert [cache.lookup(row, p) for p in (0, 1, 4, 5)] == [None, (1, 1), None, (2, 1)]
    assert alive(cache, row) == [1, 2, 3, 5, 6, 7, 8, 9]
    recount(cache)


def test_a_block_is_free_when_its_last_token_dies_and_not_before():
    cache = KVCache(8, 4)
    row = fill(cache, 10)
    cache.evict_tokens(row, [4, 5, 6])
    assert cache.block_table(row) == [1, 2, 3]
    cache.evict_tokens(row, [7])
    assert cache.block_table(row) == [1, 3]
    assert cache.pool.free_order()[0] == 2
    assert cache.store.s.header[H.FREED_BY_DEATH] == 1
    assert cache.lookup(row, 9) == (3, 1)
    recount(cache)


def test_logical_positions_go_on_and_dead_slots_are_not_written_again():
    cache = KVCache(8, 4)
    row = fill(cache, 6)
    cache.evict_tokens(row, [5, 4, 1])  # the tail block is empty now
    assert cache.block_table(row) == [1]
    cache.sync_new_tokens(row, 3)
    assert alive(cache, row) == [0, 2, 3, 6, 7, 8]
    # Block 2 came back to the front of the free list, and is written from its start.
    assert [cache.lookup(row, p) for p in (6, 7, 8)] == [(2, 0), (2, 1), (2, 2)]
    recount(cache)


@pytest.mark.parametrize("positions", [[3, 3], [10], [-1], [2, 5]])
def test_an_eviction_of_what_is_not_alive_changes_nothing(positions: list[int]):
    cache = KVCache(8, 4)
    row = fill(cache, 10)
    cache.evict_tokens(row, [2])
    before = same_state(cache)
    with pytest.raises(InputError, match="not alive, or is named twice"):
        cache.evict_tokens(row, positions)
    assert same_state(cache) == before


def test_packing_leaves_ceil_of_live_over_size_blocks_in_logical_order():
    cache = KVCache(12, 4)
    row = fill(cache, 30)
    keep_only(cache, row, [0, 5, 11, 12, 17, 29])
    cache.pack(np.array([row]))
    assert len(cache.block_table(row)) == 2
    table = cache.block_table(row)
    slots = [cache.lookup(row, p) for p in (0, 5, 11, 12, 17, 29)]
    assert slots == [(table[k // 4], k % 4) for k in range(6)]
    recount(cache)
    cache.sync_new_tokens(row, 1)
    assert cache.lookup(row, 30) == (table[1], 2)
    recount(cache)


def test_packing_a_dense_row_does_nothing():
    cache = KVCache(12, 4)
    row = fill(cache, 30)
    before = same_state(cache)
    cache.pack(np.array([row]))
    assert same_state(cache) == before


def test_with_one_slot_a_block_every_death_frees_one():
    cache = KVCache(40, 1)
    row = fill(cache, 30)
    cache.evict_tokens(row, range(0, 30, 3))
    assert len(cache.block_table(row)) == 20
    assert cache.store.s.header[H.LIVE] == cache.store.s.header[H.IN_TABLES] == 20
    recount(cache)


def test_deaths_of_several_requests_at_once_are_those_of_each_alone():
    deaths = {0: [0, 1, 2, 3, 9], 1: [5], 2: [0, 7, 8, 15, 16, 17]}
    together, alone = KVCache(40, 4, columns=("a",)), KVCache(40, 4, columns=("a",))
    for cache in (together, alone):
        for ordinal in range(3):
            row = fill(cache, 18, ordinal)
            first = int(cache.store.s.rows[row]["start"])
            cache.store.s.columns[0, first : first + 18] = 100 * ordinal + np.arange(18)
    for ordinal in range(3):
        alone.evict_tokens(ordinal_row(alone, ordinal), deaths[ordinal])
    rows = np.array([ordinal_row(together, k) for k in range(3)])
    cells = [np.array(deaths[k]) + together.store.s.rows[rows[k]]["start"] for k in range(3)]
    together.evict_cells(rows, np.concatenate(cells), np.array([len(c) for c in cells]))
    assert same_state(together) == same_state(alone)
    recount(together)


def ordinal_row(cache: KVCache, ordinal: int) -> int:
    return int(np.flatnonzero((cache.store.s.rows["ordinal"] == ordinal) & (cache.store.s.rows["blocks"] > 0))[0])


@pytest.mark.parametrize("tracked", [True, False])
def test_the_short_way_to_append_one_token_is_the_long_way(tracked: bool):
    short, long = (KVCache(40, 4, columns=("a", "b"), tracked=tracked) for _ in range(2))
    rows = [fill(cache, 9) for cache in (short, long)]
    for cache, row in zip((short, long), rows, strict=True):
        if tracked:
            cache.evict_tokens(row, [4, 5, 6, 7, 0])
        start = int(cache.store.s.rows[row]["start"])
        cache.store.s.columns[:, start:] = 7
    for _ in range(3):
        append_one(tail_of(short.store.s), rows[0], 4)
        short.store.s.header[[H.LIVE, H.WRITTEN]] += 1
        append_tokens(long.store.s, rows[1], 1)
    assert same_state(short) == same_state(long)
    recount(short)


def test_a_front_that_moves_slides_back_instead_of_asking_for_more_cells():
    cache = KVCache(400, 4, columns=("own",))
    row = fill(cache, 4)
    cap = int(cache.store.s.rows[row]["cap"])
    slid = 0
    for position in range(4, 1200):
        before = int(cache.store.s.rows[row]["start"])
        cache.sync_new_tokens(row, 1)
        record = cache.store.s.rows[row]
        slid += int(record["start"]) < before
        cell = int(record["start"] + record["live"]) - 1
        assert cache.store.s.columns[0, cell] == 0
        cache.store.s.columns[0, cell] = position
        if position >= 14:
            cache.evict_tokens(row, [position - 10])  # near the front: the front moves
            assert cache.store.s.rows[row]["start"] > record["origin"]
    assert cache.store.s.rows[row]["cap"] == cap
    assert slid > 10
    start = int(cache.store.s.rows[row]["start"])
    assert alive(cache, row)[4:] == list(range(1190, 1200))
    assert cache.store.s.columns[0, start + 4 : start + 14].tolist() == list(range(1190, 1200))
    recount(cache)


def test_the_arena_shrinks_back_when_long_requests_have_gone():
    cache = KVCache(4000, 16, columns=("own",))
    short = [fill(cache, 50, ordinal) for ordinal in range(20)]
    long = [fill(cache, 5000, 100 + k, target=1) for k in range(6)]
    late = [fill(cache, 50, 200 + k) for k in range(20)]
    for k, row in enumerate(short + late):
        start = int(cache.store.s.rows[row]["start"])
        cache.store.s.columns[0, start : start + 50] = k + np.arange(50) / 64
    assert cache.arena.top > 30_000
    for row in long:
        cache.close(row, Kind.FINISH, 0)
        recount(cache)
    asked = int(cache.store.s.rows["cap"][short + late].sum())
    assert cache.arena.top <= max(4096, 2 * asked)
    for k, row in enumerate(short + late):
        start = int(cache.store.s.rows[row]["start"])
        assert cache.store.s.columns[0, start : start + 50].tolist() == (k + np.arange(50) / 64).tolist()


def test_trimming_gives_back_the_cells_of_an_evicted_prompt():
    cache = KVCache(1000, 16)
    row = fill(cache, 6000)
    keep_only(cache, row, range(0, 6000, 60))
    cache.trim_cells(np.array([row]))
    assert cache.store.s.rows[row]["cap"] == 100 + 25 + 64
    assert alive(cache, row) == list(range(0, 6000, 60))
    recount(cache)


@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_columns_follow_their_tokens(data: st.DataObject):
    """Every token carries a mark; whatever dies, grows, slides or is compacted, the mark stays with it."""
    cache = KVCache(6000, data.draw(st.sampled_from([1, 4, 16])), columns=("mark", "other"))
    rows: dict[int, int] = {}
    count = 0

    def cells(row: int) -> slice:
        record = cache.store.s.rows[row]
        return slice(int(record["start"]), int(record["start"] + record["live"]))

    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["open", "append", "evict", "close", "pack", "trim"]))
        if what == "open" or not rows:
            if len(rows) < 6:
                rows[cache.open(count, 1, data.draw(st.integers(1, 700)), 1000)] = count
                count += 1
        else:
            row = data.draw(st.sampled_from(sorted(rows)))
            positions = alive(cache, row)
            if what == "append":
                more = data.draw(st.integers(1, 300))
                old = len(positions)
                cache.sync_new_tokens(row, more)
                new = cells(row)
                fresh = slice(new.start + old, new.stop)
                assert not cache.store.s.columns[:, fresh].any()
                where = cache.store.s.position[fresh]
                cache.store.s.columns[0, fresh] = where + 10_000 * rows[row]
                cache.store.s.columns[1, fresh] = -where
            elif what == "evict" and len(positions) > 1:
                step = data.draw(st.integers(1, 5))
                offset = data.draw(st.integers(0, len(positions) - 1))
                victims = positions[offset:-1:step] if data.draw(st.booleans()) else positions[offset : offset + 1]
                cache.evict_tokens(row, victims)
                assert alive(cache, row) == [p for p in positions if p not in set(victims)]
            elif what == "close":
                cache.close(row, Kind.FINISH, 0)
                del rows[row]
            elif what == "pack":
                cache.pack(np.array([row]))
            elif what == "trim":
                cache.trim_cells(np.array([row]))
        for row, ordinal in rows.items():
            where = cache.store.s.position[cells(row)]
            assert cache.store.s.columns[0, cells(row)].tolist() == (where + 10_000 * ordinal).tolist()
            assert cache.store.s.columns[1, cells(row)].tolist() == (-where).tolist()
        recount(cache)
