"""The notebooks run from top to bottom, and what is committed of them is what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def test_each_notebook_is_a_pair() -> None:
    assert len(NOTEBOOKS) >= 4
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_there_and_small(path: Path) -> None:
    committed = path.with_suffix(".ipynb")
    assert committed.stat().st_size < 400_000
    cells = json.loads(committed.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_logic_in_cells(path: Path) -> None:
    """What a cell defines belongs into the package; but for the notebook about adding something to it."""
    if "add_a_policy" not in path.stem:
        assert not re.search(r"^\s*(def|class|if|while|try)\b", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_what_is_committed(path: Path) -> None:
    for module in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(module, reason="needs jupytext, nbclient, ipykernel: pip install -e '.[notebooks]'")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "docs" / "notebooks.py"), "--check", path.stem]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
