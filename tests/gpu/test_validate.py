"""Validation: the engine's own prices, and a made-up device on which the loop must close."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gpu_validate.calibrate import calibrate
from gpu_validate.program import Fence, Launch, Program, StepWork
from gpu_validate.sweeps import designed
from gpu_validate.validate import COLUMNS, Predicted, compare, log_facts, predict
from sim.kv.event_file import EventFile
from sim.serving.copy import LinearCopyCost
from sim.serving.cost import LinearStepCost
from sim.serving.profile import CostProfile, save_profile
from sim.serving.profile_cost import ProfileCopyCost, ProfileStepCost
from sim.study.config import SimConfig
from sim.study.run import simulate
from tests.support.virtual_device import VirtualDevice

MODEL = VirtualDevice().model


class Log(NamedTuple):
    file: EventFile
    steps: list[StepWork]
    summary: dict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a profile that was fitted to the made-up device."""
    folder = tmp_path_factory.mktemp("loop")
    sweep = designed("cuda", capacity=600_000, max_len=131_072)
    save_profile(calibrate(VirtualDevice(), sweep, source="test").profile, folder / "profile.json")
    return folder


def costs(profile: CostProfile) -> tuple[ProfileStepCost, ProfileCopyCost]:
    return ProfileStepCost.of(profile, MODEL), ProfileCopyCost.of(profile, MODEL)


@pytest.fixture(scope="module")
def logs(folder: Path) -> dict[str, Log]:
    """Simulate under memory pressure with the fitted profile: logs and summaries by reclaimer."""
    found = {}
    for reclaimer in ("vtoken", "sync", "none"):
        path = folder / f"{reclaimer}.parquet"
        spec = f"profile:{folder / 'profile.json'}"
        evicts = reclaimer != "none"
        config = SimConfig(
            policy="h2o" if evicts else "full",
            budget=0.4 if evicts else None,
            reclaimer=reclaimer,
            kv_blocks=700,
            head=24,
            rate_scale=20.0,
            score_reads=0.0,
            step_cost=spec,
            copy_cost=spec,
        )
        summary = simulate(config, events=path).summary
        found[reclaimer] = Log(EventFile(path), list(Program(EventFile(path))), summary)
    return found


@pytest.fixture(scope="module")
def profile(folder: Path) -> CostProfile:
    from sim.serving.profile import load_profile

    return load_profile(folder / "profile.json")


@pytest.mark.parametrize("reclaimer", ["vtoken", "sync", "none"])
def test_each_step_is_priced_as_the_engine_priced_it(logs: dict, profile: CostProfile, reclaimer: str) -> None:
    log = logs[reclaimer]
    predicted = predict(log.steps, *costs(profile)).columns["predicted_ns"]
    begins = np.array([work.time_ns for work in log.steps])
    assert len(predicted) == log.summary["steps"] > 100
    np.testing.assert_array_equal(predicted[:-1], np.diff(begins))


def test_what_slowed_the_steps_is_told_apart(logs: dict, profile: CostProfile) -> None:
    sums = {name: predict(log.steps, *costs(profile)).columns for name, log in logs.items()}
    assert sums["vtoken"]["stretch_ns"].sum() == round(logs["vtoken"].summary["copy_delay_s"] * 1e9) > 0
    assert sums["vtoken"]["pause_ns"].sum() == sums["sync"]["stretch_ns"].sum() == 0
    assert sums["sync"]["pause_ns"].sum() == round(logs["sync"].summary["copy_delay_s"] * 1e9) > 0
    assert not any(sums["none"][name].any() for name in ("stretch_ns", "pause_ns", "wait_ns", "copied_tokens"))


@pytest.mark.parametrize("reclaimer", ["vtoken", "sync", "none"])
def test_the_loop_closes(logs: dict, profile: CostProfile, reclaimer: str) -> None:
    """Simulate, replay on the made-up device, compare: the same time, step by step."""
    steps = logs[reclaimer].steps
    comparison = compare(predict(steps, *costs(profile)), VirtualDevice().run(steps)[None])
    assert abs(comparison.difference) < 1e-4
    assert all(group["max_ape"] < 5e-3 for group in comparison.groups.values())


def test_a_profile_that_is_off_is_found_out(logs: dict, profile: CostProfile) -> None:
    steps = logs["vtoken"].steps
    wrong = dataclasses.replace(
        profile, attention_launch_ns=dataclasses.replace(profile.attention_launch_ns, value=2e6, interval=None)
    )
    comparison = compare(predict(steps, *costs(wrong)), VirtualDevice().run(steps)[None])
    assert comparison.difference > 0.1
    assert comparison.summary(0.1)["within_tolerance"] is False
    assert comparison.summary(0.9)["within_tolerance"] is True


def test_noise_shows_as_the_spread_of_repeated_runs(logs: dict, profile: CostProfile) -> None:
    steps = logs["vtoken"].steps
    noisy = np.stack([VirtualDevice(noise=0.05, seed=seed).run(steps) for seed in range(3)])
    comparison = compare(predict(steps, *costs(profile)), noisy)
    assert 0 < comparison.spread < 0.02 < comparison.step_spread < 0.2
    assert abs(comparison.difference) < 0.02


def test_a_fence_that_comes_before_its_copy_is_done_is_waited_for(logs: dict) -> None:
    """The log was made with quick copies; slow ones are not ready at its fences."""
    steps = logs["vtoken"].steps
    step = LinearStepCost(base_s=1e-3, per_token_s=0.0)
    quick, slow = (LinearCopyCost(per_token_s=per_token_s) for per_token_s in (1e-9, 1e-4))
    assert predict(steps, step, quick).columns["wait_ns"].sum() == 0
    waited = predict(steps, step, slow).columns
    assert waited["wait_ns"].sum() > 0
    assert (waited["predicted_ns"] >= 1_000_000 + waited["stretch_ns"] + waited["wait_ns"]).all()


def test_a_copy_is_beside_the_steps_from_its_launch_to_its_fence(logs: dict, profile: CostProfile) -> None:
    steps = logs["vtoken"].steps
    flying: set[int] = set()
    expected = []
    for work in steps:
        for action in work.before:
            if isinstance(action, Launch):
                flying |= set(action.plans)
            elif isinstance(action, Fence):
                flying -= set(action.plans)
        expected.append(bool(flying))
    assert 0 < sum(expected) < len(steps)
    np.testing.assert_array_equal(predict(steps, *costs(profile)).columns["beside_copy"], expected)


def test_groups_divide_the_steps() -> None:
    columns = {name: np.zeros(4, np.int64) for name in COLUMNS}
    columns |= {
        "tokens": np.array([4, 40, 4, 40]),
        "seqs": np.array([4, 4, 4, 4]),
        "beside_copy": np.array([0, 0, 1, 1]),
        "predicted_ns": np.array([10, 20, 30, 40]),
    }
    comparison = compare(Predicted(columns), np.array([[10.0, 10.0, 30.0, 50.0]]))
    groups = comparison.groups
    assert {name: group["steps"] for name, group in groups.items()} == {
        "all": 4,
        "decode only": 1,
        "with prefill": 1,
        "with a copy": 2,
    }
    assert groups["all"]["difference"] == 0.0
    assert groups["all"]["mean_ape"] == pytest.approx((1.0 + 0.2) / 4)
    assert groups["with prefill"]["difference"] == 1.0


def test_the_log_tells_how_hard_memory_was_pressed(logs: dict) -> None:
    summary = logs["vtoken"].summary
    facts = log_facts(logs["vtoken"].file)
    for ours, theirs in {
        "steps": "steps",
        "preemptions": "preemptions",
        "tokens_evicted": "tokens_evicted",
        "tokens_moved": "tokens_moved",
        "repacks_committed": "repacks_committed",
        "requests_finished": "finished",
    }.items():
        assert facts[ours] == summary[theirs]
    assert summary["used_blocks_peak"] <= facts["peak_held_blocks"] < facts["num_blocks"]
