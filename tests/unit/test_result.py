"""A run's directory: what is written can be read, all of it or nothing is there, and foreign files are left alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from sim.errors import InputError
from sim.study.config import SimConfig
from sim.study.export import complete_directory
from sim.study.result import RunResult, to_json
from tests.support import made_up


@pytest.fixture
def result() -> RunResult:
    return made_up.result(SimConfig(), requests=20, steps=30)


def same(one: RunResult, other: RunResult) -> None:
    assert one.config == other.config
    assert (one.config_hash, one.summary, one.versions) == (other.config_hash, other.summary, other.versions)
    for name in ("requests", "steps", "liveness"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert list(ours) == list(theirs)
        for column, values in ours.items():
            assert values.dtype == theirs[column].dtype
            np.testing.assert_array_equal(values, theirs[column])
    assert (one.pool_snapshot is None) == (other.pool_snapshot is None)
    for column, values in (one.pool_snapshot or {}).items():
        np.testing.assert_array_equal(values, (other.pool_snapshot or {})[column])


def test_what_is_saved_can_be_loaded(tmp_path: Path, result: RunResult) -> None:
    result.save(tmp_path / "run")
    same(RunResult.load(tmp_path / "run"), result)
    without = dataclasses.replace(result, pool_snapshot=None)
    without.save(tmp_path / "run")
    same(RunResult.load(tmp_path / "run"), without)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_equal_results_give_equal_bytes(tmp_path: Path, result: RunResult) -> None:
    for name in ("one", "two"):
        result.save(tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_frames_have_a_row_an_entry(result: RunResult) -> None:
    assert result.requests_frame().shape == (20, len(result.requests))
    assert result.steps_frame()["dt_s"].sum() == pytest.approx(result.steps["dt_s"].sum())
    assert list(result.liveness_frame()) == list(result.liveness)


def test_json_has_no_nan_and_no_numpy() -> None:
    assert (
        to_json({"a": float("nan"), "b": [np.int64(3)], "c": np.float64("inf")}) == '{"a": null, "b": [3], "c": null}'
    )


def test_nothing_is_left_when_writing_fails(tmp_path: Path, result: RunResult) -> None:
    broken = dataclasses.replace(result, steps={"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(ValueError, match="length"):
        broken.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_previous_run_is_replaced_as_a_whole_or_kept(tmp_path: Path, result: RunResult) -> None:
    result.save(tmp_path / "run")
    (tmp_path / "run" / "plots").mkdir()
    before = {path.name for path in (tmp_path / "run").iterdir()}
    with pytest.raises(RuntimeError), complete_directory(tmp_path / "run"):
        raise RuntimeError
    assert {path.name for path in (tmp_path / "run").iterdir()} == before
    result.save(tmp_path / "run")
    assert not (tmp_path / "run" / "plots").exists()


@pytest.mark.parametrize("foreign", ["notes.txt", "summary.csv"])
def test_foreign_files_are_never_replaced(tmp_path: Path, result: RunResult, foreign: str) -> None:
    result.save(tmp_path / "run")
    (tmp_path / "run" / foreign).write_text("mine")
    with pytest.raises(InputError, match=f"not a previous run to replace: it holds {foreign}"):
        result.save(tmp_path / "run")
    assert (tmp_path / "run" / foreign).read_text() == "mine"


def test_an_empty_directory_is_fine_and_a_file_is_not(tmp_path: Path, result: RunResult) -> None:
    (tmp_path / "empty").mkdir()
    result.save(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="expected a directory, it is a file"):
        result.save(tmp_path / "file")
    with pytest.raises(InputError, match="cannot write there"):
        result.save(tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["requests.parquet", "steps.parquet", "summary.json", "config.json"])
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, result: RunResult, name: str) -> None:
    result.save(tmp_path / "run")
    path = tmp_path / "run" / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=name):
        RunResult.load(tmp_path / "run")
    path.unlink()
    with pytest.raises(InputError, match=f"{name}: no such file"):
        RunResult.load(tmp_path / "run")


def test_a_flipped_byte_is_found(tmp_path: Path, result: RunResult) -> None:
    result.save(tmp_path / "run")
    path = tmp_path / "run" / "requests.parquet"
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"requests\.parquet"):
        RunResult.load(tmp_path / "run")


def test_a_configuration_without_a_field_of_ours_is_one_clear_line(tmp_path: Path, result: RunResult) -> None:
    result.save(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    about = json.loads(path.read_text())
    del about["versions"]
    path.write_text(json.dumps(about))
    with pytest.raises(InputError, match="field 'versions' is missing"):
        RunResult.load(tmp_path / "run")
