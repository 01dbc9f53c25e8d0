"""One request at a time, the simulator is a queue with one server: its waits are those of queueing theory."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from sim.rng import stream
from sim.workload.trace import Trace
from tests.support.serving import engine, trace

FOLDER = Path(__file__).parents[2] / "experiments" / "07_queue"
# The busier the server, the longer waits are alike, and the more requests a mean takes.
LOADS = [pytest.param(0.3, 8_000), pytest.param(0.5, 8_000), pytest.param(0.7, 16_000),
         pytest.param(0.9, 40_000, marks=pytest.mark.slow)]  # fmt: skip


@functools.cache
def script() -> ModuleType:
    """Load the experiment's script, which has the formulas."""
    spec = importlib.util.spec_from_file_location("queue_experiment", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@functools.cache
def waits(service: str, load: float, requests: int) -> NDArray[np.float64]:
    """Serve a Poisson stream; return each wait."""
    run = script()
    return run.serve(run.SERVICES[service], load, seed=0, requests=requests)["queue_s"]


# -- what a request takes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (7, 3), (8, 1), (9, 5), (64, 2), (100, 40)])
def test_service_time_in_closed_form(prompt: int, output: int):
    """Chunks of 8 prompt tokens, the last of which gives the first output token, then a step for each other one."""
    outcome = engine(
        trace((0, prompt, output)), step="linear:base_s=0.002,per_token_s=3e-5", max_num_batched_tokens=8
    ).run()
    steps = math.ceil(prompt / 8) + output - 1
    tokens = prompt + output - 1
    assert outcome.summary["steps"] == steps
    assert outcome.requests["e2e_s"][0] == pytest.approx(steps * 0.002 + tokens * 3e-5, rel=1e-12)
    assert outcome.requests["ttft_s"][0] == pytest.approx(math.ceil(prompt / 8) * 0.002 + prompt * 3e-5, rel=1e-12)


def test_each_wait_is_what_is_left_of_the_one_before():
    """Lindley: W' = max(0, W + S - gap), to a nanosecond of the clock, for lengths of all kinds."""
    n, draw = 2_000, stream(1, "lindley")
    prompt, output = draw.integers(1, 60, n), draw.integers(1, 6, n)
    service = -(-prompt // 16) * 1_000_000 + (output - 1) * 1_000_000 + (prompt + output - 1) * 10_000
    arrival = np.cumsum(np.rint(draw.exponential(service.mean() / 0.8, n)).astype(np.int64))
    outcome = engine(
        Trace(arrival, prompt, output),
        max_num_seqs=1,
        max_num_batched_tokens=16,
        step="linear:base_s=0.001,per_token_s=1e-5",
    ).run()
    expected, wait = [], 0
    for k in range(n):
        expected.append(wait)
        wait = max(0, wait + int(service[k]) - int(arrival[min(k + 1, n - 1)] - arrival[k]))
    assert np.abs(outcome.requests["queue_s"] * 1e9 - expected).max() < 1.5
    served = outcome.requests["e2e_s"] - outcome.requests["queue_s"]
    assert np.abs(served * 1e9 - service).max() < 1.5
    assert 0 < expected.count(0) < n
    assert (outcome.steps["running"] == 1).all()


# -- Poisson arrivals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "requests"), LOADS)
@pytest.mark.parametrize("service", ["constant", "prompt"])
def test_the_mean_wait_is_pollaczek_and_khinchine_s(service: str, load: float, requests: int):
    run = script()
    mean, error = run.estimate(waits(service, load, requests), requests // 20)
    expected = run.mean_wait(load, run.SERVICES[service])
    assert abs(mean - expected) < 4 * error
    # Sharp enough to tell it from what an M/M/1 queue would have, twice that of M/D/1.
    assert error < 0.15 * expected
    assert mean == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_one_long_request_in_ten_makes_the_others_wait(load: float):
    """Outputs of 1 or 21 tokens: E[S^2] is five times E[S]^2."""
    run = script()
    service = run.SERVICES["output"]
    assert service.square == pytest.approx(5 * service.mean_s**2)
    mean, error = run.estimate(waits("output", load, 16_000), 800)
    expected = run.mean_wait(load, service)
    assert abs(mean - expected) < 4 * error
    assert error < 0.15 * expected


@pytest.mark.parametrize(("load", "requests"), LOADS)
def test_waits_in_m_d_1_follow_erlang_s_formula(load: float, requests: int):
    run = script()
    unit = run.BASE_S
    for x in (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0):
        share, error = run.estimate(waits("constant", load, requests) <= x * unit + 1e-9, requests // 20)
        expected = run.no_longer_than(x, load)
        assert abs(share - expected) < 4 * error + 0.002, x
        assert error < 0.02
    assert run.no_longer_than(0.0, load) == pytest.approx(1 - load)


def test_the_formulas_agree_with_each_other():
    """The mean of Erlang's distribution is Pollaczek and Khinchine's."""
    run = script()
    x = np.linspace(0, 12, 6001)
    for load in (0.3, 0.5):
        tail = np.array([1 - run.no_longer_than(float(v), load) for v in x])
        assert np.trapezoid(tail, x) * run.BASE_S == pytest.approx(
            run.mean_wait(load, run.SERVICES["constant"]), rel=1e-3
        )


# -- levels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}, {"max_num_seqs": 4, "max_num_batched_tokens": 64}])
def test_littles_law_holds_for_running_requests(options: dict[str, Any]):
    """Levels are weighted by time, idle time too: mean running x makespan is the sum of the times that requests ran."""
    draw = stream(4, "little")
    columns = draw.integers(0, 10**9, 60), draw.integers(1, 300, 60), draw.integers(1, 50, 60)
    requests = sorted(zip(*columns, strict=True))
    outcome = engine(trace(*requests), step="linear:base_s=0.002,per_token_s=1e-5", **options).run()
    ran = outcome.requests["e2e_s"] - outcome.requests["queue_s"]
    steps = outcome.steps
    assert (steps["running"] * steps["dt_s"]).sum() == pytest.approx(ran.sum())
    assert outcome.summary["mean_running"] == pytest.approx(ran.sum() / outcome.summary["makespan_s"])


# -- the experiment ----------------------------------------------------------------------------------------------------


def test_the_files_of_the_experiment_are_within_their_errors():
    table, shares = pd.read_csv(FOLDER / "waits.csv"), pd.read_csv(FOLDER / "distribution.csv")
    run = script()
    assert len(table) == len(run.SERVICES) * len(run.LOADS)
    for row in table.itertuples():
        assert row.theory_s == pytest.approx(run.mean_wait(row.load, run.SERVICES[row.service]), rel=1e-3)
        assert row.errors == pytest.approx((row.simulated_s - row.theory_s) / row.standard_error_s, abs=0.1)
        assert abs(row.errors) < 3.5
    assert (shares.simulated - shares.theory).abs().max() < 0.02
    assert ((shares.simulated - shares.theory).abs() < 3.5 * shares.standard_error + 1e-4).all()
