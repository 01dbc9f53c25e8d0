"""NVIDIA/kvpress keeps the same tokens: of drawn layers with one head, recorded (tests/data/kvpress) and drawn anew.

kvpress compresses at the end of the prompt, each head for itself. So do these policies for one head; what they make of
several, and of decode, is theirs and tested by hand.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sim.kv.policies import policies
from sim.study.conformance import serve
from tests.support.tensors import Array, Tensors

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "kvpress" / "cases.npz"
SCRIPT = Path(__file__).with_name("kvpress_cases.py")
POLICIES = ("streaming_llm", "tova", "snapkv", "keydiff", "knorm", "expected_attention")
SPECS = {"snapkv": "snapkv:window=16"}
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


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run kvpress over the recorded seeds and over others."""
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else ROOT / ".venv-kvpress" / "bin" / "python"
    if not python.exists():
        pytest.skip(
            f"kvpress is not installed: `make kvpress` makes .venv-kvpress with it, or name the interpreter of an "
            f"environment that has it in {VARIABLE}"
        )
    out = tmp_path_factory.mktemp("kvpress")
    for name, first, count in (("recorded", 0, 8), ("others", 1000, 40)):
        command = [str(python), str(SCRIPT), str(out / f"{name}.npz"), str(first), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return out / "recorded.npz", out / "others.npz"


@pytest.mark.slow
def test_kvpress_still_gives_the_recorded_cases(anew: tuple[Path, Path]):
    for now, before in zip(cases(anew[0]), cases(RECORDED), strict=True):
        assert now.keys() == before.keys()
        for name, array in before.items():
            # Another processor adds in another order.
            np.testing.assert_allclose(now[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_tokens_are_kept_in_other_cases(name: str, anew: tuple[Path, Path]):
    assert not differences(anew[1], name)
