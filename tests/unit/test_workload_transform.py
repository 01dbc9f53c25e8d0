"""Changes to traces, and the figures that describe them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import InputError
from sim.workload import Trace, limit, open_source, transform


def made(arrival_s: list[float], prompt: int = 100, output: int = 10, **more: object) -> Trace:
    n = len(arrival_s)
    times = np.rint(np.array(arrival_s) * 1e9).astype(np.int64)
    return Trace(times, np.full(n, prompt), np.full(n, output), **more)  # type: ignore[arg-type]


def test_head_and_limit_agree() -> None:
    trace = made([0, 1, 2, 3])
    assert transform.head(trace, 2).same_requests(trace[:2])
    assert Trace.concat(limit(trace, 2).chunks()).same_requests(trace[:2])
    assert len(transform.head(trace, 9)) == 4
    assert limit(trace, 3).total == 3
    with pytest.raises(InputError):
        transform.head(trace, 0)


def test_limit_reads_no_further_than_it_must() -> None:
    source = limit(open_source("poisson:rate=16,n=100000000"), 10)
    assert sum(len(chunk) for chunk in source.chunks()) == 10


def test_window_is_half_open_and_keeps_times_and_labels() -> None:
    trace = transform.window(made([0, 1, 2, 3]), 1, 3)
    assert trace.arrival_s.tolist() == [1, 2]
    assert trace.ids == ["1", "2"]
    for bad in ((3, 1), (-1, 2), (10, 11)):
        with pytest.raises(InputError, match="window"):
            transform.window(made([0, 1]), *bad)


def test_rate_scale_divides_times() -> None:
    trace = made([0, 1, 3])
    assert transform.rate_scale(trace, 2).arrival_s.tolist() == [0, 0.5, 1.5]
    assert transform.rate_scale(trace, 1) is trace
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="rate scale"):
            transform.rate_scale(trace, bad)
    with pytest.raises(InputError, match="146 years"):
        transform.rate_scale(trace, 1e-12)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=8),
    prompt=st.none() | st.integers(1, 4000),
    output=st.none() | st.integers(1, 4000),
    total=st.none() | st.integers(2, 4000),
)
def test_caps_hold_and_never_lengthen(
    lengths: list[tuple[int, int]], prompt: int | None, output: int | None, total: int | None
) -> None:
    p, o = np.array(lengths).T
    hashes = [np.arange(-(-int(n) // 64)) for n in p]
    before = Trace(np.zeros(len(p), np.int64), p, o, prefix_hashes=hashes, hash_tokens=64)
    after = transform.cap_lengths(before, prompt=prompt, output=output, total=total)
    assert (after.prompt_tokens <= p).all()
    assert (after.output_tokens <= o).all()
    assert prompt is None or after.prompt_tokens.max() <= prompt
    assert output is None or after.output_tokens.max() <= output
    assert total is None or (after.prompt_tokens + after.output_tokens).max() <= total
    untouched = after.prompt_tokens == p
    for i, ids in enumerate(after.prefix_hashes or []):
        assert len(ids) == (len(hashes[i]) if untouched[i] else after.prompt_tokens[i] // 64)


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    tick_s=st.none() | st.floats(0.01, 5),
    seed=st.integers(0, 9),
)
def test_spread_keeps_order_and_stays_inside_the_tick(counts: list[int], tick_s: float | None, seed: int) -> None:
    stamps = [3.0 * i for i, count in enumerate(counts) for _ in range(count)]
    before = made(stamps)
    after = transform.spread_ties(before, tick_s, seed)
    moved = after.arrival_ns - before.arrival_ns
    assert (np.diff(after.arrival_ns) >= 0).all()
    assert (moved >= 0).all()
    last = before.arrival_ns == before.arrival_ns[-1]  # no later time stamp bounds the last tick
    only = 1.0 if len(counts) == 1 else 3.0  # nothing tells the tick of a single time stamp: one second
    assert (moved[~last] < min(3.0, tick_s or 3.0) * 1e9 + 1).all()
    assert (moved[last] < (tick_s or only) * 1e9 + 1).all()
    alone = np.repeat(np.array(counts) == 1, counts)
    assert (moved[alone] == 0).all()
    assert after.same_requests(transform.spread_ties(before, tick_s, seed))


def test_spread_makes_a_quantised_poisson_process_poisson_again() -> None:
    trace = open_source("poisson:rate=10,n=20000", seed=1)
    whole = Trace.concat(trace.chunks())
    quantised = Trace(whole.arrival_ns // 3_000_000_000 * 3_000_000_000, whole.prompt_tokens, whole.output_tokens)
    assert quantised.describe().equal_times > 0.9
    spread = transform.spread_ties(quantised).describe()
    assert spread.equal_times == 0
    assert spread.gap_cv == pytest.approx(1, abs=0.05)


def test_shift_to_zero() -> None:
    assert transform.shift_to_zero(made([5, 7])).arrival_s.tolist() == [0, 2]


def test_transformations_leave_their_argument_alone() -> None:
    trace = made([0, 0, 4])
    for change in (
        lambda t: transform.rate_scale(t, 3),
        lambda t: transform.cap_lengths(t, prompt=3),
        transform.spread_ties,
        transform.shift_to_zero,
    ):
        change(trace)
    assert trace.same_requests(made([0, 0, 4]))


def test_description_of_a_trace_worked_out_by_hand() -> None:
    trace = Trace(
        np.array([0, 0, 1, 4]) * 10**9,
        np.array([100, 200, 300, 400]),
        np.array([1, 1, 1, 5]),
        prefix_hashes=[np.array(h, np.int64) for h in ([1, 2], [1, 3], [], [1, 3, 2])],
        hash_tokens=64,
        session=["a", None, "a", "b"],
    )
    d = trace.describe()
    assert (d.requests, d.duration_s, d.sessions) == (4, 4.0, 2)
    assert d.rate_per_s == pytest.approx(3 / 4)
    assert d.peak_rate_per_s == 2
    assert d.equal_times == pytest.approx(1 / 3)
    gaps = np.array([0, 1, 3])
    assert d.gap_cv == pytest.approx(gaps.std() / gaps.mean())
    assert d.prompt_tokens.mean == 250
    assert d.total_tokens.max == 405
    # request 1 has block 1 already; request 3 has 1, 3 and 2, which were all seen before it
    assert d.prefix_reuse == pytest.approx((64 + 3 * 64) / 1000)
    assert "prefix reuse" in d.text()
    assert d.to_dict()["output_tokens"]["max"] == 5.0


def test_description_of_one_request_has_no_rate() -> None:
    d = made([5]).describe()
    assert d.rate_per_s is None
    assert d.gap_cv is None
    assert d.dispersion == {}
    assert "rate         - /s" in d.text()


def test_dispersion_counts_empty_windows() -> None:
    # eleven windows of 1 s; ten arrivals in the first and one at the very end, which closes no window
    trace = made([0.0] * 10 + [11.0])
    counts = np.array([10] + [0] * 10)
    assert trace.describe().dispersion["1 s"] == pytest.approx(counts.var() / counts.mean())
