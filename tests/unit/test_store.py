"""The results store: round trips, one table for pandas, and nothing trusted that is not a complete file of ours."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.errors import InputError
from sim.study import store as store_module
from sim.study.config import SimConfig
from sim.study.result import RunResult
from sim.study.run import simulate
from sim.study.run_file import STEP_ROWS, examine, flat_summary
from sim.study.store import Store
from tests.support import made_up


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "sweep")
    store.create()
    return store


def put(store: Store, **fields: object) -> RunResult:
    config = SimConfig(**fields)
    result = made_up.result(config, requests=20, steps=30)
    store.put(config.hash(), result)
    return result


def test_a_run_comes_back_as_it_was(store: Store) -> None:
    for fields in ({"reclaimer": "vtoken"}, {"reclaimer": "naive"}):
        result = put(store, **fields)
        back = store.load(result.config_hash)
        assert back.config == result.config
        assert back.versions == result.versions
        assert back.summary == {key: value for key, value in result.summary.items() if key != "wall_s"}
        for name in ("requests", "liveness", "steps"):
            for column, values in getattr(result, name).items():
                np.testing.assert_array_equal(getattr(back, name)[column], values)
        assert (back.pool_snapshot is None) == (result.pool_snapshot is None)
        for column, values in (result.pool_snapshot or {}).items():
            np.testing.assert_array_equal((back.pool_snapshot or {})[column], values)


def test_long_runs_keep_a_bounded_number_of_steps(store: Store) -> None:
    result = made_up.result(SimConfig(), requests=5, steps=3 * STEP_ROWS + 1)
    store.put(result.config_hash, result)
    steps = store.load(result.config_hash).steps
    assert len(steps["step"]) <= STEP_ROWS
    assert steps["dt_s"].sum() == pytest.approx(result.steps["dt_s"].sum())
    assert steps["n_steps"].sum() == 3 * STEP_ROWS + 1


def test_pandas_reads_the_folder_as_one_table(store: Store) -> None:
    # Fields that are set in one run and not in another must not end up with two types.
    put(store, kv_blocks=100)
    put(store, policy="full", headroom_blocks=3)
    put(store, budget_tokens=64, format="azure")
    put(store, budget_memory="1GiB")
    table = pd.read_parquet(store.runs)
    assert len(table) == 4
    assert set(table["policy"]) == {"full", "h2o"}
    assert len(table["per_request"].iloc[0]["ttft_s"]) == 20
    few = pd.read_parquet(store.runs, columns=["policy", "ttft_s_p95"])
    assert few.shape == (4, 2)


REAL = (
    {"policy": "full", "reclaimer": "none"},
    {"budget_tokens": 32, "headroom_blocks": 3},
    {"budget_memory": "64MiB", "prefix_caching": True},
    # One output token: no time per output token. Long prompts: some are refused.
    {"trace": "poisson:rate=20,n=12,prompt=uniform:low=10:high=90,output=1", "max_model_len": 70},
)


def test_pandas_and_duckdb_read_real_runs_of_all_kinds_alike(store: Store) -> None:
    duckdb = pytest.importorskip("duckdb", reason="needs DuckDB: pip install -e '.[test]'")
    for fields in REAL:
        config = SimConfig(**{"trace": "poisson:rate=20,n=12,prompt=64,output=20", "kv_blocks": 60} | fields)
        store.put(config.hash(), simulate(config))
    schemas = [pq.read_schema(path) for path in store.runs.iterdir()]
    assert all(schema.equals(schemas[0]) for schema in schemas)

    columns = ["config_hash", "policy", "budget", "budget_memory", "ttft_s_p95", "tpot_s_p95", "first_refusal"]
    table = pd.read_parquet(store.runs, columns=columns).sort_values("config_hash")
    rows = duckdb.sql(f"SELECT {', '.join(columns)} FROM read_parquet('{store.runs}/*.parquet') ORDER BY 1").fetchall()
    assert rows == [tuple(None if pd.isna(value) else value for value in row) for row in table.to_numpy().tolist()]
    assert any(row[-1] is not None for row in rows)

    nested = "SELECT config_hash, avg(t) FROM (SELECT config_hash, unnest(per_request.e2e_s) AS t FROM read_parquet(?))"
    means = dict(duckdb.execute(f"{nested} WHERE NOT isnan(t) GROUP BY 1", [f"{store.runs}/*.parquet"]).fetchall())
    assert means.keys() == set(table["config_hash"])
    for key, mean in means.items():
        assert mean == pytest.approx(store.load(key).summary["e2e_s"]["mean"])


def test_runs_from_before_a_field_have_its_default(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store)
    put(store, budget_tokens=64)
    store.index.path.unlink()

    def examine_old(path: Path) -> object:
        row = examine(path)
        assert not isinstance(row, str)
        young = ("budget_memory", "shared_blocks")
        return row | {"config": {key: value for key, value in row["config"].items() if key not in young}}

    monkeypatch.setattr(store_module, "examine", examine_old)
    table, _ = store.frame()
    assert table["budget_memory"].isna().all()
    assert set(table["shared_blocks"]) == {"skip"}


def test_table_is_ordered_by_configuration_not_by_file(store: Store) -> None:
    for seed in (1, 0):
        for policy in ("random", "h2o"):
            put(store, policy=policy, seed=seed)
    table, aside = store.frame()
    assert not aside
    assert list(zip(table["policy"], table["seed"], strict=True)) == [
        ("h2o", 0),
        ("h2o", 1),
        ("random", 0),
        ("random", 1),
    ]


def test_equal_runs_give_equal_bytes_whatever_they_took(store: Store) -> None:
    first = put(store)
    data = store.path(first.config_hash).read_bytes()
    second = put(store)
    assert first.summary["wall_s"] != second.summary["wall_s"]
    assert store.path(first.config_hash).read_bytes() == data


def test_what_is_not_a_complete_run_is_set_aside_with_the_reason(store: Store) -> None:
    good, cut, flipped, renamed = (put(store, seed=seed).config_hash for seed in range(4))
    path = store.path(cut)
    path.write_bytes(path.read_bytes()[:-100])
    data = bytearray(store.path(flipped).read_bytes())
    data[data.index(b"llama-3.1-8b")] ^= 0x01
    store.path(flipped).write_bytes(data)
    store.path(renamed).rename(store.path("0" * 16))
    pq.write_table(pa.table({"a": [1]}), store.runs / "foreign.parquet")
    (store.runs / "notes.txt").write_text("mine")
    (store.runs / "empty.parquet").touch()

    table, unused = store.frame()
    assert list(table["config_hash"]) == [good]
    assert len(unused) == 6

    finished, aside = store.scan()
    assert finished == {good}
    reasons = {each.path.name: each.reason for each in aside}
    assert "truncated or damaged" in reasons[f"{cut}.parquet"]
    assert "truncated or damaged" in reasons[f"{flipped}.parquet"]
    assert "truncated or damaged" in reasons["empty.parquet"]
    assert "not the hash" in reasons["0" * 16 + ".parquet"]
    assert "not a run of this store" in reasons["foreign.parquet"]
    assert "not a run of this store" in reasons["notes.txt"]
    assert (store.root / "set_aside" / "notes.txt").read_text() == "mine"
    assert store.scan() == ({good}, [])


def test_a_file_that_the_index_knows_is_not_opened_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {put(store, seed=seed).config_hash for seed in range(4)}
    whole, _ = store.frame()
    store.index.path.unlink()
    assert store.scan() == (keys, [])  # and writes what it learnt
    assert len(list(store.index)) == 4
    changed = store.path(min(keys))
    changed.write_bytes(changed.read_bytes())  # the same content, but who knows
    os.utime(changed, ns=(1, 1))
    opened = []
    monkeypatch.setattr(store_module, "examine", lambda path: opened.append(path) or examine(path))
    pd.testing.assert_frame_equal(store.frame()[0], whole)
    assert store.scan() == (keys, [])
    assert store.scan() == (keys, [])
    assert opened == [changed, changed]


def test_a_half_written_index_costs_nothing_but_time(store: Store) -> None:
    keys = {put(store, seed=seed).config_hash for seed in range(3)}
    whole, _ = store.frame()
    text = store.index.path.read_text()
    for damaged in (text[:-200], "", "[]\n{}\n5\nx\n" + text[: len(text) // 2], "\x00" * 50):
        store.index.path.write_text(damaged)
        pd.testing.assert_frame_equal(store.frame()[0], whole)
        assert store.scan() == (keys, [])
        assert {entry.config_hash for entry in store.index} == keys


def test_the_index_does_not_vouch_for_a_damaged_file(store: Store) -> None:
    path = store.path(put(store).config_hash)
    path.write_bytes(path.read_bytes()[:-10])
    assert store.frame()[0].empty
    assert "truncated" in store.scan()[1][0].reason


def test_nothing_set_aside_is_overwritten(store: Store) -> None:
    for text in ("one", "two"):
        (store.runs / "notes.txt").write_text(text)
        store.scan()
    texts = sorted(path.read_text() for path in (store.root / "set_aside").iterdir())
    assert texts == ["one", "two"]


def test_runs_of_another_version_are_not_mixed_in(store: Store) -> None:
    config_hash = put(store).config_hash
    assert store.scan()[0] == {config_hash}
    finished, aside = store.scan(version="99.0")
    assert not finished
    assert "made by version" in aside[0].reason


def test_leftovers_of_killed_processes_are_cleaned_and_never_read(store: Store) -> None:
    config_hash = put(store).config_hash
    leftover = store.runs / f".{config_hash}.123.tmp"
    leftover.write_text("half")
    assert store.scan() == ({config_hash}, [])
    assert len(pd.read_parquet(store.runs)) == 1
    assert store.clean() == 1
    assert not leftover.exists()


def test_failures_are_kept_until_the_run_succeeds(store: Store) -> None:
    config = SimConfig()
    store.put_failure(config.hash(), config, "no luck")
    assert store.failures() == {config.hash(): "no luck"}
    put(store)
    assert store.failures() == {}


def test_one_sweep_at_a_time(store: Store) -> None:
    with store.lock(), pytest.raises(InputError, match="another sweep is writing there"), Store(store.root).lock():
        pass
    with store.lock():
        pass


def test_a_directory_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty, and not a sweep's directory"):
        Store(tmp_path).create()
    with pytest.raises(InputError, match="cannot write there"):
        Store(tmp_path / "notes.txt").create()


def test_loading_what_is_not_there_is_one_clear_line(store: Store) -> None:
    with pytest.raises(InputError, match="no such run"):
        store.load("0" * 16)
    path = store.path(put(store).config_hash)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="damaged"):
        store.load(path.stem)


def test_flat_summary_has_no_timing_of_the_simulation_itself() -> None:
    assert flat_summary({"ttft_s": {"p95": 1.0}, "steps": 3, "wall_s": 2.0}) == {"ttft_s_p95": 1.0, "steps": 3}
