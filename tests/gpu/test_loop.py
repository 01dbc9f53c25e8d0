"""The loop on this CPU, by its commands: calibrate, simulate with what was found, replay and compare."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from gpu_validate import loop, yardstick
from gpu_validate.device import find_device
from gpu_validate.loop import parse_steps, run_calibrate, run_validate, sha256
from gpu_validate.report import write_whole
from sim.errors import InputError
from sim.serving.models import get_model
from sim.serving.profile import FIGURES, CostProfile, load_profile, save_profile
from sim.study.config import SimConfig
from sim.study.run import simulate

TRACE = "poisson:rate=60,n={n},prompt=lognormal:120:0.5,output=lognormal:{output}:0.5"


def log_of(profile: Path, path: Path, *, n: int, output: int, kv_blocks: int) -> dict:
    """Simulate a trace that no calibration sees, with the profile's costs, and write its events."""
    config = SimConfig(
        model="toy",
        trace=TRACE.format(n=n, output=output),
        policy="h2o",
        budget=0.5,
        score_reads=0.0,
        reclaimer="vtoken",
        kv_blocks=kv_blocks,
        max_num_batched_tokens=256,
        step_cost=f"profile:{profile}",
        copy_cost=f"profile:{profile}",
    )
    return simulate(config, events=path).summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate once over all shapes of the quick sweep, and simulate."""
    folder = tmp_path_factory.mktemp("loop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CPU_ROUNDS", 3)
        run_calibrate(
            model="toy", device="cpu", out=folder / "cpu.json", dtype="fp32", quick=True, rows=folder / "rows.csv"
        )
    log_of(folder / "cpu.json", folder / "events.npz", n=12, output=16, kv_blocks=80)
    return folder


def test_calibration_writes_a_profile_that_says_where_it_is_from(folder: Path) -> None:
    profile = load_profile(folder / "cpu.json")
    assert (profile.model, profile.kv_dtype, profile.hardware, profile.fitted_on) == ("toy", "fp32", None, ())
    measured = profile.provenances["measured"]
    assert measured.device == find_device("cpu").name
    assert measured.source == "vtoken calibrate --device cpu --model toy --dtype fp32 --quick"
    assert {"torch", "numpy", "python"} <= set(measured.versions)
    assert [name for name in FIGURES if profile.kind(name) == "assumed"] == [
        "score_step_ns",
        "score_request_ns",
        "score_pair_bytes",
    ]
    assert profile.attention_ns_per_byte.value > 0
    assert profile.step_overhead_ns.error is not None
    assert 0 < profile.copy_share.value < 1
    facts = json.loads((folder / "cpu.facts.json").read_text())
    assert facts["plain_copy_bytes_per_s"] > 1e8
    assert facts["backends"] == {"attention": "sdpa", "mover": "torch"}
    assert {row["scattered"] for row in facts["repack"]} == {True, False}
    lines = (folder / "rows.csv").read_text().splitlines()
    assert lines[0] == "series,point,ns,p20_ns,p80_ns,n,drift"
    assert {line.partition(",")[0] for line in lines[1:]} >= {"decode", "prefill", "matrices", "head", "repack", "step"}
    assert not list(folder.glob(".*.part"))


def test_validation_writes_table_picture_and_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_validate(
        events=folder / "events.npz",
        profile=folder / "cpu.json",
        device="cpu",
        tolerance=0.99,
        repeat=2,
        out=folder / "out",
    )
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert code == (0 if summary["within_tolerance"] else 1)
    assert summary["repeats"] == 2
    assert summary["replay"]["layouts_checked"] == summary["groups"]["all"]["steps"] == summary["log"]["steps"]
    assert summary["replay"]["tokens_seen_moved"] == summary["replay"]["timed"]["tokens_copied"]
    lines = (folder / "out" / "steps.csv").read_text().splitlines()
    assert len(lines) == 1 + summary["log"]["steps"]
    assert lines[0].endswith("predicted_ns,stretch_ns,wait_ns,pause_ns,measured_ns,measured_0_ns,measured_1_ns")
    measured = np.array([float(line.split(",")[11]) for line in lines[1:]])
    assert (measured > 0).all()
    assert measured.sum() / 1e9 == pytest.approx(summary["groups"]["all"]["measured_s"], rel=1e-3)
    assert (folder / "out" / "validation.png").stat().st_size > 10_000
    told = capsys.readouterr().out
    assert told in (folder / "out" / "report.md").read_text() + "\n"
    assert "blocks held" in told
    assert "preemptions" in told
    assert all(0.1 < factor < 10 for factor in summary["replay"]["slower_than_profile"])


def test_beyond_the_tolerance_the_exit_code_is_1(folder: Path, tmp_path: Path) -> None:
    profile = load_profile(folder / "cpu.json")
    slow = dataclasses.replace(profile.step_overhead_ns, value=1e9, interval=None)
    save_profile(dataclasses.replace(profile, step_overhead_ns=slow), tmp_path / "slow.json")
    log = folder / "events.npz"
    assert run_validate(events=log, profile=tmp_path / "slow.json", device="cpu", repeat=1, steps="2:6") == 1


def changed(folder: Path, tmp_path: Path, **changes: object) -> Path:
    profile: CostProfile = dataclasses.replace(load_profile(folder / "cpu.json"), **changes)
    save_profile(profile, tmp_path / "changed.json")
    return tmp_path / "changed.json"


def test_a_device_that_became_slower_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every repetition takes twice what the profile says of so many tokens, by a clock that says so."""
    profile = load_profile(folder / "cpu.json")
    counts, times = np.array(profile.gemm_ns.points).T

    class Slow:
        name = "slow"

        def times_ns(self, op: object) -> np.ndarray:
            tokens = op.__closure__[0].cell_contents  # type: ignore[attr-defined]
            return np.full(3, 2 * np.interp(tokens, counts, times))

    monkeypatch.setattr(yardstick, "clock_for", lambda *_, **__: Slow())
    assert yardstick.slower_now(profile, get_model("toy"), find_device("cpu")) == pytest.approx(2.0)


@pytest.mark.parametrize("by", ["name", "sha256"])
def test_the_log_that_a_profile_was_fitted_on_does_not_count(folder: Path, tmp_path: Path, by: str) -> None:
    seen = "events.npz" if by == "name" else sha256(folder / "events.npz")
    profile = changed(folder, tmp_path, fitted_on=(seen,))
    with pytest.raises(InputError, match=r"was fitted on events\.npz"):
        run_validate(events=folder / "events.npz", profile=profile, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama-3.1-8b"}, "is of model llama-3.1-8b, the log .* of toy"),
        ({"block_size": 32}, "is of blocks of 32 tokens, the log .* of 16"),
    ],
)
def test_a_profile_of_something_else_is_refused(folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_validate(events=folder / "events.npz", profile=changed(folder, tmp_path, **changes), device="cpu")


def test_a_profile_of_another_device_is_refused(folder: Path, tmp_path: Path) -> None:
    provenances = load_profile(folder / "cpu.json").provenances
    other = {name: dataclasses.replace(one, device="NVIDIA H200") for name, one in provenances.items()}
    with pytest.raises(InputError, match=r"is of 'NVIDIA H200', this device is .*: calibrate here"):
        run_validate(events=folder / "events.npz", profile=changed(folder, tmp_path, provenances=other), device="cpu")


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "3:3", "5:2", "-1:4", "a:b"])
def test_a_range_of_steps_is_two_numbers(text: str) -> None:
    assert parse_steps("3:7") == (3, 7)
    with pytest.raises(InputError, match="expected A:B"):
        parse_steps(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device 'tpu'"),
        ({"model": "llama-3.1-9b"}, "did you mean 'llama-3.1-8b'"),
        ({"memory": 1.5}, "memory: expected a share"),
        ({"out": Path("/nowhere/at/all.json")}, "its folder does not exist"),
        ({"dtype": "bf17"}, "unknown KV dtype 'bf17'"),
        ({"model": "llama-3.1-70b", "memory": 0.01}, "do not fit"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_and_nothing_written(
    tmp_path: Path, arguments: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run_calibrate(**({"model": "toy", "device": "cpu", "out": tmp_path / "cpu.json"} | arguments))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_calibration_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpu_validate.bench.TorchBench.plain_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_calibrate(model="toy", device="cpu", out=tmp_path / "cpu.json", quick=True)
    assert not list(tmp_path.iterdir())


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "profile.json"
    write_whole(target, "before")

    def full(self: Path, *_: object) -> None:
        raise OSError(f"no space left for {self}")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(target, "after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("profile.json", "before")]


@pytest.mark.bench
def test_a_calibration_predicts_a_held_out_replay(tmp_path: Path) -> None:
    """The whole loop on this machine: the total time of a replay that the fit has not seen, within 20 %."""
    run_calibrate(model="toy", device="cpu", out=tmp_path / "cpu.json")
    summary = log_of(tmp_path / "cpu.json", tmp_path / "events.npz", n=60, output=60, kv_blocks=90)
    assert summary["repacks_committed"] > 0
    assert (
        run_validate(
            events=tmp_path / "events.npz", profile=tmp_path / "cpu.json", device="cpu", tolerance=0.2, repeat=5
        )
        == 0
    )
