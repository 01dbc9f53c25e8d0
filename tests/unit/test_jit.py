"""``njit``: typed, cached, and never stale."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]

LEAF = """
from sim.jit import njit
STEP = 1
@njit
def leaf(x):
    return x + {added}
"""
TOP = """
import leaves
from leaves import leaf, STEP
from sim.jit import njit
@njit
def by_name(x):
    return leaf(x) * 10 + STEP
@njit
def by_module(x):
    return leaves.leaf(x)
@njit(inline="always")
def indirectly(x):
    return by_name(x)
@njit
def top(x):
    return indirectly(x), by_module(x)
"""
SHOW = "import tops; print(*tops.top(1), sum(tops.top.stats.cache_hits.values()))"


def run(folder: Path, code: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"} | variables
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_a_kernel_is_loaded_from_the_cache_until_what_it_calls_changes(tmp_path: Path) -> None:
    (tmp_path / "tops.py").write_text(TOP)
    (tmp_path / "leaves.py").write_text(LEAF.format(added=1))
    assert run(tmp_path, SHOW) == "21 2 0"
    assert run(tmp_path, SHOW) == "21 2 1"
    (tmp_path / "leaves.py").write_text(LEAF.format(added=7))
    assert run(tmp_path, SHOW) == "81 8 0"
    (tmp_path / "leaves.py").write_text(LEAF.format(added=7).replace("STEP = 1", "STEP = 5"))
    assert run(tmp_path, SHOW) == "85 8 0"
    assert run(tmp_path, SHOW) == "85 8 1"


def test_jit_can_be_turned_off(tmp_path: Path) -> None:
    (tmp_path / "tops.py").write_text(TOP)
    (tmp_path / "leaves.py").write_text(LEAF.format(added=1))
    code = "import tops, types; print(*tops.top(1), isinstance(tops.top, types.FunctionType))"
    assert run(tmp_path, code, NUMBA_DISABLE_JIT="1") == "21 2 True"


def test_a_folder_that_cannot_be_written_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    from sim.jit import njit

    real = numba.njit

    def refuse(**options: object) -> object:
        if options["cache"]:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'x'")
        return real(**options)

    monkeypatch.setattr("sim.jit.numba", SimpleNamespace(njit=refuse))

    @njit
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8
