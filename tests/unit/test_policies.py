"""Golden cases worked out by hand: policies that look at positions and attention."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.policies import policies
from sim.kv.policies.kernels import quantile
from sim.rng import request_key
from sim.serving.attention import build_attention
from sim.study.conformance import serve
from tests.support.policies import Scripted
from tests.support.serving import alive, fill


def test_streaming_llm_keeps_sinks_and_window():
    policy = policies.build("streaming_llm:sinks=2")
    assert serve(policy, None, 10, 3, tokens=6) == [
        [0, 1, 6, 7, 8, 9],
        [0, 1, 7, 8, 9, 10],
        [0, 1, 8, 9, 10, 11],
        [0, 1, 9, 10, 11, 12],
    ]


def test_streaming_llm_with_a_budget_below_its_sinks_keeps_fewer_sinks():
    policy = policies.build("streaming_llm:sinks=4")
    assert serve(policy, None, 10, 1, tokens=3) == [[0, 1, 9], [0, 1, 10]]
    assert serve(policy, None, 10, 1, tokens=1) == [[9], [10]]


def test_streaming_llm_without_sinks_is_a_window():
    assert serve(policies.build("streaming_llm:sinks=0"), None, 6, 1, tokens=2) == [[4, 5], [5, 6]]


def test_streaming_llm_of_a_whole_batch_is_that_of_each_request():
    policy = policies.build("streaming_llm:sinks=1")
    cache = KVCache(100, 4)
    rows = np.array([fill(cache, n, n) for n in (5, 9, 3)])
    cache.store.s.rows["length"][rows] += 1
    view = cache.view(rows, tokens=2)
    victims, counts = policy.select(view, view.n - view.keep)
    cache.evict_cells(rows, victims, counts)
    assert [alive(cache, row) for row in rows.tolist()] == [[0, 4], [0, 8], [0, 2]]


def test_h2o_keeps_the_newest_and_the_heaviest():
    """Budget 4, half of it recent: of the rest the two that have gathered most."""
    sums = [3.0, 0.1, 0.9, 0.2, 2.0, 0.3]
    attention = Scripted(sums=sums, prompt={
        6: [0.1, 0.0, 0.0, 0.0, 0.1, 0.0, 0.8],
        7: [0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.5],
        8: [0.0, 0.0, 0.0, 0.0, 0.0, 2.5, 0.0, 0.0, 0.0],
    })  # fmt: skip
    assert serve(policies.build("h2o"), attention, 6, 3, tokens=4) == [
        [0, 2, 4, 5],
        [0, 4, 5, 6],
        # Token 5 leaves the recent ones with 0.3 + 0.5, less than 0 (3.1) and 4 (2.1).
        [0, 4, 6, 7],
        # Token 6 goes with 0.8: what 5 would have got does not bring it back.
        [0, 4, 7, 8],
    ]


def test_h2o_with_one_token_keeps_the_newest():
    attention = Scripted(sums=[5.0, 1.0, 0.0], prompt={3: [1.0, 0.0, 0.0, 0.0]})
    assert serve(policies.build("h2o"), attention, 3, 1, tokens=1) == [[2], [3]]


def test_h2o_drops_the_oldest_of_equals():
    attention = Scripted(sums=[1.0] * 8)
    assert serve(policies.build("h2o:recent=0.25"), attention, 8, 0, tokens=4) == [[4, 5, 6, 7]]


def test_h2o_does_not_freeze():
    """Without protected recent tokens, each new one would be the minimum and die at once (trap 23)."""
    seen = serve(policies.build("h2o"), build_attention("uniform"), 20, 60, tokens=10)
    assert all(set(range(20 + k - 5, 20 + k)) <= set(now) for k, now in enumerate(seen))


def test_r_kv_weighs_attention_against_likeness():
    """Six prompt tokens, two generated, a window of one query (the one at 7) and one token, no pooling.

    Importance of tokens 0 to 6, relative to a mean of 1/8: 0.1, 0.3, 0.1, 0.2, 0.1, 0.1, 0.1 times 8. With lam 1 that
    alone counts, with 0 likeness alone, and with 0.1 token 1 pays for being like the others, token 3 does not.
    """
    prompt = {6: [1.0, 0, 0, 0, 0, 0, 0], 7: [0.1, 0.3, 0.1, 0.2, 0.1, 0.1, 0.1, 0.0]}
    attention = Scripted(prompt=prompt, like=[0.2, 0.9, 0.3, 0.6, 0.5, 0.1, 0.4, 0.0])

    def left(lam: str) -> list[list[int]]:
        return serve(policies.build(f"r_kv:buffer=2,window=1,pool=1,lam={lam}"), attention, 6, 2, tokens=4)

    before = [list(range(6)), list(range(7))]
    assert left("1") == [*before, [1, 3, 6, 7]]  # the oldest of the equals die
    assert left("0") == [*before, [0, 2, 5, 7]]
    # 0.1 * 8 * importance - 0.9 * likeness: -0.10, -0.57, -0.19, -0.38, -0.37, -0.01, -0.28.
    assert left("0.1") == [*before, [0, 2, 5, 7]]
    # 0.5: 0.3, 0.75, 0.25, 0.5, 0.15, 0.35, 0.2.
    assert left("0.5") == [*before, [1, 3, 5, 7]]


def test_r_kv_asks_the_queries_of_its_window_and_pools_over_neighbours():
    """Queries 8 and 9 are asked, 7 is not; of pooled importance a neighbour gets as much as the token itself."""
    prompt = {
        6: [0.0, 0, 0, 0, 0, 0, 1],
        7: [0.0, 0, 0, 0, 0, 1, 0, 0],
        8: [0.5, 0, 0, 0, 0, 0, 0, 0, 0.5],
        9: [0.0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0.5],
    }
    attention = Scripted(prompt=prompt, like=[0.0] * 10)
    narrow = policies.build("r_kv:buffer=4,window=2,pool=1")
    assert serve(narrow, attention, 6, 4, tokens=4)[-1] == [0, 3, 8, 9]
    wide = policies.build("r_kv:buffer=4,window=2,pool=3")
    assert serve(wide, attention, 6, 4, tokens=6)[-1] == [1, 2, 3, 4, 8, 9]
    assert serve(wide, attention, 6, 4, tokens=5)[-1] == [2, 3, 4, 8, 9]  # the oldest of the equals die


def test_r_kv_lives_between_its_budget_and_a_buffer_more():
    """As in R-KV: nothing dies at the end of the prompt, nor while a request is less than a buffer over its budget."""
    policy = policies.build("r_kv:buffer=8,window=2")
    held = [len(now) for now in serve(policy, build_attention("synthetic"), 30, 40, tokens=16)]
    assert held == [*range(30, 38), *[16, 17, 18, 19, 20, 21, 22, 23] * 4, 16]
    held = [len(now) for now in serve(policy, build_attention("synthetic"), 10, 30, tokens=16)]
    assert held == [*range(10, 26), *range(16, 24), *range(16, 23)]


@pytest.mark.parametrize("parameters", ["window=0", "buffer=4", "lam=1.1", "lam=-1", "pool=2", "pool=0"])
def test_r_kv_refuses_parameters_that_mean_nothing(parameters: str):
    with pytest.raises(InputError, match="r_kv"):
        policies.build(f"r_kv:{parameters}")


@pytest.mark.parametrize("recent", ["0", "1.5", "-1"])
def test_h2o_refuses_a_share_that_is_none(recent: str):
    with pytest.raises(InputError, match=r"expected a share in \(0, 1\]"):
        policies.build(f"h2o:recent={recent}")


def test_scissorhands_counts_the_votes_of_the_prompt():
    """Above the mean votes (threshold 0). Votes: 0 gets 4, 1 gets 1, 2 gets 2, 3 gets 0; 4 is recent."""
    attention = Scripted(prompt={
        0: [1.0],
        1: [0.7, 0.3],
        2: [0.2, 0.4, 0.4],
        3: [0.4, 0.1, 0.4, 0.1],
        4: [0.6, 0.1, 0.1, 0.1, 0.1],
    })  # fmt: skip
    policy = policies.build("scissorhands:threshold=0,recent=1,history=100")
    assert serve(policy, attention, 5, 0, tokens=4) == [[0, 1, 2, 4]]
    assert serve(policy, attention, 5, 0, tokens=3) == [[0, 2, 4]]
    assert serve(policy, attention, 5, 0, tokens=2) == [[0, 4]]


def test_scissorhands_forgets_votes_older_than_its_history():
    """With a ring of two queries only those at 3 and 4 count: 0 and 2 got their votes there, 1 got none."""
    attention = Scripted(prompt={
        3: [0.1, 0.1, 0.5, 0.3],
        4: [0.3, 0.0, 0.3, 0.1, 0.3],
        5: [0.0, 0.0, 0.6, 0.1, 0.1, 0.2],
        6: [0.0, 0.0, 0.9, 0.0, 0.0, 0.1, 0.0],
    })  # fmt: skip
    policy = policies.build("scissorhands:threshold=0,recent=1,history=2")
    # Queries 3, 4: votes 0:1, 1:0, 2:2, 3:1. Dead: 1.
    # Query 5 takes the place of query 3: 0:1, 2:2, 3:0, 4:1. Dead: 3.
    # Query 6 takes the place of query 4: 0:0, 2:2, 4:0, 5:1 (0.2 was above the mean). Dead: 0, the oldest of equals.
    assert serve(policy, attention, 5, 2, tokens=4) == [[0, 2, 3, 4], [0, 2, 4, 5], [2, 4, 5, 6]]


def test_scissorhands_votes_above_the_quantile_of_each_query():
    """Ten tokens, quantile 0.9: rank int(0.9 * 9) = 8 is the second largest, so one vote a query."""
    query = [0.01, 0.3, 0.02, 0.05, 0.03, 0.04, 0.25, 0.1, 0.15, 0.05]
    policy = policies.build("scissorhands:recent=1,history=1")
    assert serve(policy, Scripted(prompt={9: query}), 10, 0, tokens=2) == [[1, 9]]


def test_scissorhands_drops_in_batches_and_never_the_recent():
    policy = policies.build("scissorhands:drop=3,recent=2,history=1,threshold=0")
    attention = Scripted(prompt={k: [1.0 / (k + 1)] * (k + 1) for k in range(20)})
    # Nobody is above the mean: the oldest die, three at a time, whenever there are more than six.
    assert serve(policy, attention, 7, 4, tokens=6) == [
        [3, 4, 5, 6],
        [3, 4, 5, 6, 7],
        [3, 4, 5, 6, 7, 8],
        [6, 7, 8, 9],
        [6, 7, 8, 9, 10],
    ]
    greedy = policies.build("scissorhands:drop=100,recent=2,history=1,threshold=0")
    assert serve(greedy, attention, 7, 0, tokens=6) == [[5, 6]]


def test_scissorhands_keeps_a_bit_for_each_vote():
    """40 queries in a ring of 33, over more than one word: the votes are those of the last 33 queries."""
    rng = np.random.default_rng(5)
    prompt = {k: rng.dirichlet(np.ones(k + 1)).tolist() for k in range(60)}
    policy = policies.build("scissorhands:history=33,recent=1,threshold=0.5")
    got = serve(policy, Scripted(prompt=prompt), 40, 19, tokens=12)
    votes = np.zeros((60, 60), bool)
    for query, p in prompt.items():
        single = np.array(p, np.float32)
        votes[query, : query + 1] = single > np.sort(single)[int(0.5 * query)]
    living = list(range(40))
    for step, now in enumerate(got):
        length = 40 + step
        if step:
            living.append(length - 1)
            # A query votes among those alive when it is asked.
            p = np.array(prompt[length - 1], np.float32)[living]
            votes[length - 1] = False
            votes[length - 1, living] = p > np.sort(p)[int(0.5 * (len(p) - 1))]
        count = votes[max(0, length - 33) : length].sum(axis=0)
        while len(living) > 12:
            living.remove(min(living[:-1], key=lambda token: (count[token], token)))
        assert now == living, f"step {step}"


@pytest.mark.parametrize("parameters", ["history=0", "recent=-1", "drop=0", "threshold=1", "threshold=-0.1"])
def test_scissorhands_refuses_parameters_that_mean_nothing(parameters: str):
    with pytest.raises(InputError, match="scissorhands"):
        policies.build(f"scissorhands:{parameters}")


def test_quantiles_are_those_of_a_sort():
    rng = np.random.default_rng(1)
    for n in (1, 2, 3, 10, 257, 5000):
        values = (rng.random(n) ** 8 * (rng.random(n) > 0.2)).astype(np.float32)
        for rank in {0, n // 3, n // 2, n - 1}:
            assert quantile(values, rank) == np.sort(values)[rank]


def test_random_is_uniform_over_all_but_the_newest():
    """Which of 7 tokens dies first, over 4,000 requests: a chi-square of 5 degrees of freedom."""
    cache = KVCache(4100, 16)
    rows = np.array([cache.open(k, request_key(0, k), 7, 10) for k in range(4000)])
    for row in rows.tolist():
        cache.sync_new_tokens(row, 7)
    view = cache.view(rows, tokens=6)
    victims, _ = policies.build("random").select(view, np.ones(4000, np.int64))
    dead = np.bincount(cache.store.s.position[victims], minlength=7)
    assert dead[6] == 0
    assert ((dead[:6] - 4000 / 6) ** 2 / (4000 / 6)).sum() < 20.5  # p = 0.001


def test_random_draws_anew_at_each_length_or_once_for_all():
    anew = serve(policies.build("random"), None, 40, 30, tokens=10)
    once = serve(policies.build("random:redraw=false"), None, 40, 30, tokens=10)
    assert anew != once
    # One draw a token: who is worth less than a victim was never outlives it, so the least of the living only rises.
    cache = KVCache(100, 4)
    row = fill(cache, 71)
    score = policies.build("random:redraw=false").score(cache.view(np.array([row])))
    start = int(cache.store.s.rows[row]["start"])
    worth = score[start : start + 71]
    for before, after in itertools.pairwise(once):
        (dead,) = set(before) - set(after)
        assert worth[dead] <= min(worth[token] for token in after[:-2])
