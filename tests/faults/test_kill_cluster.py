"""Sweeps on a real Dask cluster: whatever dies, the same command again ends with what an undisturbed sweep gives."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.support.cluster import LONG_S, ROOT, Cluster, end, python, wait_until
from tests.support.command import vtoken
from tests.support.sweeps import contents

pytest.importorskip("distributed", reason="needs Dask: pip install -e '.[test]'")

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


def start(spec: Path, out: Path, *flags: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    return python("-m", "sim.cli", "sweep", str(spec), "--out", str(out), *flags, cwd=cwd)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=LONG_S)
    return process.returncode, stderr


def finished(out: Path) -> dict[str, int]:
    """Return when each finished run was written."""
    return {path.name: path.stat().st_mtime_ns for path in (out / "runs").glob("*.parquet")}


def goes_on(spec: Path, out: Path, cluster: Cluster, undisturbed: dict[str, bytes]) -> None:
    """Resume a sweep that was stopped, and look that what was finished stayed."""
    before = finished(out)
    assert 0 < len(before) < RUNS
    code, stderr = finish(start(spec, out, "--dask", str(cluster.file)))
    assert code == 0, stderr
    assert f"{RUNS - len(before)} runs made, {len(before)} were there" in stderr
    after = finished(out)
    assert {name: after[name] for name in before} == before
    assert contents(out) == undisturbed
    # A line each time a run was made: none that had finished was made again.
    assert pd.read_csv(out / "timing.csv")["config_hash"].is_unique


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "sweep.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture(scope="module")
def undisturbed(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return what a sweep in one process of this machine gives, without Dask."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    code, stderr = vtoken("sweep", str(spec), "--out", str(out), "--workers", "1")
    assert code == 0, stderr
    return contents(out)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "elsewhere").mkdir()
    with Cluster(tmp_path / "elsewhere") as cluster:
        yield cluster


@pytest.mark.slow
def test_the_client_is_killed_and_a_cluster_gives_the_bytes_of_a_local_sweep(
    tmp_path: Path, spec: Path, cluster: Cluster, undisturbed: dict[str, bytes]
) -> None:
    cluster.add_worker()
    out = tmp_path / "out"
    process = start(spec, out, "--dask", str(cluster.file))
    wait_until(lambda: len(finished(out)) >= 2, process)
    end(process)
    goes_on(spec, out, cluster, undisturbed)


@pytest.mark.slow
def test_the_scheduler_is_killed(tmp_path: Path, spec: Path, cluster: Cluster, undisturbed: dict[str, bytes]) -> None:
    cluster.add_worker()
    out = tmp_path / "out"
    process = start(spec, out, "--dask", str(cluster.file))
    wait_until(lambda: len(finished(out)) >= 2, process)
    end(cluster.scheduler)
    code, stderr = finish(process)
    assert code == 1
    assert "is out of reach; finished runs are in" in stderr
    assert f"the same command goes on: vtoken sweep {spec} --out {out} --dask {cluster.file}" in stderr
    assert "Traceback" not in stderr, stderr
    (tmp_path / "another").mkdir()
    with Cluster(tmp_path / "another") as another:
        another.add_worker()
        goes_on(spec, out, another, undisturbed)


@pytest.mark.slow
def test_a_worker_is_killed(tmp_path: Path, spec: Path, cluster: Cluster, undisturbed: dict[str, bytes]) -> None:
    for _ in range(2):
        cluster.add_worker("--no-nanny")
    out = tmp_path / "out"
    process = start(spec, out, "--dask", str(cluster.file))
    wait_until(lambda: len(finished(out)) >= 2, process)
    end(cluster.workers[0])
    code, stderr = finish(process)
    assert code == 0, stderr
    assert f"{RUNS} runs made, 0 were there" in stderr
    assert contents(out) == undisturbed
    assert len(pd.read_csv(out / "timing.csv")) == RUNS


@pytest.mark.slow
def test_control_c(tmp_path: Path, spec: Path, undisturbed: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    process = start(spec, out, "--dask-local", "1")
    wait_until(lambda: len(finished(out)) >= 1, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the client and what it started
    code, stderr = finish(process)
    assert code == 130
    assert f"the same command goes on: vtoken sweep {spec} --out {out} --dask-local 1" in stderr
    assert "Traceback" not in stderr, stderr
    code, stderr = vtoken("sweep", str(spec), "--out", str(out), "--workers", "1")
    assert code == 0, stderr
    assert contents(out) == undisturbed


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_a_client_that_is_killed(
    tmp_path: Path, spec: Path, undisturbed: dict[str, bytes]
) -> None:
    psutil = pytest.importorskip("psutil")
    out = tmp_path / "out"
    process = start(spec, out, "--dask-local", "1")
    wait_until(lambda: len(finished(out)) >= 1, process)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2  # a scheduler and a worker
    process.kill()  # alone: nobody tells the others
    process.communicate(timeout=LONG_S)
    _, alive = psutil.wait_procs(started, timeout=LONG_S)
    for each in alive:
        each.kill()
    assert not alive
    before = finished(out)
    code, stderr = finish(start(spec, out, "--dask-local", "1"))
    assert code == 0, stderr
    assert f"{len(before)} were there" in stderr
    assert contents(out) == undisturbed


BLAMED = """
import sys
from pathlib import Path
from sim.progress import Progress
from sim.study.executors import DaskCluster
from sim.study.spec import SweepSpec
from sim.study.sweep import sweep
from tests.support.made_up import simulate

progress = Progress(sys.stderr, "runs")
out, address = sys.argv[1:]
where = DaskCluster(address, progress)
report = sweep(SweepSpec(seeds=list(range(6))), out, executor=where, run=simulate, progress=progress)
for outcome in report.outcomes:
    print(outcome.config_hash, outcome.error)
"""


@pytest.mark.slow
def test_a_run_that_kills_its_worker_twice_is_blamed_alone(tmp_path: Path, cluster: Cluster) -> None:
    from sim.study.config import SimConfig

    for _ in range(2):
        cluster.add_worker(MADE_UP_DIES="3")  # with a nanny, which starts it again
    process = python("-c", BLAMED, str(tmp_path / "out"), str(cluster.file))
    stdout, stderr = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, stderr
    ended = dict(line.split(" ", 1) for line in stdout.splitlines())
    assert len(ended) == len(stdout.splitlines()) == 6
    assert "died twice" in ended.pop(SimConfig(seed=3).hash())
    assert set(ended.values()) == {"None"}
    assert "a worker process died" in stderr


@pytest.fixture
def newer(tmp_path: Path) -> str:
    """Return a PYTHONPATH on which this package says that it is another version."""
    about = tmp_path / "newer" / "vtoken_sim-99.0.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: vtoken-sim\nVersion: 99.0\n")
    return f"{tmp_path / 'newer'}:{ROOT}"


@pytest.mark.slow
def test_a_worker_of_another_version_is_refused(tmp_path: Path, spec: Path, cluster: Cluster, newer: str) -> None:
    cluster.add_worker(PYTHONPATH=newer)
    code, stderr = finish(start(spec, tmp_path / "out", "--dask", str(cluster.file)))
    assert code == 2
    assert "it has vtoken-sim 99.0, this is" in stderr
    assert "Traceback" not in stderr, stderr
    assert not finished(tmp_path / "out")


@pytest.mark.slow
def test_a_worker_of_another_version_that_comes_later_ends_the_sweep(
    tmp_path: Path, spec: Path, cluster: Cluster, newer: str
) -> None:
    cluster.add_worker("--no-nanny")
    out = tmp_path / "out"
    process = start(spec, out, "--dask", str(cluster.file))
    wait_until(lambda: len(finished(out)) >= 2, process)
    end(cluster.workers[0])
    cluster.add_worker(PYTHONPATH=newer)
    code, stderr = finish(process)
    assert code == 1
    assert "it has vtoken-sim 99.0, this is" in stderr
    assert "the same command goes on: vtoken sweep" in stderr
    assert "Traceback" not in stderr, stderr
    assert "failed: run" not in stderr


@pytest.mark.slow
def test_a_worker_must_see_the_files_that_runs_name(tmp_path: Path, cluster: Cluster) -> None:
    cluster.add_worker()
    trace = "req_id,arrival_s,prompt_tokens,output_tokens\na,0.0,20,5\nb,0.1,30,5\n"
    (tmp_path / "mine.csv").write_text(trace)
    flags = ["--trace", "mine.csv", "--out", "out", "--dask", str(cluster.file)]
    code, stderr = finish(python("-m", "sim.cli", "sweep", *flags, cwd=tmp_path))
    assert code == 2
    assert f"it does not see mine.csv from {tmp_path / 'elsewhere'}; give the whole path" in stderr

    (tmp_path / "elsewhere" / "mine.csv").write_text(trace.replace("30", "31"))
    code, stderr = finish(python("-m", "sim.cli", "sweep", *flags, cwd=tmp_path))
    assert code == 2
    assert "it sees other files than this machine: mine.csv" in stderr

    (tmp_path / "elsewhere" / "mine.csv").write_text(trace)
    code, stderr = finish(python("-m", "sim.cli", "sweep", *flags, cwd=tmp_path))
    assert code == 0, stderr


@pytest.mark.slow
def test_a_search_gives_the_same_answers(tmp_path: Path) -> None:
    flags = ["--trace", "poisson:rate=1,n=40,prompt=64,output=20", "--kv-blocks", "40", "--reclaimer", "naive"]
    here, there = (("search", "concurrency", *flags, "--out", str(tmp_path / name)) for name in ("local", "dask"))
    code, stderr = vtoken(*here, "--workers", "1")
    assert code == 0, stderr
    code, stderr = finish(python("-m", "sim.cli", *there, "--dask-local", "1"))
    assert code == 0, stderr
    assert contents(tmp_path / "local") == contents(tmp_path / "dask")
