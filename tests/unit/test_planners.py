"""Which blocks to empty: against the bounds, and the bounds against trying everything."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import InputError
from sim.kv.bound import fewest_copies
from sim.kv.cache import KVCache
from sim.kv.policies import policies
from sim.kv.reclaim import Pressure, reclaimers
from sim.kv.scatter import most_to_win, share_out, steps_of
from sim.kv.window import find_window
from tests.support.serving import MS, engine, fill, keep_only, recount, trace
from tests.unit.test_reclaim import thin

CALM = Pressure(running=0, wanted_blocks=0)
BLOCKS = st.lists(st.integers(1, 4), min_size=1, max_size=9)


def request(cache: KVCache, live: Sequence[int], ordinal: int = 0) -> int:
    """Make a request whose full blocks have these numbers of live tokens, and a tail of one."""
    size = cache.block_size
    row = fill(cache, len(live) * size + 1, ordinal)
    keep_only(cache, row, [k * size + i for k, n in enumerate(live) for i in range(n)] + [len(live) * size])
    cache.store.s.rows["decode_from"][row] = 1
    return row


def by_trying(live: Sequence[int], size: int, bound: str) -> dict[int, int]:
    """Try every set of blocks to empty; return the fewest copies for each number of blocks won."""
    best: dict[int, int] = {}
    for emptied in itertools.product([False, True], repeat=len(live)):
        tokens = [n for n, out in zip(live, emptied, strict=True) if out]
        if bound == "any":
            won, room = len(tokens), sum(size - n for n, out in zip(live, emptied, strict=True) if not out)
            if sum(tokens) > room:
                continue
        elif bound == "fresh":
            won = len(tokens) - -(-sum(tokens) // size)
        else:
            runs = [list(run) for out, run in itertools.groupby(range(len(live)), key=lambda i: emptied[i]) if out]
            won = sum(len(run) - -(-sum(live[i] for i in run) // size) for run in runs)
        for less in range(1, won + 1):  # who can win more can win less
            best[less] = min(best.get(less, 10**9), sum(tokens))
    return best


@settings(max_examples=150, derandomize=True)
@given(BLOCKS, st.sampled_from(["any", "fresh", "ordered"]))
def test_the_bounds_are_what_trying_everything_finds(live: list[int], bound: str):
    copies = fewest_copies(live, 4, bound)  # type: ignore[arg-type]
    assert copies[0] == 0
    assert dict(enumerate(copies[1:], 1)) == by_trying(live, 4, bound)


@settings(max_examples=150, derandomize=True)
@given(BLOCKS)
def test_no_freedom_costs_copies(live: list[int]):
    """What may go anywhere is no dearer than what goes into fresh blocks, and that no dearer than what keeps order."""
    free, fresh, ordered = (fewest_copies(live, 4, bound) for bound in ("any", "fresh", "ordered"))
    assert len(free) >= len(fresh) >= len(ordered)
    assert all(a <= b for a, b in zip(free, fresh, strict=False))
    assert all(a <= b for a, b in zip(fresh, ordered, strict=False))


@settings(max_examples=150, derandomize=True)
@given(BLOCKS, st.booleans())
def test_scattered_and_fill_are_optimal(live: list[int], fills: bool):
    cache = KVCache(60, 4)
    row = request(cache, live)
    gain, tokens, sources = np.empty((3, 12), np.int64)
    steps = steps_of(cache.store.s, row, fills, gain, tokens, sources)
    bound = fewest_copies(live, 4, "any" if fills else "fresh")
    assert dict(zip(gain[:steps].tolist(), tokens[:steps].tolist(), strict=True)) == dict(enumerate(bound[1:], 1))
    out = np.zeros(1, np.int64)
    assert most_to_win(cache.store.s, np.array([row]), out) == out[0] == len(bound) - 1
    for won in range(1, len(bound)):
        plan = cache.plan_fill(row, most_gain=won) if fills else cache.plan_scattered(row, 50, most_gain=won)
        assert plan is not None
        assert (plan.gain, plan.tokens) == (won, bound[won])
        cache.cancel(plan)
        cache.store.s.rows["plan"][row] = -1  # as if it had never been
        for block in plan.held:
            cache.store.s.blocks["busy"][block] = 0


@settings(max_examples=150, derandomize=True)
@given(BLOCKS, st.integers(1, 9))
def test_a_window_wins_as_much_as_order_allows_with_one_run(live: list[int], most: int):
    """It never beats the bound; where all destinations are to be had it wins as many blocks as any order can."""
    cache = KVCache(60, 4)
    row = request(cache, live)
    first, last = find_window(cache.store.s, row, most)
    bound = fewest_copies(live, 4, "ordered")
    tokens = sum(live[first:last])
    won = last - first - -(-tokens // 4)
    if last > first:
        assert tokens >= bound[won]
    if most == 9:
        assert won == len(bound) - 1


@settings(max_examples=100, derandomize=True)
@given(st.lists(BLOCKS, min_size=1, max_size=3), st.integers(1, 8), st.integers(0, 40))
def test_holes_are_shared_out_as_cheaply_as_can_be(requests: list[list[int]], wanted: int, most_tokens: int):
    """Over several requests: no other way to win as much copies less, and no other way with as much wins more."""
    cache = KVCache(100, 4)
    rows = np.array([request(cache, live, k) for k, live in enumerate(requests)])
    gain = np.empty(len(rows), np.int64)
    share_out(cache.store.s, rows, True, wanted, most_tokens, gain)
    bounds = [fewest_copies(live, 4, "any") for live in requests]
    copied = sum(bound[g] for bound, g in zip(bounds, gain.tolist(), strict=True))
    ways = [
        (sum(way), sum(bound[g] for bound, g in zip(bounds, way, strict=True)))
        for way in itertools.product(*(range(len(bound)) for bound in bounds))
    ]
    assert copied <= most_tokens
    assert all(cost >= copied for won, cost in ways if won == gain.sum())
    affordable = max(won for won, cost in ways if cost <= most_tokens)
    assert gain.sum() == min(wanted, affordable)


def test_gain_takes_the_cheapest_blocks_of_all_requests_and_no_more_than_are_wanted():
    """Two requests of ten blocks with 3 and 1 live tokens of 4: four are wanted, the thinner one has them."""
    for layout, moved in (("fill", 4), ("scattered", 6), ("ordered", 10)):
        cache, rows = thin(3, 1, blocks=33, headroom=10)
        assert cache.pool.available_blocks == 0
        spec = f"vtoken:layout={layout},plan=gain,low_watermark=0.0625,theta_f=0.1"
        plans = reclaimers.build(spec).after_step(cache, rows, CALM, False)
        assert [plan.ordinal for plan in plans] == [1]
        assert sum(plan.tokens for plan in plans) == moved, layout
        recount(cache)


def test_most_takes_all_of_one_request_first():
    cache, rows = thin(3, 1, blocks=33, headroom=10)
    plans = reclaimers.build("vtoken:layout=fill,low_watermark=0.0625,theta_f=0.1").after_step(cache, rows, CALM, False)
    assert [(plan.ordinal, plan.gain, plan.tokens) for plan in plans] == [(1, 7, 7)]


@pytest.mark.parametrize("layout", ["ordered", "scattered", "fill"])
def test_a_budget_bounds_the_tokens_of_a_launch(layout: str):
    """A tenth of a step whose time is worth 120 tokens: 12."""
    cache, rows = thin(1, 1, 1, 1, blocks=100, headroom=20)
    spec = f"vtoken:repack_when=always,layout={layout},copy_budget=0.1"
    plans = reclaimers.build(spec).after_step(cache, rows, CALM._replace(step_tokens=120.0), False)
    assert 8 <= sum(plan.tokens for plan in plans) <= 12
    unlimited = reclaimers.build(f"vtoken:repack_when=always,layout={layout}").after_step(cache, rows, CALM, False)
    assert sum(plan.tokens for plan in unlimited) > 12


@pytest.mark.parametrize("layout", ["ordered", "scattered", "fill"])
def test_no_step_is_slowed_by_more_than_the_budget(layout: str):
    """Steps of 10 ms bound by memory, copies of 10 us a token at half of it: 20 tokens make it 1 % longer."""

    class Ends:
        def __init__(self) -> None:
            self.at = [0]

        def scheduled(self, run: object) -> None:
            pass

        def applied(self, run: object, finished: int) -> None:  # noqa: ARG002
            self.at.append(run.now_ns)  # type: ignore[attr-defined]

    longest, moved = {}, {}
    for budget in ("0.05", "0"):
        ends = Ends()
        run = engine(
            trace(*[(0, 200, 60)] * 6),
            policy="random",
            budget=0.4,
            reclaimer=f"vtoken:repack_when=always,layout={layout},copy_budget={budget}",
            blocks=500,
            headroom=40,
            step="linear:base_s=0.01,per_token_s=0",
            copy="linear:per_token_s=1e-5",
            observer=ends,
        )
        moved[budget] = run.run().summary["tokens_moved"]
        longest[budget] = max(b - a for a, b in itertools.pairwise(ends.at))
    assert longest["0.05"] <= 10.5 * MS + 1
    assert longest["0"] > 11 * MS
    assert moved["0.05"] > 100


def test_pages_die_whole_by_their_mean():
    """Blocks of 4 in a request of 22 that is to keep 12: two whole blocks go, the two of least mean attention."""
    cache = KVCache(30, 4, columns=("h2o_accumulated",))
    row = fill(cache, 22)
    cache.store.s.rows["decode_from"][row] = 22
    start = int(cache.store.s.rows["start"][row])
    worth = np.array([9, 9, 9, 9, 0, 0, 0, 8, 1, 1, 1, 1, 9, 0, 0, 0, 5, 5, 5, 5, 0, 0], np.float32)
    cache.store.s.columns[0, start : start + 22] = worth
    policy = policies.build("h2o:recent=0.1")
    view, excess = cache.view(np.array([row]), tokens=12).over_budget()
    assert excess.tolist() == [10]
    victims, counts = reclaimers.build("page").choose(cache, policy, view, excess)
    assert counts.tolist() == [8]
    assert (victims - start).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]  # means 2 and 1; the next is 2.25
    cache.evict_cells(view.row, victims, counts)
    assert cache.block_table(row) == [1, 4, 5, 6]
    recount(cache)


@pytest.mark.parametrize("excess_of", [[16, 3], [3, 16], [16, 16]])
def test_without_scores_those_pages_die_whose_tokens_all_would(excess_of: list[int]):
    """StreamingLLM with two sinks would drop the 16 tokens behind them: blocks 1, 2 and 3, and of 4 the first half."""
    cache = KVCache(30, 4)
    rows = np.array([fill(cache, 24, k) for k in range(2)])
    cache.store.s.rows["decode_from"][rows] = 24
    view = cache.view(rows, tokens=8)
    policy = policies.build("streaming_llm:sinks=2")
    victims, counts = reclaimers.build("page").choose(cache, policy, view, np.array(excess_of))
    assert counts.tolist() == [12 if excess == 16 else 0 for excess in excess_of]
    starts = cache.store.s.rows["start"][rows].tolist()
    expected = [
        start + p for start, excess in zip(starts, excess_of, strict=True) if excess == 16 for p in range(4, 16)
    ]
    assert victims.tolist() == expected


def test_pages_that_hold_a_protected_token_stay():
    """All 24 tokens are worth the same and 16 are to go, but the newest 8 of what is kept are protected."""
    cache = KVCache(30, 4, columns=("h2o_accumulated",))
    row = fill(cache, 22)
    cache.store.s.rows["decode_from"][row] = 22
    view, excess = cache.view(np.array([row]), tokens=8).over_budget()
    victims, counts = reclaimers.build("page").choose(cache, policies.build("h2o:recent=1"), view, excess)
    assert counts.tolist() == [12]
    assert (victims - view.start[0]).tolist() == list(range(12))


def test_tokens_need_blocks_of_one():
    with pytest.raises(InputError, match="use block_size 1, not 16"):
        engine(trace((0, 8, 2)), policy="random", budget=0.5, reclaimer="token")


@pytest.mark.parametrize(("factor", "slots"), [("1", 10), ("1.5", 15)])
def test_pages_of_one_token_are_read_at_a_price(factor: str, slots: int):
    """Eleven slots read in the second step, the one written among them; so many more as the factor says."""
    asked = []

    class Cost:
        name = "asks"

        def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:
            asked.append((tokens, seqs, kv_read_tokens, attention_pairs))
            return MS, MS

    run = engine(
        trace((0, 10, 2)), policy="random", budget=1.0, block_size=1, reclaimer=f"token:attention_factor={factor}"
    )
    run.step_cost = Cost()  # type: ignore[assignment]
    run.run()
    assert asked[0] == (10, 1, slots, 55 + slots - 10)
