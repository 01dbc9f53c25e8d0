"""Synthetic keys, values and queries: what they are said to be, and what was measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.serving.attention import build_attention
from sim.serving.attention.synthetic import KEYS
from tests.support.attention import prompt_view, split, view_of

SYNTHETIC = build_attention("synthetic")


def mean_cosines(rows: list[np.ndarray], keys: list[int] | None = None, gap: int = 0) -> list[np.ndarray]:
    """Return the similarity of each request's live tokens."""
    names = list(range(1, len(rows) + 1)) if keys is None else keys
    view = view_of(SYNTHETIC, rows, names, [len(row) for row in rows], gap)
    out = np.full(len(view.position), np.nan, np.float32)
    SYNTHETIC.similarity(view, out)
    assert np.isnan(out).sum() == gap * (len(rows) + 1)
    return split(view, out)


def cosine(key: int, a: int, b: int) -> float:
    """Return the cosine of two tokens' keys: with two alive, the mean is of one."""
    (pair,) = mean_cosines([np.array([a, b])], [key])
    assert pair[0] == pytest.approx(pair[1], abs=1e-6)
    return float(pair[0])


def told(signal: str, lengths: list[int], keys: list[int] | None = None, gap: int = 0) -> list[np.ndarray]:
    """Return what the model says of whole prompts."""
    view = prompt_view(SYNTHETIC, lengths, keys, gap)
    SYNTHETIC.begin(view)
    out = np.full(len(view.position), np.nan, np.float32)
    arguments: tuple[Any, ...] = (view, out) if signal in ("expected", "accumulated") else (view, False, out)
    getattr(SYNTHETIC, signal)(*arguments)
    return split(view, out)


def test_similarity_is_the_mean_of_the_cosines_with_the_others():
    tokens = np.array([0, 1, 5, 6, 40, 41, 90])
    (got,) = mean_cosines([tokens], [9])
    for i, token in enumerate(tokens):
        want = np.mean([cosine(9, min(token, other), max(token, other)) for other in tokens if other != token])
        assert got[i] == pytest.approx(want, abs=1e-5)


def test_cosines_are_cosines_and_a_token_alone_is_like_nobody():
    rng = np.random.default_rng(0)
    for key in range(40):
        a, b = sorted(rng.choice(4000, 2, replace=False).tolist())
        assert -1 <= cosine(key, a, b) <= 1
    assert mean_cosines([np.array([17])])[0].tolist() == [0]


def test_keys_far_apart_are_less_alike_and_the_sink_is_like_nobody():
    """Measured: 0.73 at 8 tokens, 0.57 at 256, 0.43 at 1,536; of token 0 with the others 0.07."""
    near = np.mean([cosine(key, at, at + 10) for key in range(50) for at in (50, 211)])
    far = np.mean([cosine(key, at, at + 1400) for key in range(50) for at in (50, 211)])
    assert 0.58 < near < 0.68
    assert 0.4 < far < near - 0.1
    assert 0.04 < mean_cosines([np.arange(500)])[0][0] < 0.1


def test_the_spread_of_cosines_is_the_measured_one():
    """0.58 with a spread of 0.018 (docs/attention.md)."""
    values = np.concatenate([row[1:] for row in mean_cosines([np.arange(1000)] * 10)])
    assert values.mean() == pytest.approx(0.58, abs=0.02)
    assert 0.012 < values.std() < 0.026


def test_it_depends_on_the_request_alone():
    rows = [np.arange(0, 300, 3), np.arange(77), np.array([4, 9, 200])]
    together = mean_cosines(rows, [5, 6, 7], gap=13)
    for row, key, got in zip(rows, (5, 6, 7), together, strict=True):
        assert got.tolist() == mean_cosines([row], [key])[0].tolist()
    assert mean_cosines([rows[1]], [8])[0].tolist() != together[1].tolist()


@pytest.mark.parametrize("signal", ["key_norms", "value_norms", "expected"])
def test_so_do_norms_and_expectations(signal: str):
    together = told(signal, [300, 1, 64], [5, 6, 7], gap=11)
    for length, key, got in zip((300, 1, 64), (5, 6, 7), together, strict=True):
        assert got.tolist() == told(signal, [length], [key])[0].tolist()
        assert (got > 0).all()


@pytest.mark.parametrize(
    ("signal", "mean", "spread", "first"),
    [
        ("key_norms", KEYS.key_norm, KEYS.key_sigma, KEYS.key_first),
        ("value_norms", KEYS.value_norm, KEYS.value_sigma, KEYS.value_first),
    ],
)
def test_norms_have_the_measured_level_and_spread(signal: str, mean: float, spread: float, first: float):
    rows = told(signal, [1000] * 20)
    values = np.concatenate([row[1:] for row in rows])
    assert values.mean() == pytest.approx(mean, rel=0.1)
    assert values.std() / values.mean() == pytest.approx(spread, rel=0.15)
    assert rows[0][0] == pytest.approx(mean * first)


def test_heavy_tokens_have_short_keys():
    """Measured with the score at the end of the prompt, by ranks: -0.28 for keys, -0.34 for values."""
    score = [np.log(row[4:]) for row in told("accumulated", [1000] * 10)]
    for signal in ("key_norms", "value_norms"):
        found = [np.corrcoef(s, row[4:])[0, 1] for s, row in zip(score, told(signal, [1000] * 10), strict=True)]
        assert -0.5 < np.mean(found) < -0.1


def test_a_norm_is_what_it_was_when_its_token_was_written():
    (whole,) = told("key_norms", [80], [3])
    for length in (1, 2, 50, 80):
        view = prompt_view(SYNTHETIC, [length], [3], gap=2)
        out = np.full(len(view.position), np.nan, np.float32)
        SYNTHETIC.key_norms(view, True, out)
        assert np.flatnonzero(~np.isnan(out)).tolist() == [2 + length - 1]
        assert out[2 + length - 1] == whole[length - 1]


def test_expected_attention_sums_to_one_falls_with_age_and_follows_the_score():
    rows = told("expected", [1000] * 10)
    for row in rows:
        assert row.sum(dtype=float) == pytest.approx(1, abs=1e-5)
    mean = np.mean(rows, axis=0)
    assert mean[-100:].mean() > 2 * mean[400:500].mean()
    score = [np.log(row[4:]) for row in told("accumulated", [1000] * 10)]
    age = np.log(np.arange(1000, 4, -1))
    for s, row in zip(score, rows, strict=True):
        # Both fall with age: what is left when that is taken away.
        own = [x - np.polyval(np.polyfit(age, x, 3), age) for x in (s, np.log(row[4:]))]
        assert np.corrcoef(*own)[0, 1] > 0.5
