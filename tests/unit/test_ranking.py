"""Which configuration to take: bounds that hold, the marks of the best, and what is said about memory and load."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import sim
from sim import cli
from sim.errors import InputError
from sim.study.config import SimConfig
from sim.study.ranking import cells, notes, ranked

PLAIN: dict[str, object] = {
    "mean_running": 4.0,
    "peak_running": 9,
    "e2e_s_p95": 10.0,
    "ttft_s_p95": 1.0,
    "requests_per_s": 1.0,
    "retained_blocks_mean": 50.0,
    "used_blocks_peak": 95,
    "pool_blocks": 100,
    "preemptions": 0,
    "refused": 0,
    "load_state": "stable",
}


def runs(*different: dict[str, object]) -> pd.DataFrame:
    rows = []
    for given in different:
        each = {"reclaimer": "naive", **given}
        config = SimConfig(**{name: value for name, value in each.items() if name in SimConfig.model_fields})
        figures = {name: value for name, value in each.items() if name not in SimConfig.model_fields}
        rows.append({"config_hash": config.hash(), **config.model_dump(), **PLAIN, **figures})
    return pd.DataFrame(rows).astype({"budget": float, "budget_tokens": float})


def best(table: pd.DataFrame, *bounds: str) -> dict[tuple[str, str], str]:
    rows = ranked(table, bounds or ["e2e_p95=10"])
    return {(row["reclaimer"], row["keeps"]): row["best"] for row in rows.to_dict("records") if row["best"]}


def test_the_fastest_that_holds_and_the_one_with_the_fewest_blocks() -> None:
    table = runs(
        {"reclaimer": "naive", "requests_per_s": 3.0, "e2e_s_p95": 10.1},
        {"reclaimer": "vtoken", "requests_per_s": 2.0},
        {"reclaimer": "vtoken", "budget": 0.3, "retained_blocks_mean": 30.0},
        {"reclaimer": "ideal", "requests_per_s": 9.0, "retained_blocks_mean": 1.0},
    )
    assert best(table) == {("vtoken", "0.5"): "fastest", ("vtoken", "0.3"): "fewest blocks"}
    rows = ranked(table, "e2e_p95=10")
    assert rows["holds"].tolist() == [True, True, True, False]
    assert rows["requests_per_s"].tolist() == [9.0, 2.0, 1.0, 3.0]


def test_of_equally_fast_ones_the_lowest_latency_wins() -> None:
    table = runs(
        {"reclaimer": "naive", "requests_per_s": 1.005, "e2e_s_p95": 9.0},
        {"reclaimer": "vtoken", "requests_per_s": 1.0, "e2e_s_p95": 5.0, "retained_blocks_mean": 40.0},
        {"reclaimer": "vtoken", "budget": 0.3, "requests_per_s": 0.98, "e2e_s_p95": 2.0},
    )
    assert best(table) == {("vtoken", "0.5"): "fastest, fewest blocks"}


@pytest.mark.parametrize("fault", [{"load_state": "overloaded"}, {"refused": 1}, {"e2e_s_p95": float("nan")}])
def test_what_cannot_be_relied_on_does_not_hold(fault: dict[str, object]) -> None:
    assert best(runs({"requests_per_s": 5.0, **fault}, {"reclaimer": "vtoken"}))[("vtoken", "0.5")]
    rows = ranked(runs(fault), "e2e_p95=10")
    assert not rows["holds"].any()
    assert notes(rows)[-1] == "no configuration holds the bound"


def test_all_bounds_must_hold_and_their_figures_are_shown() -> None:
    table = runs({"reclaimer": "naive"}, {"reclaimer": "vtoken", "ttft_s_p95": 0.4})
    assert best(table, "e2e_p95=10", "ttft_p95=0.5") == {("vtoken", "0.5"): "fastest, fewest blocks"}
    assert "ttft_s_p95" in cells(ranked(table, ["ttft_p95=0.5"]))[0]


def test_seeds_are_averaged_and_the_worst_load_counts() -> None:
    table = runs({"e2e_s_p95": 8.0}, {"e2e_s_p95": 10.0, "seed": 1, "load_state": "backlogged"})
    (row,) = ranked(table, "e2e_p95=9").to_dict("records")
    assert (row["e2e_s_p95"], row["load_state"], row["holds"]) == (9.0, "backlogged", True)


def test_sorted_by_what_is_asked_for() -> None:
    table = runs({"reclaimer": "naive", "budget": 0.3}, {"reclaimer": "vtoken", "e2e_s_p95": 3.0, "rate_scale": 2.0})
    assert ranked(table, sort="e2e_s_p95")["reclaimer"].tolist() == ["vtoken", "naive"]
    assert ranked(table, sort="rate_scale")["rate_scale"].tolist() == [1.0, 2.0]
    with pytest.raises(InputError, match="did you mean 'e2e_s_p95'"):
        ranked(table, sort="e2e_p95")
    with pytest.raises(InputError, match="expected seconds"):
        ranked(table, "e2e_p95=1.05x")


def test_memory_that_is_not_short_and_load_that_is_too_much_are_said() -> None:
    roomy = {"used_blocks_peak": 61}
    (said,) = notes(ranked(runs(roomy, {"reclaimer": "vtoken", **roomy})))
    assert said.startswith("memory was not short: at most 61% of the blocks")
    assert notes(ranked(runs(roomy, {"reclaimer": "vtoken"}))) == []
    assert notes(ranked(runs({**roomy, "preemptions": 1}))) == []
    (said,) = notes(ranked(runs({"load_state": "overloaded"}, {"reclaimer": "vtoken"})))
    assert said.startswith("1 of 2 configurations are overloaded")
    (said,) = notes(ranked(runs({"refused": 3}, {"reclaimer": "vtoken"})))
    assert said.endswith("up to 3 a run")


def test_columns_that_say_nothing_are_left_out() -> None:
    heads, lines, settings = cells(ranked(runs({}, {"reclaimer": "vtoken", "preemptions": 2}), "e2e_p95=10"))
    assert heads[settings:] == [
        *("running", "at most", "e2e p95, s", "requests/s", "blocks", "pool", "preempted", "holds", "best")
    ]
    assert lines[0] == ["h2o", "0.5", "naive", "4.0", "9", "10.00", "1.000", "50.0", "95%", "0", "yes", lines[0][-1]]
    heads, lines, _ = cells(ranked(runs({"load_state": "overloaded"}), "e2e_p95=10"))
    assert lines[0][heads.index("holds")] == "overloaded"
    assert "preempted" not in heads


def test_the_command_prints_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"trace": "poisson:rate=20,n=10,prompt=64,output=20", "kv_blocks": 60, "reclaimer": ["naive", "vtoken"]}
    table = sim.sweep({"policy": "random", "budget": 0.5, **fields}, tmp_path / "out")
    expected = sim.ranked(table, ["e2e_p95=50"])
    assert expected["holds"].all()
    pd.testing.assert_frame_equal(
        sim.ranked(pd.read_csv(tmp_path / "out" / "summary.csv"), "e2e_p95=50"), expected, check_dtype=False
    )
    assert cli.main(["results", str(tmp_path / "out"), "--best", "e2e_p95=50", "--csv"]) == 0
    assert capsys.readouterr().out == expected.to_csv(index=False)
    assert cli.main(["results", str(tmp_path / "out"), "--best", "e2e_p95=50", "--markdown"]) == 0
    printed = capsys.readouterr()
    assert "| policy | keeps | reclaimer | running | at most |" in printed.out
    assert cli.main(["results", str(tmp_path / "out"), "--sort", "e2e_s_p95"]) == 0
    assert "fastest" not in capsys.readouterr().out
    assert cli.main(["results", str(tmp_path / "out"), "--best", "e2e_p95=0"]) == 2
    assert "expected a number above 0" in capsys.readouterr().err
