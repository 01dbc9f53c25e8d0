"""The scheduler against real vLLM's: every step, and every block id that a request is given.

Two recorded runs and a dozen small ones that we drew at random and ran ourselves are part of this repository
(tests/data/vllm), more recorded ones lie in ../shared where that is at hand. The files that a run dumps must be vLLM's
to the byte. `test_vllm_regenerate.py` makes vLLM's side anew.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.vllm.cases import difference, lines_of, simulate_case

HERE = Path(__file__).resolve().parents[1] / "data" / "vllm"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "reference" / "vllm"
OURS = sorted(folder.name for folder in HERE.iterdir() if folder.is_dir())
COPIED = ("poisson_roomy", "poisson_tight")
FURTHER = (
    "apc_tight", "azure_conv", "mooncake_prefix", "mooncake_prefix_tight", "poisson_async", "small_token_budget",
    "watermark_block32",
)  # fmt: skip

pytestmark = pytest.mark.differential


def case_folder(name: str) -> Path:
    if name not in OURS and not SHARED.is_dir():
        pytest.skip("this run of vLLM is not part of the repository, and ../shared/reference/vllm is not here")
    return (HERE if name in OURS else SHARED) / name


@pytest.mark.parametrize("name", [*OURS, *FURTHER])
def test_every_step_and_every_block_is_vllms(name: str, tmp_path: Path):
    folder = case_folder(name)
    result = simulate_case(folder, tmp_path)
    assert not (text := difference(lines_of(tmp_path), lines_of(folder))), text
    expected = json.loads((folder / "case.json").read_text())["result"]
    for key in ("steps", "finished", "preemptions"):
        assert result.summary[key] == int(expected[key]), key


def test_an_arrival_on_the_end_of_a_step_is_taken_in_where_a_float64_clock_takes_it_in(tmp_path: Path):
    """Request 87 comes at 51.8 s, when step 5426 begins; but the clock, added up, has 51.79999999999938 s there."""
    folder = case_folder("mooncake_prefix")
    with (folder / "trace.csv").open(newline="") as file:
        assert list(csv.DictReader(file))[87]["arrival_s"] == "51.800000"
    simulate_case(folder, tmp_path)
    lines = lines_of(tmp_path)
    at_step = {int(row["step"]): row for row in csv.DictReader(lines["steps"])}
    assert at_step[5426]["clock_s"] == "51.800000"
    assert (at_step[5426]["running"], at_step[5427]["running"]) == ("7", "8")
    assert next(row for row in csv.DictReader(lines["tables"]) if row["req"] == "87")["step"] == "5427"


def test_every_recorded_run_is_compared():
    if not SHARED.is_dir():
        pytest.skip("../shared/reference/vllm is not here")
    assert {folder.name for folder in SHARED.iterdir() if folder.is_dir()} == {*COPIED, *FURTHER}


@pytest.mark.parametrize("name", COPIED)
def test_our_copies_are_the_recorded_ones(name: str):
    if not SHARED.is_dir():
        pytest.skip("../shared/reference/vllm is not here")
    for file in (SHARED / name).iterdir():
        assert (HERE / name / file.name).read_bytes() == file.read_bytes()
