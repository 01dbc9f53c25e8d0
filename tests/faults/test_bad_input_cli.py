"""Bad input on the command line: one clear line on standard error, exit code 2, nothing on standard output."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

from sim import cli
from sim.study.config import SimConfig
from tests.support import made_up

GOOD = "req_id,arrival_s,prompt_tokens,output_tokens\na,0.0,10,5\nb,1.0,10,5\n"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused; return its line without the ``error:``."""
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("error: ")
    return captured.err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "budget: expected greater than 0, got 0.0"),
        (["--budget", "1.5"], "budget: expected less than or equal to 1, got 1.5"),
        (["--budget", "nan"], "budget: expected a finite number, got nan"),
        (["--budget", "half"], "'--budget'"),
        (["--budget", "0.5", "--budget-tokens", "3"], "exclude each other"),
        (["--budget-tokens", "0"], "budget_tokens"),
        (["--budget-memory", "2"], "budget_memory: expected a number with one of B, kB"),
        (["--budget-memory", "1GiB", "--budget", "0.5"], "budget and budget_memory exclude each other"),
        (["--budget-memory", "64KiB"], "budget_memory: 64KiB is less than one token of llama-3.1-8b"),
        (["--budget-scope", "all"], "budget_scope: expected 'request' or 'batch', got 'all'"),
        (["--budget-scope", "batch", "--policy", "random"], "budget_scope batch: tokens of different requests cannot"),
        (["--reclaimer", "reuse+vtoken:at_once=-1"], "reuse+vtoken: at_once: expected 0 or more tokens, got -1"),
        (["--policy", "snapkv:pool=2"], "snapkv: expected window >= 1 and an odd pool"),
        (["--policy", "h20"], "unknown policy 'h20'"),
        (["--policy", "h2o:recnt=1"], "did you mean 'recent'"),
        (["--policy", "h2o:recent=x"], "expected float, got 'x'"),
        (["--reclaimer", "vtokn"], "did you mean 'vtoken'"),
        (["--reclaimer", "none"], "use policy full"),
        (["--model", "llama-3.1-9b"], "did you mean 'llama-3.1-8b'"),
        (["--hardware", "h10"], "unknown hardware 'h10'"),
        (["--attention", "recorded:missing.npz"], "missing.npz"),
        (["--step-cost", "linear"], "base_s"),
        (["--step-cost", "profile:missing.json"], "missing.json"),
        (["--step-cost", "profile:h10"], "did you mean 'h100'"),
        (["--step-cost", "profile:h200"], "field hardware: expected h100-sxm, got h200-sxm"),
        (["--step-cost", "profile:h100", "--model", "toy"], "none comes along for model toy"),
        (["--copy-cost", "profile:missing.json"], "missing.json"),
        (["--kv-blocks", "0"], "kv_blocks"),
        (["--block-size", "0"], "block_size"),
        (["--seed", "-1"], "seed"),
        (["--repack-when", "never"], "repack_when: expected 'pressure' or 'always', got 'never'"),
        (["--shared-blocks", "move"], "shared_blocks: expected 'skip' or 'copy_out', got 'move'"),
        (["--prefix-caching", "--reclaimer", "sync:keep_blocks=4"], "keep_blocks"),
        (["--trace", "missing.csv"], "missing.csv"),
        (["--trace", "poisson:rate=0,n=5,prompt=5,output=5"], "rate"),
        (["--config", "missing.toml"], "missing.toml: cannot read it"),
        (["--events"], "--out"),
        (["--kv-blocks", "100000000000"], "slots in all"),
        (["--score-reads", "1e300"], "score_reads"),
        (["--rate-scale", "1e-300"], "past 146 years"),
        (["--polcy", "h2o"], "--policy"),
        (["extra"], "extra"),
    ],
)
def test_run_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(capsys, "run", "--quiet", *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"a,b\n1,2\n", ""),
        (b"req_id,arrival_s,prompt_tokens,output_tokens\na,0.0,-10,5\n", "-10"),
        (b"req_id,arrival_s,prompt_tokens,output_tokens\na,0.0,,5\n", "prompt_tokens"),
        (b"req_id,arrival_s,prompt_tokens,output_tokens\na,nan,10,5\n", "nan"),
        (b"req_id,arrival_s,prompt_tokens,output_tokens\na,2.0,10,5\nb,1.0,10,5\n", ""),
        (b"\x00\x01\x02\x03" * 100, ""),
        (b"a" * 100_000_000, ""),
    ],
    ids=["empty", "wrong columns", "negative", "missing", "NaN", "unsorted", "binary", "100 MB line"],
)
def test_trace_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    line = refused(capsys, "run", "--quiet", "--trace", str(path))
    assert str(path) in line
    assert message in line
    assert len(line) < 500


def test_a_truncated_gzip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(GOOD.encode() * 100)[:-20])
    assert str(path) in refused(capsys, "run", "--quiet", "--trace", str(path))


def test_a_request_larger_than_the_pool_is_refused_and_the_others_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(GOOD + "c,2.0,1000,5\n")
    assert cli.main(["run", "--quiet", "--json", "--trace", str(path), "--kv-blocks", "8"]) == 0
    captured = capsys.readouterr()
    assert '"finished": 2, "refused": 1' in captured.out
    assert captured.err.startswith("note: 1 requests refused; request 'c': its 1000 tokens need 63 KV blocks")


def test_a_run_in_which_no_request_fits_the_pool_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "run", "--quiet", "--trace", "poisson:rate=9,n=5,prompt=1000,output=9", "--kv-blocks", "8")
    assert "its 1000 tokens need 63 KV blocks, the pool has 6 for requests" in line


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_places_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (tmp_path / "file").write_text("mine")
    arguments = [command, "--trace", "poisson:rate=9,n=5,prompt=9,output=9"]
    line = refused(capsys, *arguments, "--out", str(tmp_path / "file" / "out"))
    assert "cannot write there" in line
    line = refused(capsys, *arguments, "--out", "/proc/nowhere")
    assert "/proc/nowhere" in line
    refused(capsys, *arguments, "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("flag", ["--dump-steps", "--dump-tables"])
def test_dumps_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    path = tmp_path / "missing" / "dump.csv"
    assert str(path) in refused(capsys, "run", "--quiet", "--json", flag, str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[grid]\npolicy = ['h20']\n", "did you mean 'h2o'"),
        ("[grid]\nbudget = [0.5, 1.5]\n", "budget 1.5"),
        ("[grid]\nreclaimer = ['none', 'naive']\n", "[[exclude]]"),
        ("[gird]\n", "did you mean 'grid'"),
        ("grid\n", "not TOML"),
        ("[base]\ntrace = 'missing.csv'\n", "missing.csv"),
    ],
)
def test_sweep_specs(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    assert message in refused(capsys, "sweep", str(path), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_directories_that_are_not_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is none" in refused(capsys, "plot", str(tmp_path / "missing"))
    assert "config.json" in refused(capsys, "plot", str(tmp_path))
    assert "expected the directory of a sweep" in refused(capsys, "results", str(tmp_path))
    (tmp_path / "runs").mkdir()
    assert "no finished run" in refused(capsys, "results", str(tmp_path))
    made_up.result(SimConfig(), 5, 5).save(tmp_path / "run")
    assert "expected one of" in refused(capsys, "plot", str(tmp_path / "run"), "--format", "jpg")
    told = refused(capsys, "plot", str(tmp_path / "run"), "--style", "papper")
    assert "style: expected one of screen, paper, got 'papper'; did you mean 'paper'" in told
    (tmp_path / "run" / "steps.parquet").write_bytes(b"PAR1")
    assert "steps.parquet" in refused(capsys, "plot", str(tmp_path / "run"))


def test_a_store_with_foreign_files_is_read_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["sweep", "--trace", "poisson:rate=9,n=5,prompt=9,output=9", "--workers", "1", "--out", str(out)]
    assert cli.main(arguments) == 0
    (out / "runs" / "foreign.parquet").write_bytes(b"PAR1PAR1")
    capsys.readouterr()
    assert cli.main(["results", str(out), "--markdown"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"warning: not used: {out / 'runs' / 'foreign.parquet'}: ")
    assert "| h2o |" in captured.out
    for command in ("plot", "report"):
        assert cli.main([command, str(out)]) == 0
        assert capsys.readouterr().err.startswith(f"warning: not used: {out / 'runs' / 'foreign.parquet'}: ")
    (out / "failed" / "other.json").write_text("{")
    (out / "sweep.json").write_text('{"runs": ["other"]}')
    assert cli.main(["results", str(out), "--markdown"]) == 0
    assert "1 runs of the last sweep are missing; 1 failed" in capsys.readouterr().err
    (out / "sweep.json").write_text("[1]")
    assert cli.main(["results", str(out), "--markdown"]) == 0
    assert "missing" not in capsys.readouterr().err


def test_a_plan_of_runs_that_cannot_be_made_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.jsonl").write_text("hello\n")
    arguments = ["sweep", "--trace", str(tmp_path / "trace.jsonl"), "--out", str(tmp_path / "out"), "--plan"]
    assert "not a known trace format" in refused(capsys, *arguments)


def test_unknown_command_and_missing_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rn" in refused(capsys, "rn")
    assert "--out" in refused(capsys, "sweep", "--policy", "h2o")
    assert "DIR" in refused(capsys, "plot")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["concurrency"], "--out"),
        (["concurrency", "--out", "x", "--head", "5"], "head: the search sets it"),
        (["concurrency", "--out", "x", "--max-num-seqs", "5"], "max_num_seqs: the search sets it"),
        (["concurrency", "--out", "x", "--rate-scale", "5"], "rate_scale: the search sets it"),
        (["concurrency", "--out", "x", "--load", "steady"], "expected 'burst' or 'sustained', got 'steady'"),
        (["concurrency", "--out", "x", "--from", "9", "--to", "8"], "expected 0 < from <= to, got 9 .. 8"),
        (["concurrency", "--out", "x", "--from", "9999"], "default: expected at least 9999 requests"),
        (["concurrency", "--out", "x", "--policy", "h20"], "unknown policy 'h20'"),
        (["concurrency", "--out", "x", "missing.toml"], "missing.toml"),
        (["concurrency", "--out", "x", "--trace", "missing.csv"], "missing.csv"),
        (["sla-throughput", "--out", "x"], "--sla"),
        (["sla-throughput", "--out", "x", "--sla", "ee_p95=1"], "did you mean 'e2e_p95'"),
        (["sla-throughput", "--out", "x", "--sla", "paper", "--baseline", "naiv"], "unknown reclaimer 'naiv'"),
        (["sla-throughput", "--out", "x", "--sla", "paper", "--tolerance", "0"], "tolerance: expected"),
        (["sla-throughput", "--out", "x", "--sla", "paper", "--baseline-rate", "0"], "baseline rate"),
        (["sla-throughput", "--out", "x", "--sla", "paper", "--from", "-1"], "expected 0 < from <= to, got -1"),
        (["sla-throughput", "--out", "x", "--sla", "paper", "--duration-s", "0"], "duration: expected"),
        (["sla-throughput", "--out", "x", "--sla", "paper", "--min-duration-s", "1e9"], "give a longer trace"),
        (["rate"], "No such command 'rate'"),
    ],
)
def test_search_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "search", *arguments)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", [["sweep"], ["search", "concurrency"]])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dask", "tcp://h:1", "--workers", "2"], "--workers and --dask exclude each other"),
        (["--dask", "tcp://h:1", "--dask-local", "2"], "--dask and --dask-local exclude each other"),
        (["--dask-local", "0"], "--dask-local"),
        (["--dask", "tcp://127.0.0.1:9"], "no Dask scheduler at 'tcp://127.0.0.1:9'"),
        (["--dask", "127.0.0.1"], "missing port number"),
        (["--dask", "smtp://127.0.0.1:9"], "unknown address scheme 'smtp'"),
    ],
)
def test_where_runs_are_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    flags: list[str],
    message: str,
) -> None:
    pytest.importorskip("distributed", reason="needs Dask: pip install -e '.[test]'")
    # Nobody answers there, however long one tries.
    monkeypatch.setattr("sim.study.executors.cluster.CONNECT_S", 0.5)
    assert message in refused(capsys, *command, *flags, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_dask_without_dask(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    line = refused(capsys, "sweep", "--dask", "tcp://h:1", "--out", str(tmp_path / "out"))
    assert "Dask is not installed: pip install 'vtoken-sim[cluster]'" in line
