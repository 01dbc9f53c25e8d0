"""Cost profiles: the file, its errors, and the step and copy costs made of it, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sim.errors import InputError
from sim.serving.copy import build_copy_cost
from sim.serving.cost import StepCost, build_step_cost
from sim.serving.hardware import get_hardware
from sim.serving.models import get_model
from sim.serving.profile import FIGURES, SHIPPED, load_profile, save_profile, shipped, shipped_names
from sim.serving.profile_cost import ProfileCopyCost, ProfileStepCost
from tests.support.profiles import content, write

LLAMA = get_model("llama-3.1-8b")
H100 = get_hardware("h100")


def build(spec: str) -> StepCost:
    return build_step_cost(spec, model=LLAMA, hardware=H100)


# ---- the step by hand ------------------------------------------------------------------------------------------------

FIXED = 1000 + 50 + 5
"""Host, launch of attention, table."""


@pytest.mark.parametrize(
    ("tokens", "gemm_ns"), [(1, 100), (8, 100), (12, 100), (16, 100), (20, 140), (32, 260), (64, 580)]
)
def test_matrices_are_interpolated_and_extrapolated(tmp_path: Path, tokens: int, gemm_ns: int) -> None:
    cost = build(f"profile:{write(tmp_path, content())}")
    # One sequence: the head's first point, 7 ns. 320 slots are 20 entries of a block table, 32 ns each.
    step_ns, memory_ns = cost.step_ns(tokens, 1, 320, 320)
    prefill = 3 * (tokens - 1)
    assert step_ns == FIXED + gemm_ns + 20 + 7 + (320 + tokens) + prefill + 20 * 32
    assert memory_ns == 100 + 20 + 320 + tokens


@pytest.mark.parametrize(("seqs", "head_ns"), [(1, 20), (6, 25), (11, 30), (15, 34)])
def test_the_head_counts_sequences(tmp_path: Path, seqs: int, head_ns: int) -> None:
    cost = build(f"profile:{write(tmp_path, content())}")
    assert cost.step_ns(seqs, seqs, 0, 0)[0] == FIXED + 100 + head_ns + 7 * seqs + seqs


def test_sequences_beyond_the_free_ones_overlap_the_bytes(tmp_path: Path) -> None:
    cost = build(f"profile:{write(tmp_path, content())}")
    at_16, at_20 = cost.step_ns(16, 16, 984, 984)[0], cost.step_ns(20, 20, 980, 980)[0]
    kv, beyond = 1000, 4 * 30
    attention = (kv**1.5 + beyond**1.5) ** (2 / 3)
    assert kv < attention < kv + beyond
    other = 4 * 10 + 4 * 1 + 4 * 7 - 4 / 16 * 32  # matrices, head, host, table entries
    assert at_20 - at_16 == pytest.approx(attention - kv + other, abs=1)


def test_pairs_beyond_one_a_slot_are_prefill(tmp_path: Path) -> None:
    cost = build(f"profile:{write(tmp_path, content())}")
    assert cost.step_ns(1, 1, 100, 900)[0] - cost.step_ns(1, 1, 100, 100)[0] == 400


def test_a_dead_slot_costs_what_a_live_one_does(tmp_path: Path) -> None:
    cost = build(f"profile:{write(tmp_path, content())}")
    assert cost.step_ns(4, 4, 2000, 2000)[0] - cost.step_ns(4, 4, 1000, 1000)[0] == 1000 + 1000 / 16 * 32


def test_scores(tmp_path: Path) -> None:
    cost = build(f"profile:{write(tmp_path, content())}")
    assert isinstance(cost, ProfileStepCost)
    pair_ns = 4 * 32 * 8 / 131_072  # bytes, layers, KV heads, at the rate of a copy of neighbours
    assert cost.score_ns(0, 0) == 11
    assert cost.score_ns(3, 100_000) == round(11 + 3 * 13 + 100_000 * pair_ns)


def test_figures_can_be_set(tmp_path: Path) -> None:
    path = write(tmp_path, content())
    plain, cost = (
        build(f"profile:{path}"),
        build(
            f"profile:{path},step_overhead_s=1e-3,sequence_overhead_s=1e-6,score_step_s=1e-3,score_request_s=2e-3,"
            "score_pair_bytes=0"
        ),
    )
    assert cost.step_ns(2, 2, 0, 0)[0] - plain.step_ns(2, 2, 0, 0)[0] == 1_000_000 - 1000 + 2 * (1000 - 7)
    assert isinstance(cost, ProfileStepCost)
    assert cost.score_ns(2, 10**9) == 5_000_000


@pytest.mark.parametrize("work", [(1, 1, 1, 1), (256, 256, 10**6, 10**6), (8192, 9, 50_000, 10**8), (300, 60, 1, 10)])
@pytest.mark.parametrize("spec", ["profile:h100", "auto"])
def test_memory_is_part_of_the_step(spec: str, work: tuple[int, int, int, int]) -> None:
    step_ns, memory_ns = build(spec).step_ns(*work)
    assert 0 < memory_ns <= step_ns


# ---- the copy --------------------------------------------------------------------------------------------------------


def test_copy_by_hand(tmp_path: Path) -> None:
    cost = build_copy_cost(f"profile:{write(tmp_path, content())}", model=LLAMA, hardware=H100)
    # A token is read and written: 2 x 131,072 bytes; scattered 4 ns, the memory is busy for 2 ns.
    assert cost.alone_ns(10) == 100 + 40
    assert cost.copy_ns(10) == 100 + 160
    assert cost.bandwidth_ns(10) == 20
    assert cost.alone_ns(0) == cost.copy_ns(0) == cost.bandwidth_ns(0) == 0
    # A third of the step's memory time at a share of one quarter; interference makes it half as much again.
    assert cost.stretch_ns(300, 300, 1000) == 150
    assert cost.stretch_ns(300, 300, 10) == 15


# ---- the file --------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, content()))
    assert profile.provenances["toy"].versions == {"torch": "2"}
    assert profile.sequence_overhead_ns.interval == (6, 8)
    assert profile.sequence_overhead_ns.error is not None
    assert profile.sequence_overhead_ns.error.p90 == 0.1
    assert profile.kind("gemm_ns") == "measured"
    save_profile(profile, tmp_path / "again.json")
    assert load_profile(tmp_path / "again.json") == profile
    assert json.loads((tmp_path / "again.json").read_text()) == content()


def test_a_device_without_preset_goes_with_any(tmp_path: Path) -> None:
    what = content()
    del what["hardware"]
    path = str(write(tmp_path, what))
    assert build_step_cost(f"profile:{path}", model=LLAMA, hardware=get_hardware("l4")).step_ns(1, 1, 0, 0)
    assert ProfileStepCost(path=path, model=LLAMA).step_ns(1, 1, 0, 0) == build(f"profile:{path}").step_ns(1, 1, 0, 0)


def test_a_profile_at_hand_needs_no_file(tmp_path: Path) -> None:
    path = write(tmp_path, content())
    profile, work = load_profile(path), (40, 20, 2000, 3000)
    assert ProfileStepCost.of(profile, LLAMA).step_ns(*work) == build(f"profile:{path}").step_ns(*work)
    copy = build_copy_cost(f"profile:{path}", model=LLAMA, hardware=H100)
    assert ProfileCopyCost.of(profile, LLAMA).copy_ns(10) == copy.copy_ns(10)
    with pytest.raises(InputError, match=r"field model: expected qwen3-8b, got llama-3\.1-8b"):
        ProfileStepCost.of(profile, get_model("qwen3-8b"))


def test_bytes_are_of_the_type_that_was_measured(tmp_path: Path) -> None:
    whole = build(f"profile:{write(tmp_path, content())}")
    half = build(f"profile:{write(tmp_path, content() | {'kv_dtype': 'fp8'})}")
    assert whole.step_ns(4, 4, 1596, 1596)[0] - half.step_ns(4, 4, 1596, 1596)[0] == 800
    copies = [
        build_copy_cost(f"profile:{write(tmp_path, content() | {'kv_dtype': kv})}", model=LLAMA, hardware=H100)
        for kv in ("fp16", "fp32", "fp8")
    ]
    assert [cost.bandwidth_ns(10) for cost in copies] == [20, 40, 10]


def test_a_run_s_own_format_is_charged(tmp_path: Path) -> None:
    """At the profile's figures for a byte, and it is said."""
    path = write(tmp_path, content())
    costs = [
        build_step_cost(f"profile:{path}", model=get_model("llama-3.1-8b", kv), hardware=H100)
        for kv in ("auto", "bf16", "fp8", "int4")
    ]
    times = [cost.step_ns(4, 4, 1596, 1596)[0] for cost in costs]
    assert times[0] == times[1]
    assert [times[0] - time for time in times[2:]] == [800, round(1600 * (1 - 34_816 / 131_072))]
    told = [cost.about for cost in costs if isinstance(cost, ProfileStepCost)]
    assert ["measured with KV in" in about for about in told] == [False, False, True, True]
    assert "measured with KV in bf16, run with int4" in told[3]
    copies = [
        build_copy_cost(f"profile:{path}", model=get_model("llama-3.1-8b", kv), hardware=H100).bandwidth_ns(1000)
        for kv in ("bf16", "fp8", "int4")
    ]
    # The scales of a token move with it.
    assert copies == [2000, 1000, math.ceil(2000 * 34_816 / 131_072)]


@pytest.mark.parametrize("hardware", ["h100", "h200"])
def test_a_cache_in_fp8_has_profiles_of_its_own(hardware: str) -> None:
    device = get_hardware(hardware)
    models = [get_model("llama-3.1-8b", kv) for kv in ("auto", "bf16", "fp8", "int4")]
    auto, bf16, fp8, int4 = (build_step_cost("auto", model=model, hardware=device) for model in models)
    assert isinstance(auto, ProfileStepCost)
    assert isinstance(bf16, ProfileStepCost)
    assert isinstance(fp8, ProfileStepCost)
    assert isinstance(int4, ProfileStepCost)
    assert auto.profile == bf16.profile
    assert (bf16.profile.kv_dtype, fp8.profile.kv_dtype, int4.profile.kv_dtype) == ("bf16", "fp8", "fp8")
    # A byte takes longer than in bf16, a token less long: by less than a half.
    read = [cost.step_ns(64, 64, 10**6, 10**6)[0] - cost.step_ns(64, 64, 10**5, 10**5)[0] for cost in (bf16, fp8, int4)]
    assert 0.5 < read[1] / read[0] < 0.8
    assert read[2] / read[1] == pytest.approx(34_816 / 65_536, rel=0.02)


def test_every_figure_is_required() -> None:
    assert len(FIGURES) == 21
    assert set(FIGURES) <= set(content())


def change(what: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    *parents, last = path.split(".")
    inner = what
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return what


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "other", "field schema: expected 'vtoken-cost-profile'"),
        ("schema", ..., "'schema' is missing"),
        ("version", 1, "field version: expected 2, got 1"),
        ("gemm_ns", ..., "field gemm_ns: it is missing"),
        ("gemm_ns", 3, "field gemm_ns: expected a JSON object"),
        ("gemm_ns.points", [[8, 100]], "field gemm_ns.points: expected at least two"),
        ("gemm_ns.points", [[8, 100], [8, 200]], "field gemm_ns.points: the numbers must be positive and increase"),
        ("gemm_ns.points", [[0, 100], [8, 200]], "increase"),
        ("gemm_ns.points", [[8, 100], [16, -1]], "the times must be positive"),
        ("gemm_ns.points", [[8, 100], [16, 90]], "extrapolated"),
        ("gemm_ns.points", [[8, 100], [16]], "field gemm_ns.points: expected 2 numbers"),
        ("gemm_ns.points", [[8.5, 100], [16, 200]], "field gemm_ns.points: expected an integer, got 8.5"),
        ("head_ns.points", "none", "field head_ns.points: expected a list"),
        ("table_step_ns.value", -1, "field table_step_ns.value: expected a number of at least 0, got -1"),
        ("table_step_ns.value", "1", "field table_step_ns.value: expected a finite number, got '1'"),
        ("table_step_ns.value", float("nan"), "field table_step_ns.value: expected a finite number"),
        ("table_step_ns.value", True, "field table_step_ns.value: expected a finite number"),
        ("table_step_ns.n", 0, "field table_step_ns.n: expected a number of at least 1"),
        ("table_step_ns.interval", [6, 8], "field table_step_ns.interval"),
        ("table_step_ns.error", {"mean": -1, "median": 0, "p90": 0, "max": 0}, "field table_step_ns.error"),
        ("table_step_ns.provenance", "toi", "field table_step_ns: no provenance is called 'toi'; did you mean 'toy'?"),
        ("table_step_ns.surprise", 1, "field table_step_ns.surprise: no such field"),
        ("copy_sharf", 1, "field copy_sharf: no such field; did you mean 'copy_share'?"),
        ("copy_share.value", 1.0, "field copy_share: expected a share in (0, 1)"),
        ("kv_dtype", "bf61", "field kv_dtype: expected one of bf16, fp16, fp32, fp8, got 'bf61'; did you mean 'bf16'"),
        ("block_size", 0, "field block_size: expected a number of at least 1"),
        ("provenances.toy.date", "yesterday", "field provenances.toy.date: expected a date"),
        ("provenances.toy.kind", "guessed", "field provenances.toy.kind: expected 'measured' or"),
        ("provenances.toy.source", " ", "field provenances.toy.source"),
        ("provenances.toy.versions", {"torch": 2}, "field provenances.toy.versions.torch: expected a text, got 2"),
        ("model", "qwen3-8b", "field model: expected llama-3.1-8b, got qwen3-8b"),
        ("hardware", "l4", "field hardware: expected h100-sxm, got l4"),
    ],
)
def test_a_bad_profile_is_one_line(tmp_path: Path, path: str, value: object, message: str) -> None:
    file = write(tmp_path, change(content(), path, value))
    with pytest.raises(InputError) as caught:
        build(f"profile:{file}")
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "line 1: expected JSON"), ("[]", "expected a JSON object"), ("\xff", "UTF-8")]
)
def test_not_a_profile(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=message):
        load_profile(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        build(f"profile:{tmp_path / 'none.json'}")
    with pytest.raises(InputError, match="needs path"):
        build("profile")
    with pytest.raises(InputError, match="cannot write it"):
        save_profile(load_profile(write(tmp_path, content())), tmp_path / "none" / "profile.json")


# ---- those that come along -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", ["h100-sxm", "h200-sxm"])
def test_every_published_model_has_one(hardware: str) -> None:
    models = {model for device, model in shipped_names() if device == hardware}
    assert models == {path.stem for path in (SHIPPED / hardware / "fp8").iterdir()}
    assert {"llama-3.1-8b", "qwen2.5-7b", "qwen2.5-math-7b", "opt-13b", "smollm2-135m"} <= models
    for model in models:
        profile = load_profile(SHIPPED / hardware / f"{model}.json")
        assert (profile.hardware, profile.model) == (hardware, model)


@pytest.mark.parametrize(("hardware", "model"), shipped_names())
def test_what_nobody_measured_is_not_called_measured(hardware: str, model: str) -> None:
    profile = load_profile(SHIPPED / hardware / f"{model}.json")
    measured = {name for name in FIGURES if profile.kind(name) == "measured"}
    kernels = {name for name in FIGURES if name.startswith(("gemm", "head", "attention", "prefill"))}
    assert measured - {"copy_ns_per_byte_contiguous"} == kernels - {"attention_free_sequences"}
    assert ("copy_ns_per_byte_contiguous" in measured) == (hardware == "h200-sxm")


def test_none_for_a_device_without_tables() -> None:
    assert shipped("l4", "llama-3.1-8b") is None
    with pytest.raises(InputError, match=r"none comes along for model llama-3\.1-8b on l4: there is no model"):
        build("profile:l4")
