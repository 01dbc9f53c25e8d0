"""One budget for a batch: against the rule written out token by token, and what it promises in runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import InputError
from sim.kv.events import Kind
from sim.kv.policies.base import ScorePolicy, lowest
from sim.kv.policies.batch_budget import FLOOR, BatchBudget, few_victims, shares
from sim.kv.policies.pooled import share_budget
from sim.kv.state import H
from sim.kv.view import View
from sim.study.config import SimConfig
from sim.study.run import build_engine

POOLING = ("h2o", "tova", "scissorhands", "keyformer")
STALLING = {"reclaimer": "stall", "repack_when": "always", "copy_cost": "linear:base_s=0.05,per_token_s=0"}
"""Who is being copied computes nothing for a few steps; its tokens compete all the same."""


class Told(ScorePolicy):
    """Scores and protected tokens as a test says."""

    pools = True

    def __init__(self, score: np.ndarray, oldest: np.ndarray, newest: np.ndarray) -> None:
        self._score, self._protected = score, (oldest, newest)

    def score(self, _: View) -> np.ndarray:
        return self._score

    def protect(self, _: View) -> tuple[np.ndarray, np.ndarray]:
        return self._protected


def view_of(n: np.ndarray, keep: np.ndarray, cells: int) -> View:
    start = np.cumsum(n) - n
    numbers = np.array([np.arange(len(n)), start, n, n, n, keep], np.int64)
    return View(numbers, np.zeros(len(n), np.uint64), np.zeros(cells, np.int32), {}, np.zeros((2, cells), np.float32))


def by_the_book(scores: list[np.ndarray], keep: list[int], oldest: list[int], newest: list[int]) -> list[list[int]]:
    """Kill one token after the other: the one of least share, among equals in the row with most of them, the last."""
    rows = range(len(keep))
    scale = [np.float32(1) / total if (total := np.float32(sum(row))) > 0 else np.float32(0) for row in scores]
    open_to, certain = [], []
    for b in rows:
        recent = min(max(1, min(newest[b], keep[b])), len(scores[b]))
        old = min(max(0, min(oldest[b], keep[b] - recent)), len(scores[b]) - recent)
        worth = [(scores[b][i], i) for i in range(old, len(scores[b]) - recent)]
        open_to.append(sorted(worth))
        certain.append(max(old + recent, min(len(scores[b]), int(FLOOR * keep[b]))))
    dead: list[list[int]] = [[] for _ in rows]
    able = [open_to[b][: len(scores[b]) - certain[b]] for b in rows]
    for _ in range(sum(map(len, scores)) - sum(keep)):
        least = min(able[b][0][0] * scale[b] for b in rows if able[b])
        ties = [sum(x * scale[b] == least for x, _ in able[b]) for b in rows]
        b = max(rows, key=lambda b: (ties[b], b))
        dead[b].append(able[b].pop(0)[1])
    return [sorted(each) for each in dead]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, ...]:
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    # Sums of a few sixteenths are the same in any order.
    scores = [np.array(draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)), np.float32) / 16 for n in sizes]
    each = {"min_size": len(sizes), "max_size": len(sizes)}
    keep, oldest, newest = (draw(st.lists(st.integers(low, 14), **each)) for low in (1, 0, 0))
    return scores, keep, oldest, newest


@given(batches())
def test_the_least_share_dies_whoever_has_it(batch):
    scores, keep, oldest, newest = batch
    n = np.array([len(row) for row in scores])
    policy = Told(np.concatenate(scores), np.array(oldest), np.array(newest))
    victims, counts = BatchBudget(policy).select(view_of(n, np.array(keep), n.sum()))
    start = np.cumsum(n) - n
    found = [part - first for part, first in zip(np.split(victims, np.cumsum(counts)[:-1]), start, strict=True)]
    wanted = by_the_book(scores, keep, oldest, newest) if n.sum() > sum(keep) else [[] for _ in keep]
    assert [each.tolist() for each in found] == wanted


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([2, 5, 1 << 20]), st.sampled_from([0.0, 0.2, 1.0]))
@settings(max_examples=200)
def test_few_deaths_are_found_without_sorting(seed, rows, values, floor):
    """The same as sorting all shares, over several chunks, with many equal ones and with rows that have no score."""
    draw = np.random.default_rng(seed)
    n = draw.integers(1, 400, rows)
    keep = np.maximum(1, (n * draw.uniform(0.3, 1.3, rows)).astype(np.int64))
    newest = np.maximum(1, np.minimum(keep, draw.integers(0, 200, rows)))
    oldest = np.minimum(draw.integers(0, 5, rows), keep - newest)
    start = np.cumsum(n + 3) - n
    score = draw.integers(0, values, start[-1] + n[-1]).astype(np.float32)
    score[: len(score) // draw.integers(1, 9)] *= draw.integers(0, 2)
    dead = int(n.sum() - keep.sum())
    if dead <= 0:
        return
    out = np.zeros_like(score)
    shares(score, start, n, out)
    left = share_budget(out, start, n, keep, np.zeros(rows, np.int64), floor, oldest, newest)
    over = left < n
    wanted = lowest(score, start[over], n[over], left[over], oldest[over], newest[over], (n - left)[over])
    victims, counts = few_victims(score, start, n, keep, floor, oldest, newest, dead)
    assert counts.tolist() == (n - left).tolist()
    assert victims.tolist() == wanted.tolist()


class Holdings:
    """Notes what all decoding requests hold after each step, and what each could keep alone."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.steps: list[tuple[np.ndarray, np.ndarray]] = []
        self.died: list[int] = []
        self.youngest: list[int] = []
        self._dead = 0

    def scheduled(self, engine: Any) -> None:
        pass

    def applied(self, engine: Any, _: int) -> None:
        s, scheduler = engine.cache.store.s, engine.scheduler
        running = scheduler.running[: scheduler.num_running]
        rows = s.rows[running[s.rows["decode_from"][running] > 0]]
        keep = np.maximum(1, np.ceil(self.share * rows["computed"] - 1e-9).astype(int))
        self.steps.append((rows["live"].astype(int), keep))
        dead = int(s.header[H.EVICTED])
        self.died.append(dead - self._dead)
        self._dead = dead
        for first, live, length, recent in zip(rows["start"], rows["live"], rows["computed"], keep // 2, strict=True):
            newest = s.position[first : first + live][-int(max(recent, 1)) :]
            self.youngest.append(int(newest[0]) - int(length - max(recent, 1)))


def run(policy: str, observer: Any = None, **changes: Any) -> Any:
    config = SimConfig(
        trace="poisson:rate=40,n=14,prompt=uniform:20:400,output=uniform:5:150",
        policy=policy,
        budget=0.4,
        block_size=8,
        kv_blocks=2000,
        budget_scope="batch",
        reclaimer="naive",
    )
    return build_engine(config.replace(**changes), logging=True, observer=observer).run()


@pytest.mark.parametrize("policy", POOLING)
@pytest.mark.parametrize("changes", [{}, {"kv_blocks": 120}, {"async_scheduling": True}, STALLING])
def test_together_they_keep_what_each_could_alone(policy, changes):
    seen = Holdings(0.4)
    outcome = run(policy, seen if "async_scheduling" not in changes else None, **changes)
    assert outcome.summary["finished"] == 14
    if "async_scheduling" in changes:
        return
    assert any((live != keep).any() for live, keep in seen.steps)
    for (live, keep), died in zip(seen.steps, seen.died, strict=True):
        # Who left may have held more than its own budget: the others are below theirs then, until they have grown.
        assert live.sum() == keep.sum() or (died == 0 and live.sum() < keep.sum())
        assert (live >= (FLOOR * keep).astype(int)).all()
    assert sum(seen.died) > 1000


def test_no_protected_token_dies():
    seen = Holdings(0.4)
    run("h2o", seen)
    assert max(seen.youngest) == 0


@pytest.mark.parametrize("policy", POOLING)
def test_a_request_alone_loses_what_it_would_lose_by_itself(policy):
    together, alone = (run(policy, max_num_seqs=1, budget_scope=scope).events.records for scope in ("batch", "request"))
    assert (together["kind"] == Kind.EVICT).sum() > 1000
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("policy", POOLING)
def test_equal_runs_are_equal(policy):
    one, other = run(policy, kv_blocks=120), run(policy, kv_blocks=120)
    assert one.summary["preemptions"] > 0
    assert np.array_equal(one.events.records, other.events.records)


def test_requests_that_look_alike_share_alike():
    """Equal prompts at once, and attention that tells no token from another."""
    seen = Holdings(0.4)
    run("tova", seen, trace="poisson:rate=1e9,n=6,prompt=300,output=100", attention="uniform")
    assert max(np.ptp(live) for live, _ in seen.steps if len(live)) <= 1


def test_who_leaves_takes_its_budget_along():
    """The first holds more than its own budget because the second's tokens are worth less; it does not keep that."""
    n, keep = np.array([80, 80]), np.array([40, 40])
    score = np.concatenate([np.ones(80), np.r_[np.full(20, 100.0), np.full(60, 0.01)]]).astype(np.float32)
    none = np.zeros(0, np.int64)
    policy = Told(score, none, none)
    _, counts = BatchBudget(policy).select(view_of(n, keep, 160))
    assert (n - counts).tolist() == [59, 21]
    alone, counts = BatchBudget(policy).select(view_of(np.array([59]), np.array([40]), 160))
    assert counts.tolist() == [19]
    assert alone.tolist() == list(range(19))


@pytest.mark.parametrize(
    ("policy", "reclaimer", "says"),
    [
        ("random", "naive", "by what policy 'random' says of them"),
        ("streaming_llm", "naive", "'streaming_llm'"),
        ("keydiff", "naive", "'keydiff'"),
        ("r_kv", "naive", "'r_kv'"),
        ("snapkv", "naive", "'snapkv'"),
        ("scissorhands:drop=8", "naive", "'scissorhands'"),
        ("h2o", "page", "reclaimer 'page' has a say in who dies"),
    ],
)
def test_others_are_refused_in_one_line(policy, reclaimer, says):
    with pytest.raises(InputError, match=says) as refused:
        build_engine(SimConfig(policy=policy, reclaimer=reclaimer, budget_scope="batch"))
    assert "\n" not in str(refused.value)


def test_full_retention_has_no_budget_to_share():
    config = SimConfig(policy="full", budget_scope="batch")
    assert config.hash() == SimConfig(policy="full").hash()
    assert build_engine(config.replace(reclaimer="none")) is not None
