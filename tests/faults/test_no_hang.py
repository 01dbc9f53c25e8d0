"""Whatever is short, a run ends within a bounded number of steps, or stops and names what cannot move."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import InputError, NoProgressError
from sim.kv.policies import policies
from sim.kv.replay import Replay
from sim.serving.engine import Outcome
from sim.workload.source import read_trace
from tests.support.serving import MS, Recorder, engine, trace

PAIRS = [("full", "none"), *[
    ("r_kv:buffer=10" if policy == "r_kv" else policy, reclaimer)
    for policy in policies.names() if policies.get(policy).evicts and not policies.get(policy).splits
    for reclaimer in ("naive", "vtoken:repack_when=always", "vtoken", "sync", "sync:keep_blocks=12", "ideal")
]]  # fmt: skip


def ends(source: Any, most: int = 20_000, **options: Any) -> tuple[Outcome, Recorder]:
    """Run to the end; schedules are counted too, since a run may hang without taking a step."""
    recorder = Recorder(most)
    run = engine(source, observer=recorder, logging=True, **options)
    schedule, calls = run.scheduler.schedule, 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        assert calls < 2 * most, "it schedules again and again and nothing happens"
        schedule()

    run.scheduler.schedule = counted  # type: ignore[method-assign]
    outcome = run.run()
    summary = outcome.summary
    assert summary["finished"] + summary["refused"] == summary["requests"]
    assert run.cache.pool.free_blocks == run.cache.pool.usable_blocks
    assert outcome.events is not None
    Replay.of(outcome.events)
    return outcome, recorder


@pytest.mark.parametrize(("policy", "reclaimer"), PAIRS)
@pytest.mark.parametrize("reserve", [True, False])
def test_memory_is_exhausted(policy: str, reclaimer: str, reserve: bool):
    """Twenty requests of up to 190 tokens, in a pool of 240."""
    requests = trace(*((k * MS, 10 + 7 * k, 50 - 2 * k) for k in range(20)))
    outcome, _ = ends(
        requests, policy=policy, reclaimer=reclaimer, budget=0.5, blocks=62, block_size=4, headroom=2,
        reserve_full_prompt=reserve, max_num_batched_tokens=64, copy="linear:per_token_s=20e-6",
    )  # fmt: skip
    assert outcome.summary["finished"] == 20
    if policy == "full":
        assert outcome.summary["preemptions"] > 0


@pytest.mark.parametrize(("policy", "reclaimer"), PAIRS)
def test_the_pool_fits_one_request(policy: str, reclaimer: str):
    headroom = 1 if reclaimer.startswith("vtoken") else 0
    outcome, recorder = ends(
        trace(*[(0, 60, 5)] * 4), policy=policy, reclaimer=reclaimer, budget=0.9, blocks=5 + headroom, headroom=headroom
    )
    assert outcome.summary["finished"] == 4
    assert max(len(step.running) for step in recorder.steps) == 1
    assert outcome.summary["steps"] == 20


@pytest.mark.parametrize("policy", ["random", "h2o"])
@pytest.mark.parametrize("budget", [0.3, 0.9])
def test_headroom_that_can_never_be_had(policy: str, budget: float):
    """All but one block are headroom: what fits one block is served, the others are refused."""
    outcome, _ = ends(
        trace((0, 40, 5), (0, 10, 3), (0, 16, 40), (5 * MS, 16, 1)), policy=policy, budget=budget,
        reclaimer="vtoken:repack_when=always", blocks=20, headroom=18, copy="linear:per_token_s=200e-6",
    )  # fmt: skip
    status = outcome.requests["status"].tolist()
    assert (status[0], status[1], status[3]) == ("refused", "finished", "finished")


def test_headroom_lower_than_any_plan_needs_is_no_deadlock():
    """No headroom at all, and nothing free: no repack is possible when it is wanted most (trap 8)."""
    outcome, _ = ends(
        trace(*((0, 60, 60) for _ in range(6))), policy="random", budget=0.5, reclaimer="vtoken", blocks=50,
        block_size=4, headroom=0, copy="linear:per_token_s=200e-6",
    )  # fmt: skip
    assert outcome.summary["finished"] == 6


@pytest.mark.parametrize(("policy", "reclaimer"), PAIRS)
def test_who_is_larger_than_the_pool_is_refused_at_once_and_the_others_go_on(policy: str, reclaimer: str):
    requests = [(0, 30, 6), (0, 5000, 6), (MS, 20, 6), (2 * MS, 999, 1), (2 * MS, 30, 6)]
    options: dict[str, Any] = {"policy": policy, "reclaimer": reclaimer, "budget": 0.5, "blocks": 40, "headroom": 2}
    outcome, recorder = ends(trace(*requests), **options)
    refused = [1, 3]
    assert np.flatnonzero(outcome.requests["status"] == "refused").tolist() == refused
    assert not any(set(refused) & set(step.waiting) for step in recorder.steps), "it never waits"
    without, _ = ends(trace(*(r for k, r in enumerate(requests) if k not in refused)), **options)
    for name in ("finish_s", "ttft_s", "retained_blocks_peak"):
        kept = outcome.requests[name][[0, 2, 4]]
        assert (kept == without.requests[name]).all() or policy == "random"
        assert np.isnan(outcome.requests[name][refused]).all()


def test_a_prompt_and_its_output_that_do_not_fit_together_are_refused_at_once_where_nothing_dies():
    """19 blocks are 304 slots; the last output token is never written, so 300 + 5 fit and 300 + 6 do not."""
    outcome, recorder = ends(trace((0, 300, 6), (0, 300, 5)), blocks=20)
    assert outcome.requests["status"].tolist() == ["refused", "finished"]
    assert len(recorder.steps) == 5


@pytest.mark.parametrize("reclaimer", ["naive", "vtoken", "ideal"])
def test_a_prompt_that_fits_and_an_output_that_outgrows_the_pool(reclaimer: str):
    """With eviction nobody knows beforehand: it ends, finished or refused, and the next one is served."""
    outcome, _ = ends(
        trace((0, 200, 2000), (0, 50, 5)), policy="random", reclaimer=reclaimer, budget=0.9, blocks=20, headroom=2
    )
    assert outcome.requests["status"].tolist() == ["refused", "finished"]
    assert 0 < outcome.requests["output_tokens"][0] < 2000


def test_a_prompt_that_outgrows_the_pool_chunk_by_chunk_is_refused():
    """Without reservation it is admitted on its first chunk; the request's last token alone is too much."""
    outcome, _ = ends(
        trace((0, 305, 2), (0, 40, 3)), policy="random", reclaimer="naive", budget=0.5, blocks=20,
        reserve_full_prompt=False, max_num_batched_tokens=16,
    )  # fmt: skip
    assert outcome.requests["status"].tolist() == ["refused", "finished"]


@pytest.mark.parametrize("reserve", [True, False])
def test_two_prompts_that_fit_alone_but_not_together(reserve: bool):
    outcome, _ = ends(
        trace((0, 250, 4), (0, 250, 4)), blocks=20, reserve_full_prompt=reserve, max_num_batched_tokens=20
    )
    assert outcome.summary["finished"] == 2


def test_a_whole_pool_under_a_watermark_of_nearly_all():
    outcome, _ = ends(trace(*[(0, 100, 10)] * 5), blocks=20, watermark=0.99)
    assert outcome.summary["finished"] == 5
    assert outcome.summary["peak_running"] == 1


@pytest.mark.parametrize("line", ["0,0.5,10,0", "0,0.5,0,10", "0,0.5,10,-3"])
def test_a_trace_with_requests_that_can_never_end_is_refused_by_the_reader(line: str, tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text(f"req_id,arrival_s,prompt_tokens,output_tokens\n{line}\n")
    with pytest.raises(InputError, match=r"trace\.csv"):
        read_trace(path)


def test_the_engine_refuses_them_too_wherever_they_come_from():
    """A source of somebody else's that does not check (trap 25)."""

    class Chunk(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.arrival_ns)

    chunk = Chunk(
        arrival_ns=np.array([0, 0, 5]), prompt_tokens=np.array([10, 0, 10]), output_tokens=np.array([0, 5, 2]),
        req_id=None, prefix_hashes=None,
    )  # fmt: skip
    source = SimpleNamespace(chunks=lambda: iter([chunk]), hash_tokens=512, name="careless", total=3)
    outcome, _ = ends(source)
    assert outcome.requests["status"].tolist() == ["refused", "refused", "finished"]


def test_what_cannot_move_is_named():
    run = engine(trace((0, 10, 5)))

    class Break(Recorder):
        def applied(self, engine: Any, finished: int) -> None:
            del finished
            rows = engine.cache.store.s.rows
            rows["length"] = rows["computed"]

    run._observer = Break()
    with pytest.raises(NoProgressError, match="'0'"):
        run.run()


@settings(max_examples=120, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 5 * MS), st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=7),
    st.sampled_from(PAIRS),
    st.integers(2, 26),
    st.integers(0, 30),
    st.sampled_from([0.2, 0.5, 1.0]),
    st.booleans(),
    st.sampled_from([1, 7, 64]),
)
def test_tiny_pools(
    requests: list[tuple[int, int, int]], pair: tuple[str, str], blocks: int, headroom: int, budget: float,
    reserve: bool, batched: int,
):  # fmt: skip
    ends(
        trace(*sorted(requests)), policy=pair[0], reclaimer=pair[1], blocks=blocks, block_size=4,
        headroom=min(headroom, blocks - 2), budget=budget, reserve_full_prompt=reserve, max_num_batched_tokens=batched,
        copy="linear:per_token_s=200e-6",
    )  # fmt: skip
