"""Calibration against a made-up device: the law comes back, within its intervals."""

import pytest

from gpu_validate.calibrate import Calibration, calibrate, predicted_steps
from gpu_validate.sweeps import designed
from tests.support.virtual_device import LAW, VirtualDevice

SWEEP = designed("cuda", capacity=600_000, max_len=131_072)

FIGURES = {
    "step_overhead_ns": "step",
    "sequence_overhead_ns": "sequence",
    "attention_launch_ns": "launch",
    "attention_ns_per_byte": "byte",
    "attention_sequence_ns": "attention_sequence",
    "prefill_ns_per_token": "prefill_token",
    "prefill_ns_per_pair": "prefill_pair",
    "copy_launch_ns": "copy_launch",
    "copy_ns_per_byte_scattered": "scattered",
    "copy_ns_per_byte_contiguous": "contiguous",
    "copy_share": "share",
    "copy_interference": "interference",
    "table_entry_ns": "entry",
    "dead_slot_factor": "dead",
}


@pytest.fixture(scope="module")
def exact() -> Calibration:
    return calibrate(VirtualDevice(), SWEEP, source="test")


@pytest.fixture(scope="module")
def noisy() -> Calibration:
    return calibrate(VirtualDevice(noise=0.02, seed=1), SWEEP, source="test")


@pytest.mark.parametrize(("figure", "law"), FIGURES.items())
def test_the_law_comes_back(exact: Calibration, figure: str, law: str) -> None:
    assert getattr(exact.profile, figure).value == pytest.approx(LAW[law], rel=2e-2)


@pytest.mark.parametrize(("figure", "law"), FIGURES.items())
def test_the_law_is_within_the_intervals_despite_noise(noisy: Calibration, figure: str, law: str) -> None:
    found = getattr(noisy.profile, figure)
    assert found.interval is not None
    low, high = found.interval
    # An interval of 95 % may miss; twice as wide it must not, for this seed.
    spare = (high - low) / 2
    assert low - spare <= LAW[law] <= high + spare
    assert high - low < 0.5 * LAW[law]


def test_errors_are_those_of_measurements_that_the_fit_did_not_see(exact: Calibration, noisy: Calibration) -> None:
    assert exact.steps is not None
    assert noisy.steps is not None
    assert exact.steps.max < 1e-4
    assert 1e-3 < noisy.steps.mean < 0.03
    for calibration, mean in ((exact, 1e-4), (noisy, 0.03)):
        for figure in ("attention_ns_per_byte", "prefill_ns_per_pair", "copy_launch_ns", "step_overhead_ns"):
            assert getattr(calibration.profile, figure).error.mean < mean


def test_the_finished_profile_predicts_the_whole_steps(exact: Calibration) -> None:
    off = predicted_steps(exact.profile, VirtualDevice().model, exact)
    # The line between two points of the matrices' curve cuts the corner where arithmetic begins to bound them.
    assert off.p90 < 1e-3
    assert off.max < 0.05


def test_matrices_are_a_curve_through_what_was_measured(exact: Calibration) -> None:
    points = dict(exact.profile.gemm_ns.points)
    assert points[1] == pytest.approx(LAW["weights"])
    assert points[4096] == pytest.approx(4096 * LAW["token"])
    assert all(ns == pytest.approx(max(LAW["weights"], LAW["token"] * n)) for n, ns in points.items())


def test_bytes_are_those_of_the_pools_type() -> None:
    """Twice the bytes a token, the same law for each: the figures do not change."""
    profile = calibrate(VirtualDevice(kv_dtype="fp32"), SWEEP, source="test").profile
    assert profile.kv_dtype == "fp32"
    for figure in ("attention_ns_per_byte", "copy_ns_per_byte_scattered", "copy_ns_per_byte_contiguous"):
        assert getattr(profile, figure).value == pytest.approx(LAW[FIGURES[figure]], rel=1e-3)


def test_every_measurement_is_kept_with_both_of_its_samples(noisy: Calibration) -> None:
    series = {row.series for row in noisy.rows}
    assert series >= {
        "decode",
        "prefill",
        "matrices",
        "head",
        "repack",
        "repack, eager",
        "step",
        "plain copy",
        "upload",
    }
    assert series >= {"decode and copy", "decode and copy, the copy", "decode alone", "copy alone"}
    assert all(row.p20_ns <= row.ns <= row.p80_ns for row in noisy.rows if row.series == "decode")
    assert {row.n for row in noisy.rows if row.series == "decode"} == {14}
    drift = noisy.facts["drift"]
    assert 0 < drift["median"] < drift["p90"] < 0.1


def test_the_facts_hold_the_copies_against_the_plain_copy(exact: Calibration) -> None:
    facts = exact.facts
    assert facts["plain_copy_bytes_per_s"] == pytest.approx(1e9 / LAW["contiguous"], rel=1e-2)
    share = {(row["tokens"], row["scattered"]): row["of_copy_rate"] for row in facts["repack"]}
    assert share[65536, False] == pytest.approx(1.0, abs=0.01)
    assert share[65536, True] == pytest.approx(LAW["contiguous"] / LAW["scattered"], abs=0.01)
    assert share[64, True] < 0.5
    assert facts["upload_host"] == pytest.approx({"step_ns": 30e3, "entry_ns": 2.0}, rel=1e-3)
    for row in facts["beside"]:
        assert 0 <= row["slower"] < row["bytes_explain"] * LAW["interference"] * 1.01
