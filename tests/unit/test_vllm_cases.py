"""The tools that compare with vLLM; what they find out needs vLLM, how they do it does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.vllm import cases
from benchmarks.vllm.draw import draw, write_case
from sim.workload.source import read_trace

SEEDS = range(60)


def test_equal_lines_do_not_differ_and_the_first_other_line_is_named():
    theirs = {"steps": ["head", "0,a", "1,b"], "tables": ["head", "0"]}
    assert cases.difference(theirs, theirs) == ""
    text = cases.difference({"steps": ["head", "0,a", "1,c"], "tables": ["head", "0"]}, theirs)
    assert text == "steps, line 3:\n  ours   ['1,c']\n  vLLM's ['1,b']"


@pytest.mark.parametrize("missing", ["ours", "theirs"])
def test_a_line_less_is_a_difference(missing: str):
    long, short = {"tables": ["head", "0", "1"]}, {"tables": ["head", "0"]}
    ours, theirs = (short, long) if missing == "ours" else (long, short)
    assert cases.difference(ours, theirs).startswith("tables, line 3:")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_case_is_the_same_each_time_and_can_be_run(seed: int, tmp_path: Path):
    case, rows = draw(seed)
    assert (case, rows) == draw(seed)
    write_case(tmp_path, {**case, "result": {}}, rows)
    trace = read_trace(tmp_path / "trace.csv")
    assert trace.prompt_tokens.tolist() == [row["prompt_tokens"] for row in rows]
    config = cases.config_of(tmp_path)
    assert (config.kv_blocks, config.async_scheduling) == (case["blocks"], case["async_scheduling"])
    # vLLM makes sure before it starts that a sequence of the greatest length fits the pool.
    assert (case["blocks"] - 1) * case["block_size"] >= case["max_model_len"] - 1


def test_drawn_cases_have_every_corner():
    drawn = [draw(seed) for seed in SEEDS]
    for name in ("prefix_caching", "reserve_full_prompt", "async_scheduling"):
        assert {case[name] for case, _ in drawn} == {True, False}
    assert {1, 32} < {case["block_size"] for case, _ in drawn}
    rows = [(case, row) for case, rows in drawn for row in rows]
    assert any(row["prompt_tokens"] >= case["max_model_len"] for case, row in rows)
    assert any(row["output_tokens"] == 1 == row["prompt_tokens"] for _, row in rows)


def test_the_interpreter_is_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cases.VARIABLE, sys.executable)
    assert cases.interpreter() == Path(sys.executable)
    monkeypatch.setenv(cases.VARIABLE, str(tmp_path / "nothing"))
    assert cases.interpreter() is None


def test_a_driver_that_fails_says_why(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"drive\.py failed: ModuleNotFoundError"):
        cases.drive(Path(sys.executable), [tmp_path])
