"""NVIDIA/kvpress keeps the same tokens: of drawn layers with one head, recorded (tests/data/kvpress) and drawn anew.

kvpress compresses at the end of the prompt, each head for itself. So do these policies for one head; what they make of
several that share one set of tokens, and of decode, is theirs and tested by hand. Presses with budgets that differ from
layer to layer or head to head are compared over five layers of three KV heads.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sim.kv.policies import policies
from sim.kv.units import Units
from sim.study.conformance import serve, serve_units
from tests.support.tensors import Array, HeadTensors, Tensors

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "kvpress" / "cases.npz"
UNITS = RECORDED.with_name("units.npz")
SCRIPT = Path(__file__).with_name("kvpress_cases.py")
POLICIES = ("streaming_llm", "tova", "snapkv", "keydiff", "knorm", "expected_attention")
SPECS = {"snapkv": "snapkv:window=16", "pyramidkv": "pyramidkv:window=6,inside=true", "ada_kv": "ada_kv:window=6"}
SPLIT = ("pyramidkv", "ada_kv")
VARIABLE = "VTOKEN_KVPRESS_PYTHON"
VERSION = "0.5.5"

pytestmark = pytest.mark.differential


def cases(path: Path) -> list[dict[str, Array]]:
    """Read what the script wrote."""
    with np.load(path, allow_pickle=False) as archive:
        assert str(archive["kvpress"]) == VERSION
        prefixes = [f"{number}_" for number in range(int(archive["cases"]))]
        return [
            {name.removeprefix(prefix): archive[name] for name in archive.files if name.startswith(prefix)}
            for prefix in prefixes
        ]


def kept_by_kvpress(name: str, case: dict[str, Array]) -> list[int]:
    """Return the positions that the press left, with the newest token, which we never drop, in place of the worst."""
    kept, score = case[f"{name}_kept"].tolist(), case[f"{name}_score"]
    newest = len(score) - 1
    if newest not in kept:
        kept.remove(min(kept, key=lambda token: score[token]))
        kept.append(newest)
    return sorted(kept)


def kept_by_us(name: str, case: dict[str, Array]) -> list[int]:
    """Return the positions that our policy leaves alive at the same budget."""
    model = Tensors(*(case[part] for part in ("queries", "plain_queries", "keys", "values")))
    policy = policies.build(SPECS.get(name, name))
    ((*left,),) = serve(policy, model, len(case["keys"]), 0, tokens=len(case[f"{name}_kept"]))
    return left


def differences(path: Path, name: str) -> list[str]:
    return [
        f"case {number}: {sorted(set(ours) ^ set(theirs))}"
        for number, case in enumerate(cases(path))
        if (ours := kept_by_us(name, case)) != (theirs := kept_by_kvpress(name, case))
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_tokens_are_kept_in_recorded_cases(name: str):
    assert not differences(RECORDED, name)


def test_the_recorded_cases_tell_policies_apart():
    """Policies at random would agree by chance now and then; those of kvpress keep very different tokens."""
    for case in cases(RECORDED):
        kept = {tuple(case[f"{name}_kept"].tolist()) for name in POLICIES}
        assert len(kept) == len(POLICIES)


def split_differences(path: Path, name: str) -> list[str]:
    """Compare what each head of each layer keeps; one line a head that differs."""
    found = []
    for number, case in enumerate(cases(path)):
        layers, heads, _, tokens = case["attention"].shape
        model = HeadTensors(case["attention"].reshape(layers * heads, -1, tokens))
        policy = policies.build(SPECS[name])
        (units,) = serve_units(policy, model, tokens, 0, tokens=int(case["budget"]), units=Units(layers, heads))
        for unit, (ours, theirs) in enumerate(zip(units, case[f"{name}_kept"].reshape(-1, tokens), strict=True)):
            if ours != np.flatnonzero(theirs).tolist():
                found.append(f"case {number}, unit {unit}: {len(ours)} and {theirs.sum()} tokens")
    return found


@pytest.mark.parametrize("name", SPLIT)
def test_each_head_keeps_the_same_tokens_in_recorded_cases(name: str):
    assert not split_differences(UNITS, name)


def test_the_recorded_cases_have_budgets_that_differ():
    by_layer = [case["pyramidkv_kept"].sum(axis=2) for case in cases(UNITS)]
    assert sum(len(np.unique(counts)) > 1 for counts in by_layer) >= 4
    assert all((counts == counts[:, :1]).all() for counts in by_layer)
    for case in cases(UNITS):
        counts = case["ada_kv_kept"].sum(axis=2)
        assert (np.ptp(counts, axis=1) > 0).all()
        assert (counts.sum(axis=1) == 3 * case["budget"]).all()


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run kvpress over the recorded seeds and over others."""
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else ROOT / ".venv-kvpress" / "bin" / "python"
    if not python.exists():
        pytest.skip(
            f"kvpress is not installed: `make kvpress` makes .venv-kvpress with it, or name the interpreter of an "
            f"environment that has it in {VARIABLE}"
        )
    out = tmp_path_factory.mktemp("kvpress")
    for name, *numbers in (
        ("recorded", 0, 8),
        ("others", 1000, 40),
        ("units", 0, 8, "units"),
        ("other_units", 1000, 40, "units"),
    ):
        command = [str(python), str(SCRIPT), str(out / f"{name}.npz"), *map(str, numbers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recorded"), [("recorded", RECORDED), ("units", UNITS)])
def test_kvpress_still_gives_the_recorded_cases(name: str, recorded: Path, anew: Path):
    for now, before in zip(cases(anew / f"{name}.npz"), cases(recorded), strict=True):
        assert now.keys() == before.keys()
        for name, array in before.items():
            # Another processor adds in another order.
            np.testing.assert_allclose(now[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_tokens_are_kept_in_other_cases(name: str, anew: Path):
    assert not differences(anew / "others.npz", name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_each_head_keeps_the_same_tokens_in_other_cases(name: str, anew: Path):
    assert not split_differences(anew / "other_units.npz", name)
