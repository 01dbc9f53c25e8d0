"""Limits that have a closed form, and what the searches find."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from sim.rng import stream
from sim.study.bisection import Found
from sim.study.concurrency import Concurrency
from sim.study.config import SimConfig
from sim.study.search import Group, search
from sim.study.sla import SlaThroughput, parse_bound


def find(out: Path, question: Concurrency | SlaThroughput, checks: int = 2) -> Found:
    (finding,) = search([(question.group, question)], out, checks=checks, workers=0).findings
    assert finding.found is not None, finding.error
    assert finding.found.monotone
    return finding.found


def together(out: Path, prompt: int, output: int, blocks: int, **options: object) -> Found:
    config = SimConfig(
        trace=f"poisson:rate=1,n=300,prompt={prompt},output={output}",
        kv_blocks=blocks,
        max_num_batched_tokens=1 << 20,  # all prompts in one step: all requests grow in step
        **{"policy": "full", "reclaimer": "none", **options},
    )
    return find(out, Concurrency(Group(config, (0,), "it")))


@pytest.mark.parametrize(
    ("prompt", "output", "blocks"),
    [(64, 200, 200), (64, 193, 200), (64, 194, 200), (500, 2, 1000), (100, 400, 32 * 9 + 1), (100, 400, 32 * 9)],
)
def test_full_retention_fits_as_often_as_the_peak_footprint_goes_into_the_pool(
    tmp_path: Path, prompt: int, output: int, blocks: int
) -> None:
    """floor(usable / ceil((prompt + output - 1) / 16)): block 0 is not handed out, the last token never written."""
    peak = math.ceil((prompt + output - 1) / 16)
    expected = (blocks - 1) // peak
    found = together(tmp_path, prompt, output, blocks)
    assert (found.value, found.fails) == (expected, expected + 1)


@pytest.mark.parametrize(("prompt", "output", "budget"), [(64, 600, 0.5), (400, 100, 0.3), (100, 700, 0.25)])
def test_the_ideal_fits_as_often_as_what_a_request_keeps(
    tmp_path: Path, prompt: int, output: int, budget: float
) -> None:
    """At the end a request holds what is kept of all but the last token written, and that one more."""
    last = prompt + output - 2
    peak = math.ceil((math.ceil(budget * last) + 1) / 16)
    found = together(tmp_path, prompt, output, 400, policy="random", budget=budget, reclaimer="ideal")
    assert found.value == 399 // peak


def test_a_window_fits_until_there_is_no_room_for_another_whole_prompt(tmp_path: Path) -> None:
    """A window of 64 tokens and one more hold 5 blocks, a prompt 20 for a step; a repack has nothing to add."""
    options = {"policy": "streaming_llm:sinks=0", "budget_tokens": 64}
    found = {
        name: together(tmp_path / name, 320, 400, 401, reclaimer=name, **options).value
        for name in ("naive", "vtoken", "ideal")
    }
    headroom = 401 // 50
    assert found["naive"] == found["ideal"] == (400 - 20) // 5 + 1
    assert found["vtoken"] == (400 - headroom - 20) // 5 + 1


SERVICE_S = 0.010
STEPS = 10


def one_at_a_time(path: Path, gaps_s: np.ndarray, bound: str, tolerance: float) -> SlaThroughput:
    """One server with constant service time: prompt in one step, nine more tokens, a millisecond each."""
    arrival_s = np.concatenate([[0.0], np.cumsum(gaps_s)])
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{t:.9f},5,{STEPS}\n" for t in arrival_s))
    config = SimConfig(
        trace=str(path),
        policy="full",
        reclaimer="none",
        max_num_seqs=1,
        step_cost=f"linear:base_s={SERVICE_S / STEPS},per_token_s=0",
    )
    return SlaThroughput(Group(config, (0,), "it"), (parse_bound(bound),), tolerance=tolerance, least_s=0.1)


def test_evenly_spaced_requests_can_come_as_fast_as_they_are_served(tmp_path: Path) -> None:
    """D/D/1: no wait up to a rate of 1 / D, a growing queue above."""
    question = one_at_a_time(tmp_path / "trace.csv", np.full(399, 0.1), "e2e_p95=0.015", 0.005)
    found = find(tmp_path / "out", question)
    assert found.value is not None
    assert found.fails is not None
    # By the 95th percentile of 400 requests, 5 ms of waiting are reached at a rate 0.13 % above 1 / D.
    assert found.value <= 1.0015 / SERVICE_S
    assert found.fails >= 1 / SERVICE_S
    assert found.fails <= 1.005 * found.value


def test_the_rate_for_a_mean_wait_is_that_of_lindleys_recursion(tmp_path: Path) -> None:
    """M/D/1 on 500 draws: the rate at which their own waits have a mean of D; in theory 2/3 of the service rate."""
    gaps_s = stream(1, "test_limits").exponential(0.05, 499)
    question = one_at_a_time(tmp_path / "trace.csv", gaps_s, f"queue_time_mean={SERVICE_S}", 0.005)
    found = find(tmp_path / "out", question, checks=1)

    def mean_wait(rate: float) -> float:
        scaled = gaps_s * (1 / rate) / gaps_s.mean()
        wait, total = 0.0, 0.0
        for gap in scaled.tolist():
            wait = max(0.0, wait + SERVICE_S - gap)
            total += wait
        return total / (len(gaps_s) + 1)

    assert found.value is not None
    assert found.fails is not None
    assert mean_wait(found.value) <= SERVICE_S * (1 + 1e-6)
    assert mean_wait(found.fails) >= SERVICE_S * (1 - 1e-6)
    assert found.value == pytest.approx(2 / 3 / SERVICE_S, rel=0.2)


def test_a_short_trace_does_not_pass_for_a_fast_server(tmp_path: Path) -> None:
    """40 requests at once are all served within 0.4 s: without the look at the load any rate would do."""
    question = one_at_a_time(tmp_path / "trace.csv", np.full(39, 0.1), "e2e_p95=0.4", 0.02)
    (finding,) = search([(question.group, question)], tmp_path / "out", workers=0).findings
    assert finding.found is not None
    assert finding.found.outside == ""
    assert finding.found.fails is not None
    assert finding.found.fails < 1.2 / SERVICE_S
    reasons = {probe.verdict.why for probe in finding.probes if not probe.verdict.holds}
    assert reasons == {"overloaded"}
