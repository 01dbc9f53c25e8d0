"""Fits: data made by a law give the law back, intervals cover it, and errors are of what the fit did not see."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.errors import InputError
from sim.serving.fit import (
    Fitted,
    attention_ns,
    errors,
    fit_attention,
    fit_copy,
    fit_curve,
    fit_linear,
    fit_prefill,
    fit_ratio,
)

LAUNCH, BYTE, SEQUENCE, FREE = 19_000.0, 3.2e-4, 220.0, 16.5
CACHED_LAUNCH, CACHED_BYTE, CACHE = 12_000.0, 2.0e-4, 50e6
N = 160

Floats = NDArray[np.float64]


@pytest.fixture
def work() -> tuple[Floats, Floats]:
    """Bytes of KV and sequences of made-up decode steps: 1 KB to 1 GB, 1 to 512."""
    draw = np.random.default_rng(5)
    return 2.0 ** draw.uniform(10, 30, N), 2.0 ** draw.integers(0, 10, N)


def decode(work: tuple[Floats, Floats]) -> Floats:
    return attention_ns(work[0] * BYTE, work[1], LAUNCH, SEQUENCE, FREE)


def test_attention_by_hand() -> None:
    assert attention_ns(100, 3, 7, 50, 4) == pytest.approx(107), "three run beside each other"
    assert attention_ns(0, 6, 7, 50, 4) == pytest.approx(107)
    assert attention_ns(100, 6, 7, 50, 4) == pytest.approx(7 + 2000 ** (2 / 3))


def test_attention_gives_the_law_back(work: tuple[Floats, Floats]) -> None:
    fitted = fit_attention(*work, decode(work), free_sequences=FREE)
    assert fitted.values == pytest.approx({"launch_ns": LAUNCH, "ns_per_byte": BYTE, "sequence_ns": SEQUENCE})
    assert fitted.n == N
    assert fitted.error is not None
    assert fitted.error.max == 0
    assert fitted.held_out == pytest.approx(decode(work))


def test_what_came_from_the_cache_gets_figures_of_its_own(work: tuple[Floats, Floats]) -> None:
    kv, sequences = work
    warm = attention_ns(kv * CACHED_BYTE, sequences, CACHED_LAUNCH, SEQUENCE, FREE)
    time = np.where(kv < CACHE, warm, decode(work))
    fitted = fit_attention(kv, sequences, time, free_sequences=FREE, cache_bytes=CACHE)
    assert fitted.values == pytest.approx(
        {
            "launch_ns": LAUNCH,
            "ns_per_byte": BYTE,
            "sequence_ns": SEQUENCE,
            "cached_launch_ns": CACHED_LAUNCH,
            "cached_ns_per_byte": CACHED_BYTE,
        }
    )
    blind = fit_attention(kv, sequences, time, free_sequences=FREE)
    assert blind.error is not None
    assert blind.error.mean > 0.02
    assert blind.values["launch_ns"] < 0.8 * LAUNCH


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_intervals_cover_the_law(work: tuple[Floats, Floats], noise: float) -> None:
    """95 % intervals of 60 fits: each figure is inside at least 51 times (below that with a chance of 0.2 %)."""
    law = {"launch_ns": LAUNCH, "ns_per_byte": BYTE, "sequence_ns": SEQUENCE}
    inside = dict.fromkeys(law, 0)
    for seed in range(60):
        time = decode(work) * np.exp(np.random.default_rng(seed).normal(0, noise, N))
        fitted = fit_attention(*work, time, free_sequences=FREE)
        for name, value in law.items():
            low, high = fitted.intervals[name]
            inside[name] += low <= value <= high
            assert 0 < high - low < 10 * noise * value
    assert all(51 <= count <= 60 for count in inside.values()), inside


def test_errors_are_of_what_the_fit_did_not_see(work: tuple[Floats, Floats]) -> None:
    """A figure that one measurement alone decides fits it, and says nothing of it."""
    alone = (np.arange(20) == 7).astype(float)
    fitted = fit_linear({"base": np.ones(20), "alone": alone}, 100 + 100 * alone)
    assert fitted.values == pytest.approx({"base": 100, "alone": 100})
    assert fitted.error is not None
    assert fitted.error.median == 0
    assert fitted.error.max > 0.3
    assert np.abs(fitted.held_out - 100)[alone == 0] == pytest.approx(0, abs=1e-3)

    time = decode(work)
    time[7] *= 2  # and one that is doubled cannot pull its own prediction up
    doubled = fit_attention(*work, time, free_sequences=FREE).error
    assert doubled is not None
    assert doubled.max == pytest.approx(0.5, abs=1e-3)
    assert doubled.median < 1e-3


def test_wild_measurements_do_not_matter(work: tuple[Floats, Floats]) -> None:
    time = decode(work)
    time[::20] *= 10
    fitted = fit_attention(*work, time, free_sequences=FREE)
    assert fitted.values["ns_per_byte"] == pytest.approx(BYTE, rel=0.01)
    assert fitted.values["launch_ns"] == pytest.approx(LAUNCH, rel=0.01)


def test_prefill_copy_ratio_and_sums() -> None:
    draw = np.random.default_rng(1)
    tokens, pairs = 2.0 ** draw.uniform(4, 13, 40), 2.0 ** draw.uniform(8, 26, 40)
    known = draw.uniform(0, 1e5, 40)
    prefill = fit_prefill(tokens, pairs, 12_000 + 13 * tokens + 0.024 * pairs + known, known_ns=known)
    assert prefill.values == pytest.approx({"launch_ns": 12_000, "ns_per_token": 13, "ns_per_pair": 0.024})

    moved, apart = 2.0 ** draw.uniform(16, 30, 40), draw.integers(0, 2, 40)
    copied = fit_copy(moved, apart, 9000 + moved * np.where(apart, 3e-4, 2.3e-4))
    expected = {"launch_ns": 9000, "contiguous_ns_per_byte": 2.3e-4, "scattered_ns_per_byte": 3e-4}
    assert copied.values == pytest.approx(expected)

    assert fit_ratio(tokens, 1.07 * tokens).values == pytest.approx({"ratio": 1.07})

    table = fit_linear({"step_ns": np.ones(40), "entry_ns": tokens}, 700 + 3.5 * tokens)
    assert table.values == pytest.approx({"step_ns": 700, "entry_ns": 3.5})


def test_no_figure_is_negative() -> None:
    x = np.arange(1.0, 30)
    fitted = fit_linear({"slope": x, "base": np.ones(29)}, 5 * x - 3)
    assert fitted.values["base"] == 0
    assert fitted.intervals["base"][0] == 0


def test_a_figure_carries_what_is_known_of_it(work: tuple[Floats, Floats]) -> None:
    time = decode(work) * np.exp(np.random.default_rng(0).normal(0, 0.05, N))
    fitted = fit_attention(*work, time, free_sequences=FREE)
    figure = fitted.figure("launch_ns", "here", scale=32, note="a note")
    assert figure.value == pytest.approx(32 * fitted.values["launch_ns"], rel=1e-5)
    assert figure.interval == pytest.approx([32 * end for end in fitted.intervals["launch_ns"]], rel=1e-5)
    assert (figure.n, figure.error, figure.provenance, figure.note) == (N, fitted.error, "here", "a note")


def test_few_measurements_have_no_error() -> None:
    fitted = fit_linear({"a": [1.0, 2, 3], "b": [1.0, 1, 1]}, [3.0, 5, 7])
    assert isinstance(fitted, Fitted)
    assert fitted.values == pytest.approx({"a": 2, "b": 1})
    assert fitted.error is None


def test_errors_by_hand() -> None:
    found = errors([110, 90, 100, 50], [100, 100, 100, 100])
    assert (found.mean, found.median, found.max) == (0.175, 0.1, 0.5)
    assert found.p90 == pytest.approx(0.38)


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_keeps_what_a_polyline_needs() -> None:
    x = np.arange(1, 101)
    time = np.where(x < 40, 1000, 1000 + 25 * (x - 40))
    points, error = fit_curve(x, time, tolerance=0.001)
    assert [count for count, _ in points] == [1, 40, 99, 100]
    assert np.interp(x, *zip(*points, strict=True)) == pytest.approx(time, rel=0.001)
    assert error is not None
    assert error.median == 0


def test_a_curve_takes_the_median_of_repeats_and_does_not_fall_at_its_end() -> None:
    points, error = fit_curve([1, 1, 1, 8, 8, 8], [90, 100, 500, 80, 81, 82])
    assert points == ((1, 100.0), (8, 100.0))
    assert error is None


def test_the_error_of_a_curve_is_that_of_its_neighbours_line() -> None:
    _, error = fit_curve([1, 2, 3], [100, 300, 300])
    assert error is not None
    assert error.mean == pytest.approx(1 / 3, abs=1e-4)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_measurements() -> None:
    with pytest.raises(InputError, match="columns of 3 measurements, got one of 2"):
        fit_linear({"a": [1.0, 2]}, [1.0, 2, 3])
    with pytest.raises(InputError, match="times above 0"):
        fit_linear({"a": [1.0, 2]}, [1.0, 0])
    with pytest.raises(InputError, match="at least one"):
        fit_linear({"a": []}, [])
    with pytest.raises(InputError, match="finite"):
        fit_ratio([1.0, np.nan], [1.0, 2])
    with pytest.raises(InputError, match="2 figures need as many measurements, got 1"):
        fit_linear({"a": [1.0], "b": [1.0]}, [1.0])
    with pytest.raises(InputError, match="at two counts at least, got 1"):
        fit_curve([1, 1], [2, 3])
    with pytest.raises(InputError, match="got none"):
        errors([], [])
