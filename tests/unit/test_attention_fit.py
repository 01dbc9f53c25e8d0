"""The fit of experiments/00_attention_fit still holds: measured against simulated fragmentation, all policies."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from sim.serving.attention.recorded import Recorded
from sim.serving.attention.synthetic import Synthetic
from tests.support.attention import SHARED

FOLDER = Path(__file__).parents[2] / "experiments" / "00_attention_fit"
OURS = Path(__file__).parents[1] / "data" / "attention"
needs_captures = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: captures are not ours to ship")


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import fit.py and the files beside it, and forget them afterwards: their names are common ones."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("fit")
    for name in names:
        sys.modules.pop(name, None)


def largest(table: pd.DataFrame) -> pd.Series:
    return table.assign(off=table.difference_points.abs()).groupby(["policy", "when"]).off.max()


@pytest.mark.differential
@needs_captures
def test_synthetic_attention_breaks_blocks_as_measured(fit: ModuleType) -> None:
    """What docs/attention.md reports, with room for fewer requests."""
    measured = fit.Measured.read()
    table = fit.tidy(fit.simulate(Synthetic(), measured, range(3000, 3016)), measured.table)
    assert len(table) == 5 * 2 * 4 * 4 * 3
    off = largest(table)
    assert (table.difference_points.abs().groupby(table.policy).mean() < 2).all()
    assert (off["h2o"] < 4).all(), off
    assert (off < 5).all(), off
    # These two look at no attention: what is left is the draw, and nothing.
    assert (off["random"] < 2).all(), off
    assert (off["streaming"] < 0.05).all(), off


@pytest.mark.differential
@needs_captures
@pytest.mark.usefixtures("fit")
@pytest.mark.parametrize("granularity", ["layer", "kvhead"])
def test_layers_and_heads_keep_what_they_were_measured_to(granularity: str) -> None:
    """What docs/attention.md reports at the end of the prompt, with room for one request of each length."""
    units = importlib.import_module("fit_units")
    sizes = units.captures()
    found = units.simulated(sizes.values(), [3000], units.SPECS, [granularity], (0.2, 0.4), decoding=())
    assert len(found) == 10
    off = (found - units.measured(sizes).loc[found.index]).abs()
    assert off.to_numpy().mean() < 3
    assert off.to_numpy().max() < 8, off
    assert off.loc["random"].to_numpy().max() < 1, off


@pytest.mark.differential
@pytest.mark.parametrize(
    "name", ["readme_md", *(pytest.param(n, marks=needs_captures) for n in ("code_py", "changelog"))]
)
def test_a_replayed_capture_breaks_blocks_as_measured(fit: ModuleType, name: str) -> None:
    """With the rows that extend.py recomputed: within a point for every policy, budget, block size and moment."""
    folder = OURS if (OURS / f"{name}.npz").exists() else SHARED
    measured = fit.Measured.read([name], folder)
    model = Recorded(str(folder / f"{name}.npz"), str(FOLDER / "rows"))
    off = largest(fit.tidy(fit.simulate(model, measured, [0], ("h2o", "scissor", "tova")), measured.table))
    assert (off < 1).all(), off
