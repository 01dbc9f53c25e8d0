"""Policies whose budgets differ from layer to layer or head to head, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.policies import policies
from sim.kv.policies.base import check_granularity
from sim.kv.units import ONE_UNIT, Units
from sim.kv.view import View
from sim.study.conformance import serve_units
from tests.support.tensors import HeadTensors


def asked(units: Units, prompt: int, keep: int, requests: int = 1) -> View:
    """Return the view of requests whose prompts have just been computed."""
    cache = KVCache(4000, 16, columns=("snapkv_window",), units=units)
    bundles = [cache.bundle(cache.open(k, k, prompt, 1)) for k in range(requests)]
    for row in np.concatenate(bundles).tolist():
        cache.sync_new_tokens(row, prompt)
    return cache.view(np.concatenate(bundles), 1.0, keep)


def test_pyramidkv_falls_from_twice_the_mean_to_a_twentieth():
    """Budget 44 with a window of 4: 40 a layer fall from 78 to 2, by 38 a layer."""
    policy = policies.build("pyramidkv:window=4")
    assert policy.allot(asked(Units(3, 1), 200, 44)).tolist() == [82, 44, 6]
    assert policy.allot(asked(Units(3, 2), 200, 44, requests=2)).tolist() == 2 * [82, 82, 44, 44, 6, 6]
    level = policies.build("pyramidkv:window=4,beta=1")
    assert level.allot(asked(Units(3, 1), 200, 44)).tolist() == [44, 44, 44]


def test_pyramidkv_gives_the_first_layer_no_more_than_there_is():
    """84 beside the window are all that a prompt of 88 has: the first layer would get 86, and the last ones 2."""
    policy = policies.build("pyramidkv:window=4,beta=44")
    assert policy.allot(asked(Units(2, 1), 88, 48)).tolist() == [88, 8]
    # Twice 45 is more than the prompt has tokens.
    assert policy.allot(asked(Units(2, 1), 88, 49)).tolist() == [49, 49]
    assert policy.allot(asked(Units(2, 1), 30, 40)).tolist() == [40, 40]


def test_pyramidkv_with_the_window_inside_is_level_where_the_last_layer_would_not_hold_it():
    """Of a mean of 100 the last layer gets 5: a window of 5, not of 6."""
    inside = "pyramidkv:window={},inside=true"
    assert policies.build(inside.format(5)).allot(asked(Units(3, 1), 400, 100)).tolist() == [195, 100, 5]
    assert policies.build(inside.format(6)).allot(asked(Units(3, 1), 400, 100)).tolist() == [100, 100, 100]


@pytest.mark.parametrize("layers", [1, 2, 5, 30])
@pytest.mark.parametrize("keep", [1, 7, 33, 50, 51, 77, 400])
@pytest.mark.parametrize("spec", ["pyramidkv", "pyramidkv:window=3,beta=7", "pyramidkv:window=2,beta=3,inside=true"])
def test_pyramidkv_spends_the_budget_to_the_token(spec: str, keep: int, layers: int):
    view = asked(Units(layers, 1), 300, keep)
    budgets = policies.build(spec).allot(view)
    assert budgets.sum() == keep * layers
    assert (np.diff(budgets) <= 0).all()
    assert (budgets >= 1).all()
    assert keep > 300 or (budgets <= 300).all()


def test_the_source_of_pyramidkv_differs_by_what_it_rounds_down():
    """KVCache-Factory, 30 layers, budget 128 with a window of 8: 6 // 1 and steps of 228 // 29 = 7, in whole tokens."""
    least, most = 120 // 20, 240 - 120 // 20
    source = [8 + most - layer * ((most - least) // 29) for layer in range(30)]
    ours = policies.build("pyramidkv:window=8").allot(asked(Units(30, 1), 1000, 128))
    assert ours[0] == source[0]
    assert ours.tolist()[-1] == 14
    assert source[-1] == 39
    assert sum(source) > ours.sum() == 30 * 128


def attention(*heads: list[float]) -> HeadTensors:
    """Return attention of one query for each head: of token 5, which is the newest and all of a window of 1."""
    return HeadTensors(np.array(heads, np.float32)[:, None, :])


def test_ada_kv_gives_the_places_of_a_head_that_looks_at_little_to_the_others():
    """Two layers of two heads, 3 tokens a head, each with its newest: 4 of the 10 others stay in each layer."""
    model = attention(
        [0.3, 0.2, 0.2, 0.1, 0.1, 0.1],
        [0.02, 0.01, 0.06, 0.04, 0.05, 0.8],
        [0.02, 0.01, 0.06, 0.04, 0.05, 0.8],
        [0.05, 0.3, 0.04, 0.26, 0.03, 0.3],
    )
    spec = "ada_kv:window=1,pool=1,floor={}"
    (units,) = serve_units(policies.build(spec.format(0)), model, 6, 0, tokens=3, units=Units(2, 2))
    # The first layer's second head has nothing among the best four. In the second layer two of 0.05 compete for one
    # place: the first head's turn.
    assert units == [[0, 1, 2, 4, 5], [5], [2, 4, 5], [1, 3, 5]]
    (units,) = serve_units(policies.build(spec.format(1)), model, 6, 0, tokens=3, units=Units(2, 2))
    assert [len(unit) for unit in units] == [3, 3, 3, 3]
    (units,) = serve_units(policies.build(spec.format(0.7)), model, 6, 0, tokens=3, units=Units(2, 2))
    assert units[:2] == [[0, 1, 2, 5], [2, 5]]


def test_heads_compete_within_their_layer_alone():
    """The first layer attends to little: its budget is its own."""
    model = attention(
        [0.01, 0.02, 0.03, 0.94], [0.02, 0.01, 0.025, 0.945], [0.4, 0.3, 0.2, 0.1], [0.1, 0.15, 0.35, 0.4]
    )
    policy = policies.build("ada_kv:window=1,pool=1,floor=0")
    (units,) = serve_units(policy, model, 4, 0, tokens=2, units=Units(2, 2))
    assert units == [[2, 3], [2, 3], [0, 3], [2, 3]]


@pytest.mark.parametrize(
    ("spec", "units", "says"),
    [
        ("pyramidkv", ONE_UNIT, "policy 'pyramidkv' gives each layer a budget of its own: use granularity per_layer"),
        ("ada_kv", ONE_UNIT, "policy 'ada_kv' gives each head a budget of its own: use granularity per_head"),
        ("ada_kv", Units(4, 1), "use granularity per_head"),
    ],
)
def test_they_say_which_granularity_they_need(spec: str, units: Units, says: str):
    with pytest.raises(InputError, match=says):
        check_granularity(policies.build(spec), units)


def test_with_it_they_are_accepted():
    check_granularity(policies.build("pyramidkv"), Units(4, 1))
    check_granularity(policies.build("pyramidkv"), Units(4, 2))
    check_granularity(policies.build("ada_kv"), Units(4, 2))
    check_granularity(policies.build("h2o"), ONE_UNIT)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("pyramidkv:beta=0", "beta >= 1"),
        ("pyramidkv:window=0", "window >= 1"),
        ("ada_kv:floor=1.5", r"share in \[0, 1\]"),
        ("ada_kv:pool=2", "odd pool"),
    ],
)
def test_bad_parameters_are_refused(spec: str, says: str):
    with pytest.raises(InputError, match=says):
        policies.build(spec)
