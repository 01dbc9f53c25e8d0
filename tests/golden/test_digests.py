"""The whole of small runs in one number each: makespan and a digest of every KV event.

A change of these numbers is a change of results, wanted or not. If it is wanted, write the new ones with
``python tests/golden/test_digests.py`` and say in the CHANGELOG why they changed.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import pytest

from sim import SimConfig, simulate
from sim.kv.events import KVEventLog

FILE = Path(__file__).with_name("digests.json")
RUNS = {
    f"{policy} {reclaimer} block {block_size}": SimConfig(
        trace="gamma:rate=30,cv=2,n=40,prompt=uniform:10:400,output=uniform:1:60",
        policy=policy,
        reclaimer=reclaimer,
        block_size=block_size,
        kv_blocks=1200 // block_size,
        headroom_blocks=max(2, 48 // block_size),
        low_watermark=0.3,
        max_num_batched_tokens=256,
        budget=None if policy == "full" else 0.4,
        step_cost="linear:base_s=0.008,per_token_s=2e-5",
        copy_cost="linear:base_s=1e-5,per_token_s=2e-5",
    )
    for policy, reclaimer, block_size in (
        ("full", "none", 16),
        ("random", "naive", 16),
        ("random", "vtoken", 16),
        ("h2o", "vtoken", 16),
        ("h2o", "vtoken", 8),
        ("h2o", "ideal", 16),
        ("scissorhands", "vtoken", 16),
        ("streaming_llm", "naive", 1),
        ("tova", "vtoken", 16),
        ("snapkv", "vtoken", 16),
        ("r_kv:buffer=16", "vtoken", 16),
        ("keydiff:every=16", "vtoken", 16),
        ("knorm", "vtoken", 16),
        ("expected_attention", "vtoken", 16),
        ("keyformer", "vtoken", 16),
        ("paged_eviction", "naive", 16),
    )
}


def fingerprint(config: SimConfig) -> dict[str, object]:
    """Run it and reduce what happened."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.parquet"
        result = simulate(config, events=events)
        log = KVEventLog.load(events)
    names = ("finished", "preemptions", "tokens_evicted", "tokens_moved", "makespan_s")
    digest = hashlib.sha256(log.records.tobytes()).hexdigest()
    return {"events": len(log), "digest": digest} | {name: result.summary[name] for name in names}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_has_changed(name: str) -> None:
    assert fingerprint(RUNS[name]) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: fingerprint(config) for name, config in RUNS.items()}, indent=1) + "\n")
