"""Compiled kernels against the same code as plain Python: equal events, to the byte."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RUN = """
import hashlib, sys, tempfile
from pathlib import Path
from sim import SimConfig, simulate
from sim.kv.events import KVEventLog

policy, reclaimer, scope = sys.argv[1:]
config = SimConfig(
    trace="poisson:rate=20,n=12,prompt=uniform:20:90,output=uniform:1:24", policy=policy, reclaimer=reclaimer,
    kv_blocks=40, headroom_blocks=3, budget=0.5, step_cost="linear:base_s=0.008,per_token_s=2e-5",
    copy_cost="linear:base_s=0,per_token_s=0.0002", low_watermark=0.5,
)
if "shared" in reclaimer:
    shared = "poisson:rate=200,n=12,prompt=uniform:5:30,output=uniform:4:24,shared_prefix=120,degree=2"
    config = config.replace(trace=shared, prefix_caching=True, kv_blocks=60, budget=0.3, headroom_blocks=10)
if scope == "batch":
    longer = "poisson:rate=20,n=12,prompt=uniform:200:400,output=uniform:9:24"
    config = config.replace(trace=longer, budget_scope="batch", kv_blocks=400)
with tempfile.TemporaryDirectory() as folder:
    result = simulate(config, events=Path(folder) / "events.parquet")
    log = KVEventLog.load(Path(folder) / "events.parquet")
assert result.summary["tokens_evicted"] > 0
print(len(log), hashlib.sha256(log.records.tobytes()).hexdigest())
"""


def agree(policy: str, reclaimer: str, scope: str) -> None:
    def run(**environment: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", RUN, policy, reclaimer, scope],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    compiled = run()
    assert compiled == run(NUMBA_DISABLE_JIT="1")
    assert int(compiled.split()[0]) > 300


@pytest.mark.parametrize(
    ("policy", "reclaimer"),
    [
        ("h2o", "vtoken"),
        ("random", "vtoken"),
        ("scissorhands:history=40", "ideal"),
        ("streaming_llm", "naive"),
        ("tova", "vtoken"),
        ("snapkv:window=8", "naive"),
        ("keydiff:every=7", "vtoken"),
        ("knorm", "vtoken"),
        ("expected_attention", "naive"),
        ("keyformer", "vtoken"),
        ("paged_eviction:block_size=5", "vtoken"),
        ("r_kv:buffer=5,window=3", "sync:keep_blocks=3"),
        ("random", "vtoken:shared_blocks=copy_out,repack_when=always"),
        ("random", "vtoken:layout=scattered,plan=gain"),
        ("h2o", "reuse+vtoken"),
        ("random", "reuse+vtoken:layout=ordered,plan=gain"),
        ("h2o", "stall:layout=fill,plan=gain,copy_budget=0.5"),
        ("h2o", "page"),
        ("streaming_llm", "page"),
    ],
)
def test_compiled_and_interpreted_runs_agree(policy: str, reclaimer: str) -> None:
    agree(policy, reclaimer, "request")


@pytest.mark.parametrize("policy", ["h2o", "scissorhands:history=40"])
def test_so_do_runs_with_a_budget_for_the_batch(policy: str) -> None:
    agree(policy, "naive", "batch")
