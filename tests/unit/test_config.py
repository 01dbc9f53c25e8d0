"""The configuration of a run: what it accepts, what it refuses and how, round trips, and its hash."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import InputError
from sim.serving.models import get_model
from sim.serving.profile import shipped
from sim.study.config import BUDGETS, DEFAULT_BUDGET, SimConfig, overlay
from sim.study.run import build_engine

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(
    trace=TEXT,
    budget=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**62),
    caching=st.booleans(),
    blocks=st.none() | st.integers(2, 10**9),
)
def test_toml_and_json_round_trip(trace: str, budget: float, seed: int, caching: bool, blocks: int | None) -> None:
    config = SimConfig(
        trace=trace,
        budget=budget,
        seed=seed,
        prefix_caching=caching,
        kv_blocks=blocks,
    )
    assert SimConfig(**tomllib.loads(config.to_toml())) == config
    assert SimConfig.from_json(config.to_json()) == config


def test_default_budget_fills_in_only_when_neither_is_given() -> None:
    assert SimConfig().budget == DEFAULT_BUDGET
    assert SimConfig(budget=0.3).budget == 0.3
    config = SimConfig(budget_tokens=512)
    assert (config.budget, config.budget_tokens) == (None, 512)


def test_full_retention_has_no_budget_so_that_equal_runs_are_equal() -> None:
    one, other = SimConfig(policy="full", budget=0.3), SimConfig(policy="full", budget_tokens=100)
    assert one == other
    assert one.hash() == other.hash()


def test_replace_swaps_one_kind_of_budget_for_the_other() -> None:
    config = SimConfig(budget=0.3)
    assert config.replace(budget_tokens=64).budget is None
    assert config.replace(budget_tokens=64).replace(budget=0.4).budget_tokens is None
    assert config.replace(seed=3).budget == 0.3
    assert config.replace(policy="full").replace(policy="h2o").budget == DEFAULT_BUDGET


def test_a_budget_of_memory_is_one_of_tokens_by_the_model() -> None:
    """Llama-3.1-8B takes 131,072 bytes a token, Qwen2.5-14B 196,608."""
    config = SimConfig(budget_memory="2GiB")
    assert (config.budget, config.budget_tokens, config.keeps) == (None, None, "2GiB")
    assert config.tokens_kept(131_072) == 16_384
    assert config.tokens_kept(196_608) == 10_922
    assert build_engine(config.replace(model="llama-3.1-8b"))._budget.tokens == 16_384
    assert SimConfig(budget_tokens=7).tokens_kept(131_072) == 7
    assert SimConfig(budget=0.5).tokens_kept(131_072) is None
    with pytest.raises(InputError, match=r"budget_memory: 125KiB is less than one token of llama-3.1-8b"):
        build_engine(SimConfig(budget_memory="128 kB"))


def test_equal_sizes_are_equal_text_and_equal_hashes() -> None:
    sizes = {text: SimConfig(budget_memory=text) for text in ("2GiB", "2048 MiB", "2147483648b", " 2gib ")}
    assert {each.budget_memory for each in sizes.values()} == {"2GiB"}
    assert len({each.hash() for each in sizes.values()}) == 1
    assert SimConfig(budget_memory="1.5GB").budget_memory == "1500MB"


def test_overlay_lets_a_flag_replace_the_rival_field_of_a_file() -> None:
    assert overlay({"budget": 0.3, "seed": 1}, {"budget_tokens": 8}) == {"seed": 1, "budget_tokens": 8}
    assert overlay({"budget_memory": "1GiB"}, {"budget": 0.5}) == {"budget": 0.5}
    assert overlay({"budget_tokens": 8}, {"budget_memory": "1GiB"}) == {"budget_memory": "1GiB"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"polcy": "h2o"}, "unknown field 'polcy'; did you mean 'policy'?"),
        ({"block-size": 16}, "unknown field 'block-size'; did you mean 'block_size'?"),
        ({"budget": 0}, "budget: expected greater than 0, got 0"),
        ({"budget": 1.5}, "budget: expected less than or equal to 1, got 1.5"),
        ({"budget": float("nan")}, "budget: expected a finite number, got nan"),
        ({"budget": "half"}, "budget: expected a valid number, got 'half'"),
        ({"budget": 0.5, "budget_tokens": 100}, "exclude each other"),
        ({"budget_memory": "1GiB", "budget_tokens": 100}, "budget_tokens and budget_memory exclude each other"),
        ({"budget_memory": "1GiB", "budget": 0.5}, "budget and budget_memory exclude each other"),
        ({"budget_memory": "2 GiBs"}, "KiB, MiB, GiB, TiB, got '2 GiBs'"),
        ({"budget_memory": "2"}, "KiB, MiB, GiB, TiB, got '2'"),
        ({"budget_memory": "-1GB"}, "KiB, MiB, GiB, TiB, got '-1GB'"),
        ({"budget_memory": 4096}, "budget_memory: expected a valid string, got 4096"),
        ({"budget_tokens": 0}, "budget_tokens: expected greater than or equal to 1, got 0"),
        ({"seed": -1}, "seed: expected greater than or equal to 0, got -1"),
        ({"seed": True}, "seed: expected a valid integer, got True"),
        ({"kv_blocks": 0}, "kv_blocks: expected greater than or equal to 2"),
        ({"rate_scale": 0.0}, "rate_scale: expected greater than 0"),
        ({"repack_when": "never"}, "repack_when: expected 'pressure' or 'always', got 'never'"),
        ({"reclaimer": "none", "policy": "h2o"}, "use policy full"),
        ({"granularity": "per_token"}, "granularity: expected 'shared', 'per_layer' or 'per_head', got 'per_token'"),
        ({"granularity": "per_layer", "simulated_layers": 0}, "simulated_layers: expected greater than or equal to 1"),
        ({"granularity": "per_layer", "block_tables": "both"}, "block_tables: expected 'per_unit' or 'shared'"),
        ({"table_us": -1.0}, "table_us: expected greater than or equal to 0"),
        ({"evict_every": 0}, "evict_every: expected greater than or equal to 1"),
        ({"evict_every": 2, "budget_scope": "batch"}, "evict_every: a budget of the whole batch is kept in every step"),
        ({"shared_blocks": "move"}, "shared_blocks: expected 'skip' or 'copy_out', got 'move'"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]+$") as caught:
        SimConfig(**fields)
    assert message in str(caught.value)


def test_flags_win_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SimConfig(budget=0.3, seed=2).to_toml(), encoding="utf-8")
    assert SimConfig.from_toml(path) == SimConfig(budget=0.3, seed=2)
    assert SimConfig.from_toml(path, budget_tokens=9) == SimConfig(budget_tokens=9, seed=2)


def test_errors_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\nbudget = 2\n")
    with pytest.raises(InputError, match=r"run\.toml: budget: expected less than or equal to 1, got 2"):
        SimConfig.from_toml(path)
    path.write_text("seed = 1\nbudget 2\n")
    with pytest.raises(InputError, match=r"run\.toml: not TOML: .*line 2"):
        SimConfig.from_toml(path)
    path.write_bytes(b"trace = '\xff'")
    with pytest.raises(InputError, match="not UTF-8"):
        SimConfig.from_toml(path)
    with pytest.raises(InputError, match="cannot read it"):
        SimConfig.from_toml(tmp_path / "missing.toml")


def test_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SimConfig().seed = 1  # type: ignore[misc]


def test_paths_and_numpy_scalars_are_welcome(tmp_path: Path) -> None:
    config = SimConfig(trace=tmp_path / "t.csv", seed=np.int64(4), budget=np.float32(0.5))  # type: ignore[arg-type]
    assert (config.trace, config.seed, config.budget) == (str(tmp_path / "t.csv"), 4, 0.5)


def test_every_field_has_a_description_in_the_schema() -> None:
    schema = SimConfig.model_json_schema()
    assert set(schema["properties"]) == set(SimConfig.model_fields)
    assert all(len(field["description"]) > 15 for field in schema["properties"].values())
    assert schema["additionalProperties"] is False
    json.dumps(schema)


def test_hash_changes_with_every_field() -> None:
    base = SimConfig(policy="full", reclaimer="naive")
    other = {
        "trace": "poisson:rate=1,n=5,prompt=5,output=5",
        "format": "azure",
        "arrivals": "poisson:rate=2",
        "head": 3,
        "rate_scale": 2.0,
        "model": "mistral-7b",
        "hardware": "a100-80g",
        "gpu_memory_utilization": 0.5,
        "kv_blocks": 100,
        "block_size": 32,
        "kv_dtype": "fp8",
        "policy": "random",
        "reclaimer": "none",
        "granularity": "per_layer",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 2048,
        "long_prefill_token_threshold": 128,
        "watermark": 0.01,
        "reserve_full_prompt": False,
        "prefix_caching": True,
        "async_scheduling": True,
        "repack_when": "always",
        "theta_f": 0.5,
        "low_watermark": 0.2,
        "shared_blocks": "copy_out",
        "headroom_blocks": 0,
        "attention": "uniform",
        "step_cost": "linear:base_s=0.1,per_token_s=0",
        "copy_cost": "linear:base_s=0.1,per_token_s=0",
        "score_reads": 0.25,
        "table_us": 0.0,
        "seed": 1,
    }
    of_units = {"block_tables": "shared", "simulated_layers": 4}
    assert {*other, *of_units, *BUDGETS, "budget_scope", "evict_every"} == set(SimConfig.model_fields)
    hashes = {base.hash()} | {base.replace(**{name: value}).hash() for name, value in other.items()}
    hashes |= {SimConfig(budget=0.3).hash(), SimConfig(budget=0.4).hash(), SimConfig(budget_tokens=3).hash()}
    hashes |= {SimConfig(budget_memory="1GiB").hash(), SimConfig(budget_scope="batch").hash()}
    hashes |= {SimConfig(evict_every=16).hash()}
    hashes |= {base.replace(granularity="per_layer", **{name: value}).hash() for name, value in of_units.items()}
    assert len(hashes) == len(other) + len(of_units) + 7
    assert all(len(each) == 16 and int(each, 16) >= 0 for each in hashes)


def test_what_only_units_need_is_nothing_where_there_are_none() -> None:
    one = SimConfig(block_tables="shared", simulated_layers=3)
    assert one == SimConfig()
    assert one.hash() == SimConfig().hash()
    assert SimConfig(granularity="per_head", simulated_layers=3).replace(granularity="shared") == SimConfig()


def test_hash_takes_a_file_by_content_not_by_name(tmp_path: Path) -> None:
    one, copy, changed = tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv"
    for path, text in ((one, "x"), (copy, "x"), (changed, "y")):
        path.write_text(text)
    assert SimConfig(trace=str(one)).hash() == SimConfig(trace=str(copy)).hash()
    assert SimConfig(trace=str(one)).hash() != SimConfig(trace=str(changed)).hash()
    recorded = [SimConfig(attention=f"recorded:{path}").hash() for path in (one, copy, changed)]
    assert recorded[0] == recorded[1] != recorded[2]
    one.write_text("longer")
    assert SimConfig(trace=str(one)).hash() != SimConfig(trace=str(copy)).hash()


def test_hash_ignores_the_order_of_parameters() -> None:
    one = SimConfig(step_cost="linear:base_s=0.1,per_token_s=0.2")
    assert one.hash() == SimConfig(step_cost="linear:per_token_s=0.2, base_s=0.1").hash()


def test_hash_is_stable_across_releases() -> None:
    # Results in stores are found by it: changing it makes every store start anew.
    assert SimConfig(step_cost="roofline").hash() == "03bb1d928c74b49f"


def test_a_choice_that_does_not_exist_gets_a_hint() -> None:
    with pytest.raises(InputError, match=r"kv_dtype: expected 'auto', .* got 'fp9'; did you mean 'fp8'\?"):
        SimConfig(kv_dtype="fp9")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"repack_when: .*got 'allways'; did you mean 'always'\?"):
        SimConfig(repack_when="allways")  # type: ignore[arg-type]


def test_a_budget_in_memory_counts_tokens_of_the_format() -> None:
    for kv_dtype, tokens in (("auto", 1_024), ("fp8", 2_048), ("int4", 2**27 // 34_816)):
        config = SimConfig(budget_memory="128MiB", kv_dtype=kv_dtype)  # type: ignore[arg-type]
        model = get_model(config.model, config.kv_dtype)
        assert config.tokens_kept(model.kv_bytes_per_token) == tokens
        assert build_engine(config)._budget.tokens == tokens


def test_hash_takes_costs_for_what_they_stand_for(tmp_path: Path) -> None:
    """A profile enters by its content, whoever names it; ``auto`` is what it resolves to."""
    along = shipped("h100-sxm", "llama-3.1-8b")
    assert along is not None
    copy, other = tmp_path / "copy.json", tmp_path / "other.json"
    copy.write_text(along.read_text())
    other.write_text(along.read_text().replace("800000.0", "900000.0"))
    names = ("auto", "profile:h100", "profile:path=h100-sxm", f"profile:{along}", f"profile:{copy}")
    assert len({SimConfig(step_cost=name).hash() for name in names}) == 1
    assert SimConfig(step_cost=f"profile:{other}").hash() != SimConfig().hash()
    assert SimConfig(step_cost="auto:score_step_s=0.001").hash() != SimConfig().hash()
    copies = [SimConfig(copy_cost=f"profile:{path}").hash() for path in ("h100", copy, other)]
    assert copies[0] == copies[1] != copies[2]
    without = SimConfig(hardware="l4")
    assert without.hash() == without.replace(step_cost="roofline").hash()
