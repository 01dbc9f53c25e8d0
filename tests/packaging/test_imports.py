"""What importing the packages pulls in, each looked at in a fresh interpreter."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("numba", "pandas", "matplotlib", "simpy", "pyarrow", "scipy", "torch", "triton", "dask", "distributed")


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level modules in ``sys.modules`` after importing ``modules``."""
    code = f"import json, sys; import {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in json.loads(result.stdout)}


@pytest.mark.parametrize("module", ["sim", "sim.errors", "sim.registry", "sim.cli", "gpu_validate", "gpu_validate.cli"])
def test_nothing_heavy_is_imported_up_front(module: str) -> None:
    assert loaded_by(module).isdisjoint(HEAVY)


def test_the_command_line_starts_without_numpy() -> None:
    assert "numpy" not in loaded_by("sim.cli", "gpu_validate.cli", "gpu_validate.__main__")


def public_modules() -> list[str]:
    modules = []
    for path in sorted((ROOT / "sim").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [module for module in modules if not module.endswith("__main__")]


@pytest.mark.slow
def test_no_module_of_the_simulator_needs_torch() -> None:
    """All of them, with torch, triton and the torch harness made impossible to import."""
    code = f"""
import importlib, sys
for name in ("torch", "triton", "gpu_validate"):
    sys.modules[name] = None
for module in {public_modules()!r}:
    importlib.import_module(module)
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr


def test_torch_is_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [need for need in project["dependencies"] if need.startswith(("torch", "triton", "dask"))]
    assert {need.split(">")[0] for need in project["optional-dependencies"]["gpu"]} == {"torch", "triton"}
    assert set(project["optional-dependencies"]) == {"gpu", "cluster", "docs", "notebooks", "test"}
