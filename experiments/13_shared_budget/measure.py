"""Measure what a budget for the whole batch keeps of the requests' attention, and what it serves when blocks are short.

python experiments/13_shared_budget/measure.py: writes kept.csv and served.csv beside it (two minutes of CPU).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sim.serving.attention import build_attention
from sim.study.attention_kept import AttentionKept
from sim.study.config import SimConfig
from sim.study.run import build_engine

HERE = Path(__file__).parent
TRACES = "../shared/traces"
RECORDED = "recorded:../shared/attention"
AZURE = {"trace": f"{TRACES}/azure_llm_2023_conv.csv", "head": 150, "rate_scale": 4.0}
ALIKE = {"trace": "poisson:rate=20,n=60,prompt=1000,output=200"}
REASONING = {"trace": f"{TRACES}/servegen_deepseek_r1_lengths.json", "head": 30, "rate_scale": 0.25}
ALL = ("h2o", "tova", "scissorhands", "keyformer")
BUDGETS = (*({"budget": share} for share in (0.1, 0.2, 0.3, 0.5)), *({"budget_tokens": n} for n in (128, 256, 512)))
SOME = ({"budget": 0.1}, {"budget": 0.3})
WORKLOADS: dict[str, tuple[dict[str, Any], int, tuple[int, ...], tuple[str, ...], tuple[dict[str, Any], ...]]] = {
    # Settings, every so many-th step looked at, seeds, policies, budgets.
    "azure": (AZURE, 8, (0,), ALL, BUDGETS),
    "azure, recorded": (AZURE | {"attention": RECORDED}, 8, (0,), ALL, BUDGETS),
    "reasoning": (REASONING, 32, (0,), ("h2o", "tova"), SOME),
    "alike": (ALIKE, 4, (0, 1, 2), ALL, SOME),
    "alike, recorded": (ALIKE | {"attention": RECORDED}, 4, (0, 1, 2), ALL, SOME),
}
SCOPES = ("request", "batch")
BASE = {"model": "llama-3.1-8b", "hardware": "h100", "step_cost": "roofline", "reclaimer": "reuse+vtoken"}
SHORT = {"trace": f"{TRACES}/azure_llm_2023_conv.csv", "head": 400, "rate_scale": 4.0, "gpu_memory_utilization": 0.25}


def runs() -> Iterator[tuple[str, int, SimConfig]]:
    """Yield workload, how often to look, and configuration; the pool is the device's, nobody waits for blocks."""
    for workload, (settings, every, seeds, policies, budgets) in WORKLOADS.items():
        for policy, budget, seed, scope in itertools.product(policies, budgets, seeds, SCOPES):
            fields = BASE | settings | budget | {"policy": policy, "budget_scope": scope, "seed": seed}
            yield workload, every, SimConfig(**fields)


def measure(config: SimConfig, every: int) -> dict[str, Any]:
    """Run one, and reduce what each request kept of its attention."""
    observer = AttentionKept(build_attention(config.attention), every)
    outcome = build_engine(config, observer=observer).run()
    seen = observer.by_request()
    kept = np.array([*seen.values()])
    prompt = outcome.requests["prompt_tokens"][[*seen]]
    summary, steps = outcome.summary, outcome.steps
    quarter = np.argsort(prompt, kind="stable")
    some = len(kept) // 4
    return {
        "policy": config.policy,
        "budget": config.keeps,
        "scope": config.budget_scope,
        "seed": config.seed,
        "kept_mean": kept.mean(),
        "kept_p5": np.percentile(kept, 5),
        "kept_least": kept.min(),
        "kept_shortest_quarter": kept[quarter[:some]].mean(),
        "kept_longest_quarter": kept[quarter[-some:]].mean(),
        "live_tokens_a_request": np.average(steps["live_slots"], weights=steps["dt_s"]) / summary["mean_running"],
        "blocks_a_request": summary["used_blocks_mean"] / summary["mean_running"],
        **serving(summary),
    }


def serving(summary: dict[str, Any]) -> dict[str, Any]:
    """Return what a run served."""
    return {
        "requests_per_s": summary["requests_per_s"],
        "mean_running": summary["mean_running"],
        "preemptions": summary["preemptions"],
        "e2e_p95_s": summary["e2e_s"]["p95"],
        "ttft_p95_s": summary["ttft_s"]["p95"],
    }


def main() -> None:
    """Measure both tables."""
    rows = [{"workload": workload, **measure(config, every)} for workload, every, config in runs()]
    pd.DataFrame(rows).to_csv(HERE / "kept.csv", index=False, float_format="%.6g")
    rows = []
    for policy, share, scope in itertools.product(ALL, (0.2, 0.3, 0.5), SCOPES):
        config = SimConfig(**BASE | SHORT | {"policy": policy, "budget": share, "budget_scope": scope})
        rows.append({"workload": "azure, blocks short", **measure(config, 16)})
    pd.DataFrame(rows).to_csv(HERE / "served.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
