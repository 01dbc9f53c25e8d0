"""Random event traces on a real pool, with copies that are slow and come in any order: nothing is lost or misread."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch: pip install -e '.[gpu]'")

import torch

from gpu_validate.options import Options
from gpu_validate.program import Launch, Program
from gpu_validate.replay import replay
from sim.kv.events import Kind
from tests.property.test_engine_events import COPIES, RECLAIMERS, SHARING
from tests.support.replay import TINY, Driver, logged

torch.set_num_threads(1)

HOW = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["fp32", "fp8", "bf16"]),
        "visible": st.sampled_from(["listed", "live"]),
        "queue": st.sampled_from(["deferred", "deferred", "thread", "sync"]),
        "graph": st.booleans(),
        "seed": st.integers(0, 1 << 20),
    }
)


@st.composite
def engine_runs(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.sampled_from([4, 1, 8]))
    slots = draw(st.integers(100, 240))
    requests = st.tuples(st.integers(0, 8_000_000), st.integers(1, 60), st.integers(1, 16))
    options: dict[str, Any] = {
        "requests": sorted(draw(st.lists(requests, min_size=2, max_size=6))),
        "reclaimer": draw(st.sampled_from(["none", "token", *RECLAIMERS, *SHARING])),
        "copy": draw(st.sampled_from(COPIES)),
        "block_size": size,
        "blocks": slots // size + 1,
        "headroom": max(1, 16 // size),
        "policy": draw(st.sampled_from(["random", "h2o", "streaming_llm"])),
        "budget": draw(st.sampled_from([0.3, 0.6])),
        "max_num_batched_tokens": draw(st.sampled_from([16, 256])),
        "async_scheduling": draw(st.booleans()),
        "prefix_caching": draw(st.booleans()),
        "attention": "synthetic",
    }
    if options["reclaimer"] == "none":
        options |= {"policy": "full", "budget": 1.0}
    elif options["reclaimer"] == "token":
        options |= {"block_size": 1, "blocks": slots + 1, "headroom": 16}
    elif "keep_blocks" in options["reclaimer"]:
        options["prefix_caching"] = False
    return options


@settings(max_examples=40, derandomize=True)
@given(engine_runs(), HOW)
def test_runs_of_the_engine(run: dict[str, Any], how: dict[str, Any]):
    log = logged(**run)
    if len(log):
        check(log, how)


@settings(max_examples=15, derandomize=True)
@given(st.integers(0, 1 << 20), st.sampled_from([(4, 60), (2, 100), (8, 40), (1, 150), (16, 24)]), st.booleans(), HOW)
def test_any_order_of_calls(seed: int, sizes: tuple[int, int], disorder: bool, how: dict[str, Any]):
    check(Driver(seed, size=sizes[0], blocks=sizes[1], steps=16, disorder=disorder).log, how)


def check(log: Any, how: dict[str, Any]) -> None:
    report = replay(log, TINY, Options(verify=True, **how))
    assert report.steps == (log.records["kind"] == Kind.STEP).sum() == report.layouts_checked
    planned = log.records[log.records["kind"] == Kind.PLAN]["b"].sum()
    assert report.tokens_copied == report.tokens_seen_moved == planned
    assert report.outputs_verified is not None
    assert report.outputs_undefined is not None
    assert report.outputs_verified + report.outputs_undefined >= report.steps
    assert how["visible"] == "listed" or not report.outputs_undefined
    assert report.tokens_verified is not None
    assert report.tokens_verified >= report.tokens_written


def test_what_is_hard_does_happen():
    """The same kinds of traces, more of them and read only."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        size, blocks = ((4, 60), (2, 100), (8, 40))[seed % 3]
        driver = Driver(seed, size=size, blocks=blocks, steps=16, disorder=seed >= 30)
        seen += driver.happened
        in_flight = 0
        for work in Program(driver.log):
            for action in work.before:
                in_flight += len(action.plans) if isinstance(action, Launch) else 0
                seen["launches together"] += isinstance(action, Launch) and len(action.plans) > 1
                if not isinstance(action, Launch) and hasattr(action, "plans"):
                    in_flight -= len(action.plans)
            seen["steps beside a copy"] += in_flight > 0
            seen["steps beside two copies"] += in_flight > 1
    for what in (
        "shared", "packed", "FINISH", "PREEMPT", "planned", "died mid-copy", "committed", "copied out",
        "landed after its request left", "launches together", "steps beside a copy", "steps beside two copies",
        "planned to scatter", "planned to fill", "filled", "wrote into a hole",
    ):  # fmt: skip
        assert seen[what] > 3, f"{what}: {dict(seen)}"
