"""What an installation puts on the path: the wheel's names, and an editable install's."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEANT = {"sim", "gpu_validate"}

pytestmark = pytest.mark.slow


def hook(name: str, folder: Path) -> Path:
    """Call a hook of the build backend in a fresh interpreter, as a frontend would; return the file it made."""
    pytest.importorskip("hatchling", reason="needs hatchling: pip install -e '.[test]'")
    code = f"from hatchling import build; print(build.{name}({str(folder)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return folder / result.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(hook("build_wheel", tmp_path_factory.mktemp("wheel")))


def top_level(names: list[str]) -> set[str]:
    tops = {name.partition("/")[0] for name in names}
    return {top for top in tops if not top.endswith(".dist-info")}


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    assert top_level(wheel.namelist()) == MEANT


def test_the_wheel_has_every_module_and_nothing_compiled(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = {str(path.relative_to(ROOT)) for package in MEANT for path in (ROOT / package).rglob("*.py")}
    assert sources <= names
    assert {"sim/py.typed", "gpu_validate/py.typed"} <= names
    assert not [name for name in names if name.endswith((".pyc", ".nbi", ".nbc"))]


def test_the_wheel_carries_the_default_trace(wheel: zipfile.ZipFile) -> None:
    assert "sim/workload/data/default.csv" in wheel.namelist()


def test_the_wheel_carries_the_cost_profiles(wheel: zipfile.ZipFile) -> None:
    profiles = {str(path.relative_to(ROOT)) for path in (ROOT / "sim" / "serving" / "data").rglob("*.json")}
    assert len(profiles) > 20
    assert profiles <= set(wheel.namelist())


def test_the_wheel_carries_the_parts_of_the_page(wheel: zipfile.ZipFile) -> None:
    parts = {str(path.relative_to(ROOT)) for path in (ROOT / "sim" / "study" / "report" / "assets").iterdir()}
    assert {Path(part).suffix for part in parts} == {".css", ".html", ".js"}
    assert parts <= set(wheel.namelist())


def test_one_command(wheel: zipfile.ZipFile) -> None:
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    commands = ["calibrate", "replay", "validate"]
    assert wheel.read(entry_points).decode().split() == [
        *("[console_scripts]", "vtoken", "=", "sim.cli:main"),
        "[vtoken.commands]",
        *(word for name in commands for word in (name, "=", f"gpu_validate.cli:{name}")),
    ]


def test_an_editable_install_maps_the_packages_and_nothing_else(tmp_path: Path) -> None:
    """Unpacked for an interpreter that knows nothing else of the checkout: the packages are found, the rest is not."""
    editables = pytest.importorskip("editables", reason="needs editables: pip install -e '.[test]'")
    site = tmp_path / "site"
    with zipfile.ZipFile(hook("build_editable", tmp_path)) as archive:
        archive.extractall(site)
    # Without the environment of the tests (-S); of it the mapping needs this one package.
    shutil.copytree(Path(editables.__file__).parent, site / "editables")
    code = f"""
import importlib.util, site, sys
site.addsitedir({str(site)!r})
for name in ("sim", "gpu_validate", "tests", "experiments", "benchmarks", "notebooks", "traces", "docs"):
    spec = importlib.util.find_spec(name)
    if spec is not None:
        print(name, spec.origin)
assert {str(ROOT)!r} not in sys.path
import sim.errors
"""
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    found = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert found == {name: str(ROOT / name / "__init__.py") for name in MEANT}
