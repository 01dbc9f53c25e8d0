"""Killed and interrupted sweeps: the same command again ends with what an undisturbed sweep gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from tests.support.command import vtoken
from tests.support.sweeps import contents

ROOT = Path(__file__).parents[2]
SPEC = """
seeds = [0, 1]
[base]
trace = "poisson:rate=20,n=60,prompt=200,output=60"
kv_blocks = 120
[grid]
policy = ["random", "h2o", "streaming_llm"]
reclaimer = ["naive", "vtoken"]
"""
RUNS = 12


def command(spec: Path, out: Path, workers: int = 2) -> list[str]:
    return ["sweep", str(spec), "--out", str(out), "--workers", str(workers)]


def start(spec: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sim.cli", *command(spec, out)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finished(out: Path) -> list[Path]:
    return sorted((out / "runs").glob("*.parquet"))


def wait_until_some_are_done(process: subprocess.Popen[str], out: Path, runs: int) -> None:
    deadline_s = time.monotonic() + 120
    while len(finished(out)) < runs:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def processes_of(session: int) -> list[int]:
    """Return the living processes of a session, but for zombies."""
    living = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == session and fields[0] != "Z":
            living.append(int(entry.name))
    return living


def wait_until_all_ended(process: subprocess.Popen[str]) -> None:
    """Wait for the processes that a driver started; they notice that it is gone."""
    deadline_s = time.monotonic() + 20
    while processes_of(process.pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "sweep.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture(scope="module")
def undisturbed(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    # One worker here and two in the tests: the number must not matter.
    code, stderr = vtoken(*command(spec, out, workers=1))
    assert code == 0, stderr
    assert len(finished(out)) == RUNS
    return contents(out)


@pytest.mark.slow
@pytest.mark.parametrize(("after", "workers"), [(1, 2), (6, 1)])
def test_kill_9_and_go_on(tmp_path: Path, spec: Path, undisturbed: dict[str, bytes], after: int, workers: int) -> None:
    out = tmp_path / "out"
    process = start(spec, out)
    wait_until_some_are_done(process, out, after)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until_all_ended(process)
    before = {path.name: path.stat().st_mtime_ns for path in finished(out)}
    assert after <= len(before) < RUNS
    code, stderr = vtoken(*command(spec, out, workers))
    assert code == 0, stderr
    assert f"{RUNS - len(before)} runs made, {len(before)} were there" in stderr
    assert all((out / "runs" / name).stat().st_mtime_ns == stamp for name, stamp in before.items())
    assert contents(out) == undisturbed
    assert len(pd.read_csv(out / "summary.csv")) == RUNS


@pytest.mark.slow
def test_control_c_says_how_to_go_on(tmp_path: Path, spec: Path, undisturbed: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    process = start(spec, out)
    wait_until_some_are_done(process, out, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the driver and its workers
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    same = f"vtoken sweep {spec} --out {out} --workers 2"
    assert f"interrupted; finished runs are in {out}, the same command goes on: {same}\n" in stderr
    assert "Traceback" not in stderr
    wait_until_all_ended(process)
    code, stderr = vtoken(*command(spec, out, workers=1))
    assert code == 0, stderr
    assert contents(out) == undisturbed


@pytest.mark.slow
def test_a_killed_worker_does_not_stop_the_sweep(tmp_path: Path, spec: Path, undisturbed: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    process = start(spec, out)
    wait_until_some_are_done(process, out, 1)
    workers = [pid for pid in processes_of(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "a worker process died" in stderr
    assert contents(out) == undisturbed


@pytest.mark.slow
def test_control_c_of_a_run_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["run", "--trace", "poisson:rate=5,n=1000000,prompt=500,output=500", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "sim.cli", *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert "requests" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted; nothing was written" in stderr
    assert list(tmp_path.iterdir()) == []
