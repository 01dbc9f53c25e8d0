"""The notebooks run from top to bottom."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(path))
    assert set(names["results"]) == {"naive", "vtoken", "ideal"}
    assert names["change"].median() < 0, "repacking holds fewer blocks"
    assert "p95 end to end" in capsys.readouterr().out
    assert names["axes"].get_ylabel()
