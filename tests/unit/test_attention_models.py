"""What every attention model promises, whatever it is made of."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import InputError
from sim.serving.attention import AttentionModel, attention_models, build_attention
from tests.support.attention import accumulated, attended, prompt_view, queried, view_of

LENGTHS = [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 300]


def tiny_capture(path: Path, prompt: int = 40, generated: int = 12, seed: int = 3) -> Path:
    """Write a capture of random numbers in the format of a real one."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(60, 256, (generated, prompt + generated)).astype(np.uint8)
    codes[np.arange(prompt + generated)[None] > prompt + np.arange(generated)[:, None]] = 0
    score = rng.gamma(1.0, 1.0, prompt).astype(np.float32)
    np.savez(path, P=prompt, G=generated, attn_u8=codes, prefill_score_global=score * prompt / score.sum())
    return path


@pytest.fixture(params=["uniform", "synthetic", "synthetic:region_bits=5,weight_sigma=0.2", "recorded"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> AttentionModel:
    spec = request.param
    if spec == "recorded":
        spec = f"recorded:{tiny_capture(tmp_path / 'a.npz')}"
    return build_attention(spec)


def test_names() -> None:
    assert attention_models.names() == ["recorded", "synthetic", "uniform"]


def test_is_an_attention_model(model: AttentionModel) -> None:
    assert isinstance(model, AttentionModel)
    assert all(isinstance(name, str) for name in model.columns)


def test_no_requests(model: AttentionModel) -> None:
    view = prompt_view(model, [])
    out = np.zeros(5, np.float32)
    model.begin(view)
    model.accumulated(view, out)
    model.query(view, 0, out)
    model.attend(view, out)
    assert not out.any()


def test_rows_sum_to_one(model: AttentionModel) -> None:
    for row in attended(model, prompt_view(model, LENGTHS)):
        assert row.dtype == np.float32
        assert np.isfinite(row).all()
        assert (row >= 0).all()
        assert row.sum(dtype=float) == pytest.approx(1, abs=2e-6)


def test_column_sums_sum_to_the_length(model: AttentionModel) -> None:
    for length, row in zip(LENGTHS, accumulated(model, prompt_view(model, LENGTHS)), strict=True):
        assert np.isfinite(row).all()
        assert (row >= 0).all()
        assert row.sum(dtype=float) == pytest.approx(length, rel=2e-6)


@pytest.mark.parametrize("back", [0, 1, 5, 62, 299, 300, 1000])
def test_prompt_queries(model: AttentionModel, back: int) -> None:
    for length, row in zip(LENGTHS, queried(model, prompt_view(model, LENGTHS), back), strict=True):
        visible = max(length - back, 0)
        assert np.isfinite(row).all()
        assert (row >= 0).all()
        assert row[visible:].tolist() == [0] * (length - visible)
        assert row.sum(dtype=float) == pytest.approx(float(visible > 0), abs=2e-6)


@settings(max_examples=40)
@given(data=st.data())
def test_any_survivors(data: st.DataObject) -> None:
    """Sinks gone, gaps, a lone newest token: still a distribution."""
    model = build_attention(data.draw(st.sampled_from(["synthetic", "uniform"])))
    rows = []
    for _ in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(1, 120))
        kept = data.draw(st.sets(st.integers(0, length - 1)))
        rows.append(np.array(sorted(kept | {length - 1})))
    keys = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=len(rows), max_size=len(rows)))
    view = view_of(model, rows, keys, [1] * len(rows))
    for row in attended(model, view):
        assert (row > 0).all()
        assert row.sum(dtype=float) == pytest.approx(1, abs=2e-6)


@pytest.mark.parametrize("what", [attended, accumulated, lambda m, v: queried(m, v, 7)])
def test_a_request_is_alone_in_its_row(model: AttentionModel, what: object) -> None:
    """Same bytes alone, among others, in another order, and at another place of the arena."""
    assert callable(what)
    lengths, keys = [30, 7, 64, 1, 129], [11, 2**63 + 5, 7, 9, 2**64 - 1]
    together = what(model, prompt_view(model, lengths, keys, gap=3))
    backwards = what(model, prompt_view(model, lengths[::-1], keys[::-1], gap=5))[::-1]
    for i, (length, key) in enumerate(zip(lengths, keys, strict=True)):
        alone = what(model, prompt_view(model, [length], [key]))[0]
        assert together[i].tobytes() == alone.tobytes() == backwards[i].tobytes()


def test_cells_of_others_are_left_alone(model: AttentionModel) -> None:
    view = prompt_view(model, [9, 20], gap=4)
    inside = np.zeros(len(view.position), bool)
    for start, n in zip(view.start, view.n, strict=True):
        inside[start : start + n] = True
    for column in view.columns.values():
        column[~inside] = 42
    out = np.full(len(inside), 42, np.float32)
    model.begin(view)
    model.accumulated(view, out)
    model.query(view, 3, out)
    model.attend(view, out)
    assert (out[~inside] == 42).all()
    assert all((column[~inside] == 42).all() for column in view.columns.values())


def test_survivors_share_what_the_dead_had(model: AttentionModel) -> None:
    """Open loop: attention over the survivors is the full cache's, renormalised."""
    if model == build_attention("synthetic") or "region_bits=5" in repr(model):
        pytest.skip("the share of a living sink is fixed: tested in test_attention_synthetic.py")
    full = attended(model, prompt_view(model, [45], [5]))[0]
    kept = np.array([2, 3, 11, 30, 44])
    view = view_of(model, [kept], [5], [45])
    np.testing.assert_allclose(attended(model, view)[0], full[kept] / full[kept].sum(), rtol=1e-5)


def test_unknown_name_and_parameter() -> None:
    with pytest.raises(InputError, match="did you mean 'synthetic'"):
        build_attention("sinthetic")
    with pytest.raises(InputError, match="did you mean 'sink_share'"):
        build_attention("synthetic:sink_shar=0.2")
    with pytest.raises(InputError, match="no parameter"):
        build_attention("uniform:x=1")
