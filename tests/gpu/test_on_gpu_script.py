"""The script for a GPU, run dry on this CPU with the toy model; and the report that it ends with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gpu_validate.targets import Target, main, targets

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "gpu_validate" / "on_gpu.sh"


def run(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "MODEL": "toy",
        "DTYPE": "fp32",
        "LOGS": str(folder / "logs"),
        "OUT": str(folder / "out"),
        "QUICK": "1",
        "REPEAT": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=environment | changes,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare the logs and run the script once."""
    folder = tmp_path_factory.mktemp("on_gpu")
    prepared = run(folder, "prepare")
    assert prepared.returncode == 0, prepared.stderr
    done = run(folder)
    # How fast a CPU is today decides nothing here.
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_part_runs_and_leaves_small_files(folder: Path) -> None:
    out = folder / "out"
    parts = (out / "parts.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in parts] == ["verify", "layouts", "calibrate", "validate"]
    assert all("exit 0" in line or line.startswith("validate: exit 1") for line in parts)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5 << 20
    assert {
        "report.md",
        "versions.txt",
        "profile.json",
        "profile.facts.json",
        "measurements.csv",
        "verify.json",
        "layouts.json",
        "summary.json",
        "steps.csv.gz",
        "validation.png",
    } <= {path.name for path in files}


@pytest.mark.slow
def test_what_is_right_or_wrong_passes_and_what_is_fast_is_only_told(folder: Path) -> None:
    found = {one.name: one for one in targets(folder / "out", on_gpu=False)}
    verify = next(one for name, one in found.items() if name.startswith("verify ("))
    assert verify.met is True
    assert "tokens copied" in verify.found
    assert found["verify: graph"].met is True
    assert found["block counts"].met is True
    assert [
        found[name].met for name in ("repack against the copy rate", "decode beside a copy", "predicted total time")
    ] == [
        None,
        None,
        None,
    ]
    report = (folder / "out" / "report.md").read_text()
    assert report.count("| PASS |") == 3
    assert "FAIL" not in report


@pytest.mark.slow
def test_the_budget_stops_a_part_and_skips_the_rest(folder: Path, tmp_path: Path) -> None:
    done = run(tmp_path, LOGS=str(folder / "logs"), BUDGET_S="6")
    parts = (tmp_path / "out" / "parts.txt").read_text().splitlines()
    assert any("stopped after its limit" in line or "the budget of 6 s is used up" in line for line in parts)
    assert parts[-1] == "validate: skipped, there is no profile"
    assert done.returncode == 1


def test_logs_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {tmp_path}/logs/verify.npz: no such file; make it with: {SCRIPT} prepare"
    ]
    assert run(tmp_path, "perpare").returncode == 2


# ---- the report, from made-up results of a GPU -----------------------------------------------------------------------


def results(folder: Path, *, share: float = 0.9, slower: float = 0.03, within: bool = True, checked: int = 8) -> Path:
    verified = {
        "attention": "flashinfer",
        "dtype": "bf16",
        "steps": 8,
        "layouts_checked": checked,
        "tokens_verified": 100,
        "outputs_verified": 10,
        "tokens_seen_moved": 5,
        "tokens_copied": 5,
        "max_error": 1e-3,
        "graph": "captured",
        "graph_checks": 7,
        "first_step": 0,
        "last_step": 7,
    }
    copies = [
        {"tokens": tokens, "scattered": True, "ns": 1e5, "eager_ns": 2e5, "bytes_per_s": 4e12, "of_copy_rate": of}
        for tokens, of in ((64, 0.1), (4096, share), (65536, 0.95))
    ]
    facts = {
        "plain_copy_bytes_per_s": 4.2e12,
        "repack": copies,
        "beside": [{"batch": 64, "tokens": 4096, "steps": 4, "slower": slower, "bytes_explain": 0.01}],
    }
    summary = {
        "difference": 0.05,
        "tolerance": 0.1,
        "within_tolerance": within,
        "repeats": 2,
        "spread_of_repeated_totals": 0.01,
        "groups": {"all": {"steps": 8}},
    }
    (folder / "validation").mkdir()
    for name, content in {
        "verify.json": verified,
        "verify_paged.json": verified,
        "verify_fp8.json": verified,
        "layouts.json": verified,
        "profile.facts.json": facts,
        "validation/summary.json": summary,
    }.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "versions.txt").write_text("versions\n")
    (folder / "parts.txt").write_text("verify: exit 0 after 1 s\n")
    return folder


def missed(folder: Path) -> list[str]:
    return [one.name for one in targets(folder, on_gpu=True) if one.met is not True]


def test_all_targets_can_be_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert missed(results(tmp_path)) == []
    assert main([str(tmp_path), "cuda"]) == 0
    assert "FAIL" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"share": 0.84}, "repack against the copy rate"),
        ({"slower": 0.061}, "decode beside a copy"),
        ({"within": False}, "predicted total time"),
    ],
)
def test_each_target_can_be_missed(tmp_path: Path, change: dict, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert missed(results(tmp_path, **change)) == [name]
    assert main([str(tmp_path), "cuda"]) == 1
    assert f"| FAIL | {name} |" in capsys.readouterr().out


def test_a_layout_that_was_not_checked_in_every_step_is_no_pass(tmp_path: Path) -> None:
    assert "block counts" in missed(results(tmp_path, checked=7))


def test_what_was_not_measured_is_neither_met_nor_missed(tmp_path: Path) -> None:
    found = list(targets(tmp_path, on_gpu=True))
    assert {one.met for one in found} == {None}
    assert all(isinstance(one, Target) and one.found == "not measured" for one in found)
