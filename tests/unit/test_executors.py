"""Executors: what a sweep asks of one, however many runs there are, and what a worker refuses."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from sim.progress import Progress
from sim.study.check import files_named
from sim.study.config import SimConfig
from sim.study.executors import InProcess, Kept, Lost, Made, RunFunction
from sim.study.executors.base import execute
from sim.study.executors.cluster import _look, _make
from sim.study.run_file import Packed, pack
from sim.study.spec import Run, SweepSpec
from sim.study.store import Store
from sim.study.sweep import sweep
from sim.study.versions import package_version
from tests.support import made_up

TRACE = "req_id,arrival_s,prompt_tokens,output_tokens\na,0.0,20,5\nb,0.1,30,5\n"


class Instant(InProcess):
    """Give every run the same result, and note how many were asked for at once."""

    ROOM = 8

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed = packed
        self.flying: list[str] = []
        self.most = 0
        self.checked: list[int] = []

    def check(self, runs: Sequence[Run]) -> None:
        self.checked.append(len(runs))

    def room(self, *, alone: bool) -> int:
        return 1 if alone else self.ROOM

    def submit(self, run: Run, function: RunFunction | None) -> None:  # noqa: ARG002
        self.flying.append(run.config_hash)
        self.most = max(self.most, len(self.flying))

    def wait(self, timeout_s: float) -> list[Made | Lost]:  # noqa: ARG002
        return [Made(self.flying.pop(0), 0.01, self.packed)]


@pytest.fixture
def packed() -> Packed:
    config = SimConfig()
    return pack(config.hash(), made_up.result(config, requests=2, steps=2))


class Memory(Progress):
    """Note what Python holds, every so many runs."""

    def __init__(self) -> None:
        super().__init__(None, "runs")
        self.bytes: dict[int, int] = {}

    def update(self, done: int | None = None, note: str = "") -> None:
        super().update(done, note)
        if done is not None and done % 100 == 0:
            self.bytes[done] = tracemalloc.get_traced_memory()[0]


def test_many_runs_are_few_at_a_time_and_leave_little_behind(tmp_path: Path, packed: Packed) -> None:
    executor, memory = Instant(packed), Memory()
    tracemalloc.start()
    try:
        report = sweep(SweepSpec(seeds=list(range(600))), tmp_path, executor=executor, progress=memory)
    finally:
        tracemalloc.stop()
    assert (len(report.outcomes), report.failures) == (600, ())
    assert executor.most == Instant.ROOM
    assert executor.checked == [600]
    # How each run ended is kept, its result (of 28 kB) is not.
    assert (memory.bytes[600] - memory.bytes[200]) / 400 < 1000 < len(packed.data) / 10


def test_an_executor_without_work_is_not_asked(tmp_path: Path, packed: Packed) -> None:
    spec = SweepSpec(seeds=[0, 1])
    sweep(spec, tmp_path, workers=0, run=made_up.simulate)
    executor = Instant(packed)
    assert sweep(spec, tmp_path, executor=executor).already_done == 2
    assert (executor.checked, executor.most) == ([], 0)


class Ending(Instant):
    """Note how often it ended."""

    ended = 0

    def __exit__(self, *_: object) -> None:
        self.ended += 1


def test_an_executor_that_is_kept_serves_one_sweep_after_another(tmp_path: Path, packed: Packed) -> None:
    executor = Ending(packed)
    with executor:
        for place in ("first", "second"):
            report = sweep(SweepSpec(seeds=[0, 1]), tmp_path / place, executor=Kept(executor))
            assert (len(report.outcomes), executor.ended) == (2, 0)
    assert (executor.ended, executor.most, executor.checked) == (1, 2, [2, 2])


class Dying(Instant):
    """Lose what is in flight the first two times, and one run always."""

    def __init__(self, packed: Packed, culprit: str) -> None:
        super().__init__(packed)
        self.culprit = culprit
        self.alone: list[list[str]] = []

    def wait(self, timeout_s: float) -> list[Made | Lost]:
        if self.culprit in self.flying:
            lost = [Lost(each) for each in self.flying]
            self.alone.append(self.flying)
            self.flying = []
            return list(lost)
        return super().wait(timeout_s)


def test_of_runs_that_are_lost_together_the_one_to_blame_is_found(tmp_path: Path, packed: Packed) -> None:
    culprit = SimConfig(seed=11).hash()
    executor = Dying(packed, culprit)
    report = sweep(SweepSpec(seeds=list(range(20))), tmp_path, executor=executor)
    assert [each.config_hash for each in report.failures] == [culprit]
    assert len(report.outcomes) == 20
    first, second = executor.alone
    assert len(first) == Instant.ROOM
    assert second == [culprit]
    assert "died twice" in Store(tmp_path).failures()[culprit]


def test_a_run_is_not_made_with_another_file_than_the_sweep_began_with(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    config = SimConfig(trace=str(path))
    run = Run(config, config.hash())
    assert execute(run, made_up.simulate).packed is not None
    path.write_text(TRACE.replace("30", "31"))
    made = execute(run, made_up.simulate)
    assert made.packed is None
    assert "not the one that the sweep began with" in made.error


def test_a_worker_refuses_what_it_must_not_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    config = SimConfig(trace="trace.csv")
    run, here = Run(config, config.hash()), package_version()
    assert _look([(run, files_named(config))], here) is None
    assert isinstance(_make(run, made_up.simulate, here), Made)
    assert _look([], "99.0") == f"it has vtoken-sim {here}, this is 99.0"
    assert "it has vtoken-sim" in str(_make(run, made_up.simulate, "99.0"))
    path.write_text(TRACE.replace("30", "31"))
    assert _look([(run, ["trace.csv"])], here) == "it sees other files than this machine: trace.csv"
    assert "it sees other files" in str(_make(run, made_up.simulate, here))
    path.unlink()
    line = _look([(run, ["trace.csv"])], here)
    assert line == f"it does not see trace.csv from {os.getcwd()}; give the whole path"
    assert _look([(run, [str(path)])], here) == f"it does not see {path}"


def test_files_that_a_configuration_names(tmp_path: Path) -> None:
    trace, attention, profile = (tmp_path / name for name in ("trace.csv", "attention.npz", "profile.json"))
    for path in (trace, attention, profile):
        path.touch()
    config = SimConfig(
        trace=str(trace), attention=f"recorded:{attention}", step_cost=f"profile:path={profile}", copy_cost="bandwidth"
    )
    assert files_named(config) == [str(trace), str(attention), str(profile)]
    assert files_named(SimConfig(step_cost="profile:h100")) == []
    assert files_named(SimConfig(trace="poisson:rate=1,n=2")) == []
