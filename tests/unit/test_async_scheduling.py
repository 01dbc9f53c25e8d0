"""Asynchronous scheduling: the next step is decided on while one is on the device."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from sim.kv.events import Kind, KVEventLog
from sim.kv.replay import Replay
from sim.serving.engine import Engine, Outcome
from tests.support.serving import MS, Steps, engine, trace


class Watch(Steps):
    """Notes when each step was decided on, and when its results were in."""

    def __init__(self) -> None:
        super().__init__(20_000)
        self.decided: list[tuple[int, int]] = []
        self.done: list[int] = []

    def scheduled(self, engine: Engine) -> None:
        super().scheduled(engine)
        self.decided.append((engine.step, engine.now_ns // MS))

    def applied(self, engine: Engine, finished: int) -> None:
        del finished
        self.done.append(engine.now_ns // MS)


def run(*requests: tuple[int, int, int], **options: Any) -> tuple[Outcome, Watch]:
    watch = Watch()
    return engine(trace(*requests), async_scheduling=True, observer=watch, **options).run(), watch


def test_a_step_is_decided_on_while_the_one_before_it_begins():
    outcome, watch = run((0, 8, 4))
    assert watch.decided == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert watch.done == [1, 2, 3, 4]
    # A fifth schedule finds the last token on its way and nothing else to do.
    assert outcome.summary["steps"] == 5
    assert outcome.requests["ttft_s"].tolist() == [0.001]
    assert outcome.requests["e2e_s"].tolist() == [0.004]


def test_after_idle_time_two_steps_are_decided_on_at_once():
    _, watch = run((0, 8, 1), (10 * MS, 8, 2))
    assert watch.decided == [(0, 0), (2, 10), (3, 10)]


def test_an_arrival_waits_for_one_step_more():
    """It comes in mid-step: at that step's end, one that knows nothing of it goes onto the device."""
    late = ((0, 8, 9), (MS // 2, 8, 1))
    synchronous = engine(trace(*late)).run()
    assert synchronous.requests["ttft_s"].tolist() == [0.001, 0.0015]
    assert run(*late)[0].requests["ttft_s"].tolist() == [0.001, 0.0025]


@pytest.mark.parametrize(("limit", "outputs"), [(12, [4, 1]), (9, [1, 1]), (100, [6, 1])])
def test_nobody_gets_a_token_too_many(limit: int, outputs: list[int]):
    outcome, _ = run((0, 8, 6), (0, 8, 1), max_model_len=limit)
    assert outcome.requests["output_tokens"].tolist() == outputs
    assert outcome.summary["output_tokens"] == sum(outputs)


def events(outcome: Outcome) -> list[tuple[int, int, int]]:
    assert outcome.events is not None
    Replay.of(outcome.events)
    return list(outcome.events.records[["time_ns", "kind", "req"]].tolist())


def test_a_token_on_its_way_is_delivered_to_whom_was_preempted():
    """Pools of every size, until requests were preempted with their last token, and with others, on the way."""
    seen: Counter[str] = Counter()
    for blocks, produced in itertools.product(range(6, 12), range(1, 14)):
        requests = [(0, 5, 14), (0, 6, 9), (0, 7, produced)]
        outcome, _ = run(*requests, blocks=blocks, block_size=4, logging=True)
        done = outcome.requests["status"] == "finished"
        assert (outcome.requests["output_tokens"][done] == np.array(requests)[done, 2]).all()
        waiting: set[int] = set()
        finished: Counter[int] = Counter()
        for _, kind, req in events(outcome):
            if kind == Kind.PREEMPT:
                waiting.add(req)
                seen["preempted"] += 1
            elif kind == Kind.ADMIT:
                waiting.discard(req)
            elif kind == Kind.FINISH:
                finished[req] += 1
                seen["finished while waiting"] += req in waiting
        assert set(finished.values()) <= {1}
        assert len(finished) == outcome.summary["finished"]
    assert seen["preempted"] > 20, dict(seen)
    assert seen["finished while waiting"] > 0, dict(seen)


def test_who_outgrows_the_pool_is_refused_though_a_chunk_of_it_is_on_the_device():
    """H2O keeps it small; preempted, it needs 81 tokens at once, where 80 fit."""
    requests = [(0, 72, 20), (0, 72, 20), (0, 11, 22)]
    outcome, _ = run(
        *requests, policy="h2o", reclaimer="naive", budget=0.3, attention="synthetic", blocks=6, max_num_seqs=2,
        max_num_batched_tokens=32, reserve_full_prompt=False, logging=True,
    )  # fmt: skip
    assert outcome.events is not None
    Replay.of(outcome.events)
    assert outcome.requests["status"].tolist().count("refused") == outcome.summary["refused"] > 0


def deaths(log: KVEventLog) -> list[tuple[int, int]]:
    return sorted(log.records[["req", "a"]][log.records["kind"] == Kind.EVICT].tolist())


@pytest.mark.parametrize("policy", ["random", "streaming_llm", "h2o", "scissorhands"])
@pytest.mark.parametrize("reclaimer", ["naive", "vtoken:repack_when=always", "ideal"])
def test_the_same_tokens_die_as_with_synchronous_scheduling(policy: str, reclaimer: str):
    """The token of the step under way has a slot already, and is nobody's to see."""
    requests = trace(*[(k * MS, 30 + 11 * k, 20 + 3 * k) for k in range(6)])
    logs = []
    for late in (False, True):
        outcome = engine(
            requests, async_scheduling=late, policy=policy, reclaimer=reclaimer, attention="synthetic", budget=0.5,
            block_size=4, headroom=20, logging=True,
        ).run()  # fmt: skip
        assert outcome.events is not None
        Replay.of(outcome.events)
        logs.append(outcome.events)
    assert deaths(logs[0]) == deaths(logs[1])
    assert len(deaths(logs[0])) > 100


def test_a_copy_begins_when_the_step_on_the_device_ends():
    """That step still writes into blocks that look complete, and reads those that have just been given back."""
    spans: dict[bool, set[int]] = {}
    for late in (False, True):
        outcome = engine(
            trace((0, 64, 30)), async_scheduling=late, policy="random", budget=0.3, block_size=4, headroom=8,
            reclaimer="vtoken:repack_when=always", copy="linear:base_s=0.0025,per_token_s=0", logging=True,
        ).run()  # fmt: skip
        assert outcome.events is not None
        records = outcome.events.records
        planned = records["time_ns"][records["kind"] == Kind.PLAN]
        copied = records["time_ns"][records["kind"] == Kind.COPIED]
        # The last request's plans may still be under way when it ends.
        spans[late] = set(np.diff(np.stack([planned[: len(copied)], copied]), axis=0)[0][:-1].tolist())
    longest = {late: max(span) for late, span in spans.items()}
    assert longest[False] == min(spans[False]) + 0  # every copy takes as many steps
    assert longest[True] - longest[False] == MS
