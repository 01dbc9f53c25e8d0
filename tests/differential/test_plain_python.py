"""Compiled kernels against the same code as plain Python: equal events, to the byte."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sim import SimConfig, simulate
from sim.kv.events import KVEventLog

ROOT = Path(__file__).parents[2]

ANSWER = """
import sys, tempfile
from pathlib import Path
from numba import config
from tests.differential.test_plain_python import events_of

assert config.DISABLE_JIT
with tempfile.TemporaryDirectory() as folder:
    for line in sys.stdin:
        print(events_of(Path(folder), *line.split()), flush=True)
"""


def events_of(folder: Path, policy: str, reclaimer: str, scope: str) -> str:
    """Return how many events a run has, and their digest."""
    config = SimConfig(
        trace="poisson:rate=20,n=12,prompt=uniform:20:90,output=uniform:1:24", policy=policy, reclaimer=reclaimer,
        kv_blocks=40, headroom_blocks=3, budget=0.5, step_cost="linear:base_s=0.008,per_token_s=2e-5",
        copy_cost="linear:base_s=0,per_token_s=0.0002", low_watermark=0.5,
    )  # fmt: skip
    if "shared" in reclaimer:
        shared = "poisson:rate=200,n=12,prompt=uniform:5:30,output=uniform:4:24,shared_prefix=120,degree=2"
        config = config.replace(trace=shared, prefix_caching=True, kv_blocks=60, budget=0.3, headroom_blocks=10)
    if scope == "batch":
        longer = "poisson:rate=20,n=12,prompt=uniform:200:400,output=uniform:9:24"
        config = config.replace(trace=longer, budget_scope="batch", kv_blocks=400)
    result = simulate(config, events=folder / "events.parquet")
    assert result.summary["tokens_evicted"] > 0
    log = KVEventLog.load(folder / "events.parquet")
    return f"{len(log)} {hashlib.sha256(log.records.tobytes()).hexdigest()}"


@pytest.fixture(scope="module")
def plain() -> Iterator[Callable[..., str]]:
    """Answer as :func:`events_of` does, from one process in which no kernel is compiled."""
    with subprocess.Popen(
        [sys.executable, "-c", ANSWER], cwd=ROOT, env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(*case: str) -> str:
            print(*case, file=process.stdin, flush=True)
            return process.stdout.readline().strip()

        yield ask


def agree(folder: Path, plain: Callable[..., str], *case: str) -> None:
    compiled = events_of(folder, *case)
    assert compiled == plain(*case)
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
def test_compiled_and_interpreted_runs_agree(
    tmp_path: Path, plain: Callable[..., str], policy: str, reclaimer: str
) -> None:
    agree(tmp_path, plain, policy, reclaimer, "request")


@pytest.mark.parametrize("policy", ["h2o", "scissorhands:history=40"])
def test_so_do_runs_with_a_budget_for_the_batch(tmp_path: Path, plain: Callable[..., str], policy: str) -> None:
    agree(tmp_path, plain, policy, "naive", "batch")
