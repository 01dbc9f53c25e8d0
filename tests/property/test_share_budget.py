"""share_budget against the same rule written out token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from sim.kv.policies.base import NOBODY, lowest
from sim.kv.policies.pooled import share_budget


def by_the_book(scores, keep, group, floor, oldest, newest):
    """Sort every token of a group and take the best; among equals the rows take turns."""
    shared = list(keep)
    for g in set(group):
        rows = [b for b in range(len(keep)) if group[b] == g]
        total = sum(keep[b] for b in rows)
        if total >= sum(len(scores[b]) for b in rows):
            short = sum(max(0, len(scores[b]) - keep[b]) for b in rows)
            for b in rows:
                given_away = min(max(0, keep[b] - len(scores[b])), short)
                short -= given_away
                shared[b] = max(keep[b] - given_away, len(scores[b]))
            continue
        rivals = []
        for turn, b in enumerate(rows):
            n = len(scores[b])
            last = min(n, max(1, min(newest[b], keep[b])))
            first = max(0, min(oldest[b], keep[b] - last, n - last))
            others = sorted(scores[b][first : n - last], reverse=True)
            certain = max(first + last, min(n, int(floor * keep[b])))
            shared[b] = certain
            total -= certain
            rest = others[certain - first - last :]
            rivals += [(-value, rest[:i].count(value), turn, b) for i, value in enumerate(rest)]
        for _, _, _, b in sorted(rivals)[:total]:
            shared[b] += 1
    return shared


@st.composite
def rows_of_a_batch(draw):
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    values = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1, width=32)
    scores = [draw(st.lists(values.map(lambda x: x + 0.0), min_size=n, max_size=n)) for n in sizes]
    each = {"min_size": len(sizes), "max_size": len(sizes)}
    # Mostly less than there is: with more, nobody competes.
    keep = [draw(st.integers(1, max(1, n // 2)) | st.integers(1, 14)) for n in sizes]
    oldest, newest = (draw(st.lists(st.sampled_from([0, 0, 1, 3, 14]), **each)) for _ in range(2))
    group = draw(st.just([0] * len(sizes)) | st.lists(st.integers(0, 2), **each))
    return scores, keep, group, draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])), oldest, newest


def shared_by_the_kernel(scores, keep, group, floor, oldest, newest, gap=0):
    n = np.array([len(row) for row in scores])
    start = np.cumsum(n + gap) - n
    cells = np.full(int((n + gap).sum()) + gap, 9, np.float32)
    for first, row in zip(start, scores, strict=True):
        cells[first : first + len(row)] = row
    return share_budget(cells, start, n, np.array(keep), np.array(group), floor, oldest, newest), cells, start, n


@given(rows_of_a_batch(), st.integers(0, 3))
@example(([[0.5] * 4, [0.5] * 4], [2, 3], [0, 0], 0.0, [0, 0], [0, 0]), 0)
@example(([[1.0] * 4, [0.0] * 4], [2, 2], [0, 0], 1.0, [0, 0], [0, 0]), 0)  # the floor binds
def test_the_best_of_a_group_stay(case, gap):
    _, keep, group, floor, oldest, newest = case
    shared, _, _, n = shared_by_the_kernel(*case[:4], np.array(oldest), np.array(newest), gap)
    assert shared.tolist() == by_the_book(*case)
    for g in set(group):
        mine = np.array(group) == g
        assert shared[mine].sum() == np.array(keep)[mine].sum()
        if np.array(keep)[mine].sum() < n[mine].sum():
            assert (shared[mine] <= n[mine]).all()
    assert (shared >= 1).all()
    assert (shared >= np.minimum(n, (floor * np.array(keep)).astype(int))).all()


@given(rows_of_a_batch())
def test_who_dies_then_is_worth_no_more_than_who_lives_without_a_floor(case):
    scores, keep, group, _, _, _ = case
    shared, cells, start, n = shared_by_the_kernel(scores, keep, group, 0.0, NOBODY, NOBODY)
    excess = np.maximum(n - shared, 0)
    over = excess > 0
    dead = lowest(cells, start[over], n[over], shared[over], NOBODY, NOBODY, excess[over])
    alive = np.setdiff1d(np.concatenate([s + np.arange(k) for s, k in zip(start, n, strict=True)]), dead)
    alive = np.setdiff1d(alive, start + n - 1)  # the newest stays whatever it is worth
    for g in set(group):
        inside = [(s, s + k) for s, k, h in zip(start, n, group, strict=True) if h == g]
        of = [cells[[c for c in some if any(a <= c < b for a, b in inside)]] for some in (dead, alive)]
        if len(of[0]) and len(of[1]):
            assert of[0].max() <= of[1].min()


def test_rows_whose_tokens_all_look_alike_end_up_alike():
    shared, *_ = shared_by_the_kernel([[0.5] * 10] * 3, [4, 4, 4], [7, 7, 7], 0.2, NOBODY, NOBODY)
    assert shared.tolist() == [4, 4, 4]
