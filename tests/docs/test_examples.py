"""What the documentation shows is run: packages are built and installed, their tests pass, outputs are as printed."""

import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from sim.cli import COMMANDS, PLUGINS
from sim.study.config import SimConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return (language, file name or nothing, text) of each code block of a page."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def write_files(page: str, folder: Path) -> None:
    """Write the code blocks that have a file name."""
    for _, name, text in blocks(page):
        if name:
            (folder / name).write_text(text, encoding="utf-8")


def shell(page: str) -> str:
    """Return the page's commands; ``vtoken`` is this checkout's."""
    commands = "".join(text for language, _, text in blocks(page) if language == "sh")
    assert "vtoken " in commands
    return f'set -e\nvtoken() {{ "{sys.executable}" -m sim.cli "$@"; }}\n{commands}'


def call(*command: str, cwd: Path, path: tuple[Path, ...] = ()) -> str:
    """Run a command with ``path`` and this checkout importable; return what it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "listing", "names"),
    [
        ("add_a_policy.md", "policies", {"decayed", "thin_middle"}),
        ("add_a_reclaimer.md", "reclaimers", {"per_request"}),
    ],
)
def test_the_package_works_once_installed(page: str, listing: str, names: set[str], tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling: pip install -e '.[test]'")
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    for folder in (source, elsewhere):
        folder.mkdir()
    write_files(page, source)
    build = f"from hatchling import build; build.build_wheel({str(tmp_path)!r})"
    call(sys.executable, "-c", build, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    listed = json.loads(call(sys.executable, "-m", "sim.cli", listing, "--json", cwd=elsewhere, path=(site,)))
    assert names <= {row["name"] for row in listed}
    call("bash", "-c", shell(page), cwd=elsewhere, path=(site,))
    (test,) = source.glob("test_*.py")
    (elsewhere / test.name).write_text(test.read_text())
    call(sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=elsewhere, path=(site,))


COMMAND_PAGES = sorted(f"commands/{path.name}" for path in (DOCS / "commands").glob("*.md") if path.stem != "index")
NEED_TORCH = {"commands/calibrate.md", "commands/replay.md", "commands/validate.md"}


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMAND_PAGES)
def test_the_examples_of_a_command(page: str, tmp_path: Path) -> None:
    if page in NEED_TORCH:
        pytest.importorskip("torch", reason="needs torch: pip install -e '.[gpu]'")
    write_files(page, tmp_path)
    call("bash", "-c", shell(page), cwd=tmp_path)


def test_every_command_has_a_page() -> None:
    plugins = [entry.name for entry in entry_points(group=PLUGINS)]
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "commands").glob("*.md"))
    for name in (*COMMANDS, *plugins):
        listed = re.search(rf"^```{{vtoken-options}} {name}\b", pages, re.MULTILINE)
        assert listed or (DOCS / f"{name}.md").exists(), name


def test_the_examples_of_the_library(tmp_path: Path) -> None:
    ((_, _, text),) = [block for block in blocks("library.md") if block[0] == "python"]
    (tmp_path / "example.py").write_text(text)
    call(sys.executable, "-W", "error", "example.py", cwd=tmp_path)
    assert (tmp_path / "slots.png").stat().st_size > 10_000


@pytest.mark.parametrize("page", ["add_a_policy.md", "add_a_reclaimer.md"])
def test_examples_stay_short(page: str) -> None:
    written = [text for language, name, text in blocks(page) if language == "python" and not name.startswith("test_")]
    assert written
    assert all(len(text.splitlines()) < 50 for text in written)


def test_the_worked_example_of_a_repack(tmp_path: Path) -> None:
    page = "kv_events.md"
    write_files(page, tmp_path)
    call("bash", "-c", shell(page), cwd=tmp_path)
    printed = call(sys.executable, "print_events.py", cwd=tmp_path)
    shown = [text for language, _, text in blocks(page) if language == "text" and " ms " in text]
    assert [printed] == shown


@pytest.mark.slow
def test_the_commands_of_the_page_on_reports(tmp_path: Path) -> None:
    call("bash", "-c", shell("report.md"), cwd=tmp_path)
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert '"label": "naive"' in page
    assert '"label": "vtoken"' in page
    picture = "block_map.svg"
    assert (tmp_path / "runs" / "vtoken" / "plots" / picture).stat().st_size > 10_000
    assert (DOCS / "images" / picture).stat().st_size > 10_000


def test_the_sweep_of_the_page_on_sweeps(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs Dask: pip install -e '.[test]'")
    pytest.importorskip("duckdb", reason="needs DuckDB: pip install -e '.[test]'")
    write_files("sweeps.md", tmp_path)
    printed = call("bash", "-c", shell("sweeps.md"), cwd=tmp_path)
    assert "expected time: " in printed
    assert "| h2o | 0.3 |" in printed
    assert call(sys.executable, "read.py", cwd=tmp_path).count("streaming_llm") >= 3


def test_the_way_from_a_trace_to_a_decision(tmp_path: Path) -> None:
    write_files("decide.md", tmp_path)
    lines = [
        {"timestamp": 300 * n, "input_length": 500 + 40 * (n % 7), "output_length": 20 + n % 9, "hash_ids": [0, n + 1]}
        for n in range(24)
    ]
    (tmp_path / "my_trace.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    printed = call("bash", "-c", shell("decide.md"), cwd=tmp_path)
    table = printed[printed.rindex("policy") :]
    heads = re.split(r"  +", table.splitlines()[0].strip())
    shown = [
        text for _, text in re.findall(r"(\n\n)(\| policy .*\n)", (DOCS / "decide.md").read_text(encoding="utf-8"))
    ]
    # Nobody is preempted in this trace, so that the column is not there.
    assert [f"| {' | '.join(heads)} |\n"] == [shown[-1].replace(" preempted |", "")]
    assert table.count(" yes ") == 13
    assert table.count("fastest") == 1
    assert call(sys.executable, "decide.py", cwd=tmp_path).count("fastest") == 1


def test_the_fit_of_the_page_on_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, _, text),) = [block for block in blocks("profiles.md") if block[0] == "python"]
    exec(compile(text, "profiles.md", "exec"), {})
    value, low, high = (float(part) for part in re.findall(r"[\d.]+", capsys.readouterr().out))
    assert low < value < high
    assert value == pytest.approx(3.2e-4, rel=0.02)


def test_the_checks_of_the_page_on_plugins() -> None:
    toml, code = (text for language, _, text in blocks("plugins.md") if language in ("toml", "python"))
    assert toml in (ROOT / "tests" / "example_plugin" / "pyproject.toml").read_text(encoding="utf-8")
    exec(compile(code, "plugins.md", "exec"), {})


def test_configuration_is_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "configuration_md.py"))
    expected = script["page"](SimConfig.model_json_schema())
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == expected, (
        "out of date: vtoken config schema | python docs/configuration_md.py > docs/configuration.md"
    )


def test_links_lead_somewhere() -> None:
    for page in [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
