"""The documentation builds into a website without a warning, and nothing public is missing from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sim

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^   sim\.([\w.]+)$", (DOCS / "api.rst").read_text(encoding="utf-8"), re.MULTILINE))
    assert {name for name in sim.__all__ if name != "plots"} <= listed
    assert {f"plots.{name}" for name in sim.plots.__all__} <= listed


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(module, reason="needs Sphinx, myst-nb and furo: pip install -e '.[docs]'")
    out = tmp_path / "site"
    command = [sys.executable, str(DOCS / "build.py"), str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [path.relative_to(DOCS) for path in DOCS.rglob("*.md") if path.name != "README.md"]
    pages += [Path("notebooks") / path.name for path in (ROOT / "notebooks").glob("*.ipynb")]
    for page in pages:
        assert (out / page).with_suffix(".html").exists(), page
    run = (out / "commands" / "run.html").read_text(encoding="utf-8")
    assert "--dump-steps" in run
    assert "Write the state at every step." in run
    sweep = (out / "api" / "sim.sweep.html").read_text(encoding="utf-8")
    assert "One row a run" in sweep
    assert len(list((out / "_images").glob("*.png"))) > 8, "the pictures of the notebooks"
    loaded = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?://[^"]+)"', run)
    assert not loaded, "pages need nothing from elsewhere"
