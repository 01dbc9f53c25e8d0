"""Step costs: exact where they are exact, by hand, against a measured run, and the profile's file."""

import json
from pathlib import Path
from typing import Any

import pytest

from sim.errors import InputError
from sim.serving.cost import StepCost, build_step_cost, step_costs
from sim.serving.hardware import get_hardware
from sim.serving.models import get_model
from sim.serving.profile import CostProfile, load_profile, save_profile

LLAMA = get_model("llama-3.1-8b")
H100 = get_hardware("h100")


def build(spec: str) -> StepCost:
    return build_step_cost(spec, model=LLAMA, hardware=H100)


def test_names() -> None:
    assert step_costs.names() == ["linear", "profile", "roofline"]


# ---- linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 3, 255, 8192, 10**7])
def test_linear_is_exact(tokens: int) -> None:
    cost = build("linear:base_s=0.008,per_token_s=2e-5")
    step_ns, memory_ns = cost.step_ns(tokens, 1, 5, 5)
    assert step_ns == 8_000_000 + 20_000 * tokens
    assert memory_ns == step_ns


def test_linear_rounds_each_part() -> None:
    cost = build("linear:base_s=1.4e-9,per_token_s=0.3e-9,memory_share=0.25")
    assert [cost.step_ns(n, 1, 0, 0)[0] for n in range(6)] == [1, 1, 2, 2, 2, 3]
    assert build("linear:base_s=1e-6,per_token_s=0,memory_share=0.25").step_ns(1, 1, 0, 0) == (1000, 250)


# ---- roofline --------------------------------------------------------------------------------------------------------

IDEAL = (
    "roofline:gemm_bandwidth_efficiency=1,gemm_flops_efficiency=1,attention_bandwidth_efficiency=1,"
    "attention_flops_efficiency=1,attention_launch_s=0,sequence_kv_head_s=0,step_overhead_s=0,sequence_overhead_s=0"
)


def test_roofline_one_decode_reads_the_weights_and_the_cache() -> None:
    step_ns, memory_ns = build(IDEAL).step_ns(1, 1, 999, 999)
    bytes_read = (LLAMA.parameters - LLAMA.head_parameters) * 2 + 1000 * 131_072
    assert step_ns == pytest.approx(bytes_read / 3350, rel=1e-4)  # the norms' vectors are not counted
    assert memory_ns == step_ns


def test_roofline_long_prefill_is_bound_by_arithmetic() -> None:
    tokens = 8192
    pairs = tokens * (tokens + 1) // 2
    step_ns, memory_ns = build(IDEAL).step_ns(tokens, 1, tokens, pairs)
    flops = 2 * LLAMA.layer_matrix_parameters * tokens + 2 * LLAMA.head_parameters
    flops += (pairs - tokens) * LLAMA.attention_flops_per_pair
    kv_ns = 2 * tokens * 131_072 / 3350
    assert step_ns == pytest.approx(flops / 989_500 + kv_ns, abs=1)
    assert memory_ns < 0.1 * step_ns


def test_roofline_dead_slots_cost_as_much_as_live_ones() -> None:
    cost = build("roofline")
    live, _ = cost.step_ns(128, 128, 128 * 1024, 128 * 1024)
    with_dead, _ = cost.step_ns(128, 128, 2 * 128 * 1024, 128 * 1024)
    assert with_dead - live == pytest.approx(128 * 1024 * 131_072 / (3350 * 0.94), abs=1)


def test_roofline_overheads_add_up() -> None:
    base, _ = build(IDEAL).step_ns(4, 4, 100, 100)
    full = IDEAL.replace("attention_launch_s=0", "attention_launch_s=1e-6")
    full = full.replace("sequence_kv_head_s=0", "sequence_kv_head_s=1e-8").replace(
        "step_overhead_s=0", "step_overhead_s=1e-3"
    )
    full = full.replace("sequence_overhead_s=0", "sequence_overhead_s=1e-6")
    assert build(full).step_ns(4, 4, 100, 100)[0] - base == 1_000_000 + 32 * 1000 + 4 * (1000 + 10 * 32 * 8)


@pytest.mark.parametrize("work", [(1, 1, 1, 1), (256, 256, 10**6, 10**6), (8192, 9, 50_000, 10**8), (300, 60, 1, 10)])
def test_roofline_memory_is_part_of_the_step(work: tuple[int, int, int, int]) -> None:
    step_ns, memory_ns = build("roofline").step_ns(*work)
    assert 0 < memory_ns <= step_ns


def test_roofline_against_a_measured_run() -> None:
    """The first row of R-KV's stress test on an H100: 256 requests of 700 + 1,024 tokens, all at once, nothing evicted.

    13,902 output tokens a second over the run, prefill included (github.com/Zefan-Cai/R-KV, RESULTS_stress.md). The
    kernel efficiencies are from another source; the overhead of 2.5 ms a step was chosen with this row in view. So the
    10 % say that the parts add up to a step, not that the model predicts one.
    """
    cost = build_step_cost("roofline", model=get_model("qwen2.5-math-7b"), hardware=H100)
    total_ns = 0
    for _ in range(256 * 700 // 8192):
        total_ns += cost.step_ns(8192, 12, 8192, 8192 * 351)[0]
    for generated in range(1024):
        slots = 256 * (700 + generated)
        total_ns += cost.step_ns(256, 256, slots, slots)[0]
    assert 256 * 1024 / (total_ns / 1e9) == pytest.approx(13_902, rel=0.10)


# ---- profile ---------------------------------------------------------------------------------------------------------


def figure(value: float) -> dict[str, Any]:
    return {"value": value, "provenance": "toy", "n": 3, "error": 0.05}


@pytest.fixture
def content() -> dict[str, Any]:
    return {
        "schema": "vtoken-cost-profile",
        "version": 1,
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm",
        "provenances": {
            "toy": {
                "device": "none",
                "date": "2026-11-30",
                "source": "made up for this test",
                "versions": {"torch": "2"},
            }
        },
        "step_overhead_ns": figure(1000),
        "gemm_ns": {"points": [[8, 100], [16, 100], [32, 260]], "provenance": "toy"},
        "attention_launch_ns": figure(50),
        "attention_ns_per_byte": figure(1 / 131_072),
        "sequence_ns": figure(7),
        "prefill_ns_per_pair": figure(0.5),
        "copy_launch_ns": figure(11),
        "copy_ns_per_byte": figure(1 / 131_072),
        "copy_share": figure(0.5),
    }


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("tokens", "gemm_ns"), [(1, 100), (8, 100), (12, 100), (16, 100), (20, 140), (32, 260), (64, 580)]
)
def test_profile_interpolates_and_extrapolates(
    tmp_path: Path, content: dict[str, Any], tokens: int, gemm_ns: int
) -> None:
    cost = build(f"profile:{write(tmp_path, content)}")
    # 1,000 + 50 fixed; 1 ns a slot read or written; 7 ns a sequence; half a ns a further pair
    step_ns, memory_ns = cost.step_ns(tokens, 2, 500, 600)
    assert step_ns == 1050 + gemm_ns + 500 + tokens + 14 + 50
    assert memory_ns == 100 + 500 + tokens


def test_profile_round_trip(tmp_path: Path, content: dict[str, Any]) -> None:
    profile = load_profile(write(tmp_path, content))
    assert profile.provenances[profile.sequence_ns.provenance].versions == {"torch": "2"}
    assert isinstance(profile, CostProfile)
    save_profile(profile, tmp_path / "again.json")
    assert load_profile(tmp_path / "again.json") == profile
    assert json.loads((tmp_path / "again.json").read_text())["schema"] == "vtoken-cost-profile"


def change(content: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    *parents, last = path.split(".")
    inner = content
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "other", "field schema"),
        ("schema", ..., "'schema' is missing"),
        ("version", 2, "field version"),
        ("gemm_ns", ..., "field gemm_ns"),
        ("gemm_ns.points", [[8, 100]], "field gemm_ns.points"),
        ("gemm_ns.points", [[8, 100], [8, 200]], "increase"),
        ("gemm_ns.points", [[8, 100], [16, -1]], "positive"),
        ("gemm_ns.points", [[8, 100], [16, 90]], "extrapolated"),
        ("sequence_ns.value", -1, "field sequence_ns.value"),
        ("sequence_ns.provenance", "elsewhere", "no provenance is called 'elsewhere'"),
        ("sequence_ns.surprise", 1, "field sequence_ns.surprise"),
        ("copy_share.value", 1.0, "copy_share"),
        ("provenances.toy.date", "yesterday", "field provenances.toy.date"),
        ("model", "qwen3-8b", "field model: expected llama-3.1-8b, got qwen3-8b"),
        ("hardware", "l4", "field hardware: expected h100-sxm, got l4"),
    ],
)
def test_a_bad_profile_is_one_line(
    tmp_path: Path, content: dict[str, Any], path: str, value: object, message: str
) -> None:
    file = write(tmp_path, change(content, path, value))
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


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rooflin", "did you mean 'roofline'"),
        ("linear", "needs base_s, per_token_s"),
        ("linear:base_s=-1,per_token_s=0", "base_s: expected at least 0 seconds"),
        ("linear:base_s=inf,per_token_s=0", "base_s: expected at least 0 seconds"),
        ("linear:base_s=nan,per_token_s=0", "base_s"),
        ("linear:base_s=0,per_token_s=0", "at least 1 ns"),
        ("linear:base_s=1,per_token_s=0,memory_share=2", "memory_share"),
        ("roofline:gemm_flops_efficiency=0", "gemm_flops_efficiency: expected a share"),
        ("roofline:gemm_flops_eficiency=1", "did you mean 'gemm_flops_efficiency'"),
        ("roofline:step_overhead_s=-1", "step_overhead_s"),
        ("roofline:score_request_s=-1", "score_request_s"),
        ("roofline:score_pair_bytes=-1", "score_pair_bytes: expected at least 0 bytes"),
    ],
)
def test_bad_specifications(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(spec)
