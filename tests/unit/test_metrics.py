import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.serving.metrics import (
    LIVENESS,
    STEP_COLUMNS,
    LivenessSamples,
    StepLog,
    liveness_classes,
    percentiles,
)
from sim.serving.summary import load_state
from tests.support.serving import engine, trace

LEVELS = STEP_COLUMNS[4:12]
TOTALS = STEP_COLUMNS[14:20]


def filled(rows: np.ndarray, most: int) -> StepLog:
    log = StepLog(most)
    for row in rows:
        log.buffer[log.filled] = row
        log.filled += 1
        if log.filled == len(log.buffer):
            log.flush()
    return log


def made_up(steps: int, seed: int = 0) -> np.ndarray:
    """Rows as the engine writes them: levels, and totals that only grow."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, 50, (steps, len(STEP_COLUMNS))).astype(float)
    rows[:, 0] = np.arange(steps)
    rows[:, 1] = 1
    rows[:, 3] = draw.exponential(0.01, steps) + 1e-4
    rows[:, 2] = np.cumsum(rows[:, 3]) - rows[:, 3]
    rows[:, 14:] = np.cumsum(rows[:, 14:], axis=0)
    return rows


@pytest.mark.parametrize("steps", [1, 100, 2048, 5000, 33_001])
def test_merging_steps_keeps_sums_and_time_weighted_means(steps: int):
    rows = made_up(steps)
    last = rows[-1, 14:20] + 3
    whole, merged = filled(rows, 1 << 20), filled(rows, 4096)
    whole.finish(last)
    merged.finish(last)
    a, b = whole.columns(), merged.columns()
    assert len(a["step"]) == steps
    assert len(b["step"]) <= 4096
    assert b["n_steps"].sum() == steps
    assert b["step"][0] == 0
    assert (np.cumsum(b["n_steps"])[:-1] == b["step"][1:]).all()
    for name in ("dt_s", "sched_tokens", "sched_reqs", *TOTALS):
        assert a[name].sum() == pytest.approx(b[name].sum(), rel=1e-12)
    for name in TOTALS:
        assert b[name].sum() == pytest.approx(last[TOTALS.index(name)])
    for name in LEVELS:
        weighted = (a[name] * a["dt_s"]).sum()
        assert (b[name] * b["dt_s"]).sum() == pytest.approx(weighted, rel=1e-9)
        assert whole.mean(name) == merged.mean(name) == pytest.approx(weighted / a["dt_s"].sum(), rel=1e-9)


def test_fragmentation_is_the_dead_and_the_tail():
    """By hand: 0.5 of the slots dead for 1 s, then a quarter dead and a quarter tail for 3 s, then nothing for 10 s."""
    log = StepLog()
    for k, (dt, live, dead, tail) in enumerate([(1, 8, 8, 0), (3, 8, 4, 4), (10, 0, 0, 0)]):
        row = log.buffer[k]
        row[:] = 0
        row[3], row[9], row[10], row[11] = dt, live, dead, tail
    log.filled = 3
    log.flush()
    assert log.allocated_s == 4
    assert log.weighted_dead / log.allocated_s == pytest.approx((0.5 * 1 + 0.25 * 3) / 4)
    assert log.weighted_tail / log.allocated_s == pytest.approx(0.25 * 3 / 4)
    assert log.weighted_fragmentation == pytest.approx(log.weighted_dead + log.weighted_tail)


@pytest.mark.parametrize("reclaimer", ["naive", "vtoken:repack_when=always", "ideal"])
def test_live_dead_and_tail_are_all_there_is(reclaimer: str):
    source = trace((0, 200, 60), (0, 90, 60), (2_000_000, 130, 30))
    run = engine(source, policy="random", budget=0.5, reclaimer=reclaimer, headroom=20, blocks=100)
    outcome = run.run()
    steps, summary = outcome.steps, outcome.summary
    in_tables = steps["used_blocks"] - steps["reserved_blocks"]
    assert (steps["live_slots"] + steps["dead_slots"] + steps["tail_slots"] == 16 * in_tables).all()
    assert (steps["used_blocks"] + steps["free_blocks"] == 99).all()
    fragmentation = 1 - steps["live_slots"] / (16 * in_tables)
    weights = steps["dt_s"]
    assert summary["fragmentation_mean"] == pytest.approx((fragmentation * weights).sum() / weights.sum())
    assert summary["fragmentation_mean"] == pytest.approx(summary["dead_fraction_mean"] + summary["tail_slack_mean"])
    assert summary["tokens_evicted"] == steps["evicted"].sum() == outcome.requests["tokens_evicted"].sum()
    assert summary["tokens_moved"] == steps["moved"].sum() == outcome.requests["tokens_moved"].sum()
    assert summary["blocks_freed_by_death"] == steps["freed_by_death"].sum()
    assert summary["blocks_freed_by_repack"] == steps["freed_by_repack"].sum()
    assert summary["copy_time_s"] == pytest.approx(steps["copy_s"].sum())
    assert (summary["tokens_moved"] > 0) == reclaimer.startswith("vtoken")


def test_holdings_of_a_request_are_weighted_by_time():
    """Blocks of 4; a prompt of 8 and five outputs, 1 ms + 1 ms a token: 9 ms of prefill, then four steps of 2 ms."""
    outcome = engine(trace((0, 8, 5)), block_size=4, step="linear:base_s=0.001,per_token_s=0.001").run()
    (row,) = [{name: column[0] for name, column in outcome.requests.items()}]
    # Decode writes tokens 9 .. 12 into the third block.
    assert (row["retained_blocks"], row["retained_blocks_peak"], row["retained_blocks_finish"]) == (3, 3, 3)
    assert row["over_retention"] == 1
    outcome = engine(trace((0, 7, 5)), block_size=4, step="linear:base_s=0.001,per_token_s=0.001").run()
    # Tokens 8, 9, 10, 11: two blocks once, three blocks three times.
    assert outcome.requests["retained_blocks"][0] == pytest.approx((2 + 3 + 3 + 3) / 4)


def test_over_retention_is_blocks_over_what_the_living_need():
    """A prompt of 16 in blocks of 4, one sink and a window of one: two blocks for two tokens that need one."""
    outcome = engine(
        trace((0, 16, 3)), policy="streaming_llm:sinks=1", budget_tokens=2, reclaimer="naive", block_size=4
    ).run()  # fmt: skip
    # Step 1 writes token 16 into a third block, beside the sink's and token 15's: 3 blocks for 3 tokens; then token 15
    # dies, and step 2 has the sink's block and the new one: 2 for 3 tokens.
    assert outcome.requests["over_retention"][0] == pytest.approx((3 / 1 + 2 / 1) / 2)
    assert outcome.requests["retained_blocks"][0] == pytest.approx(2.5)
    ideal = engine(
        trace((0, 16, 3)), policy="streaming_llm:sinks=1", budget_tokens=2, reclaimer="ideal", block_size=4
    ).run()  # fmt: skip
    assert ideal.requests["over_retention"][0] == 1


def test_a_request_of_one_token_has_no_gap_between_tokens():
    outcome = engine(trace((0, 10, 1))).run()
    assert np.isnan(outcome.requests["tpot_s"][0])
    assert np.isnan(outcome.requests["retained_blocks"][0])
    assert outcome.summary["tpot_s"] == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))


def test_percentiles_leave_out_what_is_not_a_number():
    values = np.array([np.nan, *range(1, 101)], float)
    got = percentiles(values)
    assert got["mean"] == 50.5
    assert got["p50"] == 50.5
    assert got["p99"] == pytest.approx(99.01)
    assert percentiles(np.array([np.nan]))["mean"] is None


@pytest.mark.parametrize(
    ("size", "classes"),
    [
        (16, [0, *[1] * 4, *[2] * 4, *[3] * 4, *[4] * 3, 5]),
        (4, [0, 1, 2, 3, 5]),
        (1, [0, 5]),
        (2, [0, 2, 5]),
        (3, [0, 2, 3, 5]),
    ],
)
def test_blocks_are_classed_by_their_share_of_live_slots(size: int, classes: list[int]):
    assert liveness_classes(size).tolist() == classes


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=400))
def test_samples_stay_few_and_in_order(gaps: list[int]):
    samples = LivenessSamples(most=16, every_ns=1000)
    now = 0
    taken = 0
    for gap in gaps:
        if now >= samples.next_ns:
            samples.add(now, np.arange(6))
            taken += 1
        now += gap
    columns = samples.columns()
    assert list(columns) == list(LIVENESS)
    assert min(taken, 8) <= len(columns["clock_s"]) < 16 or taken == len(columns["clock_s"])
    assert (np.diff(columns["clock_s"]) > 0).all()


def test_samples_count_every_block_of_a_table():
    run = engine(trace((0, 200, 60)), policy="random", budget=0.3, reclaimer="naive", blocks=100)
    outcome = run.run()
    counts = np.array([outcome.liveness[name] for name in LIVENESS[1:]]).sum(axis=0)
    assert counts[0] == 13


def queues(first: float, second: float, n: int = 100, arrivals: str = "spread") -> dict[str, np.ndarray]:
    queue = np.concatenate([np.full(n // 2, first), np.full(n - n // 2, second)])
    arrival = np.arange(n, dtype=float) if arrivals == "spread" else np.zeros(n)
    return {"queue_s": queue, "arrival_s": arrival}


def waiting(mean: float) -> StepLog:
    log = StepLog()
    log.buffer[0, 3], log.buffer[0, 5] = 1.0, mean
    log.filled = 1
    log.flush()
    return log


@pytest.mark.parametrize(
    ("columns", "mean", "at_end", "state"),
    [
        (queues(0.0, 0.1), 0.5, 0, "stable"),
        (queues(1.0, 9.0), 5.0, 50, "overloaded"),
        (queues(1.0, 9.0), 5.0, 5, "backlogged"),
        (queues(5.0, 6.0), 5.0, 50, "backlogged"),
        (queues(1.0, 9.0, arrivals="at once"), 50.0, 99, "backlogged"),
    ],
)
def test_the_load_is_named(columns: dict[str, np.ndarray], mean: float, at_end: int, state: str):
    assert load_state(columns, at_end, waiting(mean)) == state
