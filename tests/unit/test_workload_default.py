"""The trace that is shipped: what the manifest says of it is true."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim.cli.trace import app
from sim.workload import open_source, read_trace
from sim.workload.default import default_path

FOLDER = Path(__file__).resolve().parents[2] / "traces"
ENTRY = tomllib.loads((FOLDER / "manifest.toml").read_text())["default"]


def test_the_hash_is_the_files() -> None:
    assert hashlib.sha256((FOLDER / ENTRY["file"]).read_bytes()).hexdigest() == ENTRY["sha256"]


def test_the_command_makes_the_file_again_byte_for_byte(tmp_path: Path) -> None:
    vtoken, trace, *arguments = ENTRY["command"]
    assert (vtoken, trace) == ("vtoken", "trace")
    assert arguments[-2:] == ["--out", f"traces/{ENTRY['file']}"]
    out = tmp_path / "again.csv"
    result = CliRunner().invoke(app, [*arguments[:-1], str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_bytes() == (FOLDER / ENTRY["file"]).read_bytes()


def test_it_looks_like_the_service_it_is_fitted_to() -> None:
    trace = read_trace("default")
    d = trace.describe()
    assert d.requests == ENTRY["requests"] == 2000
    assert d.prompt_tokens.mean == pytest.approx(1155, rel=0.1)
    assert d.prompt_tokens.p50 == pytest.approx(1020, rel=0.1)
    assert d.output_tokens.mean == pytest.approx(211, rel=0.1)
    assert d.output_tokens.p90 == pytest.approx(424, rel=0.1)
    assert d.rate_per_s == pytest.approx(5.5, rel=0.15)
    assert d.gap_cv == pytest.approx(1.09, abs=0.06)
    assert d.dispersion["10 s"] == pytest.approx(3.9, rel=0.3)


def test_the_source_tree_holds_it_and_its_name_wins() -> None:
    assert default_path().read_bytes() == (FOLDER / ENTRY["file"]).read_bytes()
    assert open_source("default").name == "default.csv"
