"""The pool at chosen moments of a log: as the interpreter of the events has it, and as the engine counted it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import InputError
from sim.kv.block_states import Role, frames
from sim.kv.events import EVENT, Kind, KVEventLog
from sim.study.config import SimConfig
from sim.study.report.block_map import block_map, chosen_moments, varints
from sim.study.run import simulate
from tests.support.replay import Driver, logged
from tests.support.report import decoded, judged, same

RUNS: dict[str, dict[str, Any]] = {
    "vtoken": {},
    "naive": {"reclaimer": "naive"},
    "sync": {"reclaimer": "sync"},
    "ideal": {"reclaimer": "ideal"},
    "reuse": {"reclaimer": "reuse+vtoken:when=always"},
    "block of one": {"block_size": 1, "blocks": 200, "reclaimer": "token", "headroom": 16},
    "block of nine": {"block_size": 9, "blocks": 30},
    "async": {"async_scheduling": True},
    "shared": {"prefix_caching": True},
    "slow copies": {"copy": "linear:per_token_s=5e-3"},
}


def compare(log: KVEventLog, data: dict[str, Any], moments: list[int]) -> set[int]:
    """Compare every block of every frame; return the roles that occurred."""
    roles = set()
    for moment, states in zip(moments, decoded(data), strict=True):
        known = judged(log, moment)
        wrong = [(block, *pair) for block, pair in enumerate(zip(states, known, strict=True)) if not same(*pair)]
        assert not wrong, (moment, wrong[:3])
        roles |= {state.role for state in states}
    return roles


@pytest.mark.parametrize("name", RUNS)
def test_every_frame_is_what_the_events_say(name: str) -> None:
    log = logged(**RUNS[name])
    moments = chosen_moments(log, 10_000)
    roles = compare(log, block_map(log, limit_bytes=1 << 20, most_frames=10_000), moments)
    assert roles >= {Role.FREE, Role.HELD}
    if name == "slow copies":
        assert roles >= {Role.SOURCE, Role.DESTINATION}
    if name == "shared":
        assert Role.SHARED in roles


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20), size=st.sampled_from([1, 4, 9]), most=st.sampled_from([7, 1000]))
def test_copies_that_end_in_any_order(seed: int, size: int, most: int) -> None:
    log = Driver(seed, size=size, blocks=40, steps=20).log
    compare(log, block_map(log, limit_bytes=1 << 20, most_frames=most), chosen_moments(log, most))


def test_frames_that_are_merged_lose_nothing_but_moments() -> None:
    log = logged()
    moments = chosen_moments(log, 10_000)
    whole = block_map(log, limit_bytes=1 << 20)
    part = block_map(log, limit_bytes=sum(len(text) for text in whole["states"].values()) // 3)
    events = {time: event for time, event in zip(whole["frames"]["time_s"], moments, strict=True)}
    kept = [events[time] for time in part["frames"]["time_s"]]
    assert 2 <= len(kept) < len(moments)
    assert kept[-1] == moments[-1]
    compare(log, part, kept)
    for name in ("died", "moved", "committed", "admitted", "finished"):
        assert sum(part["frames"][name]) == sum(whole["frames"][name]) > 0
    assert set(np.concatenate(part["frames"]["from"])) == set(np.concatenate(whole["frames"]["from"]))


def test_figures_are_those_that_the_engine_counted(tmp_path: Path) -> None:
    config = SimConfig(trace="poisson:rate=50,n=20,prompt=64,output=40", kv_blocks=90, repack_when="always")
    result = simulate(config, events=tmp_path / "events.parquet")
    log = KVEventLog.load(tmp_path / "events.parquet")
    columns = block_map(log, limit_bytes=1 << 20, most_frames=10_000)["frames"]
    begun = [place for place, dead in enumerate(columns["step"]) if dead not in columns["step"][:place]]
    assert len(begun) == result.summary["steps"] > 40
    for shown, counted in (
        ("used", "used_blocks"),
        ("free", "free_blocks"),
        ("reserved", "reserved_blocks"),
        ("live", "live_slots"),
        ("dead", "dead_slots"),
        ("tail", "tail_slots"),
    ):
        assert [columns[shown][place] for place in begun] == result.steps[counted].tolist(), shown
    assert max(columns["dead"]) > 0
    assert sum(columns["moved"]) == result.summary["tokens_moved"] > 0
    assert sum(columns["died"]) == result.summary["tokens_evicted"]
    over = np.array(columns["table_blocks"]) - np.array(columns["ideal_blocks"])
    assert (over >= 0).all()
    assert over.max() > 0


def test_a_repack_has_a_moment_before_its_blocks_are_handed_out() -> None:
    log = logged()
    for frame in frames(log, chosen_moments(log, 10_000)):
        if not len(frame.moved_from) or log.records["kind"][frame.event - 1] == Kind.STEP:
            continue
        role = dict(zip(frame.blocks.tolist(), frame.role.tolist(), strict=True))
        assert Role.FREE in {role[block] for block in frame.moved_from.tolist()}
        assert all(role[block] != Role.FREE for block in frame.moved_to.tolist())
        return
    pytest.fail("no repack had a moment of its own")


def test_of_many_steps_those_around_repacks_are_among_the_chosen() -> None:
    log = logged()
    kinds = log.records["kind"]
    moments = chosen_moments(log, 24)
    assert len(moments) <= 25
    assert moments == sorted(set(moments))
    assert moments[-1] == len(log)
    ends = [moment for moment in moments[:-1] if kinds[moment - 1] != Kind.STEP]
    assert len(ends) == 6
    steps = (np.flatnonzero(kinds == Kind.STEP) + 1).tolist()
    for end in ends:
        assert max(step for step in steps if step <= end) in moments


def test_times_rise() -> None:
    times = block_map(logged(), limit_bytes=1 << 20)["frames"]["time_s"]
    assert all(later > earlier for earlier, later in itertools.pairwise(times))


def test_a_log_without_a_step_is_refused() -> None:
    log = logged()
    records = log.records[log.records["kind"] != Kind.STEP]
    with pytest.raises(InputError, match="no step among the KV events"):
        block_map(KVEventLog(records, 4, 50), limit_bytes=1000)


def test_events_that_cannot_have_happened_are_refused() -> None:
    log = logged()
    records = log.records.copy()
    records["b"][np.flatnonzero(records["kind"] == Kind.EVICT)[3]] += 1
    with pytest.raises(InputError, match=r"cannot have happened: event \d+ \(EVICT"):
        block_map(KVEventLog(records, log.block_size, log.num_blocks), limit_bytes=1000)


@given(st.lists(st.integers(0, 1 << 40)))
def test_varints(values: list[int]) -> None:
    read, value, shift = [], 0, 0
    for byte in varints(np.array(values, np.int64)):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            read.append(value)
            value = shift = 0
    assert read == values


def log_of_a_full_pool(requests: int) -> KVEventLog:
    """Return a log of requests of 100 blocks that fill the pool, and lose tokens in a random order."""
    size, blocks = 16, 100 * requests + 1
    rows: list[tuple[int, int, int, int, int]] = []
    for req in range(requests):
        first = 1 + 100 * req
        rows += [(0, Kind.ADMIT, req, 0, 1590), *((0, Kind.ALLOC, req, first + i, 0) for i in range(100))]
        rows.append((0, Kind.APPEND, req, 0, 1590))
    rows.append((0, Kind.STEP, -1, 0, 1590 * requests))
    draw = np.random.default_rng(0)
    victims = [draw.permutation(1590) for _ in range(requests)]
    for step in range(1, 11):
        for req in range(requests):
            slots = (1 + 100 * req) * size
            dead = victims[req][(step - 1) * 90 : step * 90]
            rows += [(step, Kind.EVICT, req, int(token), slots + int(token)) for token in dead]
            rows.append((step, Kind.APPEND, req, 1589 + step, 1))
        rows.append((step, Kind.STEP, -1, step, requests))
    return KVEventLog(np.array(rows, EVENT), size, blocks)


@pytest.mark.slow
def test_a_hundred_thousand_blocks_and_a_million_events_fit_a_page() -> None:
    log = log_of_a_full_pool(1000)
    assert log.num_blocks > 100_000
    assert len(log) > 1_000_000
    data = block_map(log, limit_bytes=3_000_000)
    assert sum(len(text) for text in data["states"].values()) < 4_100_000


def test_the_last_frame_of_many_blocks_is_what_the_events_say() -> None:
    """More than 2**14 blocks, whose numbers take three bytes."""
    log = log_of_a_full_pool(170)
    states = list(decoded(block_map(log, limit_bytes=3_000_000 * 17 // 100)))[-1]
    known = judged(log, len(log))
    assert sum(state.role != Role.FREE for state in states) == log.num_blocks - 1 > 1 << 14
    assert all(map(same, states, known))


def test_units_of_a_request_count_as_one_request(tmp_path: Path) -> None:
    config = SimConfig(
        trace="poisson:rate=50,n=9,prompt=64,output=20", kv_blocks=400, granularity="per_layer", simulated_layers=2
    )
    result = simulate(config, events=tmp_path / "events.parquet")
    log = KVEventLog.load(tmp_path / "events.parquet")
    data = block_map(log, limit_bytes=1 << 20)
    assert data["units"] == log.units == 2
    assert sum(data["frames"]["admitted"]) == sum(data["frames"]["finished"]) == result.summary["finished"] == 9
    owners = {owner for states in decoded(data) for state in states for owner in state.owners}
    assert owners == {-1, *range(18)}
