"""How often a request is cut to its budget."""

import numpy as np
import pytest

from sim import SimConfig
from sim.serving.request import RequestState
from sim.study.run import build_engine


class LiveTokens:
    """Notes, after each step, how many tokens of the one request live, and its length."""

    def __init__(self):
        self.seen = []

    def scheduled(self, engine):
        """Nothing to see before the step."""

    def applied(self, engine, finished):
        state: RequestState | None = next(iter(engine.scheduler.states.values()), None) if not finished else None
        if state is not None and state.row >= 0:
            row = engine.cache.store.s.rows[state.row]
            self.seen.append((int(row["length"]), int(row["live"])))


@pytest.mark.parametrize("every", [1, 7, 16])
@pytest.mark.parametrize("policy", ["random", "h2o", "scissorhands", "streaming_llm"])
def test_a_request_is_over_its_budget_by_the_steps_since_it_was_cut(policy, every):
    """Prompt 200, budget 100: with L tokens written, 100 + (L - 200) mod every live; the newest is not written yet."""
    config = SimConfig(
        trace="poisson:rate=1,n=1,prompt=200,output=64",
        policy=policy,
        budget_tokens=100,
        reclaimer="vtoken",
        evict_every=every,
        step_cost="linear:base_s=0.01,per_token_s=0",
    )
    observer = LiveTokens()
    build_engine(config, observer=observer).run()
    length, live = np.array([each for each in observer.seen if each[0] > 200]).T
    assert len(length) > 60
    assert live.tolist() == (100 + (length - 1 - 200) % every).tolist()
