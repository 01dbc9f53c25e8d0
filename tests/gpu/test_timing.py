"""Clocks, samples, the order of measurements; CUDA's calls against a stand-in that keeps time by itself."""

import numpy as np
import pytest

from gpu_validate.timing import Case, CpuClock, CudaClock, Rotation, Sample, VirtualClock, measure, repetitions
from tests.support.stand_in_cuda import StandInCuda

torch = pytest.importorskip("torch")


def test_a_sample_is_median_and_percentiles() -> None:
    sample = Sample.of(np.arange(1.0, 102.0))
    assert (sample.median, sample.p20, sample.p80, sample.n) == (51.0, 21.0, 81.0, 101)


def virtual_case(clock: VirtualClock, name: str, ns: float, log: list[str]) -> Case:
    def prepare():
        log.append(name)
        return lambda _: clock.advance(ns)

    return Case(name, {"ns": ns}, clock, prepare)


def test_each_case_is_measured_twice_in_different_orders() -> None:
    clock, log = VirtualClock(), []
    cases = [virtual_case(clock, str(i), 100.0 * (i + 1), log) for i in range(8)]
    measured = measure(cases)
    assert [one.name for one in measured] == [str(i) for i in range(8)]
    assert [one.ns for one in measured] == [100.0 * (i + 1) for i in range(8)]
    assert all(len(one.samples) == 2 and one.n == 14 for one in measured)
    assert sorted(log[:8]) == sorted(log[8:]) == [str(i) for i in range(8)]
    assert log[:8] != log[8:]


def test_drift_is_the_distance_of_the_two_medians() -> None:
    clock = VirtualClock()
    speeds = iter((100.0, 150.0))

    def prepare():
        ns = next(speeds)
        return lambda _: clock.advance(ns)

    (one,) = measure([Case("slower later", {}, clock, prepare)])
    assert one.ns == 125.0
    assert one.drift == pytest.approx(50 / 125)
    assert one.spread == 0.0


def test_noise_is_the_same_for_the_same_seed() -> None:
    def medians(seed: int) -> list[float]:
        clock = VirtualClock(noise=0.1, seed=seed)
        return [one.ns for one in measure([virtual_case(clock, "a", 1000.0, [])])]

    assert medians(1) == medians(1) != medians(2)


def test_two_operations_beside_each_other_contend() -> None:
    clock = VirtualClock(contend=lambda first, second: (first + second / 2, 2 * second))
    case = Case("both", {}, clock, lambda: lambda _: clock.advance(1000), beside=lambda: lambda _: clock.advance(100))
    (one,) = measure([case])
    assert (one.ns, one.beside_ns) == (1050.0, 200.0)


@pytest.mark.parametrize(
    ("one_ns", "expected"),
    [(1e6, (1, 30)), (1e8, (1, 3)), (100.0, (500, 30)), (0.0, (50_000, 30))],
)
def test_repetitions_fill_an_interval_and_the_budget(one_ns: float, expected: tuple[int, int]) -> None:
    assert repetitions(one_ns, budget_ns=60e6, least_ns=50e3) == expected


def test_the_cpu_clock_numbers_the_repetitions_on() -> None:
    seen: list[int] = []
    times = CpuClock(budget_ns=1e5, least_ns=0.0).times_ns(seen.append)
    assert seen == list(range(len(seen)))
    assert len(times) >= 3
    assert (times >= 0).all()


def test_the_cpu_clock_runs_two_operations_at_once() -> None:
    import threading

    threads: dict[str, set[int]] = {"first": set(), "second": set()}
    first, second = CpuClock(budget_ns=1e5).together_ns(
        lambda _: threads["first"].add(threading.get_ident()), lambda _: threads["second"].add(threading.get_ident())
    )
    assert len(first) == len(second) >= 3
    assert len(threads["second"] - threads["first"]) == 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    stand_in = StandInCuda()
    monkeypatch.setattr(torch, "cuda", stand_in)
    return stand_in


@pytest.mark.parametrize("graph", [True, False])
def test_the_cuda_clock_divides_by_the_repetitions(cuda: StandInCuda, graph: bool) -> None:
    times = CudaClock("cpu", graph=graph).times_ns(lambda _: cuda.work(20_000.0))
    assert times == pytest.approx(np.full(30, 20_000.0))
    assert cuda.captures == graph


def test_an_interval_covers_whole_rounds_of_a_rotation(cuda: StandInCuda) -> None:
    seen: list[int] = []

    def op(i: int) -> None:
        if cuda.recording is not None:
            seen.append(i)
        cuda.work(100_000.0)

    CudaClock("cpu").times_ns(Rotation(op, 7))
    assert seen == list(range(7))  # five would fill the interval
    assert repetitions(100e3, 30e6, 500e3, period=3)[0] == 6


def test_a_start_that_the_host_was_late_for_does_not_count(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time, issuing takes longer than the device sleeps: it is done again with a longer sleep."""
    clock = iter(range(0, 10**12, 3_000_000))  # every look at the host's clock comes 3 ms after the last
    monkeypatch.setattr("gpu_validate.timing.time.perf_counter_ns", lambda: next(clock))
    slept: list[int] = []
    cuda._sleep = slept.append
    first, _ = CudaClock("cpu", graph=False, budget_ns=0.0).together_ns(
        lambda _: cuda.work(3e6), lambda _: cuda.work(1e6)
    )
    assert slept == [4_000_000] + [15_000_000] * 5
    assert len(first) == 5


def test_the_cuda_clock_starts_both_streams_at_one_event(cuda: StandInCuda) -> None:
    first, second = CudaClock("cpu", budget_ns=0.0).together_ns(
        lambda _: cuda.work(3_000_000.0), lambda _: cuda.work(700_000.0)
    )
    assert first == pytest.approx(np.full(5, 3e6))
    assert second == pytest.approx(np.full(5, 7e5))
