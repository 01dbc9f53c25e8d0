from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sim import SimConfig, simulate
from sim.errors import InputError
from sim.kv.events import EVENT, Kind, KVEventLog
from sim.kv.replay import Replay
from tests.support.serving import engine, trace


@pytest.fixture
def log() -> KVEventLog:
    run = engine(
        trace((0, 200, 30), (0, 100, 40)), policy="random", budget=0.4, reclaimer="vtoken:repack_when=always",
        headroom=5, logging=True,
    )  # fmt: skip
    events = run.run().events
    assert events is not None
    return events


def test_a_log_comes_back_as_it_was(log: KVEventLog, tmp_path: Path):
    log.save(tmp_path / "events.parquet")
    again = KVEventLog.load(tmp_path / "events.parquet")
    assert (again.block_size, again.num_blocks, len(again)) == (16, 1000, len(log))
    assert again.records.dtype == EVENT
    assert (again.records == log.records).all()
    Replay.of(again)


def test_events_are_in_effect_order_and_of_every_kind_that_such_a_run_has(log: KVEventLog):
    assert (np.diff(log.records["time_ns"]) >= 0).all()
    kinds = {Kind(kind) for kind in np.unique(log.records["kind"])}
    assert kinds >= {
        Kind.STEP, Kind.ADMIT, Kind.ALLOC, Kind.APPEND, Kind.EVICT, Kind.FREE, Kind.PLAN, Kind.SOURCE, Kind.RESERVE,
        Kind.COPIED, Kind.MOVE, Kind.COMMIT, Kind.FINISH,
    }  # fmt: skip
    steps = log.records[log.records["kind"] == Kind.STEP]
    assert steps["a"].tolist() == list(range(len(steps)))


def test_without_logging_nothing_is_kept():
    run = engine(trace((0, 200, 30)))
    assert run.run().events is None
    assert len(run.cache.event_log()) == 0
    assert run.cache.event_log().records.dtype == EVENT


def test_another_version_is_refused(log: KVEventLog, tmp_path: Path):
    path = tmp_path / "events.parquet"
    log.save(path)
    table = pq.read_table(path)
    meta = dict(table.schema.metadata) | {b"vtoken.kv_events": b"7"}
    pq.write_table(table.replace_schema_metadata(meta), path)
    with pytest.raises(InputError, match="version 7, expected 3"):
        KVEventLog.load(path)


def test_a_parquet_file_of_something_else_is_refused(tmp_path: Path):
    import pyarrow as pa

    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "other.parquet")
    with pytest.raises(InputError, match="version None, expected 3"):
        KVEventLog.load(tmp_path / "other.parquet")


def test_a_truncated_file_is_refused(log: KVEventLog, tmp_path: Path):
    path = tmp_path / "events.parquet"
    log.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"events\.parquet: not a KV event log"):
        KVEventLog.load(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no such file"):
        KVEventLog.load(tmp_path / "none.parquet")


def test_a_run_says_whose_kv_cache_it_was(tmp_path: Path):
    trace, cost = "poisson:rate=20,n=3,prompt=20,output=4", "linear:base_s=0.01,per_token_s=0"
    config = SimConfig(trace=trace, model="qwen2.5-7b", kv_blocks=40, step_cost=cost)
    simulate(config, events=tmp_path / "events.parquet")
    log = KVEventLog.load(tmp_path / "events.parquet")
    assert (log.model, log.kv_dtype) == ("qwen2.5-7b", "bf16")
    log.save(tmp_path / "events.npz")
    again = KVEventLog.load(tmp_path / "events.npz")
    assert (again.model, again.kv_dtype) == ("qwen2.5-7b", "bf16")
    assert (again.records == log.records).all()


def test_chunks_are_the_records_in_order(log: KVEventLog):
    for events in (1, 100, len(log), 1 << 20):
        parts = list(log.chunks(events))
        assert all(0 < len(part) <= events for part in parts)
        assert (np.concatenate(parts) == log.records).all()
