"""How far experiments/06_sglang_32384 agrees with the report of zero freed pages: red when that changes."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "06_sglang_32384"
CAPTURE = ROOT / "tests" / "data" / "attention" / "readme_md.npz"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    """Load the experiment's script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec = importlib.util.spec_from_file_location("sglang_32384", FOLDER / "run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        del sys.modules["pages"]  # the name is not ours alone
        return module


@pytest.fixture(scope="module")
def simulated() -> pd.DataFrame:
    return pd.read_csv(FOLDER / "simulated.csv")


@pytest.mark.parametrize("arm", ["grow", "fixed", "prompt"])
@pytest.mark.parametrize(
    "policy", ["h2o", "h2o:recent=0.000001", "h2o:recent=0.1", "h2o:recent=0.9", "scissorhands", "random"]
)
def test_the_file_is_what_the_simulator_gives(run: ModuleType, simulated: pd.DataFrame, policy: str, arm: str):
    contexts = (256, 512, 1024)
    for page in (16, 64):
        for ceiling in (0.60, 0.25):
            ours = run.pages.freed(policy, arm, ceiling, page, contexts)
            chosen = (simulated.policy == policy) & (simulated.arm == arm) & simulated.context.isin(contexts)
            theirs = simulated[chosen & (simulated.page_size == page) & (simulated.ceiling == ceiling)]
            assert len(ours) == len(theirs) == len(contexts)
            for column in ("pages", "evicted", "freed", "none", "requests"):
                assert ours[column].to_numpy(float) == pytest.approx(theirs[column].to_numpy(float), abs=1e-4), column


def test_where_ours_is_zero_at_every_ceiling(run: ModuleType, simulated: pd.DataFrame):
    """One token set for all layers, one token at a time: pages of 64 agree with the report, those of 16 do not."""
    table = run.differences(simulated)
    pd.testing.assert_frame_equal(table, pd.read_csv(FOLDER / "differences.csv"))
    verdict = table.set_index(["policy", "arm", "page_size"]).sort_index().zero_at_every_ceiling
    assert verdict["h2o", "grow"].to_dict() == {1: "no", 16: "no", 32: "up to 4096", 64: "yes"}
    assert verdict["h2o", "fixed"].to_dict() == {1: "no", 16: "no", 32: "no", 64: "yes"}
    assert verdict["h2o", "prompt"].to_dict() == {1: "no", 16: "no", 32: "up to 256", 64: "up to 4096"}
    assert verdict[run.HEAVY_ONLY, "grow"].to_dict() == {16: "up to 256", 32: "yes", 64: "yes"}
    assert set(verdict["streaming_llm"]) == {"no"}
    for arm in run.ARMS:
        # Four pages of 64 in 256 tokens: half of the requests free none, even at 0.25.
        assert verdict["scissorhands", arm].to_dict() == {16: "no", 32: "no", 64: "up to 256"}


def test_a_page_of_one_token_is_free_with_its_token(simulated: pd.DataFrame):
    single = simulated[simulated.page_size == 1]
    assert len(single) == 3 * 5 * 8
    assert (single.freed - single.evicted).abs().max() < 1e-9
    assert (single.freed > 0).all()


def test_a_table_for_all_layers_frees_nothing(run: ModuleType):
    """The sets that H2O kept for each of 30 layers: no page of 16 tokens is dead in all of them, at any ceiling."""
    by_layer, pooled = run.pages.kept(CAPTURE, "layer"), run.pages.kept(CAPTURE, "global")
    assert sorted(by_layer) == [0.2, 0.4, 0.6, 0.8]
    for ratio, layers in by_layer.items():
        assert layers.shape == (30, 640)
        assert layers.mean() == pytest.approx(ratio, abs=0.01)
        for page in run.PAGE_SIZES:
            assert run.pages.dead_pages(layers.any(axis=0), page) == 0
    # A table for each layer, or one set for all layers: pages die.
    assert np.mean([run.pages.dead_pages(layer, 16) for layer in by_layer[0.2]]) > 4
    assert run.pages.dead_pages(pooled[0.2][0], 16) > 4
    table = run.pages.shared_table([CAPTURE], (1, 30), draws=8).set_index(["ceiling", "page_size", "layers"])
    assert table.freed[0.2, 16, 30] == 0 < table.freed[0.2, 16, 1]


def test_recorded_attention_frees_pages_of_16(run: ModuleType):
    freed = {(c, s): run.pages.replay(CAPTURE, "h2o", c, s) for c in (0.60, 0.25) for s in (16, 64)}
    table = pd.read_csv(FOLDER / "recorded.csv").set_index(["capture", "policy", "ceiling", "page_size"])
    for (ceiling, size), (pages_freed, pages) in freed.items():
        row = table.loc["readme_md", "h2o", ceiling, size]
        assert (pages_freed, pages) == (row.freed, row.pages)
    assert freed[0.25, 16][0] >= 4
    assert freed[0.25, 64][0] == freed[0.60, 64][0] == 0


def test_the_closed_form_is_that_of_independent_deaths(run: ModuleType):
    context, page, draws = 4096, 8, 300
    rng = np.random.default_rng(1)
    for ceiling, recent in ((0.25, 0.5), (0.4, 0.0)):
        window = round(recent * ceiling * context)
        alive = round(ceiling * context) - window
        found = []
        for _ in range(draws):
            live = np.ones(context, bool)
            live[: context - window] = False
            live[rng.choice(context - window, alive, replace=False)] = True
            found.append(run.pages.dead_pages(live, page))
        expected = run.pages.expected_freed(context, ceiling, page, recent)
        assert np.mean(found) == pytest.approx(expected, abs=4 * np.std(found) / math.sqrt(draws))
        first = run.pages.first_page(ceiling, page, recent)
        assert run.pages.expected_freed(first, ceiling, page, recent) == pytest.approx(1)
