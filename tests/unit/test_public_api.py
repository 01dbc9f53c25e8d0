"""What users' code relies on: names and signatures, written down; data frames, axes, and examples that run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import sim
from sim.study import library
from sim.study.search import search

WRITTEN_DOWN = Path(__file__).parents[1] / "golden" / "public_api.txt"
TRACE = "poisson:rate=8,n=12,prompt=200,output=40"
FIELDS = {"trace": TRACE, "policy": "random", "budget": 0.5, "reclaimer": ["naive", "ideal"], "kv_blocks": 400}


def described(name: str, what: Any) -> list[str]:
    """Return lines that change when a caller would have to."""
    if inspect.ismodule(what):
        return [line for each in what.__all__ for line in described(f"{name}.{each}", getattr(what, each))]
    if not inspect.isclass(what):
        return [f"{name}{inspect.signature(what)}"]
    # A configuration's fields are written down in docs/configuration.md.
    plain = what is sim.SimConfig or what.__init__ is RuntimeError.__init__
    lines = [f"{name}(..)" if plain else f"{name}{inspect.signature(what)}"]
    for each, value in sorted(vars(what).items()):
        if each.startswith("_") or each in getattr(what, "__dataclass_fields__", {}):
            continue
        if isinstance(value, property):
            lines.append(f"{name}.{each} -> {inspect.signature(value.fget).return_annotation}")
        elif isinstance(value, classmethod | staticmethod) or inspect.isfunction(value):
            function = getattr(what, each)
            lines.append(f"{name}.{each}{inspect.signature(function)}")
    return lines


def test_names_and_signatures_change_on_purpose() -> None:
    found = "\n".join(line for name in sim.__all__ for line in described(f"sim.{name}", getattr(sim, name))) + "\n"
    if os.environ.get("VTOKEN_WRITE_PUBLIC_API"):
        WRITTEN_DOWN.write_text(found, encoding="utf-8")
    assert found == WRITTEN_DOWN.read_text(encoding="utf-8"), (
        "the library has changed: say so in CHANGELOG.md, and write it down with "
        "VTOKEN_WRITE_PUBLIC_API=1 pytest tests/unit/test_public_api.py"
    )


def test_every_public_name_is_there_and_documented() -> None:
    assert sim.__all__ == sorted(sim.__all__)
    assert set(sim.__all__) <= set(dir(sim))
    for name in sim.__all__:
        assert inspect.getdoc(getattr(sim, name)), name
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = sim.simulat


@pytest.mark.parametrize("module", ["sim", "sim.plots", "sim.study.library", "sim.study.run"])
def test_the_examples_of_the_library_run(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried
    assert not failed


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return sim.sweep(FIELDS | {"seed": [1, 0]}, tmp_path_factory.mktemp("sweep") / "out")


def test_a_sweep_is_a_tidy_table_in_the_order_asked_for(table: pd.DataFrame) -> None:
    assert list(zip(table["reclaimer"], table["seed"], strict=True)) == [
        ("naive", 1), ("naive", 0), ("ideal", 1), ("ideal", 0)
    ]  # fmt: skip
    grid = {"reclaimer": FIELDS["reclaimer"]}
    base = {name: value for name, value in FIELDS.items() if name not in grid}
    spec = sim.SweepSpec(base=base, grid=grid, seeds=[1, 0])
    assert list(table["config_hash"]) == [run.config_hash for run in spec.expand().runs]
    one = sim.simulate(spec.expand().runs[2].config)
    assert table["e2e_s_p95"].iloc[2] == one.summary["e2e_s"]["p95"]
    naive, ideal = table["retained_blocks_mean"].iloc[[0, 2]]
    assert table["retained_blocks_mean_vs_naive"].iloc[2] == pytest.approx(ideal / naive - 1)
    assert list(one.requests_frame().columns)[:2] == ["req_id", "status"]


def test_a_sweep_takes_every_form_of_a_specification(tmp_path: Path) -> None:
    config = sim.SimConfig(**(FIELDS | {"reclaimer": "naive"}))
    toml = tmp_path / "sweep.toml"
    base = "\n".join(f"{key} = {value!r}".replace("'", '"') for key, value in FIELDS.items() if key != "reclaimer")
    toml.write_text(f'[base]\n{base}\n[grid]\nreclaimer = ["naive"]\n')
    spec = sim.SweepSpec.from_toml(toml)
    tables = [sim.sweep(each, tmp_path / "out") for each in (config, toml, str(toml), spec, spec.to_dict())]
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0])


def test_a_sweep_returns_its_own_runs_of_a_directory(tmp_path: Path) -> None:
    first = sim.sweep(FIELDS, tmp_path)
    again = sim.sweep(FIELDS | {"reclaimer": "ideal"}, tmp_path)
    assert list(again["config_hash"]) == [first["config_hash"].iloc[1]]
    assert again["retained_blocks_mean_vs_naive"].iloc[0] < 0, "paired with what was there before"


def test_a_run_that_fails_is_an_error(tmp_path: Path) -> None:
    impossible = FIELDS | {"reclaimer": "naive", "kv_blocks": 2}
    with pytest.raises(sim.RunFailedError, match=r"1 of 1 runs failed; \w+: no request can be served"):
        sim.sweep(impossible, tmp_path / "out")
    with pytest.raises(sim.InputError, match="unknown field 'polcy'; did you mean 'policy'"):
        sim.sweep({"polcy": "random"})


def test_a_search_says_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sim.search_concurrency(FIELDS | {"kv_blocks": 100}, tmp_path, checks=0)
    assert (found.metric, found.unit) == ("max_concurrency", "requests")
    naive, ideal = found.answers["max_concurrency"]
    assert 1 <= naive < ideal
    assert found.answers["vs_naive"].tolist() == [1.0, ideal / naive]
    for place, answer in enumerate((naive, ideal)):
        probes = found.probes[found.probes["search"] == place]
        assert probes.loc[probes["holds"], "value"].max() == answer
    with pytest.raises(ValueError, match="there are 2 searches"):
        _ = found.answer
    axes = sim.plots.search_probes(found)
    assert axes.get_xlabel() == "max_concurrency (requests)"
    assert [text.get_text() for text in axes.get_yticklabels()] == list(found.answers["label"])
    drawn = sorted(x for line in axes.get_lines() if line.get_marker() != "None" for x in line.get_xdata())
    assert drawn == sorted(found.probes["value"])

    def failing(*args: Any, **kwargs: Any) -> Any:
        return search(*args, run=_fails, **kwargs)

    monkeypatch.setattr(library, "search_all", failing)
    with pytest.raises(sim.RunFailedError, match="no luck"):
        sim.search_concurrency(FIELDS, tmp_path / "other")


def _fails(config: sim.SimConfig) -> sim.RunResult:
    raise RuntimeError(f"no luck with {config.policy}")


def test_an_answer_may_not_exist() -> None:
    found = library.SearchResult("rate", "1/s", pd.DataFrame({"rate": [None]}), pd.DataFrame())
    assert found.answer is None


def test_pictures_are_axes_of_yours_or_new_ones(table: pd.DataFrame) -> None:
    configs = [sim.SimConfig(**(FIELDS | {"reclaimer": name, "repack_when": "always"})) for name in ("naive", "vtoken")]
    naive, vtoken = map(sim.simulate, configs)
    assert vtoken.pool_snapshot is not None
    given: dict[str, Any] = {name: vtoken for name in sim.plots.__all__}
    given |= {"setting_bars": table, "latency_ranges": table, "reduction_cdf": [naive, vtoken]}
    del given["search_probes"], given["save"], given["use_style"]  # have tests elsewhere
    for name, data in given.items():
        draw = getattr(sim.plots, name)
        mine = Figure().subplots()
        assert draw(data, axes=mine) is mine
        made = draw(data)
        assert isinstance(made, Axes)
        for axes in (mine, made):
            assert axes.get_title("left")
            assert axes.has_data()
            assert axes.get_xlabel() or name == "pool_blocks"
    assert "matplotlib.pyplot" not in sys.modules


def test_pictures_refuse_what_they_cannot_draw(table: pd.DataFrame) -> None:
    result = sim.simulate(sim.SimConfig(**(FIELDS | {"reclaimer": "ideal"})))
    with pytest.raises(
        sim.InputError, match="latency 'e2e': expected one of ttft_s, tpot_s, e2e_s; did you mean 'e2e_s'"
    ):
        sim.plots.latency_distribution(result, "e2e")
    with pytest.raises(sim.InputError, match=r"column 'mean_runing': .*; did you mean 'mean_running'"):
        sim.plots.setting_bars(table, "mean_runing")
    with pytest.raises(sim.InputError, match="when: expected 'before' or 'after'"):
        sim.plots.pool_blocks(result, "then")
    with pytest.raises(sim.InputError, match="expected a run with reclaimer 'naive'"):
        sim.plots.reduction_cdf([result])


def test_bars_say_what_the_table_says(table: pd.DataFrame) -> None:
    axes = sim.plots.setting_bars(table, "mean_running")
    drawn = [patch.get_height() for patch in axes.patches]
    assert drawn == pytest.approx(table.groupby("reclaimer", sort=False)["mean_running"].mean().tolist())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["naive", "ideal"]


def test_workers_give_the_same_table(table: pd.DataFrame, tmp_path: Path) -> None:
    both = sim.sweep(FIELDS | {"seed": [1, 0]}, tmp_path, workers=2)
    pd.testing.assert_frame_equal(both, table)
