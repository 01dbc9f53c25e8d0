"""Serve where the whole model, layers or heads decide, under tables of their own or one for all; and other kinds of KV.

python experiments/12_granularity/run.py            # served.csv, layers.csv, models.csv: eight minutes of one core
python experiments/12_granularity/run.py layers     # one of them
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from sim.serving.models import Model, get_model
from sim.study.config import SimConfig
from sim.study.run import simulate

HERE = Path(__file__).parent
TRACES = "../shared/traces"
BASE = {"model": "llama-3.1-8b", "hardware": "h100", "step_cost": "roofline", "budget": 0.3}
WORKLOADS: dict[str, dict[str, Any]] = {
    "azure": {
        "trace": f"{TRACES}/azure_llm_2023_conv.csv",
        "head": 300,
        "rate_scale": 4.0,
        "gpu_memory_utilization": 0.25,
    },
    "mooncake": {"trace": f"{TRACES}/mooncake_fast25_conversation.jsonl", "head": 32, "gpu_memory_utilization": 0.4},
}
POLICIES = ("h2o", "snapkv", "pyramidkv", "ada_kv", "random", "streaming_llm")
NEEDS = {"pyramidkv": ("per_layer", "per_head"), "ada_kv": ("per_head",)}
"""Granularities under which a policy means something, where that is not all."""
RECLAIMERS = ("naive", "vtoken:repack_when=always", "reuse+vtoken", "ideal")
SIMULATED = {
    ("per_layer", "per_unit"): 4,
    ("per_head", "per_unit"): 4,
    ("per_layer", "shared"): 32,
    ("per_head", "shared"): 4,
}
"""Layers that are simulated one by one: tables of their own need few, a vote under one table needs all."""
LAYERS = (1, 2, 4, 8, 16, 32)
COLUMNS = (
    "finished",
    "requests_per_s",
    "retained_blocks_mean",
    "over_retention_mean",
    "mean_running",
    "preemptions",
    "dead_fraction_mean",
    "tail_slack_mean",
    "output_tokens",
    "tokens_copied",
    "repack_launches",
    "copy_time_s",
    "copy_delay_s",
    "makespan_s",
    "steps",
    "block_table_bytes",
    "kv_bytes_per_token",
    "pool_blocks",
)


def run(geometry: Model | None = None, **fields: Any) -> dict[str, Any]:
    """Run one configuration and return the figures of its row; ``geometry`` takes the place of the preset."""
    start = time.process_time()
    summary = simulate(SimConfig(**BASE | fields), model=geometry).summary
    row = {name: summary[name] for name in COLUMNS}
    row |= {
        "tables": summary["tables_per_request"],
        "e2e_p95_s": summary["e2e_s"]["p95"],
        "tpot_mean_s": summary["tpot_s"]["mean"],
    }
    return row | {"cpu_s": time.process_time() - start}


def served() -> Iterator[dict[str, Any]]:
    """Yield a row for each workload, policy, granularity, kind of tables and reclaimer."""
    for workload in WORKLOADS:

        def row(policy: str, reclaimer: str, workload: str = workload, **fields: Any) -> dict[str, Any]:
            names = {"granularity": "shared", "block_tables": "", "simulated_layers": 0, "table_us": 0.6} | fields
            said = run(policy=policy, reclaimer=reclaimer, **WORKLOADS[workload] | fields)
            return {"workload": workload, "policy": policy, "reclaimer": reclaimer} | names | said

        yield row("full", "none")
        for policy, reclaimer in itertools.product(POLICIES, RECLAIMERS):
            if policy not in NEEDS:
                yield row(policy, reclaimer)
            for (granularity, tables), layers in SIMULATED.items():
                if granularity in NEEDS.get(policy, (granularity,)):
                    fields = {"granularity": granularity, "block_tables": tables, "simulated_layers": layers}
                    yield row(policy, reclaimer, **fields)
        for granularity, reclaimer in itertools.product(("per_layer", "per_head"), ("naive", "reuse+vtoken")):
            layers = SIMULATED[granularity, "per_unit"]
            yield row("h2o", reclaimer, granularity=granularity, simulated_layers=layers, table_us=0.0)


def layers() -> Iterator[dict[str, Any]]:
    """Yield rows that differ in how many layers are simulated."""
    for policy, granularity, tables, count in itertools.product(
        ("h2o", "snapkv"), ("per_layer", "per_head"), ("per_unit", "shared"), LAYERS
    ):
        fields = {"granularity": granularity, "block_tables": tables, "simulated_layers": count}
        said = run(policy=policy, reclaimer="reuse+vtoken", **WORKLOADS["azure"] | {"head": 40} | fields)
        yield {"policy": policy} | fields | said


MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    # Name -> preset, fields changed, model whose bytes the pool has.
    "llama-3.1-8b": ("llama-3.1-8b", {}, "llama-3.1-8b"),
    "llama-3.1-8b, fp8": ("llama-3.1-8b", {"kv_dtype": "fp8"}, "llama-3.1-8b"),
    "llama-3.1-8b, int4": ("llama-3.1-8b", {"kv_dtype": "int4"}, "llama-3.1-8b"),
    "deepseek-v2-lite": ("deepseek-v2-lite", {}, "deepseek-v2-lite"),
    "deepseek-v2-lite, bytes of llama-3.1-8b": ("deepseek-v2-lite", {}, "llama-3.1-8b"),
    "gemma-3-12b, no windows": ("gemma-3-12b", {"window": 0, "window_layers": 0}, "gemma-3-12b"),
    "gemma-3-12b": ("gemma-3-12b", {}, "gemma-3-12b"),
    "gpt-oss-20b, no windows": ("gpt-oss-20b", {"window": 0, "window_layers": 0}, "gpt-oss-20b"),
    "gpt-oss-20b": ("gpt-oss-20b", {}, "gpt-oss-20b"),
}
POOL_TOKENS = {"azure": 26_000, "mooncake": 110_000}
"""Tokens that the pool of a model holds in its own number format and without windows."""
MODES = (
    ("full", "none"),
    ("h2o", "naive"),
    ("h2o", "page"),
    ("h2o", "vtoken:repack_when=always"),
    ("h2o", "reuse+vtoken"),
    ("h2o", "ideal"),
)


def models() -> Iterator[dict[str, Any]]:
    """Yield rows for models with windows, latent attention and other number formats."""
    for workload, (name, (preset, changes, pool)) in itertools.product(WORKLOADS, MODELS.items()):
        kv_dtype = changes.get("kv_dtype", "auto")
        geometry = get_model(preset, kv_dtype)
        if "window" in changes:
            geometry = dataclasses.replace(geometry, **changes)
        group = geometry.kv_bytes_per_token * geometry.kv_group_layers // geometry.layers
        blocks = POOL_TOKENS[workload] * get_model(pool).kv_bytes_per_token // (16 * group) + 1
        for policy, reclaimer in MODES:
            if reclaimer == "reuse+vtoken" and geometry.window:
                continue  # refused: it would write tokens out of order
            fields = WORKLOADS[workload] | {"model": preset, "kv_dtype": kv_dtype, "kv_blocks": blocks}
            said = run(geometry, policy=policy, reclaimer=reclaimer, **fields)
            yield {"workload": workload, "model": name, "policy": policy, "reclaimer": reclaimer} | said


def main() -> None:
    """Write the tables that are asked for, or all."""
    for part in sys.argv[1:] or ("served", "layers", "models"):
        rows = []
        for row in {"served": served, "layers": layers, "models": models}[part]():
            rows.append(row)
            pd.DataFrame(rows).to_csv(HERE / f"{part}.csv", index=False, float_format="%.6g")
            print(part, *list(row.values())[:7], f"{row['cpu_s']:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
