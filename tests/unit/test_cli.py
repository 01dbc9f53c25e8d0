"""The command line: what goes to which stream, exit codes, files, start-up time, and whether the help is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sim import cli
from sim.cli import options
from sim.errors import NoProgressError
from sim.study.config import SimConfig
from sim.study.result import RunResult
from tests.support import made_up

ROOT = Path(__file__).parents[2]
TINY = ["--trace", "poisson:rate=20,n=12,prompt=64,output=20", "--kv-blocks", "200"]
PROMISED = [
    "requests",
    "finished",
    "refused",
    "steps",
    "makespan_s",
    "output_tokens_per_s",
    "requests_per_s",
    "peak_running",
    "mean_running",
    "preemptions",
    "recomputed_tokens",
    "retained_blocks_mean",
    "retained_blocks_peak_mean",
    "over_retention_mean",
    "fragmentation_mean",
    "dead_fraction_mean",
    "tail_slack_mean",
    "used_blocks_mean",
    "used_blocks_peak",
    "blocks_freed_by_death",
    "blocks_freed_by_repack",
    "tokens_evicted",
    "tokens_moved",
    "repacks_committed",
    "repacks_cancelled",
    "copy_time_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "config_hash",
    "wall_s",
    "load_state",
]


def vtoken(*arguments: str, **more: typing.Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sim.cli", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, **more
    )


def test_json_is_the_only_thing_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *TINY, "--json"]) == 0
    out = capsys.readouterr().out
    summary = json.loads(out)
    assert not set(PROMISED) - summary.keys()
    assert all({"mean", "p50", "p90", "p95", "p99"} <= summary[name].keys() for name in ("ttft_s", "tpot_s", "e2e_s"))
    assert summary["finished"] == 12
    assert (summary["kv_bytes_per_token"], summary["pool_blocks"]) == (131_072, 199)
    assert len(out.splitlines()) == 1


def test_run_prints_a_table_and_writes_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert cli.main(["run", *TINY, "--policy", "random", "--seed", "3", "--out", str(out)]) == 0
    assert "random keeping 0.5, vtoken" in capsys.readouterr().out
    result = RunResult.load(out)
    assert (result.config.policy, result.config.seed, result.config.kv_blocks) == ("random", 3, 200)
    assert result.config_hash == result.config.hash() == result.summary["config_hash"]
    assert len(result.requests["req_id"]) == 12
    assert {"python", "vtoken-sim", "numpy"} <= result.versions.keys()


def test_events_and_dumps_are_written_where_they_belong(tmp_path: Path) -> None:
    out, steps, tables = tmp_path / "run", tmp_path / "steps.csv", tmp_path / "tables.csv"
    code = cli.main(
        [
            "run",
            *TINY,
            "--out",
            str(out),
            "--events",
            "--dump-steps",
            str(steps),
            "--dump-tables",
            str(tables),
            "--json",
        ]
    )
    assert code == 0
    assert (out / "events.parquet").stat().st_size > 0
    assert steps.read_text().startswith("step,")
    assert tables.read_text().startswith("step,")
    assert cli.main(["run", *TINY, "--out", str(out), "--json"]) == 0
    assert not (out / "events.parquet").exists()


def test_flags_win_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('policy = "random"\nbudget = 0.3\nseed = 5\n')
    assert cli.main(["config", "show", "--config", str(path), "--budget-tokens", "99", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    expected = SimConfig(policy="random", budget_tokens=99, seed=5)
    assert shown == {"config_hash": expected.hash(), "config": expected.model_dump()}


def test_config_show_prints_toml_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", "--policy", "full", "--prefix-caching", "--no-reserve-full-prompt"]) == 0
    path = tmp_path / "shown.toml"
    path.write_text(capsys.readouterr().out)
    assert SimConfig.from_toml(path) == SimConfig(policy="full", prefix_caching=True, reserve_full_prompt=False)


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "schema"]) == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]) == set(SimConfig.model_fields)


def test_an_unused_budget_is_noted_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *TINY, "--policy", "full", "--budget", "0.3", "--json"]) == 0
    captured = capsys.readouterr()
    assert "the budget is not used" in captured.err
    json.loads(captured.out)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (NoProgressError("request 3 waits for ever"), 3, "error: request 3 waits for ever\n"),
        (RuntimeError("oh\nno"), 1, "error: RuntimeError: oh no (--traceback shows where)\n"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was written\n"),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("sim.study.run.simulate", fail)
    assert cli.main(["run", "--out", str(tmp_path / "run")]) == code
    captured = capsys.readouterr()
    assert captured.err.lstrip() == line
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_traceback_shows_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("oh no")

    monkeypatch.setattr("sim.study.run.simulate", fail)
    assert cli.main(["run", "--traceback"]) == 1
    assert "in fail" in capsys.readouterr().err


def test_long_runs_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def slow(config: SimConfig, *, progress: typing.Any, **_: object) -> RunResult:
        for done in (1, 2, 3):
            progress(done, 4, 1.5 * done)
        return made_up.result(config, 10, 10)

    monkeypatch.setattr("sim.study.run.simulate", slow)
    monkeypatch.setattr("sim.progress.Progress.PIPE_S", 0.0)
    assert cli.main(["run", "--json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("3/4 requests, ")
    assert lines[-1].endswith("simulated time 4 s")
    assert cli.main(["run", "--json", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_sweep_results_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "sweep.toml"
    spec.write_text(
        '[base]\ntrace = "poisson:rate=20,n=10,prompt=64,output=20"\nkv_blocks = 60\n'
        '[grid]\npolicy = ["random", "streaming_llm"]\nreclaimer = ["naive", "vtoken", "ideal"]\n'
    )
    out = tmp_path / "out"
    arguments = ["sweep", str(spec), "--policy", "random", "--budget", "0.5", "--budget", "0.3", "--workers", "1"]
    assert cli.main([*arguments, "--out", str(out), "--plan"]) == 0
    planned = capsys.readouterr().out
    assert "6 runs (0 there, 6 to make); 0 excluded, 0 duplicates dropped" in planned
    assert "expected time: " in planned
    assert "of one process; expected size: " in planned
    assert " runs of the first 10 requests made now in " in planned
    assert cli.main([*arguments, "--out", str(out), "--plan", "--probe-s", "0"]) == 0
    assert "expected" not in capsys.readouterr().out
    assert not out.exists()

    assert cli.main([*arguments, "--out", str(out), "--limit", "2"]) == 0
    assert "2 runs made, 0 were there, 4 left by --limit" in capsys.readouterr().err
    assert cli.main([*arguments, "--out", str(out), "--plan", "--probe-s", "0"]) == 0
    assert "from earlier runs here (0 of 2 pairs of policy and reclaimer); the others" in capsys.readouterr().out
    assert cli.main([*arguments, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "4 runs made, 2 were there" in captured.err
    assert "KV blocks a request holds" in captured.out

    (out / "summary.csv").unlink()
    assert cli.main(["results", str(out), "--markdown"]) == 0
    assert "| policy | keeps | naive | vtoken | ideal |" in capsys.readouterr().out
    assert cli.main(["results", str(out), "--csv"]) == 0
    assert capsys.readouterr().out == (out / "summary.csv").read_text()

    assert cli.main(["plot", str(out), "--format", "svg"]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert out / "plots" / "fragmentation.svg" in paths
    assert all(path.stat().st_size > 1000 for path in paths)
    assert cli.main(["plot", str(out), "--style", "paper", "--out", str(tmp_path / "figures")]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [f"{path.stem}.pdf" for path in paths]


def test_the_plan_of_a_large_sweep_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = [flag for seed in range(60) for flag in ("--seed", str(seed))]
    assert cli.main(["sweep", *TINY[:2], *seeds, "--out", str(tmp_path / "out"), "--plan", "--probe-s", "0"]) == 0
    printed = capsys.readouterr().out
    assert "... and 10 more" in printed
    assert "60 runs (0 there, 60 to make)" in printed
    assert len(printed.splitlines()) < 60


def test_a_sweep_with_a_failed_run_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # llama-3.1-70b in bf16 does not fit one device, and only the run can say so.
    arguments = ["sweep", *TINY[:2], "--model", "llama-3.1-70b", "--model", "llama-3.1-8b", "--policy", "full"]
    assert cli.main([*arguments, "--workers", "1", "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert "error: 1 runs failed" in captured.err
    assert cli.main(["results", str(tmp_path / "out")]) == 0
    failed = tmp_path / "out" / "failed"
    assert f"1 runs of the last sweep are missing; 1 failed, see {failed}\n" in capsys.readouterr().err
    assert "1 runs made, 0 were there, 1 failed" in captured.err
    assert "full" in captured.out


@pytest.mark.parametrize("name", ["policies", "reclaimers", "attention", "step-costs", "copy-costs"])
def test_registries_are_listed_with_parameters(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["name"] and len(row["what"]) > 15 for row in rows)
    assert cli.main([name]) == 0
    shown = capsys.readouterr().out
    assert all(row["name"] in shown for row in rows)
    if name == "policies":
        assert {"full", "random", "streaming_llm", "h2o", "scissorhands"} <= {row["name"] for row in rows}
        assert next(row for row in rows if row["name"] == "streaming_llm")["parameters"]["sinks"] == 4


@pytest.mark.parametrize("name", ["models", "hardware"])
def test_presets_are_listed_with_their_sources(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--json"]) == 0
    assert all(row["source"] for row in json.loads(capsys.readouterr().out))
    assert cli.main([name]) == 0
    assert "llama-3.1-8b" in capsys.readouterr().out or name == "hardware"


def test_every_field_has_a_flag_and_every_flag_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    for field in SimConfig.model_fields:
        parameter = options._flag(field, repeat=False)
        option = typing.get_args(parameter.annotation)[1]
        # The first argument of an option is its default, unless it is an annotation's: then it is its name.
        assert option.default.partition("/")[0] == "--" + field.replace("_", "-")
        assert option.help == SimConfig.model_fields[field].description
    assert cli.main(["run", "--help"]) == 0
    assert "--policy" in capsys.readouterr().out


def test_the_list_of_commands_says_what_each_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    quick = capsys.readouterr().out
    full = CliRunner().invoke(cli.app(), ["--help"]).output
    for name, (_, _, text) in cli.COMMANDS.items():
        for shown in (quick, full):
            (line,) = [line for line in shown.splitlines() if f" {name} " in line[:16]]
            assert text.split()[0] in line


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"Usage: vtoken {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vtoken-sim ")


def test_names_are_completed_in_the_shell() -> None:
    words = "vtoken run --policy str"
    environment = {"_VTOKEN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    done = vtoken(env={**os.environ, **environment})
    assert done.stdout.split() == ["streaming_llm"]


def test_commands_of_other_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    group = typer.Typer()
    group.command("hello")(lambda: print("hello from elsewhere"))
    group.command("bye")(lambda: None)

    class Entry:
        name = "elsewhere"

        def load(self) -> typer.Typer:
            return group

    found = lambda group: [Entry()] if group == cli.PLUGINS else []  # noqa: E731
    monkeypatch.setattr("importlib.metadata.entry_points", found)
    assert "hello from elsewhere" in CliRunner().invoke(cli.app("elsewhere"), ["elsewhere", "hello"]).output


def test_a_command_that_cannot_be_loaded_stops_only_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        name, value = "broken", "nowhere:app"

        def load(self) -> object:
            raise ModuleNotFoundError("No module named 'nowhere'")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Broken()] if group == cli.PLUGINS else [])
    assert cli.main(["broken"]) == 2
    assert capsys.readouterr().err == (
        "error: command 'broken' (nowhere:app) cannot be loaded: ModuleNotFoundError: No module named 'nowhere'\n"
    )
    assert cli.main(["models"]) == 0
    assert cli.main(["--help"]) == 0
    assert "Cannot be loaded" in capsys.readouterr().out


def test_help_needs_nothing_heavy() -> None:
    heavy = ("numpy", "pandas", "matplotlib", "numba", "simpy", "pyarrow", "scipy")
    code = (
        "import sys; from sim.cli import main; main(sys.argv[1:]); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    for arguments in (["--help"], ["run", "--help"], ["sweep", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stderr.strip() == "[]"
