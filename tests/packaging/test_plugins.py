"""Everything that another package can add, added by one: built, installed beside this checkout, listed, used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "example_plugin"
TRACE = "# arrival_s prompt output\n" + "".join(f"{0.05 * k:.2f} {100 + k} {20 + k % 7}\n" for k in range(30))

pytestmark = pytest.mark.slow


def vtoken(*arguments: str, site: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command with ``site`` importable; away from the checkout, as a user would."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "sim.cli", *arguments],
        cwd=site, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the example package in it, as pip would have put it there."""
    pytest.importorskip("hatchling", reason="needs hatchling: pip install -e '.[test]'")
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    build = f"from hatchling import build; build.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("policies", "every_other"),
        ("reclaimers", "patient"),
        ("attention", "sink_and_recent"),
        ("step-costs", "per_request"),
        ("copy-costs", "per_launch"),
    ],
)
def test_each_is_listed_with_where_it_comes_from(command: str, name: str, site: Path) -> None:
    rows = {row["name"]: row for row in json.loads(vtoken(command, "--json", site=site).stdout)}
    assert rows[name]["from"] == "package vtoken-example 0.1.0"
    assert {row["from"] for row in rows.values()} == {"built in", "package vtoken-example 0.1.0"}
    assert "vtoken-example" in vtoken(command, site=site).stdout


def test_a_run_with_all_of_them(site: Path) -> None:
    listed = vtoken("trace", "formats", site=site).stdout
    assert "space_separated" in listed
    assert "[package vtoken-example 0.1.0]" in listed
    trace = site.parent / "requests.txt"
    trace.write_text(TRACE, encoding="utf-8")
    used = {
        "policy": "every_other:recent=4",
        "budget": "0.5",
        "reclaimer": "patient:blocks=2",
        "attention": "sink_and_recent:half_life=32",
        "step-cost": "per_request:base_s=0.004",
        "copy-cost": "per_launch",
    }
    flags = [word for name, value in used.items() for word in (f"--{name}", value)]
    done = vtoken("run", "--trace", str(trace), *flags, "--kv-blocks", "300", "--json", "--quiet", site=site)
    summary = json.loads(done.stdout)
    assert summary["finished"] == 30
    assert summary["tokens_evicted"] > 0
    assert summary["repacks_committed"] > 0
    assert summary["step_cost_used"] == "per_request"


def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    """With the checks that vtoken-sim has for other packages."""
    for test in (PLUGIN / "tests").glob("test_*.py"):
        shutil.copy(test, tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def fake(site: Path, package: str, group: str, name: str, value: str, module: str = "") -> Path:
    """Install a package of one entry point and one module into a copy of ``site``."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    if module:
        (site / f"{value.partition(':')[0]}.py").write_text(module)
    return site


def test_one_that_cannot_be_imported_is_named_and_stops_nobody_else(tmp_path: Path) -> None:
    broken = fake(
        tmp_path / "site", "unlucky", "vtoken.policies", "unlucky", "unlucky_module:Policy", "import nowhere\n"
    )
    done = vtoken("run", "--policy", "unlucky", site=broken, code=2)
    assert done.stderr == (
        "error: policy 'unlucky': package unlucky 1.0 cannot be loaded (unlucky_module:Policy): "
        "ModuleNotFoundError: No module named 'nowhere'\n"
    )
    rows = {row["name"]: row for row in json.loads(vtoken("policies", "--json", site=broken).stdout)}
    assert "cannot be loaded" in rows["unlucky"]["what"]
    assert rows["h2o"]["parameters"]
    fake(broken, "astray", "vtoken.trace_readers", "aaa", "astray_module:Reader", "raise OSError('no licence')\n")
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,10,5\n")
    assert "requests" in vtoken("trace", "describe", str(trace), site=broken).stdout
    (tmp_path / "odd.txt").write_text("?\n")
    said = vtoken("trace", "describe", str(tmp_path / "odd.txt"), site=broken, code=2).stderr
    assert said.count("\n") == 1
    assert "package astray 1.0 cannot be loaded (astray_module:Reader): OSError: no licence" in said


def test_two_with_one_name_are_named(site: Path, tmp_path: Path) -> None:
    both = shutil.copytree(site, tmp_path / "site")
    fake(both, "double", "vtoken.policies", "every_other", "vtoken_example.policy:EveryOther")
    said = vtoken("run", "--policy", "every_other", site=both, code=2).stderr
    assert said.startswith("error: policy 'every_other' is there twice: in package ")
    assert {"vtoken-example 0.1.0", "double 1.0"} == {
        word for word in ("vtoken-example 0.1.0", "double 1.0") if word in said
    }
    assert said.count("\n") == 1
    fake(both, "usurper", "vtoken.reclaimers", "vtoken", "vtoken_example.reclaimer:Patient")
    said = vtoken("run", "--reclaimer", "vtoken", site=both, code=2).stderr
    assert said == (
        "error: reclaimer 'vtoken' is there twice: in package usurper 1.0 (vtoken_example.reclaimer:Patient) and in "
        "vtoken-sim itself; uninstall one of them, or rename it\n"
    )


def test_what_is_not_a_dataclass_is_refused(tmp_path: Path) -> None:
    odd = fake(tmp_path / "site", "odd", "vtoken.step_costs", "odd", "odd_module:cost", "def cost(): ...\n")
    said = vtoken("run", "--step-cost", "odd", "--head", "5", site=odd, code=2).stderr
    assert said.startswith(
        "error: step cost 'odd': package odd 1.0: expected odd_module:cost to be a dataclass, got <function"
    )
