"""One simulation, from its configuration to its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.policies import policies
from sim.kv.reclaim import reclaimers
from sim.kv.units import ONE_UNIT, Units
from sim.serving.attention import build_attention
from sim.serving.ballots import Ballots
from sim.serving.copy import build_copy_cost
from sim.serving.cost import build_step_cost
from sim.serving.engine import Budget, Engine, Outcome
from sim.serving.hardware import get_hardware
from sim.serving.limits import Limits
from sim.serving.memory import kv_blocks
from sim.serving.models import Model, get_model
from sim.serving.scheduler import Scheduler
from sim.serving.summary import whole_number
from sim.study.config import SimConfig
from sim.study.dumps import Dump
from sim.study.result import RunResult
from sim.study.versions import versions
from sim.workload.source import Mapped, Source, limit, open_source
from sim.workload.transform import rate_scale

__all__ = ["NOBODY_SERVED", "build_engine", "simulate"]

NOBODY_SERVED = "no request can be served"
"""How the error begins that says so."""


def simulate(
    config: SimConfig,
    source: Source | None = None,
    *,
    model: Model | None = None,
    progress: Callable[[int, int | None, float], None] | None = None,
    dump_steps: Path | None = None,
    dump_tables: Path | None = None,
    events: Path | None = None,
) -> RunResult:
    """Run one simulation.

    Parameters
    ----------
    config
        What to simulate.
    source
        The workload, in place of the one that ``config.trace`` names.
    model
        A model of your own, in place of the preset that ``config.model`` names.
    progress
        Called a few times a second with (requests done, requests in all if known, simulated seconds).
    dump_steps, dump_tables
        CSV files to write the state of every step to, and what every request was given.
    events
        File to write the KV events to (docs/kv_events.md).

    Returns
    -------
    RunResult
        The same for the same configuration, but for ``summary["wall_s"]``.

    Raises
    ------
    InputError
        If the configuration or the workload cannot be used, or not one request can be served.
    NoProgressError
        If something waits for what can never come.

    Examples
    --------
    >>> from sim import SimConfig, simulate
    >>> result = simulate(SimConfig(trace="poisson:rate=8,n=20,prompt=200,output=40", policy="random", budget=0.5))
    >>> result.summary["finished"], len(result.requests_frame())
    (20, 20)
    """
    model = model or get_model(config.model, config.kv_dtype)
    with contextlib.ExitStack() as stack:
        dump = stack.enter_context(Dump.open(dump_steps, dump_tables)) if dump_steps or dump_tables else None
        engine = build_engine(config, source, model=model, logging=events is not None, observer=dump, progress=progress)
        outcome = engine.run()
    if outcome.summary["refused"] == outcome.summary["requests"]:
        raise InputError(f"{NOBODY_SERVED}; {outcome.summary['first_refusal'] or 'the trace is empty'}")
    if events is not None:
        log = outcome.events
        assert log is not None
        log.model, log.kv_dtype = model.name, model.kv_format.name
        log.save(events)
    cache = engine.cache
    memory = {
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "pool_blocks": whole_number(cache.pool.usable_blocks / cache.units.count),
    }
    return _result(config, outcome, memory, str(getattr(engine.step_cost, "about", engine.step_cost.name)))


def build_engine(
    config: SimConfig,
    source: Source | None = None,
    *,
    model: Model | None = None,
    logging: bool = False,
    observer: Any = None,
    progress: Callable[[int, int | None, float], None] | None = None,
) -> Engine:
    """Put the parts together that the configuration names."""
    model, hardware = model or get_model(config.model, config.kv_dtype), get_hardware(config.hardware)
    policy = policies.build(config.policy, block_size=config.block_size)
    reclaimer = reclaimers.build(
        config.reclaimer,
        theta_f=config.theta_f,
        low_watermark=config.low_watermark,
        repack_when=config.repack_when,
        shared_blocks=config.shared_blocks,
    )
    attention = build_attention(config.attention) if policy.attends or policy.needs else None
    blocks = config.kv_blocks
    if blocks is None:
        blocks = kv_blocks(model, hardware, config.block_size, config.gpu_memory_utilization)
    units = _units(config, model)
    tables = units if config.block_tables == "per_unit" else ONE_UNIT
    kept = config.tokens_kept(model.kv_bytes_per_token)
    headroom = 0
    needs_headroom = reclaimer.needs_headroom or (config.prefix_caching and reclaimer.shares_headroom)
    if needs_headroom and policy.evicts:
        headroom = max(1, blocks // 50) if config.headroom_blocks is None else config.headroom_blocks
    if not tables.windows:
        # A block of a unit is one of the whole model by the number of units. (One of a group is what vLLM counts.)
        blocks, headroom = tables.count * (blocks - 1) + 1, tables.count * headroom
    columns = (*policy.columns, *(attention.columns if attention is not None else ()))
    ballots = None
    if policy.evicts and tables.count < units.count:
        ballots = Ballots(units, config.block_size, columns)
        columns = ballots.shared_columns
    cache = KVCache(
        blocks,
        config.block_size,
        columns=columns,
        tracked=policy.evicts,
        headroom_blocks=headroom,
        logging=logging,
        units=tables,
    )
    if source is None:
        source = _open(config)
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len if config.max_model_len is not None else model.max_model_len,
        watermark=config.watermark,
        reserve_full_prompt=config.reserve_full_prompt,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        prefix_caching=config.prefix_caching,
        async_scheduling=config.async_scheduling,
    )
    return Engine(
        source=source,
        scheduler=Scheduler(cache, limits, source.hash_tokens),
        policy=policy,
        budget=Budget(config.budget if config.budget is not None else 1.0, kept or 0, config.budget_scope == "batch"),
        reclaimer=reclaimer,
        attention=attention,
        step_cost=build_step_cost(config.step_cost, model=model, hardware=hardware),
        copy_cost=build_copy_cost(config.copy_cost, model=model, hardware=hardware),
        score_reads=config.score_reads,
        table_us=config.table_us,
        evict_every=config.evict_every,
        ballots=ballots,
        seed=config.seed,
        observer=observer,
        progress=progress,
    )


def _units(config: SimConfig, model: Model) -> Units:
    """Return what decides alone, or has block tables of its own.

    Raises
    ------
    InputError
        If the model cannot be cut like that.
    """
    groups = model.kv_groups
    if config.granularity == "shared":
        if not any(group.window for group in groups):
            return ONE_UNIT
        return Units(windows=tuple(group.window for group in groups), weights=tuple(group.layers for group in groups))
    if any(group.window for group in groups):
        raise InputError(
            f"granularity {config.granularity}: the layers of {model.name} that have a sliding window have tables of "
            "their own already; use granularity shared"
        )
    layers = config.simulated_layers or model.layers
    if layers > model.layers:
        raise InputError(f"simulated_layers: {model.name} has {model.layers} layers, got {layers}")
    heads = model.kv_heads if config.granularity == "per_head" else 1
    return Units(layers=layers, heads=heads, of=model.layers * heads)


def _open(config: SimConfig) -> Source:
    source: Source = open_source(config.trace, format=config.format, seed=config.seed, arrivals=config.arrivals)
    if config.head is not None:
        source = limit(source, config.head)
    if config.rate_scale != 1.0:
        source = Mapped(source, lambda chunk: rate_scale(chunk, config.rate_scale))
    return source


def _result(config: SimConfig, outcome: Outcome, memory: dict[str, float], step_cost: str) -> RunResult:
    digest = config.hash()
    told = {"step_cost_used": step_cost, "config_hash": digest, "seed": config.seed}
    return RunResult(
        config=config,
        config_hash=digest,
        summary={**outcome.summary, **memory, **told},
        requests=outcome.requests,
        steps=outcome.steps,
        liveness=outcome.liveness,
        pool_snapshot=outcome.pool_snapshot,
        versions=versions(),
    )
