"""The scheduler against real vLLM's: every step, and every block id that a request is given.

Two runs are part of this repository (tests/data/vllm), more lie in ../shared where that is at hand. Where nothing is
evicted the files that a run dumps must be vLLM's to the byte.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.study.config import SimConfig
from sim.study.run import simulate
from sim.workload.source import read_trace
from sim.workload.trace import Trace

HERE = Path(__file__).resolve().parents[1] / "data" / "vllm"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "reference" / "vllm"
OURS = ("poisson_roomy", "poisson_tight")
FURTHER = (
    "apc_tight", "azure_conv", "mooncake_prefix_tight", "small_token_budget", "watermark_block32",
)  # fmt: skip
# Not modelled: asynchronous scheduling, which decides on a step before it has the results of the one before.
NOT_MODELLED = ("poisson_async",)

pytestmark = pytest.mark.differential


def case_folder(name: str) -> Path:
    if name not in OURS and not SHARED.is_dir():
        pytest.skip("this run of vLLM is not part of the repository, and ../shared/reference/vllm is not here")
    return (HERE if name in OURS else SHARED) / name


def dumped(folder: Path, out: Path, trace: Trace | None = None) -> dict[str, list[str]]:
    """Simulate a case and return the lines of both files."""
    case: dict[str, Any] = json.loads((folder / "case.json").read_text())
    assert not case["async_scheduling"]
    config = SimConfig(
        trace=folder / "trace.csv",
        policy="full",
        reclaimer="none",
        kv_blocks=case["blocks"],
        step_cost=f"linear:base_s={case['base_s']},per_token_s={case['per_token_s']}",
        **{
            name: case[name]
            for name in (
                "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_caching",
                "reserve_full_prompt", "watermark",
            )
        },
    )  # fmt: skip
    result = simulate(config, trace, dump_steps=out / "steps.csv", dump_tables=out / "tables.csv")
    expected = {name: int(value) for name, value in case["result"].items()}
    assert {name: result.summary[name] for name in expected} == expected
    return {name: (out / f"{name}.csv").read_text().splitlines() for name in ("steps", "tables")}


def recorded(folder: Path) -> dict[str, list[str]]:
    return {
        name: gzip.decompress((folder / f"{name}.csv.gz").read_bytes()).decode().splitlines()
        for name in ("steps", "tables")
    }


def first_difference(ours: list[str], theirs: list[str]) -> int | None:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((k for k, (a, b) in pairs if a != b), None if len(ours) == len(theirs) else min(len(ours), len(theirs)))


def assert_same(ours: dict[str, list[str]], theirs: dict[str, list[str]]) -> None:
    for name in theirs:
        at = first_difference(ours[name], theirs[name])
        if at is not None:
            pytest.fail(
                f"{name}, line {at + 1}:\n  ours   {ours[name][at : at + 1]}\n  vLLM's {theirs[name][at : at + 1]}"
            )


@pytest.mark.parametrize("name", [*OURS, *FURTHER])
def test_every_step_and_every_block_is_vllms(name: str, tmp_path: Path):
    folder = case_folder(name)
    assert_same(dumped(folder, tmp_path), recorded(folder))


# -- one run in which a clock that is not exact decides ----------------------------------------------------------------

INEXACT, REQUEST, STEP = "mooncake_prefix", 87, 5426


def test_an_arrival_on_a_step_boundary_is_taken_in_where_vllms_driver_just_missed_it(tmp_path: Path):
    """Request 87 comes at 51.8 s, the very instant at which step 5426 begins.

    The recorded run added its clock up in floating point and had it at 51.79999999999938 s there: it took the request
    in one step later. Time is whole nanoseconds here, so it is in that step. Before it nothing differs.
    """
    folder = case_folder(INEXACT)
    ours, theirs = dumped(folder, tmp_path), recorded(folder)
    case = json.loads((folder / "case.json").read_text())
    arrivals = read_trace(folder / "trace.csv").arrival_s
    assert arrivals[REQUEST] == 51.8

    at = first_difference(ours["steps"], theirs["steps"])
    assert at == STEP + 1  # behind the heading
    columns = ours["steps"][0].split(",")
    mine, other = (dict(zip(columns, lines["steps"][at].split(","), strict=True)) for lines in (ours, theirs))
    assert mine["clock_s"] == other["clock_s"] == "51.800000"
    assert (mine["running"], other["running"]) == ("8", "7")
    tables = first_difference(ours["tables"], theirs["tables"])
    assert tables is not None
    assert ours["tables"][tables].startswith(f"{STEP},{REQUEST},")

    # The clock of the recorded run, added up as it was: it is behind the arrival when the step begins.
    clock = 0.0
    for row in csv.DictReader(theirs["steps"][: STEP + 2]):
        if float(row["clock_s"]) > clock + 1e-6:  # idle: it jumped to an arrival
            clock = float(row["clock_s"])
        assert clock == pytest.approx(float(row["clock_s"]), abs=1e-6)
        at_step = clock
        clock += case["base_s"] + case["per_token_s"] * int(row["sched_tokens"])
    assert int(row["step"]) == STEP
    assert 51.8 - 1e-9 < at_step < 51.8


def test_with_that_arrival_a_microsecond_later_the_run_is_vllms(tmp_path: Path):
    folder = case_folder(INEXACT)
    trace = read_trace(folder / "trace.csv")
    arrival_ns = trace.arrival_ns.copy()
    arrival_ns[REQUEST] += 1000
    assert_same(dumped(folder, tmp_path, dataclasses.replace(trace, arrival_ns=arrival_ns)), recorded(folder))


def test_every_recorded_run_is_either_compared_or_named_as_not_modelled():
    if not SHARED.is_dir():
        pytest.skip("../shared/reference/vllm is not here")
    cases = {folder.name for folder in SHARED.iterdir() if folder.is_dir()}
    assert cases == {*OURS, *FURTHER, INEXACT, *NOT_MODELLED}


@pytest.mark.parametrize("name", OURS)
def test_our_copies_are_the_recorded_ones(name: str):
    if not SHARED.is_dir():
        pytest.skip("../shared/reference/vllm is not here")
    for file in (SHARED / name).iterdir():
        assert (HERE / name / file.name).read_bytes() == file.read_bytes()
