"""What layers and heads leave of blocks, in experiments/12_granularity: replays and synthetic against measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.kv.policies import policies
from tests.support.attention import SHARED

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments" / "12_granularity" / "measured.py"
CAPTURE = ROOT / "tests" / "data" / "attention" / "readme_md.npz"
needs_captures = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: captures are not ours to ship")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("measured_12", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "measured_12", module)  # dataclasses look their module up
        patch.setattr(policies, "_entries", dict(policies._entries))
        spec.loader.exec_module(module)
        yield module


def kept(budget: float) -> np.ndarray:
    """Return bool[layers, blocks, slots]: what the capture says that each layer held after the last step."""
    with np.load(CAPTURE) as capture:
        at = int(np.argmin(abs(capture["ratios"] - budget)))
        bits = np.unpackbits(capture["kept_h2o_layer"][at], axis=1)
    return bits.reshape(len(bits), -1, 16).astype(bool)


@pytest.mark.parametrize("budget", [0.2, 0.4, 0.6, 0.8])
def test_recorded_sets_leave_the_blocks_that_can_be_counted_by_hand(script: Any, budget: float) -> None:
    """The capture that comes along: 30 layers, 640 tokens, 40 blocks a table; no block, token or layer lost."""
    sets = kept(budget)
    spec = f"h2o_kept:path={CAPTURE},budget={budget}"
    for tables, each in (("shared", sets.any(axis=0)[None]), ("per_unit", sets)):
        held, live = each.any(axis=2).sum(axis=1), each.sum(axis=(1, 2))
        by_hand = np.mean([live / 640, 1 - held / 40, (held - np.ceil(live / 16)) / 40], axis=1)
        assert script.leave(spec, "layer", tables, budget, 640, 1)[0] == pytest.approx(100 * by_hand)


@pytest.mark.differential
@needs_captures
def test_replays_leave_what_was_measured(script: Any) -> None:
    """H2O's and SnapKV's blocks by layer, mean over seven captures, under one table and under thirty."""
    frame = script.pd.DataFrame(script.recorded(SHARED), columns=[*script.KEYS, *script.MEASURES])
    found = frame.groupby(script.KEYS).mean()
    expected = script.measured(SHARED).loc[found.index]
    assert len(found) == 3 * 4 * 2
    assert (found - expected).abs().max().max() < 0.05
    # The published means over ten texts: 64 and 87 % alive, none dead, 36 and 12 % to win; a table a layer, 24 and 56.
    for share, published in ((0.2, (64, 0, 36)), (0.4, (87, 0, 12))):
        assert found.loc[("h2o", "layer", share, "shared", "last step")].to_numpy() == pytest.approx(published, abs=2.5)
    assert found.loc[("h2o", "layer", 0.2, "per_unit", "last step")].to_numpy() == pytest.approx((20, 24, 56), abs=2.5)


@pytest.mark.differential
@needs_captures
def test_synthetic_layers_and_heads_leave_what_was_measured(script: Any) -> None:
    """H2O at 20 and 40 %, prompt end and decode, through the engine."""
    frame = script.pd.DataFrame(
        script.synthetic(SHARED, names=("h2o",), budgets=(0.2, 0.4)), columns=[*script.KEYS, *script.MEASURES]
    )
    found = frame.groupby(script.KEYS).mean()
    assert len(found) == 2 * 2 * 2 * 2
    assert (found - script.measured(SHARED).loc[found.index]).abs().max().max() < 4
