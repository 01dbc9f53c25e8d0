"""Attention of layers and heads that decide by themselves: alike as far as measured, and no two the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.policies import policies
from sim.kv.units import Units
from sim.kv.view import View
from sim.serving.attention import build_attention
from sim.serving.attention.base import check_signals
from sim.serving.attention.recorded import Recorded
from sim.serving.attention.synthetic import UNITS, Synthetic
from sim.serving.attention.units import mixture
from tests.support.attention import SHARED

LAYERS, HEADS = Units(30, 1), Units(30, 3)
needs_captures = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: captures are not ours to ship")
Ask = Callable[[Any, View], NDArray[np.float32]]


def prompts(model: Any, units: Units, lengths: list[int], keys: list[int] | None = None, before: int = 0) -> View:
    """Return the view of prompts that have just been computed, and begun; ``before``: requests that lie before them."""
    cache = KVCache(20_000, 16, columns=model.columns, units=units)
    for k in range(before):
        for row in cache.bundle(cache.open(100 + k, 999 + k, 33, 1)):
            cache.sync_new_tokens(row, 33)
    bundles = []
    for k, length in enumerate(lengths):
        bundles.append(cache.bundle(cache.open(k, (keys or [11, 22, 33])[k], length, 64)))
        for row in bundles[-1]:
            cache.sync_new_tokens(row, length)
            cache.store.s.rows[row]["decode_from"] = length
    view = cache.view(np.concatenate(bundles), model=model)
    model.begin(view)
    return view


def rows(view: View, out: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return [out[s : s + n].copy() for s, n in zip(view.start, view.n, strict=True)]


def filled(ask: str, *arguments: Any) -> Ask:
    def get(model: Any, view: View) -> NDArray[np.float32]:
        out = np.full(len(view.position), np.nan, np.float32)
        getattr(model, ask)(view, *arguments, out)
        return out

    return get


SIGNALS: dict[str, Ask] = {
    "weights": lambda model, view: view.columns[model.columns[0]],
    "attend": filled("attend"),
    "query": filled("query", 3),
    "accumulated": filled("accumulated"),
    "expected": filled("expected"),
    "similarity": filled("similarity"),
    "key_norms": filled("key_norms", False),
    "newest key_norms": lambda model, view: filled("key_norms", True)(model, view)[view.newest].repeat(view.n),
    "value_norms": filled("value_norms", False),
}


@pytest.mark.parametrize("units", [LAYERS, HEADS, Units(1, 4)], ids=["layers", "heads", "heads of one layer"])
@pytest.mark.parametrize("name", SIGNALS)
def test_no_two_units_have_the_same(name: str, units: Units):
    model = Synthetic()
    view = prompts(model, units, [200])
    found = rows(view, np.resize(SIGNALS[name](model, view), len(view.position)))
    assert np.isfinite(found).all()
    assert len(np.unique(found, axis=0)) == units.count


@pytest.mark.parametrize(("name", "total"), [("attend", 1), ("query", 1), ("expected", 1), ("accumulated", 200)])
def test_each_unit_s_attention_sums_to_what_it_should(name: str, total: int):
    model = Synthetic()
    view = prompts(model, HEADS, [200])
    found = rows(view, SIGNALS[name](model, view))
    np.testing.assert_allclose(np.sum(found, axis=1), total, rtol=1e-5)


@pytest.mark.parametrize("name", ["attend", "query", "accumulated", "expected", "weights"])
def test_a_unit_sees_the_same_whatever_lies_beside_its_request(name: str):
    model = Synthetic()
    together = prompts(model, LAYERS, [150, 60, 97], [5, 6, 7])
    alone = prompts(model, LAYERS, [60], [6], before=3)
    want = rows(together, SIGNALS[name](model, together))[30:60]
    got = rows(alone, SIGNALS[name](model, alone))
    assert [row.tobytes() for row in got] == [row.tobytes() for row in want]


def test_a_query_of_the_prompt_is_what_the_step_would_have_seen():
    model = Synthetic()
    long, short = prompts(model, LAYERS, [120]), prompts(model, LAYERS, [117])
    found = rows(long, SIGNALS["query"](model, long))
    for asked, attended in zip(found, rows(short, SIGNALS["attend"](model, short)), strict=True):
        assert asked[:117].tobytes() == attended.tobytes()
        assert not asked[117:].any()


def test_attend_and_add_is_attend_and_add():
    model = Synthetic()
    view = prompts(model, HEADS, [90])
    want = SIGNALS["attend"](model, view)
    out, total = np.zeros((2, len(view.position)), np.float32)
    total[:] = 2
    model.attend_and_add(view, out, total)
    for one, both, summed in zip(rows(view, want), rows(view, out), rows(view, total), strict=True):
        assert one.tobytes() == both.tobytes()
        np.testing.assert_allclose(summed, 2 + one, rtol=1e-6)


def correlations(units: Units) -> NDArray[np.float64]:
    """Return [units, units], of the logarithm of the score at the end of the prompt, its trend taken away."""
    model = Synthetic()
    found = np.zeros((units.count, units.count))
    requests = 6
    for key in range(requests):
        view = prompts(model, units, [1200], [key])
        scores = np.log(rows(view, SIGNALS["accumulated"](model, view)))[:, 4:-32]
        age = np.log(np.log(1199 - np.arange(1200)[4:-32] + 1.7))
        trend = np.stack([np.ones_like(age), age])
        scores -= (trend.T @ np.linalg.lstsq(trend.T, scores.T, rcond=None)[0]).T
        found += np.corrcoef(scores) / requests
    return found


def test_layers_are_alike_as_much_as_measured():
    """Correlations at distances of 1, 5, 10 and 20 of 30 layers: SmolLM2-135M has 0.72, 0.53, 0.37 and 0.16."""
    found = correlations(LAYERS)
    for distance, measured in ((1, 0.72), (5, 0.53), (10, 0.37), (20, 0.16)):
        assert abs(np.diag(found, distance).mean() - measured) < 0.08


def test_heads_are_less_alike_than_layers():
    """Any two heads of a layer, as much as the mixture says; heads of far layers less."""
    found = correlations(HEADS)
    same_layer = np.mean([found[3 * k, 3 * k + 1] for k in range(30)])
    assert abs(same_layer - UNITS.alike * (UNITS.common + UNITS.near)) < 0.08
    assert np.diag(found, 60).mean() < same_layer - 0.15
    # Unit 0 draws from the request's own key: what units share must come from elsewhere.
    assert abs(found[0, 1:3].mean() - same_layer) < 0.08


def test_compiled_and_plain_python_agree_to_the_bit(tmp_path: Path):
    script = """
import sys
import numpy as np
from sim.kv.policies import policies
from sim.kv.units import Units
from sim.serving.attention.synthetic import Synthetic
from tests.unit.test_attention_units import SIGNALS, prompts
model = Synthetic()
view = prompts(model, Units(3, 2), [1, 2, 33])
parts = [SIGNALS[name](model, view).copy() for name in ("weights", "attend", "query", "accumulated", "expected")]
view.columns["snapkv_window"] = parts[1]
view.keep[:] = np.repeat([1, 1, 9], 6)
budgets = policies.build("ada_kv:window=1").allot(view)
np.save(sys.argv[1], np.concatenate([*parts, budgets]))
"""
    answers = []
    for disable in ("0", "1"):
        path = tmp_path / f"{disable}.npy"
        environment = os.environ | {"NUMBA_DISABLE_JIT": disable}
        subprocess.run(
            [sys.executable, "-W", "error", "-c", script, str(path)],
            check=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        answers.append(np.load(path))
    assert len(np.unique(answers[0][-6:])) > 1
    assert answers[0].tobytes() == answers[1].tobytes()


def test_the_draws_of_a_unit_have_the_pooled_variance():
    for heads in (1, 3):
        m = mixture(UNITS, heads).astype(float)
        assert (m[:3] ** 2).sum() == pytest.approx(1)
        assert (m[3:5] ** 2).sum() == pytest.approx(1)


def test_the_sink_differs_from_layer_to_layer_as_measured():
    model = Synthetic()
    view = prompts(model, LAYERS, [100])
    sinks = np.array([row[0] for row in rows(view, SIGNALS["attend"](model, view))])
    assert sinks.mean() == pytest.approx(model.sink_share, rel=1e-3)
    assert sinks[:12].max() < 0.15
    assert sinks.max() > 0.6
    other = prompts(model, Units(6, 1), [100])
    fewer = np.array([row[0] for row in rows(other, SIGNALS["attend"](model, other))])
    np.testing.assert_allclose(fewer, sinks.reshape(6, 5).mean(axis=1), rtol=1e-5)


def test_uniform_is_the_same_for_every_unit():
    model = build_attention("uniform")
    view = prompts(model, HEADS, [50])
    assert (np.array(rows(view, filled("attend")(model, view))) == np.float32(1 / 50)).all()


def test_random_draws_for_each_unit():
    view = prompts(build_attention("uniform"), HEADS, [50])
    found = rows(view, policies.build("random").score(view))  # type: ignore[attr-defined]
    assert len(np.unique(found, axis=0)) == 90


def test_what_would_overflow_in_a_single_layer_is_refused():
    model = Synthetic(region_sigma=2.0)
    check_signals(policies.build("h2o"), model)
    with pytest.raises(InputError, match="in 30 layers: weights, noise and decay together exceed a float32"):
        check_signals(policies.build("h2o"), model, LAYERS)
    check_signals(policies.build("h2o"), Synthetic(), LAYERS)


def capture(path: Path, layers: int = 3, prompt: int = 6) -> str:
    """Write a capture of a few layers."""
    rng = np.random.default_rng(0)
    np.savez(
        path,
        P=np.array(prompt),
        G=np.array(2),
        attn_u8=np.tril(np.full((2, prompt + 2), 200, np.uint8), prompt),
        prefill_score_global=np.ones(prompt, np.float32),
        prefill_score_layer=rng.random((layers, prompt)).astype(np.float16),
        last32_score_layer=rng.random((layers, prompt)).astype(np.float16),
    )
    return str(path)


def test_recorded_gives_each_layer_its_own_scores(tmp_path: Path):
    file = capture(tmp_path / "a.npz")
    capture(tmp_path / "b.npz", prompt=9)
    model = Recorded(str(tmp_path))
    with np.load(file) as archive:
        scores, last = (archive[name].astype(float) for name in ("prefill_score_layer", "last32_score_layer"))
    key = next(k for k in range(20) if model.capture_of(k).name == "a")
    view = prompts(model, Units(3, 1), [6], [key])
    summed = np.array(rows(view, filled("accumulated")(model, view)))
    np.testing.assert_allclose(summed, 6 * scores / scores.sum(axis=1, keepdims=True), rtol=1e-5)
    for back in (0, 2):
        row = np.array(rows(view, filled("query", back)(model, view)))
        part = last[:, : 6 - back]
        np.testing.assert_allclose(row[:, : 6 - back], part / part.sum(axis=1, keepdims=True), rtol=1e-5)
        assert not row[:, 6 - back :].any()


def test_recorded_says_what_it_does_not_know_of_units(tmp_path: Path):
    model = Recorded(capture(tmp_path / "a.npz"))
    check_signals(policies.build("snapkv"), model, Units(3, 1))
    check_signals(policies.build("h2o"), model)
    for name, units, says in (
        ("snapkv", Units(3, 2), "does not know single heads; use 'synthetic'"),
        ("snapkv", Units(4, 1), "does not know 4 layers: it has 3; use 'synthetic'"),
        ("h2o", Units(3, 1), "what policy 'h2o' asks of single layers: it has their scores at the end of the prompt"),
    ):
        with pytest.raises(InputError, match=says):
            check_signals(policies.build(name), model, units)
    np.savez(tmp_path / "c.npz", **{k: v for k, v in np.load(tmp_path / "a.npz").items() if "layer" not in k})
    with pytest.raises(InputError, match="it has no scores of single layers"):
        check_signals(policies.build("snapkv"), Recorded(str(tmp_path / "c.npz")), Units(3, 1))


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.ones((3, 5), np.float32), r"must have shape \[3, 6\]"),
        (np.full((3, 6), -1, np.float32), "must be finite and not negative"),
        (np.ones((3, 6), np.int64), "must be floating point"),
    ],
)
def test_damaged_layer_scores_are_refused(tmp_path: Path, array: NDArray[Any], says: str):
    capture(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as archive:
        np.savez(tmp_path / "bad.npz", **(dict(archive) | {"last32_score_layer": array}))
    with pytest.raises(InputError, match=f"last32_score_layer {says}"):
        Recorded(str(tmp_path / "bad.npz"))


@needs_captures
def test_recorded_layers_are_those_of_the_capture():
    model = Recorded(str(SHARED / "code_py.npz"))
    check_signals(policies.build("pyramidkv"), model, LAYERS)
    view = prompts(model, LAYERS, [1024])
    with np.load(SHARED / "code_py.npz") as archive:
        np.testing.assert_allclose(
            rows(view, filled("accumulated")(model, view)), archive["prefill_score_layer"].astype(float), rtol=2e-3
        )
