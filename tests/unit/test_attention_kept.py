"""The share of full attention that falls on live tokens."""

from __future__ import annotations

import numpy as np
import pytest

from sim.errors import InputError
from sim.serving.attention import build_attention
from sim.study.attention_kept import AttentionKept
from sim.study.config import SimConfig
from sim.study.run import build_engine

TRACE = "poisson:rate=40,n=6,prompt=uniform:20:200,output=uniform:2:60"


def measured(every: int = 1, **settings: object) -> np.ndarray:
    config = SimConfig(trace=TRACE, block_size=8, kv_blocks=2000, reclaimer="naive", **settings)
    kept = AttentionKept(build_attention(config.attention), every)
    build_engine(config, observer=kept).run()
    return np.array([*kept.by_request().values()])


def test_who_keeps_all_keeps_all_attention():
    for policy in ("full", "quest"):
        assert measured(policy=policy) == pytest.approx(np.ones(6), abs=1e-5)


def test_where_all_look_alike_it_is_the_share_of_live_tokens():
    """A request of n tokens that keeps k of them sees k and its newest in the next step."""
    config = SimConfig(
        trace="poisson:rate=1,n=1,prompt=100,output=5",
        policy="random",
        budget_tokens=20,
        attention="uniform",
        reclaimer="naive",
    )
    kept = AttentionKept(build_attention("uniform"))
    build_engine(config, observer=kept).run()
    # Steps of four queries: behind the prompt each adds a token, sees 20 others, and leaves 20.
    assert kept.by_request() == {0: pytest.approx(np.mean([21 / length for length in (101, 102, 103, 104)]))}


def test_attention_says_what_random_loses():
    by_policy = {policy: measured(policy=policy, budget=0.3).mean() for policy in ("random", "h2o", "tova")}
    assert by_policy["random"] < by_policy["h2o"]
    assert by_policy["random"] < by_policy["tova"]
    assert all(0 < value < 1 for value in by_policy.values())


def test_the_measurement_changes_nothing():
    config = SimConfig(trace=TRACE, policy="h2o", budget=0.3, block_size=8, kv_blocks=2000)
    watched = build_engine(config, observer=AttentionKept(build_attention("synthetic"))).run()
    alone = build_engine(config).run()
    for run in (watched, alone):
        del run.summary["wall_s"]
    assert watched.summary == alone.summary


def test_some_steps_stand_for_all():
    settings = {"policy": "h2o", "budget": 0.3}
    all_steps, some = measured(**settings), measured(5, **settings)
    assert some.mean() == pytest.approx(all_steps.mean(), abs=0.05)
    with pytest.raises(InputError, match="every: expected at least 1 step, got 0"):
        measured(0, **settings)
