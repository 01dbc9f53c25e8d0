import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sim.kv.policies.base import lowest

FLOATS = st.one_of(st.floats(width=32, allow_nan=False), st.sampled_from([0.0, 1.0, -1.0, np.inf, -np.inf, 1e-40, 0.5]))


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_the_lowest_are_those_of_a_stable_sort(data: st.DataObject):
    """Several requests in one arena with cells between them that are nobody's."""
    rows = data.draw(st.integers(1, 4))
    score: list[float] = []
    start, n, keep, oldest, newest, excess, expected = [], [], [], [], [], [], []
    for _ in range(rows):
        score += [-np.inf] * data.draw(st.integers(0, 3))
        mine = data.draw(hnp.arrays(np.float32, st.integers(2, 300), elements=FLOATS)) + np.float32(0)  # no -0.0
        old = data.draw(st.integers(0, len(mine) - 2))
        new = data.draw(st.integers(1, len(mine) - 1 - old))
        most = len(mine) - old - new
        many = data.draw(st.one_of(st.just(1), st.integers(1, most)))
        first = len(score)
        order = np.argsort(mine[old : len(mine) - new], kind="stable")[:many]
        expected += sorted((first + old + order).tolist())
        score += mine.tolist()
        values = (first, len(mine), old + new, old, new, many)
        for column, value in zip((start, n, keep, oldest, newest, excess), values, strict=True):
            column.append(value)
    columns = [np.array(column, np.int64) for column in (start, n, keep, oldest, newest, excess)]
    assert lowest(np.array(score, np.float32), *columns).tolist() == expected


def test_equal_scores_go_oldest_first():
    one = np.array([1], np.int64)
    for excess in (1, 3):
        victims = lowest(np.full(600, 0.25, np.float32), 0 * one, 600 * one, 9 * one, 2 * one, one, excess * one)
        assert victims.tolist() == list(range(2, 2 + excess))


def test_a_minimum_far_back_is_found():
    one = np.array([1], np.int64)
    score = np.linspace(1, 2, 1000, dtype=np.float32)
    score[777] = -3
    assert lowest(score, 0 * one, 1000 * one, one, 0 * one, one, one).tolist() == [777]


@pytest.mark.parametrize(
    ("keep", "oldest", "newest", "spared"),
    [
        (5, 3, 2, [0, 1, 2, 8, 9]),
        (4, 3, 2, [0, 1, 8, 9]),  # first fewer of the oldest
        (2, 3, 2, [8, 9]),
        (1, 3, 2, [9]),  # then of the newest
        (3, 1, 0, [0, 9]),  # the newest one always
        (1, 3, 0, [9]),
    ],
)
def test_the_budget_comes_before_what_is_protected(keep: int, oldest: int, newest: int, spared: list[int]):
    one = np.array([1], np.int64)
    many = 10 - len(spared)
    score = np.arange(10, dtype=np.float32)[::-1].copy()
    victims = lowest(score, 0 * one, 10 * one, keep * one, oldest * one, newest * one, many * one)
    assert victims.tolist() == sorted(set(range(10)) - set(spared))
