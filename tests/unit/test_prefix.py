import numpy as np

from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.prefix import PrefixCache, chain
from tests.support.serving import MS, engine, fill, trace


def identities(until: int, *, prompt: int, hashes: list[int], owner: int, size: int = 16, span: int = 32) -> list[int]:
    none = np.zeros(0, np.int64)
    known = chain(none, until, block_size=size, prompt_tokens=prompt, hashes=hashes, hash_tokens=span, owner=owner)
    return known.tolist()


def test_equal_ids_after_equal_prefixes_are_equal_blocks():
    first = identities(8, prompt=128, hashes=[1, 2, 3, 4], owner=0)
    second = identities(8, prompt=128, hashes=[1, 2, 9, 4], owner=1)
    assert first[:4] == second[:4]
    # From the first difference on nothing is equal, equal ids or not.
    assert not set(first[4:]) & set(second[4:])
    assert len(set(first)) == 8


def test_a_chain_extends_what_is_known():
    known = np.array(identities(3, prompt=128, hashes=[1, 2, 3, 4], owner=0))
    more = chain(known, 8, block_size=16, prompt_tokens=128, hashes=[1, 2, 3, 4], hash_tokens=32, owner=0)
    assert more.tolist() == identities(8, prompt=128, hashes=[1, 2, 3, 4], owner=0)


def test_ids_that_python_hashes_alike_are_told_apart():
    """hash(-1) == hash(-2), and hash(n) == hash(n + 2**61 - 1)."""
    chains = [identities(2, prompt=32, hashes=[one], owner=0) for one in (-1, -2, 5, 5 + (1 << 61) - 1)]
    assert len({block for known in chains for block in known}) == 8


def test_a_prompt_without_ids_shares_with_nobody_but_itself():
    assert identities(4, prompt=64, hashes=[], owner=5) == identities(4, prompt=64, hashes=[], owner=5)
    assert not set(identities(4, prompt=64, hashes=[], owner=5)) & set(identities(4, prompt=64, hashes=[], owner=6))
    # An id is a number like an owner's: they are told apart all the same.
    assert not set(identities(4, prompt=64, hashes=[], owner=5)) & set(identities(4, prompt=64, hashes=[5, 5], owner=6))


def test_tokens_behind_the_last_id_are_shared_with_nobody():
    """Two ids for 64 of 128 tokens: the blocks behind them, and those of the output, are each request's own."""
    first = identities(10, prompt=128, hashes=[1, 2], owner=0)
    second = identities(10, prompt=128, hashes=[1, 2], owner=1)
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second[4:])
    assert first == identities(10, prompt=128, hashes=[1, 2], owner=0)


def test_the_block_in_which_a_prompt_ends_is_another_than_the_full_one():
    longer = identities(3, prompt=48, hashes=[1, 2], owner=0)
    shorter = identities(3, prompt=40, hashes=[1, 2], owner=1)
    assert longer[:2] == shorter[:2]
    assert longer[2] != shorter[2]


def test_generated_tokens_are_all_the_same():
    """Two requests with the same prompt may share blocks of their output too."""
    assert identities(5, prompt=40, hashes=[1, 2], owner=0) == identities(5, prompt=40, hashes=[1, 2], owner=1)


def test_the_longest_known_prefix_is_found_and_the_one_published_first():
    cache = KVCache(20, 16, tracked=False)
    prefix = PrefixCache(cache.store)
    fill(cache, 160)
    prefix.publish([3, 7, 4], [100, 100, 200])
    assert prefix.find([100, 200, 300]) == [3, 4]
    assert prefix.find([200]) == [4]
    assert prefix.find([300, 100]) == []


def test_a_block_that_is_taken_for_something_else_is_forgotten_and_the_other_found():
    cache = KVCache(4, 16, tracked=False)
    prefix = PrefixCache(cache.store)
    row = fill(cache, 48)
    for block, identity in ((1, 100), (2, 100), (3, 200)):
        prefix.publish([block], [identity])
    cache.close(row, Kind.FINISH, 0)
    assert cache.pool.free_order() == [3, 2, 1]
    fill(cache, 32)  # takes 3 and 2
    prefix.forget_taken()
    assert prefix.find([100]) == [1]
    assert prefix.find([200]) == []
    fill(cache, 16)
    prefix.forget_taken()
    assert prefix.find([100]) == []


def test_a_second_request_computes_only_what_is_new():
    """One at a time; 160 tokens in 10 blocks; the prompt's last token is computed again, so 9 blocks are found."""
    requests = trace((0, 160, 3), (100 * MS, 160, 3), (200 * MS, 160, 3), hashes=[list(range(10))] * 2 + [[7] * 10])
    run = engine(requests, prefix_caching=True, step="linear:base_s=0.001,per_token_s=0.000001", logging=True)
    outcome = run.run()
    assert outcome.requests["cached_tokens"].tolist() == [0, 144, 0]
    # 1 ms + 1 us a token: the hit saves 144 us of the first step.
    assert [round(ttft * 1e9) for ttft in outcome.requests["ttft_s"]] == [1_160_000, 1_016_000, 1_160_000]


def test_running_requests_share_blocks_and_the_pool_sees_each_once():
    requests = trace((0, 64, 40), (5 * MS, 64, 40), hashes=[[1, 2, 3, 4]] * 2)
    seen = []

    class Look:
        def scheduled(self, engine):
            if engine.scheduler.num_running == 2:
                rows = engine.scheduler.running[:2].tolist()
                seen.append([engine.cache.block_table(row) for row in rows])
                assert engine.cache.pool.used_blocks == len({b for table in seen[-1] for b in table})

        def applied(self, engine, finished):
            pass

    engine(requests, prefix_caching=True, observer=Look()).run()
    first, second = seen[0]
    assert first[:3] == second[:3]
    assert not set(first[3:]) & set(second[3:])
