"""What a sweep will take: from runs that are made for it, from earlier ones, and when there are neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.study.config import SimConfig
from sim.study.estimate import EITHER_WAY, Point, estimate, extrapolate
from sim.study.result import RunResult
from sim.study.run_file import STEP_ROWS
from sim.study.spec import SweepSpec
from sim.study.store import Store
from sim.study.sweep import sweep
from tests.support import made_up

TRACE = "poisson:rate=10,n=1000,prompt=50,output=10"
SPEC = SweepSpec(base={"trace": TRACE}, grid={"policy": ["h2o", "random"], "reclaimer": ["naive", "vtoken"]})


class Machine:
    """Runs that cost a fixed time and a time a request, by a clock that only they move."""

    def __init__(self, request_s: float, start_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.request_s, self.start_s = request_s, start_s
        self.made: list[tuple[str, str, int]] = []

    def clock(self) -> float:
        return self.now_s

    def __call__(self, config: SimConfig, *, progress: object = None) -> RunResult:
        requests = config.head or 1000
        self.now_s += self.start_s
        for _ in range(requests):
            self.now_s += self.request_s
            assert callable(progress)
            progress(0, None, 0.0)
        self.made.append((config.policy, config.reclaimer, requests))
        result = made_up.result(config, requests=requests, steps=4 * requests)
        result.requests["output_tokens"][:] = 10
        return result


def take(machine: Machine, out: Path, probe_s: float, spec: SweepSpec = SPEC):
    return estimate(spec.expand().runs, Store(out), probe_s, simulate=machine, clock=machine.clock)


def test_runs_that_end_in_time_are_taken_at_their_word(tmp_path: Path) -> None:
    found = take(Machine(request_s=0.001), tmp_path, probe_s=1000)
    assert found.wall_s == pytest.approx((4 / EITHER_WAY, 4 * EITHER_WAY))
    assert found.longest_s == pytest.approx((1 / EITHER_WAY, 1 * EITHER_WAY))
    assert found.on(2) == pytest.approx((2 / EITHER_WAY, 2 * EITHER_WAY))
    assert found.on(100) == found.longest_s
    assert "1,000 requests made now" in found.rests_on
    assert "4 of 4 pairs" in found.rests_on


def test_shortened_runs_keep_to_the_time_and_bracket_the_whole(tmp_path: Path) -> None:
    machine = Machine(request_s=0.01, start_s=0.05)
    found = take(machine, tmp_path, probe_s=20)
    assert machine.now_s <= 20
    assert max(requests for *_, requests in machine.made) < 1000
    truth_s = 4 * (0.05 + 10)
    assert found.wall_s is not None
    low, high = found.wall_s
    assert low < truth_s < high < 2 * truth_s
    assert found.size is not None
    whole = sum(made_up_size(tmp_path / str(place), run.config) for place, run in enumerate(SPEC.expand().runs))
    assert found.size[0] < whole < found.size[1]


def made_up_size(out: Path, config: SimConfig) -> int:
    store = Store(out)
    store.create()
    result = made_up.result(config, requests=1000, steps=4000)
    result.requests["output_tokens"][:] = 10
    store.put(config.hash(), result)
    return store.path(config.hash()).stat().st_size


def test_pairs_for_which_no_time_is_left_are_said_to_be_guessed(tmp_path: Path) -> None:
    class Late(Machine):
        def __call__(self, config: SimConfig, *, progress: object = None) -> RunResult:
            if config.policy == "random":
                self.now_s += 1000  # as a kernel does that is compiled first
            return super().__call__(config, progress=progress)

    found = take(Late(request_s=0.001), tmp_path, probe_s=100)
    assert "2 of 4 pairs" in found.rests_on
    assert "the others are taken to cost what these do" in found.rests_on
    assert found.wall_s == pytest.approx((4 / EITHER_WAY, 4 * EITHER_WAY))


def test_nothing_is_said_where_nothing_is_known(tmp_path: Path) -> None:
    for probe_s in (0, 0.001):
        found = take(Machine(request_s=1.0), tmp_path, probe_s)
        assert (found.wall_s, found.size) == (None, None)


def test_earlier_runs_are_believed_and_not_made_again(tmp_path: Path) -> None:
    sweep(SweepSpec(base=SPEC.base, grid={**SPEC.grid, "policy": ["h2o"]}), tmp_path, workers=0, run=with_tokens)
    lines = (tmp_path / "timing.csv").read_text().splitlines()
    timing = [f"{line.split(',')[0]},{wall_s},1" for line, wall_s in zip(lines[1:], (2.0, 3.0), strict=True)]
    (tmp_path / "timing.csv").write_text("\n".join([lines[0], *timing]) + "\n")
    later = SweepSpec(base=SPEC.base, grid=SPEC.grid, seeds=[5])
    machine = Machine(request_s=0.001)
    found = take(machine, tmp_path, 1000, later)
    assert {policy for policy, *_ in machine.made} == {"random"}
    # 40 requests of 10 tokens took 2 s and 3 s; these have 1,000.
    assert found.wall_s == pytest.approx(((50 + 75 + 2) / EITHER_WAY, (50 + 75 + 2) * EITHER_WAY))
    assert found.rests_on.startswith("earlier runs here (2 of 4 pairs")
    assert take(machine, tmp_path, 0, later).wall_s is not None


def with_tokens(config: SimConfig) -> RunResult:
    result = made_up.simulate(config)
    result.summary["output_tokens"] = 400
    return result


def test_extrapolation_gives_the_proportion_and_the_line() -> None:
    assert extrapolate([(10, 2.0)], 100) == (20.0, 20.0)
    assert extrapolate([(10, 2.0), (10, 3.0)], 100) == (20.0, 30.0)
    assert extrapolate([(10, 2.0), (20, 3.0)], 100) == pytest.approx((11.0, 15.0))
    assert extrapolate([(10, 2.0), (20, 3.0)], 100, proportional=False) == pytest.approx((11.0, 11.0))
    assert extrapolate([(10, 3.0), (20, 2.0)], 100, proportional=False) == (2.0, 2.0)


def test_steps_of_a_file_are_bounded() -> None:
    point = Point(requests=10, tokens=100, wall_s=1.0, size=1000, steps=50, steps_size=5000)
    assert point.steps_of(200) == 10000
    assert point.steps_of(10**9) == 100 * STEP_ROWS
