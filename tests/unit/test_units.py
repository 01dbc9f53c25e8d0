"""Units: what they are, groups of a hybrid model, what falls out of a window, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_validate.program import Program
from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.events import Kind, KVEventLog
from sim.kv.replay import Replay
from sim.kv.state import H
from sim.kv.tokens import append_tokens, drop_oldest
from sim.kv.units import ONE_UNIT, Units
from sim.serving.bundles import pairs_of
from sim.serving.hardware import get_hardware
from sim.serving.memory import kv_blocks
from sim.serving.models import KVGroup, Model, get_model
from sim.study.config import SimConfig
from sim.study.run import build_engine, simulate
from tests.support.serving import admit, recount

TOY = get_model("toy")
HYBRID = get_model("toy-hybrid")


def hybrid(full: int, windowed: int) -> Model:
    return dataclasses.replace(TOY, layers=full + windowed, window=64, window_layers=windowed)


# -- what they are -----------------------------------------------------------------------------------------------------


def test_units_are_counted_and_weighed():
    assert (ONE_UNIT.count, ONE_UNIT.token_share) == (1, (1, 1))
    assert Units(4, 2).count == 8
    assert Units(4, 2).token_share == (8, 64)
    groups = Units(windows=(64, 64, 0), weights=(3, 2, 3))
    assert groups.count == 3
    assert groups.token_share == (3, 8)
    assert [groups.decides(unit) for unit in range(3)] == [0, 0, 0]
    assert [Units(3).decides(unit) for unit in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "fields", [{"layers": 2, "windows": (4, 0)}, {"layers": 2, "weights": (1,)}, {"layers": 2, "weights": (1, 0)}]
)
def test_units_that_contradict_themselves_are_refused(fields: dict[str, object]):
    with pytest.raises(ValueError, match=r"expected|have to be 1"):
        Units(**fields)  # type: ignore[arg-type]


def test_units_of_a_request_draw_apart_and_groups_together():
    cut, groups = KVCache(100, 4, units=Units(2, 2)), KVCache(100, 4, units=Units(windows=(8, 0, 0)))
    cut_row, group_row = (cache.open(3, key=77, length=10, target=5) for cache in (cut, groups))
    assert len(set(cut.store.s.rows["key"][cut.bundle(cut_row)])) == 4
    assert set(groups.store.s.rows["key"][groups.bundle(group_row)]) == {77}
    assert cut.store.s.rows["ordinal"][cut.bundle(cut_row)].tolist() == [12, 13, 14, 15]


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 50))
def test_pairs_in_a_window_are_those_that_one_counts(before: int, tokens: int, window: int):
    pairs = sum(min(position + 1, window) for position in range(before, before + tokens))
    assert pairs_of(before, tokens, -1, window) == pairs
    assert pairs_of(before, tokens, before + tokens, 0) == sum(range(before + 1, before + tokens + 1))


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "windowed", "expected"),
    [
        (2, 4, [(64, 2), (64, 2), (0, 2)]),
        (12, 12, [(64, 12), (0, 12)]),
        (13, 12, [(64, 12), (0, 13)]),  # one layer of padding rather than groups of 12 and 1
        (10, 52, [(64, 9)] * 4 + [(64, 8)] * 2 + [(0, 10)]),  # Gemma 3 27B
        (20, 10, [(64, 10), (0, 10), (0, 10)]),
        (5, 0, [(0, 5)]),
        (0, 5, [(64, 5)]),
    ],
)
def test_groups_are_those_that_vllm_makes(full: int, windowed: int, expected: list[tuple[int, int]]):
    model = hybrid(full, windowed)
    assert model.kv_groups == tuple(KVGroup(*group) for group in expected)
    assert max(layers for _, layers in expected) <= model.kv_group_layers


@pytest.mark.parametrize(
    ("name", "windows", "layers"),
    [("gpt-oss-20b", (128, 0), 12), ("gemma-3-12b", (1024,) * 5 + (0,), 8), ("mistral-7b-v0.1", (4096,), 32),
     ("llama-3.1-8b", (0,), 32)],
)  # fmt: skip
def test_groups_of_presets(name: str, windows: tuple[int, ...], layers: int):
    model = get_model(name)
    assert tuple(group.window for group in model.kv_groups) == windows
    assert {group.layers for group in model.kv_groups} == {layers}


def test_a_block_of_a_group_takes_the_bytes_of_its_layers_and_their_padding():
    hardware = get_hardware("h100")
    reference = kv_blocks(hybrid(12, 0), hardware, 16, activation_reserve_bytes=0)
    # 10 layers a block where the model has 62: what the weights take differs a little.
    model = hybrid(10, 52)
    room = 0.9 * hardware.memory_bytes - model.weight_bytes
    assert kv_blocks(model, hardware, 16, activation_reserve_bytes=0) == int(
        room // (16 * model.kv_bytes_per_token * 10 // 62)
    )
    assert reference < kv_blocks(hybrid(2, 4), hardware, 16, activation_reserve_bytes=0)


@pytest.mark.parametrize("window", [1, 3, 4, 9])
@pytest.mark.parametrize("size", [1, 4])
def test_what_falls_out_of_a_window_dies_oldest_first(window: int, size: int):
    cache = KVCache(200, size, tracked=False, logging=True, units=Units(windows=(window,)))
    row = admit(cache, 0, 40)
    cache.store.reserve_events(1000)
    computed = 0
    for tokens in (7, 1, 1, 5, 1, 20, 1):
        drop_oldest(cache.store.s, row, computed - window + 1)
        assert cache.store.s.rows[row]["live"] == min(computed, window - 1)
        append_tokens(cache.store.s, row, tokens)
        computed += tokens
        recount(cache)
        log = cache.event_log()
        replay = Replay(size, 200)
        replay.apply([tuple(event)[1:] for event in log.records.tolist()])
        replay.check()
        held = cache.block_table(row)
        assert replay.table(0) == held
        first = max(0, computed - tokens - window + 1)
        assert sorted(replay.requests[0].slots) == list(range(first, computed))
        assert len(held) == -(-computed // size) - first // size
    assert cache.store.s.header[H.EVICTED] == 35 - window + 1
    drop_oldest(cache.store.s, row, 0)
    assert cache.store.s.header[H.EVICTED] == 35 - window + 1


# -- a run -------------------------------------------------------------------------------------------------------------

RUN = SimConfig(
    trace="poisson:rate=30,n=12,prompt=uniform:20:300,output=uniform:5:60",
    model="toy",
    policy="h2o",
    budget=0.4,
    reclaimer="naive",
    kv_blocks=200,
)


def test_rows_of_a_request_are_sequences_of_the_log(tmp_path: Path):
    events = tmp_path / "events.parquet"
    result = simulate(RUN.replace(granularity="per_head"), events=events)
    assert result.summary["tables_per_request"] == 4
    log = KVEventLog.load(events)
    assert log.units == 4
    assert not Replay.of(log).holders
    admitted = log.records["req"][log.records["kind"] == Kind.ADMIT]
    assert sorted(admitted) == list(range(4 * 12))
    log.save(tmp_path / "events.npz")
    assert KVEventLog.load(tmp_path / "events.npz").units == 4
    with pytest.raises(InputError, match="4 block tables a request"):
        Program(log)


def test_the_log_of_a_run_with_one_table_does_not_speak_of_units(tmp_path: Path):
    import pyarrow.parquet as pq

    simulate(RUN, events=tmp_path / "events.parquet")
    assert b"units" not in (pq.read_schema(tmp_path / "events.parquet").metadata or {})
    assert KVEventLog.load(tmp_path / "events.parquet").units == 1


def test_each_table_beyond_the_first_takes_its_time():
    config = RUN.replace(policy="full", reclaimer="none", granularity="per_layer", step_cost="roofline")
    long, longer = (simulate(config.replace(table_us=us)) for us in (0.0, 100.0))
    steps = long.steps
    assert longer.summary["steps"] >= 1
    alone = simulate(config.replace(granularity="shared", table_us=100.0))
    assert alone.summary["makespan_s"] == long.summary["makespan_s"]
    # Two layers: one table more than a request has anyway.
    engine = build_engine(config.replace(table_us=100.0))
    engine.run()
    assert engine._table_ns == 100_000
    assert longer.steps["dt_s"][0] - steps["dt_s"][0] == pytest.approx(100e-6 * steps["sched_reqs"][0])


def test_scoring_costs_what_it_costs_once_over_all_layers():
    """R-KV scores every so many tokens, in a time that goes by the pairs of live keys; each layer its own."""
    step = "roofline:score_request_s=0.001,score_step_s=1e-4"
    config = RUN.replace(policy="r_kv:buffer=16", reclaimer="ideal", step_cost=step, table_us=0.0)
    one, layers = simulate(config), simulate(config.replace(granularity="per_layer"))
    assert one.summary["tokens_evicted"] == layers.summary["tokens_evicted"] > 0
    free = simulate(config.replace(step_cost="roofline"))
    assert one.steps["dt_s"].sum() > free.steps["dt_s"].sum() + 0.005
    assert layers.steps["dt_s"].sum() == pytest.approx(one.steps["dt_s"].sum(), rel=1e-6)


def test_a_hybrid_model_pays_for_what_a_window_sees():
    """One request of 300 tokens, all computed at once, then 40 decoded; two layers of six attend to everything."""
    config = SimConfig(
        trace="poisson:rate=1,n=1,prompt=300,output=41", model="toy-hybrid", policy="full", reclaimer="none",
        kv_blocks=500, step_cost="roofline", table_us=0,
    )  # fmt: skip
    engine = build_engine(config)
    asked: list[tuple[int, int, int, int]] = []
    cost = engine.step_cost

    class Listener:
        name = "listener"

        def step_ns(self, *work: int) -> tuple[int, int]:
            asked.append(work)  # type: ignore[arg-type]
            return cost.step_ns(*work)

    engine.step_cost = Listener()
    engine.run()
    pairs = (300 * 301 // 2) * 2 + (128 * 129 // 2 + 172 * 128) * 4
    assert asked[0] == (300, 1, 300, round(pairs / 6))
    assert asked[1] == (1, 1, round((301 * 2 + 128 * 4) / 6), round((301 * 2 + 128 * 4) / 6))
    assert asked[-1][2] == round((340 * 2 + 128 * 4) / 6)
    # The layers without a window hold ceil(340 / 16) blocks, each group with one at most 9: its tokens, begun anywhere.
    assert engine.cache.store.s.header[H.FREED_BY_DEATH] == 2 * ((340 - 128) // 16)


def test_a_policy_evicts_from_the_layers_without_a_window_only():
    config = SimConfig(
        trace="poisson:rate=1,n=1,prompt=600,output=10", model="toy-hybrid", policy="streaming_llm", budget_tokens=50,
        reclaimer="ideal", kv_blocks=500,
    )  # fmt: skip
    seen: list[list[int]] = []

    class Look:
        def scheduled(self, engine: object) -> None:
            pass

        def applied(self, engine: object, finished: int) -> None:
            cache = engine.cache  # type: ignore[attr-defined]
            if not finished:
                seen.append(cache.store.s.rows["live"][:3].tolist())

    build_engine(config, observer=Look()).run()
    assert seen[0] == [600, 600, 50]  # a window's tokens die when the next step is scheduled
    assert all(live == [128, 128, 50] for live in seen[1:])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"granularity": "per_layer", "prefix_caching": True}, "prefix_caching: requests share blocks of the whole"),
        ({"granularity": "per_layer", "simulated_layers": 3}, "simulated_layers: toy has 2 layers, got 3"),
        ({"granularity": "per_head", "model": "toy-hybrid"}, "granularity per_head: the layers of toy-hybrid"),
        ({"model": "toy-hybrid", "reclaimer": "reuse"}, "reuse writes tokens out of order"),
        ({"model": "toy-hybrid", "reclaimer": "reuse+vtoken"}, r"reuse\+vtoken writes tokens out of order"),
        ({"model": "toy-hybrid", "reclaimer": "vtoken:layout=fill"}, "vtoken: layout fill writes tokens out of order"),
        ({"model": "toy-hybrid", "reclaimer": "stall:layout=scattered"}, "stall: layout scattered writes tokens"),
        ({"model": "toy-hybrid", "prefix_caching": True}, "each of 3 units has block tables of its own"),
    ],
)
def test_what_cannot_be_is_one_clear_line(fields: dict[str, object], message: str):
    with pytest.raises(InputError, match=rf"^[^\n]*{message}[^\n]*$"):
        build_engine(RUN.replace(**fields))


def test_a_model_all_of_whose_layers_have_a_window_evicts_nothing_else():
    model = dataclasses.replace(TOY, window=32, window_layers=2)
    with pytest.raises(InputError, match="every layer has a window"):
        build_engine(RUN, model=model)
    result = simulate(RUN.replace(policy="full", reclaimer="none"), model=model)
    assert result.summary["finished"] == 12
    assert np.max(result.requests["retained_blocks_peak"]) <= 3
