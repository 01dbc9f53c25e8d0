"""The times of a replay's steps and copies, by a clock that says what it will."""

import time

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from gpu_validate.layouts import step_work
from gpu_validate.program import Launch
from gpu_validate.step_times import StepTimes
from gpu_validate.sweeps import Step
from tests.support.stand_in_cuda import StandInCuda

WORK = step_work(Step(2, 16), block_size=16, num_blocks=20)
LAUNCH = Launch((3,), (5,), np.arange(16, 21), np.arange(32, 37))


def test_on_a_cpu_a_step_lasts_from_begin_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(time, "thread_time_ns", lambda: now)
    times = StepTimes(cuda=False)
    for ns in (700, 900):
        times.begin(WORK)
        now += ns
        times.end(WORK)
        now += 10_000  # between two steps
    times.copy_begin(LAUNCH)
    now += 400
    times.copy_end(LAUNCH)
    assert times.times_ns().tolist() == [700, 900]
    assert [values.tolist() for values in times.copies()] == [[5], [400]]


def test_the_hosts_part_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    times = StepTimes(cuda=False)
    for upload, plan in ((10, 100), (30, 300), (20, 200)):
        times.moved(WORK)
        now += upload
        times.uploaded(WORK)
        now += plan
        times.planned(WORK)
    assert times.host_ns() == (20, 200)


def test_on_cuda_events_on_the_streams_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StandInCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    times = StepTimes(cuda=True)
    copying = cuda.Stream(None)
    for ns in (7e6, 9e6):
        times.begin(WORK)
        cuda.work(ns)
        times.end(WORK)
    with cuda.stream(copying):
        times.copy_begin(LAUNCH)
        cuda.work(4e6)
        times.copy_end(LAUNCH)
    cuda.work(1e6)
    assert times.times_ns() == pytest.approx([7e6, 9e6])
    assert times.copies()[1] == pytest.approx([4e6])
