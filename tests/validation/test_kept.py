"""How experiments/11_policies adds up the attention that a policy keeps: against what can be written down at once."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.kv.policies import policies
from sim.kv.reclaim import reclaimers
from sim.serving.attention.recorded import Recorded

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments" / "11_policies" / "kept.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("kept_11", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "kept_11", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module


@pytest.fixture(scope="module")
def model() -> Recorded:
    rows = ROOT / "experiments" / "00_attention_fit" / "rows" / "readme_md.npz"
    return Recorded(path=str(ROOT / "tests" / "data" / "attention" / "readme_md.npz"), rows=str(rows))


def test_a_window_keeps_the_attention_inside_it(script: Any, model: Recorded) -> None:
    attention = model.captures[0].attention
    prompt = attention.shape[1] - len(attention)
    shares = []
    for step, row in enumerate(attention):
        length = prompt + step
        newest = math.ceil(0.5 * length) - 4
        shares.append((row[:4].sum() + row[length - newest :].sum()) / row.sum())
    found = script.kept(policies.build("streaming_llm"), reclaimers.build("naive"), model, 0, 0.5)
    assert found["kept"] == pytest.approx(np.mean(shares), abs=1e-5)
    assert found["kept_p05"] == pytest.approx(np.percentile(shares, 5), abs=1e-5)
    assert found["sink"] == 1


def test_who_loses_nothing_keeps_all_attention(script: Any, model: Recorded) -> None:
    found = script.kept(policies.build("h2o"), reclaimers.build("naive"), model, 0, 1.0)
    assert found == pytest.approx({"kept": 1, "kept_far": 1, "live": 1, "sink": 1, "kept_p05": 1}, abs=1e-5)


def test_h2o_keeps_more_than_random_at_the_same_budget(script: Any, model: Recorded) -> None:
    h2o, random = (
        script.kept(policies.build(name), reclaimers.build("naive"), model, 7, 0.3) for name in ("h2o", "random")
    )
    assert h2o["live"] == random["live"]
    assert h2o["kept"] > random["kept"] + 0.1
