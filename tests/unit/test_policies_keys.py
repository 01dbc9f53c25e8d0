"""Golden cases worked out by hand: policies that look at keys, values, and the last queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.errors import InputError
from sim.kv.policies import policies
from sim.kv.policies.kernels import _exp2, _log2, add_noisy_softmax, blur
from sim.rng import request_key
from sim.study.config import SimConfig
from sim.study.conformance import serve
from sim.study.run import build_engine
from tests.support.policies import Scripted
from tests.support.serving import engine, trace


def test_tova_keeps_what_the_newest_query_looks_at():
    """Budget 3. Token 5, then 6, is the newest; nothing of what the query before looked at is remembered."""
    attention = Scripted(prompt={5: [0.3, 0.05, 0.1, 0.2, 0.25, 0.1], 6: [0.05, 0.9, 0.9, 0.9, 0.5, 0.2, 0.25]})
    assert serve(policies.build("tova"), attention, 6, 1, tokens=3) == [[0, 4, 5], [4, 5, 6]]


def test_snapkv_pools_what_the_window_looks_at():
    """Queries 6 and 7 give tokens 0 to 5: 0.1, 0, 0.3, 0, 0, 0.2; three neighbours 0.1, 0.4, 0.3, 0.3, 0.2, 0.2."""
    attention = Scripted(
        prompt={
            5: [0, 0, 0, 0, 9.0, 0],
            6: [0.1, 0, 0, 0, 0, 0.2, 0.7],
            7: [0, 0, 0.3, 0, 0, 0, 0.5, 0.2],
        }
    )
    policy = policies.build("snapkv:window=2,pool=3")
    assert serve(policy, attention, 8, 0, tokens=5) == [[1, 2, 3, 6, 7]]
    assert serve(policy, attention, 8, 0, tokens=4) == [[1, 3, 6, 7]]  # the older of equals dies
    assert serve(policy, attention, 8, 0, tokens=1) == [[7]]
    assert serve(policies.build("snapkv:window=2,pool=1"), attention, 8, 0, tokens=5) == [[0, 2, 5, 6, 7]]


def test_snapkv_lets_what_is_generated_live():
    attention = Scripted(prompt={k: [0.1] * (k + 1) for k in range(6)})
    seen = serve(policies.build("snapkv:window=2"), attention, 6, 3, tokens=3)
    # In the middle there are more neighbours; of 1 and 2, the older dies.
    assert seen == [[2, 4, 5], [2, 4, 5, 6], [2, 4, 5, 6, 7], [2, 4, 5, 6, 7, 8]]


def test_keydiff_keeps_keys_that_are_unlike_the_others():
    """Budget 3, a turn at the end of the prompt and every second token: in between nothing dies."""
    attention = Scripted(like=[0.9, 0.2, 0.5, 0.7, 0.1, 0.3, 0.95, 0.4])
    seen = serve(policies.build("keydiff:every=2"), attention, 5, 3, tokens=3)
    assert seen == [[1, 2, 4], [1, 2, 4, 5], [1, 4, 6], [1, 4, 6, 7]]


def test_knorm_keeps_short_keys():
    attention = Scripted(keys=[5.0, 1.0, 3.0, 2.0, 4.0, 1.5, 9.0, 0.5])
    seen = serve(policies.build("knorm"), attention, 5, 3, tokens=3)
    # A long key is spared while it is the newest, and dies in the step after.
    assert seen == [[1, 3, 4], [1, 3, 5], [1, 5, 6], [1, 5, 7]]


def test_expected_attention_weighs_values_and_spares_sinks():
    """Expected attention times norms: 0, 0.3, 0.4, 0.5, 0.2, 0.2. Token 0 is a sink, 5 the newest."""
    attention = Scripted(hopes=[0.0, 0.3, 0.2, 0.1, 0.2, 0.2], values=[1.0, 1.0, 2.0, 5.0, 1.0, 1.0])
    policy = policies.build("expected_attention:sinks=1")
    assert serve(policy, attention, 6, 2, tokens=4) == [[0, 2, 3, 5], [0, 2, 3, 5, 6], [0, 2, 3, 5, 6, 7]]
    assert serve(policies.build("expected_attention:sinks=0"), attention, 6, 0, tokens=4) == [[1, 2, 3, 5]]


def test_paged_eviction_drops_whole_pages_when_the_newest_is_full():
    """Pages of two tokens. Values over keys by page: 4, 1, 2, 9, 3."""
    values = [4.0, 12.0, 2.0, 1.0, 2.0, 2.0, 9.0, 9.0, 3.0, 3.0]
    keys = [1.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    attention = Scripted(values=values, keys=keys)
    policy = policies.build("paged_eviction:block_size=2")
    assert serve(policy, attention, 7, 3, tokens=5) == [
        [0, 1, 4, 5, 6],
        [0, 1, 6, 7],  # one token over the budget, and the page of 6 and 7 is full
        [0, 1, 6, 7, 8],
        [6, 7, 8, 9],
    ]
    assert serve(policy, attention, 7, 3, tokens=4) == [
        [0, 1, 6],  # three over the budget: two pages
        [0, 1, 6, 7],
        [0, 1, 6, 7, 8],  # over it, but the newest page has room
        [6, 7, 8, 9],
    ]
    # The newest page stays, whatever the budget.
    assert serve(policy, attention, 7, 3, tokens=1) == [[6], [6, 7], [6, 7, 8], [8, 9]]


def test_paged_eviction_weighs_a_page_by_the_mean_of_its_tokens():
    attention = Scripted(values=[1.0, 9.0, 4.0, 4.0, 1.0, 1.0], keys=[1.0] * 6)
    assert serve(policies.build("paged_eviction:block_size=2"), attention, 6, 0, tokens=4) == [[0, 1, 4, 5]]


def test_paged_eviction_leaves_no_block_partly_dead():
    config = SimConfig(
        trace="poisson:rate=20,n=20,prompt=uniform:20:300,output=uniform:5:120",
        policy="paged_eviction",
        reclaimer="naive",
        block_size=32,
        budget=0.4,
    )
    outcome = build_engine(config, logging=True).run()
    assert outcome.summary["tokens_evicted"] > 1000
    assert outcome.summary["blocks_freed_by_death"] * 32 == outcome.summary["tokens_evicted"]


def test_keyformer_adds_a_softmax_to_what_the_prompt_gave():
    """Attention of 1 on one token has no rival whatever the noise: the sums go where it goes."""
    attention = Scripted(sums=[3.0, 0.5, 1.0, 0.2, 0.1], prompt={5: [0, 1.0, 0, 0, 0, 0], 6: [0, 1.0, 0, 0, 0, 0, 0]})
    policy = policies.build("keyformer:recent=0.5,tau_end=1,prompt_noise=0")
    # Tokens 3 and 4 are recent; then 4 and 5, and of 0 (3.0), 1 (1.5), 2 (1.0), 3 (0.2) two stay.
    assert serve(policy, attention, 5, 2, tokens=4) == [[0, 2, 3, 4], [0, 2, 4, 5], [0, 2, 5, 6]]
    attention.sums[1] = 0.95
    assert serve(policy, attention, 5, 2, tokens=5)[-1] == [0, 1, 2, 5, 6]


def noisy(p: list[float], keys: np.ndarray, tau: float = 1.0, length: int = 9) -> np.ndarray:
    """Return float32[requests, tokens]: the noisy softmax of the same attention for each request."""
    b, n = len(keys), len(p)
    start, count = np.arange(b) * n, np.full(b, n)
    total, scratch = np.zeros((2, b * n), np.float32)
    position = np.tile(np.arange(n, dtype=np.int32), b)
    attention = np.tile(np.array(p, np.float32), b)
    inverse = np.full(b, 1 / tau, np.float32)
    add_noisy_softmax(keys, start, count, np.full(b, length), position, inverse, attention, scratch, total)
    return total.reshape(b, n)


KEYS = np.array([request_key(0, k) for k in range(4000)], np.uint64)


def test_gumbel_noise_makes_the_largest_what_a_draw_from_attention_would_be():
    """The property that gives the noise its name; a chi-square of 3 degrees of freedom."""
    p = [0.5, 0.3, 0.15, 0.05]
    found = noisy(p, KEYS)
    assert found.sum(axis=1) == pytest.approx(np.ones(len(KEYS)), abs=1e-5)
    largest = np.bincount(found.argmax(axis=1), minlength=4)
    want = np.array(p) * len(KEYS)
    assert ((largest - want) ** 2 / want).sum() < 16.3  # p = 0.001


def test_temperature_is_a_power_and_flattens():
    p = [0.6, 0.3, 0.1]
    cold, warm = noisy(p, KEYS[:500]), noisy(p, KEYS[:500], tau=2.0)
    root = np.sqrt(cold)
    assert warm == pytest.approx(root / root.sum(axis=1, keepdims=True), rel=0.02, abs=1e-4)
    assert warm.max(axis=1).mean() < cold.max(axis=1).mean() - 0.05


def test_the_prompt_is_blurred_by_as_much_as_said():
    """A lognormal factor of its own for each token of each request, the same whenever the prompt is looked at."""
    n = 500
    values = np.full(4 * n, 3.0, np.float32)
    start, position = np.arange(4) * n, np.tile(np.arange(n, dtype=np.int32), 4)
    blur(KEYS[:4], start, np.full(4, n), position, 0.42, values)
    logs = np.log(values / 3)
    assert logs.mean() == pytest.approx(0, abs=0.03)
    assert logs.std() == pytest.approx(0.42, abs=0.03)
    assert len(np.unique(values)) > 500
    again = np.full(n, 3.0, np.float32)
    blur(KEYS[1:2], np.zeros(1, np.int64), np.full(1, n), position[:n], 0.42, again)
    assert again.tolist() == values[n : 2 * n].tolist()
    blur(KEYS[:1], np.zeros(1, np.int64), np.full(1, n), position[:n], 0.0, again)
    assert again == pytest.approx(values[n : 2 * n])


def test_noise_is_drawn_anew_for_each_query_and_request():
    p = [0.25] * 4
    one = noisy(p, KEYS[:50])
    assert (one == noisy(p, KEYS[:50])).all()
    assert not np.isclose(one, noisy(p, KEYS[:50], length=10)).any(axis=1).all()
    assert len({tuple(row) for row in one.tolist()}) == 50


def test_logarithms_and_powers_are_close():
    x = np.geomspace(1e-30, 1e30, 4001).astype(np.float32)
    logs = np.array([_log2(value) for value in x])
    assert np.abs(logs - 127 - np.log2(x.astype(float))).max() < 0.01
    y = np.linspace(1, 254, 4001).astype(np.float32)
    powers = np.array([_exp2(value) for value in y], float)
    assert powers / 2.0 ** (y.astype(float) - 127) == pytest.approx(1, rel=0.005)


def test_quest_reads_the_chosen_pages_and_the_extremes_of_all():
    quest: Any = policies.build("quest:dense=0")
    # 63 pages, of which 6 are read; 3 pages of 16 are all there is, and to look at extremes as well would be more.
    assert quest.reads(np.array([1000, 40]), np.array([100, 1])).tolist() == [6 * 16 + 63, 40]
    assert quest.reads(np.array([1000]), np.array([1])).tolist() == [3 * 16 + 63]
    assert policies.build("quest").reads(np.array([1000]), np.array([100])).tolist() == [212]  # 2 of 32 layers read all


def test_quest_makes_decode_steps_read_less_and_keeps_everything():
    """Two requests; the step cost is told how many slots attention reads."""
    told = []

    class Told:
        name = "told"

        def step_ns(self, tokens: int, _seqs: int, kv_read: int, pairs: int) -> tuple[int, int]:
            told.append((tokens, kv_read, pairs))
            return 1_000_000, 1_000_000

    requests = trace((0, 200, 3), (0, 100, 3))
    for policy in ("full", "quest:dense=0"):
        served = engine(requests, policy=policy, reclaimer="none", budget=0.25)
        served.step_cost = Told()
        assert served.run().summary["tokens_evicted"] == 0
    full, quest = told[: len(told) // 2], told[len(told) // 2 :]
    assert full[0] == quest[0], "prefill reads everything"
    assert [row[1] for row in full[1:]] == [201 + 101, 202 + 102]
    # Budgets of 50 and 25 tokens: 3 pages each (of 13 and 7).
    assert [row[1] for row in quest[1:]] == [48 + 13 + 48 + 7] * 2
    assert [row[2] for row in quest[1:]] == [48 + 13 + 48 + 7] * 2


def test_a_policy_that_needs_no_attention_pays_for_none():
    """Norms and cosines of keys are at hand; only probabilities have to be computed once more."""

    def makespan(policy: str, score_reads: float) -> float:
        config = SimConfig(
            trace="poisson:rate=20,n=5,prompt=300,output=40", policy=policy, reclaimer="naive", score_reads=score_reads
        )
        return float(build_engine(config).run().summary["makespan_s"])

    for policy in ("knorm", "keydiff", "snapkv", "expected_attention", "paged_eviction"):
        assert makespan(policy, 0) == makespan(policy, 5)
    for policy in ("tova", "keyformer"):
        assert makespan(policy, 0) < makespan(policy, 5)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("snapkv:window=0", "window >= 1"),
        ("snapkv:pool=4", "odd pool"),
        ("keydiff:every=0", "at least 1 token"),
        ("expected_attention:sinks=-1", "0 or more"),
        ("keyformer:recent=0", r"share in \(0, 1\]"),
        ("keyformer:tau_init=3", "tau_init <= tau_end"),
        ("keyformer:tau_init=0.1", "0.25 <= tau_init"),
        ("keyformer:prompt_noise=-1", r"spread in \[0, 3\]"),
        ("paged_eviction:block_size=0", "at least 1 token"),
        ("quest:page=0", "page >= 1"),
        ("quest:dense=1.5", r"dense in \[0, 1\]"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(spec: str, says: str):
    with pytest.raises(InputError, match=says):
        policies.build(spec)


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        ("keydiff", "cosines of keys"),
        ("knorm", "norms of keys"),
        ("paged_eviction", "norms of keys and norms of values"),
        ("expected_attention", "statistics of queries and norms of values"),
    ],
)
def test_attention_that_knows_no_keys_is_refused(policy: str, what: str, tmp_path: Any):
    path = tmp_path / "capture.npz"
    np.savez(path, P=2, G=1, attn_u8=np.full((1, 3), 200, np.uint8), prefill_score_global=np.ones(2))
    with pytest.raises(InputError, match=f"policy '{policy}' needs {what}, which attention 'recorded' does not have"):
        build_engine(SimConfig(policy=policy, attention=f"recorded:{path}"))


def test_the_page_is_a_block_unless_said_otherwise():
    """``build_engine`` passes the block size on; a parameter wins."""
    for spec, size, want in (("paged_eviction", 32, 32), ("paged_eviction:block_size=8", 32, 8)):
        served = build_engine(SimConfig(policy=spec, block_size=size))
        assert served._policy.granule == want
