"""Plausible run results without a simulation: for the store, tables and plots, whose tests need no engine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from sim.errors import InputError
from sim.rng import stream
from sim.study.config import SimConfig
from sim.study.result import RunResult
from sim.study.versions import versions

DENSITY = {"naive": 0.35, "vtoken": 0.8, "ideal": 0.97, "none": 0.97}
SKILL = {"h2o": 1.0, "random": 0.85, "scissorhands": 1.05, "streaming_llm": 1.6, "full": 1.0}


def percentiles(values: np.ndarray) -> dict[str, float]:
    """Return the figures that a summary gives for a latency."""
    known = values[~np.isnan(values)]
    return {"mean": float(known.mean())} | {f"p{p}": float(np.percentile(known, p)) for p in (50, 90, 95, 99)}


def result(config: SimConfig, requests: int = 300, steps: int = 4000) -> RunResult:
    """Return a result that looks like a run of ``config``; the same one for the same configuration."""
    kept = 1.0 if config.budget is None else config.budget
    policy = config.policy.partition(":")[0]
    reclaimer = config.reclaimer.partition(":")[0]
    density = min(0.97, DENSITY.get(reclaimer, 0.6) * SKILL.get(policy, 1.0))
    draw = stream(config.seed, "made up")  # pairs share everything but the reclaimer's part
    prompt = draw.lognormal(6.5, 0.9, requests).astype(np.int64) + 1
    output = draw.lognormal(5.0, 0.8, requests).astype(np.int64) + 1
    noise = draw.normal(1, 0.05, requests)
    arrival_s = np.cumsum(draw.exponential(0.1, requests))
    live_blocks = np.ceil((prompt + output / 2) * kept / config.block_size)
    retained = np.maximum(live_blocks, live_blocks / density * noise)
    slow = 1 + 0.4 * (1 - density)
    queue_s = draw.exponential(0.3, requests) * slow
    ttft_s = queue_s + prompt * 2e-5 * slow
    tpot_s = np.where(output > 1, 0.012 * slow * draw.normal(1, 0.1, requests), np.nan)
    e2e_s = ttft_s + np.nan_to_num(tpot_s) * (output - 1)
    columns = {
        "req_id": np.array([f"r{i}" for i in range(requests)], dtype=object),
        "status": np.array(["finished"] * requests, dtype=object),
        "arrival_s": arrival_s,
        "queue_s": queue_s,
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "e2e_s": e2e_s,
        "finish_s": arrival_s + e2e_s,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "preemptions": draw.poisson(0.05, requests),
        "recomputed_tokens": np.zeros(requests, np.int64),
        "cached_tokens": np.zeros(requests, np.int64),
        "retained_blocks": retained,
        "retained_blocks_peak": np.ceil(retained * 1.2).astype(np.int64),
        "retained_blocks_finish": np.ceil(retained).astype(np.int64),
        "over_retention": retained / live_blocks,
        "tokens_evicted": ((prompt + output) * (1 - kept)).astype(np.int64),
        "tokens_moved": (live_blocks * (reclaimer == "vtoken")).astype(np.int64),
    }
    dt_s = draw.normal(0.012, 0.001, steps).clip(0.005)
    clock_s = np.cumsum(dt_s) - dt_s
    pool = config.kv_blocks or 4000
    wave = np.clip(0.2 + clock_s / clock_s[-1] + 0.1 * np.sin(clock_s / 5), 0, 1)
    used = np.round(pool * 0.95 * wave * min(1.0, 0.5 + (1 - density))).astype(np.int64)
    slots = used * config.block_size
    tail = np.round(slots * 0.02).astype(np.int64)
    live = np.round((slots - tail) * density).astype(np.int64)
    by_step = {
        "step": np.arange(steps),
        "n_steps": np.ones(steps, np.int64),
        "clock_s": clock_s,
        "dt_s": dt_s,
        "running": np.round(100 * wave).astype(np.int64),
        "waiting": np.round(20 * wave**4).astype(np.int64),
        "used_blocks": used,
        "free_blocks": pool - used,
        "reserved_blocks": np.zeros(steps, np.int64),
        "live_slots": live,
        "dead_slots": slots - tail - live,
        "tail_slots": tail,
        "sched_tokens": draw.integers(50, 500, steps),
        "sched_reqs": np.round(100 * wave).astype(np.int64),
        "preemptions": draw.poisson(0.01, steps),
        "freed_by_death": draw.poisson(1.0, steps),
        "freed_by_repack": draw.poisson(2.0 * (reclaimer == "vtoken"), steps),
        "evicted": draw.poisson(50, steps),
        "moved": draw.poisson(5.0 * (reclaimer == "vtoken"), steps),
        "copy_s": np.zeros(steps),
    }
    at = np.linspace(0, steps - 1, min(steps, 512)).astype(int)
    shares = np.array([0.02, (1 - density) / 3, (1 - density) / 3, (1 - density) / 3, density / 2, density / 2])
    counts = np.round(used[at, None] * shares / shares.sum()).astype(np.int64)
    liveness = {"clock_s": clock_s[at]} | dict(zip(("empty", "q1", "q2", "q3", "q4", "full"), counts.T, strict=True))
    latencies = {"ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": e2e_s}
    makespan_s = float(columns["finish_s"].max() - arrival_s[0])
    summary = {
        "requests": requests,
        "finished": requests,
        "refused": 0,
        "steps": steps,
        "makespan_s": makespan_s,
        "requests_per_s": requests / makespan_s,
        "output_tokens_per_s": float(output.sum() / makespan_s),
        "peak_running": 100,
        "mean_running": 60.0,
        "preemptions": int(columns["preemptions"].sum()),
        "retained_blocks_mean": float(retained.mean()),
        "retained_blocks_peak_mean": float(columns["retained_blocks_peak"].mean()),
        "over_retention_mean": float(columns["over_retention"].mean()),
        "fragmentation_mean": 1 - density * 0.98,
        "dead_fraction_mean": 1 - density * 0.98 - 0.02,
        "tail_slack_mean": 0.02,
        "used_blocks_mean": float(used.mean()),
        "load_state": "stable",
        **{name: percentiles(values) for name, values in latencies.items()},
        "config_hash": config.hash(),
        "wall_s": time.perf_counter() % 1,  # as in a real run: never the same
    }
    return RunResult(
        config=config,
        config_hash=config.hash(),
        summary=summary,
        requests=columns,
        steps=by_step,
        liveness=liveness,
        pool_snapshot=snapshot(config, density) if reclaimer == "vtoken" else None,
        versions=versions(),
    )


def snapshot(config: SimConfig, density: float, blocks: int = 400) -> dict[str, object]:
    """Return a pool before and after the repack of one of its requests."""
    draw = stream(config.seed, "snapshot")
    owner = np.sort(draw.integers(-1, 8, blocks)).astype(np.int32)
    live = np.where(owner >= 0, draw.binomial(config.block_size, density * 0.6, blocks), 0).astype(np.int32)
    after, owner_after = live.copy(), owner.copy()
    mine = np.flatnonzero(owner == 3)
    after[mine], owner_after[mine] = 0, -1
    dense = np.flatnonzero(owner == -1)[: -(-int(live[mine].sum()) // config.block_size)]
    after[dense], owner_after[dense] = config.block_size, 3
    return {
        "clock_s": 12.5,
        "live_before": live,
        "owner_before": owner,
        "live_after": after,
        "owner_after": owner_after,
    }


def simulate(config: SimConfig, **_: object) -> RunResult:
    """Stand in for the simulation: quick, and failing where a test says so through ``MADE_UP_*``."""
    if str(config.seed) in os.environ.get("MADE_UP_REFUSES", "").split(","):
        raise InputError(f"seed {config.seed} is refused")
    if str(config.seed) in os.environ.get("MADE_UP_BREAKS", "").split(","):
        raise RuntimeError("something is broken")
    if str(config.seed) in os.environ.get("MADE_UP_DIES", "").split(","):
        os._exit(9)
    once = os.environ.get("MADE_UP_DIES_ONCE")
    if once and not Path(once).exists():
        Path(once).touch()
        os._exit(9)
    time.sleep(float(os.environ.get("MADE_UP_SLEEPS_S", "0")))
    return result(config, requests=40, steps=50)
