"""``vtoken trace``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from sim.cli.trace import app
from sim.errors import InputError
from sim.workload import Trace, read_trace, write_trace


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    trace = Trace(np.array([3, 3, 3, 6, 9]) * 10**9, np.full(5, 3000), np.full(5, 100))
    write_trace(trace, tmp_path / "in.csv")
    return tmp_path / "in.csv"


def test_describe_as_text_and_as_json(quantised: Path) -> None:
    assert "requests     5" in run("describe", quantised).stdout
    figures = json.loads(run("describe", quantised, "--json").stdout)
    assert figures["requests"] == 5
    assert figures["equal_times"] == 0.5
    assert figures["prompt_tokens"]["p99"] == 3000


def test_convert_changes_what_was_asked(quantised: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    run("convert", quantised, "--out", out, "--max-prompt", 2000, "--max-total", 1500, "--shift-to-zero")
    trace = read_trace(out)
    assert trace.arrival_s.tolist() == [0, 0, 0, 3, 6]
    assert set(trace.prompt_tokens.tolist()) == {1400}
    run("convert", quantised, "--out", out, "--spread-ties", "--rate-scale", 2, "--head", 4)
    trace = read_trace(out)
    assert len(trace) == 4
    assert len(set(trace.arrival_ns.tolist())) == 4
    assert trace.arrival_s[-1] == 3
    run("convert", quantised, "--out", out, "--from-s", 4, "--to-s", 9)
    assert read_trace(out).arrival_s.tolist() == [6]


def test_convert_without_changes_is_exact(quantised: Path, tmp_path: Path) -> None:
    run("convert", quantised, "--out", tmp_path / "t.parquet")
    run("convert", tmp_path / "t.parquet", "--out", tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_bytes() == quantised.read_bytes()


def test_notes_go_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text("num_prefill_tokens,num_decode_tokens\n374,44\n396,0\n")
    result = run("convert", tmp_path / "v.csv", "--arrivals", "poisson:rate=4", "--out", tmp_path / "out.csv")
    assert "left out 1 of 2 rows" in result.stderr
    assert result.stdout == ""


def test_generate_to_a_file_and_to_stdout(tmp_path: Path) -> None:
    spec = "gamma:rate=4,cv=2,n=20,prompt=lognormal:100:0.5"
    run("generate", spec, "--seed", 3, "--out", tmp_path / "g.csv")
    assert run("generate", spec, "--seed", 3).stdout == (tmp_path / "g.csv").read_text()
    with pytest.raises(InputError, match="did you mean 'gamma'"):
        run("generate", "gama:rate=4", "--out", tmp_path / "g.csv")


def test_options_that_would_do_nothing_are_refused(quantised: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--spread-ties"):
        run("convert", quantised, "--out", tmp_path / "o.csv", "--tick-s", 3)
    with pytest.raises(InputError, match="arrival times of its own"):
        run("convert", quantised, "--out", tmp_path / "o.csv", "--arrivals", "poisson:rate=4")
    with pytest.raises(InputError, match="is a generator"):
        run("describe", "poisson:rate=4", "--format", "azure")


def test_formats_lists_them_all() -> None:
    from sim.workload.readers import trace_readers

    listed = [line.split()[0] for line in run("formats").stdout.splitlines()]
    assert listed == list(trace_readers)
