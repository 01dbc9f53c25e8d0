import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.state import H
from tests.support.serving import fill, recount, same_state


def close(cache: KVCache, row: int) -> None:
    cache.close(row, Kind.FINISH, 0)


def mark_cached(cache: KVCache, *blocks: int) -> None:
    cache.store.s.blocks["cached"][list(blocks)] = 1


def test_a_new_pool_hands_out_every_block_but_0_in_order():
    cache = KVCache(6, 16, tracked=False)
    assert cache.pool.free_order() == [1, 2, 3, 4, 5]
    assert (cache.pool.usable_blocks, cache.pool.free_blocks, cache.pool.used_blocks) == (5, 5, 0)
    assert cache.block_table(fill(cache, 40)) == [1, 2, 3]
    assert cache.pool.free_order() == [4, 5]


def test_the_last_block_of_a_request_comes_out_first():
    cache = KVCache(8, 16, tracked=False)
    first, second = fill(cache, 48), fill(cache, 16)
    close(cache, first)
    assert cache.pool.free_order() == [3, 2, 1, 5, 6, 7]
    close(cache, second)
    assert cache.pool.free_order() == [4, 3, 2, 1, 5, 6, 7]
    recount(cache)


def test_cached_blocks_go_to_the_back_and_the_first_of_a_chain_last():
    cache = KVCache(8, 16, tracked=False)
    row = fill(cache, 64)
    mark_cached(cache, 1, 2, 3)
    close(cache, row)
    assert cache.pool.free_order() == [4, 5, 6, 7, 3, 2, 1]


def test_uncached_blocks_between_cached_ones_go_to_the_front_together():
    cache = KVCache(8, 16, tracked=False)
    row = fill(cache, 80)
    mark_cached(cache, 1, 3)
    close(cache, row)
    assert cache.pool.free_order() == [5, 4, 2, 6, 7, 3, 1]


def test_a_hit_takes_a_free_block_out_of_the_middle():
    cache = KVCache(8, 16, tracked=False)
    row = fill(cache, 64)
    mark_cached(cache, 1, 2, 3)
    close(cache, row)
    again = cache.open(1, 1, 100, 10)
    cache.share_blocks(again, [1, 2])
    assert cache.block_table(again) == [1, 2]
    assert cache.pool.free_order() == [4, 5, 6, 7, 3]
    record = cache.store.s.rows[again]
    assert (record["written"], record["live"], record["computed"]) == (32, 32, 32)
    recount(cache)


def test_a_shared_block_is_free_when_its_last_user_leaves():
    cache = KVCache(8, 16, tracked=False)
    first = fill(cache, 32)
    mark_cached(cache, 1, 2)
    second = cache.open(1, 1, 100, 10)
    cache.share_blocks(second, [1, 2])
    assert cache.store.s.header[H.IN_TABLES] == 2
    recount(cache)
    close(cache, first)
    assert cache.pool.free_order() == [3, 4, 5, 6, 7]
    recount(cache)
    close(cache, second)
    assert cache.pool.free_order() == [3, 4, 5, 6, 7, 2, 1]
    recount(cache)


def test_taking_a_cached_block_is_told_and_forgets_its_contents():
    cache = KVCache(3, 16, tracked=False)
    row = fill(cache, 16)
    mark_cached(cache, 1)
    close(cache, row)
    assert cache.pool.free_order() == [2, 1]
    fill(cache, 32)
    s = cache.store.s
    assert s.dropped[: s.header[H.DROPPED]].tolist() == [1]
    assert s.blocks["cached"].sum() == 0


def test_headroom_is_not_for_requests():
    cache = KVCache(8, 16, headroom_blocks=3)
    assert (cache.pool.free_blocks, cache.pool.available_blocks) == (7, 4)
    row = fill(cache, 64)
    before = same_state(cache)
    with pytest.raises(InputError, match="17 tokens need 2 blocks: the pool has 0 to give"):
        cache.sync_new_tokens(row, 17)
    assert same_state(cache) == before


@pytest.mark.parametrize(
    ("blocks", "size", "headroom", "message"),
    [
        (1, 16, 0, "KV blocks"),
        (8, 0, 0, "block size"),
        (8, 16, 7, "headroom"),
        (8, 16, -1, "headroom"),
        (1 << 27, 16, 0, "slots in all"),
        (8, 1 << 28, 0, "slots in all"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(blocks: int, size: int, headroom: int, message: str):
    with pytest.raises(InputError, match=message):
        KVCache(blocks, size, headroom_blocks=headroom)


@settings(max_examples=80, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sets(st.integers(0, 5))), max_size=30))
def test_the_free_list_is_a_plain_list(steps: list[tuple[bool, int, set[int]]]):
    """Requests of 0 to 5 blocks come and go; some of their blocks are cached when they go."""
    cache = KVCache(20, 4, tracked=False)
    order = list(range(1, 20))
    running: list[tuple[int, list[int]]] = []
    for come, number, cached in steps:
        if come and number <= len(order):
            row = cache.open(0, 0, 4 * number, 1)
            cache.sync_new_tokens(row, 4 * number)
            table, order = order[:number], order[number:]
            running.append((row, table))
            assert cache.block_table(row) == table
        elif running:
            row, table = running.pop(number % len(running))
            known = [block for k, block in enumerate(table) if k in cached]
            mark_cached(cache, *known)
            close(cache, row)
            order = [b for b in reversed(table) if b not in known] + order + [b for b in reversed(table) if b in known]
        assert cache.pool.free_order() == order
        cache.store.s.header[H.DROPPED] = 0
    recount(cache)
