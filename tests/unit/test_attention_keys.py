"""Synthetic keys: the mean cosine is one, and has the structure that a redundancy-aware policy looks for."""

from __future__ import annotations

import numpy as np
import pytest

from sim.serving.attention.keys import similarity
from sim.serving.attention.uniform import Uniform
from tests.support.attention import split, view_of


def mean_cosines(rows: list[np.ndarray], keys: list[int] | None = None, gap: int = 0) -> list[np.ndarray]:
    """Return the similarity of each request's live tokens."""
    names = list(range(1, len(rows) + 1)) if keys is None else keys
    view = view_of(Uniform(), rows, names, [len(row) for row in rows], gap)
    out = np.full(len(view.position), np.nan, np.float32)
    similarity(view, out)
    return split(view, out)


def cosine(key: int, a: int, b: int) -> float:
    """Return the cosine of two tokens' keys: with two alive, the mean is of one."""
    (pair,) = mean_cosines([np.array([a, b])], [key])
    assert pair[0] == pytest.approx(pair[1], abs=1e-6)
    return float(pair[0])


def test_it_is_the_mean_of_the_cosines_with_the_others():
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


def test_neighbours_are_alike_and_so_are_passages_on_one_topic():
    """Cosines of 0.7 within a topic, 0.3 otherwise, on average: neighbours share one, and so do some far tokens."""
    near = [cosine(key, at, at + 1) for key in range(100) for at in (50, 211)]
    far = np.array([cosine(key, at, at + 300) for key in range(400) for at in (50, 211)])
    assert np.mean(near) > 0.6
    assert 0.25 < np.mean(far) < 0.4
    # One pair in sixteen shares its topic by chance.
    assert 0.03 < np.mean(far > 0.8) < 0.15


def test_it_depends_on_the_request_alone():
    rows = [np.arange(0, 300, 3), np.arange(77), np.array([4, 9, 200])]
    together = mean_cosines(rows, [5, 6, 7], gap=13)
    for row, key, got in zip(rows, (5, 6, 7), together, strict=True):
        assert got.tolist() == mean_cosines([row], [key])[0].tolist()
    assert mean_cosines([rows[1]], [8])[0].tolist() != together[1].tolist()


def test_tokens_differ_in_how_redundant_they_are():
    (got,) = mean_cosines([np.arange(800)], [3])
    assert got.std() > 0.02
