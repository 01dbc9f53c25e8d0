"""Sweeps: the same bytes for any number of workers, resuming, failures, workers that die, limits."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from sim.errors import InputError
from sim.progress import Progress
from sim.study.config import SimConfig
from sim.study.executors import default_workers
from sim.study.result import RunResult
from sim.study.spec import SweepSpec
from sim.study.store import Store
from sim.study.sweep import sweep
from tests.support.made_up import simulate
from tests.support.sweeps import contents

SPEC = SweepSpec(grid={"policy": ["h2o", "random"], "reclaimer": ["naive", "vtoken"]}, seeds=[0, 1])


def never(config: SimConfig) -> RunResult:
    raise AssertionError(f"{config} was run again")


def test_one_worker_two_workers_and_none_give_the_same_bytes(tmp_path: Path) -> None:
    for workers in (0, 1, 2):
        report = sweep(SPEC, tmp_path / str(workers), workers=workers, run=simulate)
        assert (len(report.outcomes), report.failures) == (8, ())
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "2")
    assert {"sweep.json", "summary.csv", "summary.parquet"} < contents(tmp_path / "0").keys()
    assert len((tmp_path / "0" / "timing.csv").read_text().splitlines()) == 9


def test_a_finished_run_is_never_run_again(tmp_path: Path) -> None:
    first = sweep(SPEC, tmp_path, workers=0, limit=3, run=simulate)
    assert (len(first.outcomes), first.left) == (3, 5)
    second = sweep(SPEC, tmp_path, workers=0, run=simulate)
    assert (second.already_done, len(second.outcomes), second.left) == (3, 5, 0)
    third = sweep(SPEC, tmp_path, workers=0, run=never)
    assert (third.already_done, third.outcomes) == (8, ())


def test_a_sweep_can_grow(tmp_path: Path) -> None:
    sweep(SPEC, tmp_path / "grown", workers=0, run=simulate)
    more = SweepSpec(grid={**SPEC.grid, "budget": [0.5, 0.3]}, seeds=[0, 1])
    report = sweep(more, tmp_path / "grown", workers=0, run=simulate)
    assert (report.already_done, len(report.outcomes)) == (8, 8)
    sweep(more, tmp_path / "at once", workers=0, run=simulate)
    assert contents(tmp_path / "grown") == contents(tmp_path / "at once")


def test_a_failing_run_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP_REFUSES", "1")
    monkeypatch.setenv("MADE_UP_BREAKS", "2")
    spec = SweepSpec(seeds=[0, 1, 2, 3])
    stream = io.StringIO()
    report = sweep(spec, tmp_path, workers=1, run=simulate, progress=Progress(stream, "runs"))
    assert sorted(outcome.error for outcome in report.failures if outcome.error) == [
        "RuntimeError: something is broken",
        "seed 1 is refused",
    ]
    store = Store(tmp_path)
    assert len(store.scan()[0]) == 2
    record = json.loads((store.failed / f"{SimConfig(seed=2).hash()}.json").read_text())
    assert record["config"]["seed"] == 2
    assert "in simulate" in record["traceback"]
    assert f"failed: run {SimConfig(seed=1).hash()}: seed 1 is refused" in stream.getvalue()

    monkeypatch.delenv("MADE_UP_REFUSES")
    monkeypatch.delenv("MADE_UP_BREAKS")
    again = sweep(spec, tmp_path, workers=0, run=simulate)
    assert (again.already_done, len(again.outcomes), again.failures) == (2, 2, ())
    assert store.failures() == {}


def test_runs_of_a_worker_that_died_are_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP_DIES_ONCE", str(tmp_path / "died"))
    stream = io.StringIO()
    report = sweep(SPEC, tmp_path / "out", workers=2, run=simulate, progress=Progress(stream, "runs"))
    assert (len(report.outcomes), report.failures) == (8, ())
    assert "a worker process died" in stream.getvalue()
    sweep(SPEC, tmp_path / "undisturbed", workers=0, run=simulate)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_a_run_that_kills_its_worker_twice_is_blamed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP_DIES", "3")
    report = sweep(SweepSpec(seeds=list(range(6))), tmp_path, workers=2, run=simulate)
    (failure,) = report.failures
    assert failure.config_hash == SimConfig(seed=3).hash()
    assert "died twice" in str(failure.error)
    assert len(Store(tmp_path).scan()[0]) == 5


def test_files_that_cannot_be_trusted_are_made_again(tmp_path: Path) -> None:
    sweep(SPEC, tmp_path, workers=0, run=simulate)
    before = contents(tmp_path)
    path = min((tmp_path / "runs").iterdir())
    path.write_bytes(path.read_bytes()[:-10])
    (tmp_path / "runs" / ".x.tmp").touch()
    stream = io.StringIO()
    report = sweep(SPEC, tmp_path, workers=0, run=simulate, progress=Progress(stream, "runs"))
    assert (report.already_done, len(report.outcomes), report.cleaned) == (7, 1, 1)
    assert f"set aside: {tmp_path / 'set_aside' / path.name}: truncated or damaged" in stream.getvalue()
    (tmp_path / "set_aside" / path.name).unlink()
    assert contents(tmp_path) == before


def test_two_sweeps_do_not_write_to_one_directory(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create()
    with store.lock(), pytest.raises(InputError, match="another sweep"):
        sweep(SPEC, tmp_path, workers=0, run=simulate)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"policy": "h20"}, "unknown policy 'h20'.*did you mean 'h2o'"),
        ({"reclaimer": "vtokn"}, "unknown reclaimer 'vtokn'.*did you mean 'vtoken'"),
        ({"model": "llama-9"}, "unknown model 'llama-9'"),
        ({"hardware": "h1000"}, "unknown hardware 'h1000'"),
        ({"attention": "synthetc"}, "unknown attention model 'synthetc'"),
        ({"step_cost": "roof"}, "unknown step cost 'roof'"),
        ({"copy_cost": "band"}, "unknown copy cost 'band'"),
        ({"trace": "missing.csv"}, "missing.csv"),
    ],
)
def test_what_no_run_could_use_is_refused_before_anything_is_written(
    tmp_path: Path, base: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        sweep(SweepSpec(base=base), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_there_is_a_worker_for_each_processor() -> None:
    assert default_workers() >= 1
