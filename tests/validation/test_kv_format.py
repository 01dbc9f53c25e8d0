"""What a smaller KV format and a model with another kind of cache do to a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import InputError
from sim.kv.events import KVEventLog
from sim.study.config import SimConfig
from sim.study.result import RunResult
from sim.study.run import simulate
from sim.study.spec import SweepSpec
from sim.study.store import Store
from sim.study.sweep import sweep

CROWD = {
    "trace": "poisson:rate=1000,n=60,prompt=1000,output=300",
    "gpu_memory_utilization": 0.27,
    "policy": "full",
    "reclaimer": "none",
}
"""Sixty requests at once, for which the pool has room for a third in bf16, and for all in int4."""


@pytest.fixture(scope="module", params=["auto", "roofline"])
def runs(request: pytest.FixtureRequest) -> dict[str, RunResult]:
    return {
        kv_dtype: simulate(SimConfig(kv_dtype=kv_dtype, step_cost=request.param, **CROWD))  # type: ignore[arg-type]
        for kv_dtype in ("bf16", "fp8", "int4")
    }


def test_the_pool_doubles_and_more_run_at_once(runs: dict[str, RunResult]) -> None:
    blocks = {kv_dtype: run.summary["pool_blocks"] + 1 for kv_dtype, run in runs.items()}
    assert blocks["fp8"] in (2 * blocks["bf16"], 2 * blocks["bf16"] + 1)
    assert blocks["int4"] == pytest.approx(blocks["bf16"] * 131_072 / 34_816, abs=4)
    running = {kv_dtype: run.summary["peak_running"] for kv_dtype, run in runs.items()}
    assert running["bf16"] < running["fp8"] <= running["int4"] == 60
    assert runs["bf16"].summary["preemptions"] > runs["int4"].summary["preemptions"] == 0


def test_it_pays_in_throughput(runs: dict[str, RunResult]) -> None:
    rates = [runs[kv_dtype].summary["output_tokens_per_s"] for kv_dtype in ("bf16", "fp8", "int4")]
    assert rates[1] > 1.1 * rates[0]
    assert rates[2] > rates[1]


def test_a_format_is_an_axis_of_a_sweep(tmp_path: Path) -> None:
    base = {"trace": "poisson:rate=9,n=3,prompt=40,output=20", "kv_blocks": 50, "model": "toy"}
    sweep(SweepSpec(base=base, grid={"kv_dtype": ["bf16", "fp8"]}, seeds=[0]), tmp_path, workers=0)
    table, _ = Store(tmp_path).frame()
    assert dict(zip(table["kv_dtype"], table["kv_bytes_per_token"], strict=True)) == {"bf16": 1_024, "fp8": 512}


@pytest.mark.parametrize(
    ("model", "kv_dtype", "name"), [("toy", "auto", "bf16"), ("toy", "int4", "int4"), ("minicpm3-4b", "fp8", "fp8")]
)
def test_an_event_log_says_whose_bytes_it_is_about(tmp_path: Path, model: str, kv_dtype: str, name: str) -> None:
    config = SimConfig(trace="poisson:rate=9,n=3,prompt=40,output=20", kv_blocks=50, model=model, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    simulate(config, events=tmp_path / "events.npz")
    log = KVEventLog.load(tmp_path / "events.npz")
    assert (log.model, log.kv_dtype) == (model, name)


@pytest.mark.parametrize("model", ["minicpm3-4b", "deepseek-v2-lite", "gpt-oss-20b", "gemma-3-12b"])
@pytest.mark.parametrize("budget", [{"budget": 0.5}, {"budget_memory": "16MB"}])
def test_models_of_other_kinds_run(model: str, budget: dict[str, float | str]) -> None:
    result = simulate(SimConfig(trace="poisson:rate=9,n=5,prompt=400,output=30", model=model, **budget))  # type: ignore[arg-type]
    assert result.summary["finished"] == 5
    assert result.summary["step_cost_used"] == "roofline"


def test_where_every_layer_has_a_window_only_that_can_be_kept() -> None:
    config = SimConfig(trace="poisson:rate=9,n=5,prompt=400,output=30", model="mistral-7b-v0.1", policy="full")
    assert simulate(config).summary["finished"] == 5
    with pytest.raises(InputError, match="every layer has a window"):
        simulate(config.replace(policy="h2o"))


def test_a_profile_of_another_kind_of_model_is_not_made_up() -> None:
    config = SimConfig(trace="poisson:rate=9,n=5,prompt=400,output=30", model="minicpm3-4b", step_cost="profile:h100")
    with pytest.raises(InputError, match="none comes along for model minicpm3-4b on h100-sxm"):
        simulate(config)
