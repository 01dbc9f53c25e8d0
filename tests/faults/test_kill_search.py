"""A search that is killed or interrupted: the same command again ends with what an undisturbed search gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command import vtoken
from tests.support.sweeps import contents

ROOT = Path(__file__).parents[2]
ARGUMENTS = [
    *("--trace", "poisson:rate=20,n=80,prompt=200,output=200", "--kv-blocks", "300", "--policy", "random"),
    *("--reclaimer", "naive", "--reclaimer", "vtoken", "--checks", "4"),
]


def command(out: Path, workers: int = 2) -> list[str]:
    where = ["--out", str(out), "--workers", str(workers)]
    return ["search", "concurrency", *ARGUMENTS, *where]


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sim.cli", *command(out)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finished(out: Path) -> list[Path]:
    return sorted((out / "runs").glob("*.parquet"))


def wait_for_runs(process: subprocess.Popen[str], out: Path, runs: int) -> None:
    deadline_s = time.monotonic() + 120
    while len(finished(out)) < runs:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    # One worker here and two in the tests: the number must not matter.
    code, stderr = vtoken(*command(out, workers=1))
    assert code == 0, stderr
    assert " requests: holds, all decode together" in stderr
    return contents(out)


def go_on(out: Path, undisturbed: dict[str, bytes], workers: int) -> None:
    """Run the command to its end; no run that was finished is made again, and the bytes are those of one go."""
    before = {path: path.stat().st_mtime_ns for path in finished(out)}
    code, stderr = vtoken(*command(out, workers))
    assert code == 0, stderr
    runs = sum(name.endswith(".parquet") for name in undisturbed)
    assert 0 < len(before) < runs
    assert f"{runs - len(before)} runs made, {len(before)} were there" in stderr
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert contents(out) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("after", "workers"), [(1, 2), (9, 1)])
def test_kill_9_and_go_on(tmp_path: Path, undisturbed: dict[str, bytes], after: int, workers: int) -> None:
    out = tmp_path / "out"
    process = start(out)
    wait_for_runs(process, out, after)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()  # returns when its workers have ended too, which hold the pipe
    assert not (out / "search.json").exists()
    go_on(out, undisturbed, workers)


@pytest.mark.slow
def test_control_c_says_how_to_go_on(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    process = start(out)
    wait_for_runs(process, out, 4)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the driver and its workers
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"interrupted; finished runs are in {out}, the same command goes on" in stderr
    assert "Traceback" not in stderr
    go_on(out, undisturbed, workers=1)
