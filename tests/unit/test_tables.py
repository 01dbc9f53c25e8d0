"""Tables of a sweep: pairs with naive reclamation, means over seeds with their spread, text and Markdown."""

from __future__ import annotations

import io
import math

import pandas as pd
import pytest
from rich.console import Console

from sim.study.config import SimConfig
from sim.study.tables import Spread, comparison, markdown, paired, reclaimer_rank, text


def table(*runs: dict[str, object]) -> pd.DataFrame:
    rows = []
    for run in runs:
        figures = {name: value for name, value in run.items() if name not in SimConfig.model_fields}
        config = SimConfig(**{name: value for name, value in run.items() if name in SimConfig.model_fields})
        rows.append({"config_hash": config.hash(), **config.model_dump(), **figures})
    return pd.DataFrame(rows).astype({"budget": float, "budget_tokens": float})


def blocks(reclaimer: str, value: float, **fields: object) -> dict[str, object]:
    return {"reclaimer": reclaimer, "retained_blocks_mean": value, **fields}


def test_pairs_differ_in_nothing_but_reclamation() -> None:
    runs = table(
        blocks("naive", 100.0),
        blocks("vtoken", 60.0),
        blocks("vtoken", 50.0, theta_f=0.1),
        blocks("naive", 10.0, seed=1),
        blocks("vtoken", 9.0, seed=1),
        blocks("vtoken", 1.0, policy="random"),
        blocks("none", 80.0, policy="full"),
        blocks("naive", 40.0, budget_tokens=64),
        blocks("ideal", 10.0, budget_tokens=64),
    )
    change = paired(runs)["retained_blocks_mean_vs_naive"].tolist()
    assert change[:5] == pytest.approx([0.0, -0.4, -0.5, 0.0, -0.1])
    assert all(math.isnan(value) for value in change[5:7])
    assert change[7:] == pytest.approx([0.0, -0.75])


def test_each_kind_of_budget_is_a_row_in_its_own_words() -> None:
    runs = table(
        blocks("naive", 1.0, budget_memory="512MiB"),
        blocks("naive", 2.0, budget_memory="1GiB"),
        blocks("naive", 3.0, budget_tokens=64),
        blocks("naive", 4.0, budget=0.25),
    )
    keys = comparison(runs, "retained_blocks_mean").keys
    assert keys == (("h2o", "512MiB"), ("h2o", "1GiB"), ("h2o", "64 tokens"), ("h2o", "0.25"))


def test_rows_hold_settings_that_differ_and_columns_reclaimers() -> None:
    runs = table(
        blocks("naive", 100.0),
        blocks("vtoken", 60.0),
        blocks("naive", 50.0, block_size=32, budget=0.3),
        blocks("ideal", 5.0, policy="full"),
    )
    grid = comparison(runs, "retained_blocks_mean")
    assert grid.names == ("policy", "keeps", "block_size")
    assert grid.keys == (("h2o", "0.5", 16), ("h2o", "0.3", 32), ("full", "all", 16))
    assert grid.reclaimers == ("naive", "vtoken", "ideal")
    assert grid.cells[0][:2] == (Spread(100.0), Spread(60.0))
    assert grid.present(1) == [0]
    assert grid.present(2) == [2]


def test_seeds_are_averaged_and_their_spread_is_told() -> None:
    runs = table(*(blocks("naive", value, seed=seed) for seed, value in enumerate([10.0, 12.0, 14.0])))
    ((cell,),) = comparison(runs, "retained_blocks_mean").cells
    assert cell.mean == 12.0
    assert 1.0 <= cell.half <= 2.0
    assert comparison(runs, "retained_blocks_mean").cells == ((cell,),)


def test_markdown_names_the_change_and_its_spread() -> None:
    runs = table(
        *(blocks("naive", value, seed=seed) for seed, value in enumerate([100.0, 100.0])),
        *(blocks("vtoken", value, seed=seed) for seed, value in enumerate([60.0, 50.0])),
        blocks("none", 80.0, policy="full"),
    )
    assert markdown(runs) == (
        "**KV blocks a request holds while it decodes (mean)**\n\n"
        "| policy | keeps | none | naive | vtoken |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| h2o | 0.5 | - | 100.0 | 55.0 (-45.0 ±5.0 %) |\n"
        "| full | all | 80.0 | - | - |\n"
    )


def test_text_fits_a_terminal() -> None:
    runs = table(blocks("naive", 100.0), blocks("vtoken", 100.04), blocks("ideal", 20.0))
    stream = io.StringIO()
    Console(file=stream, width=80).print(*text(runs))
    assert "100.0 (+0.0 %)   20.0 (-80.0 %)" in stream.getvalue()
    assert "…" not in stream.getvalue()


def test_reclaimers_go_from_nothing_to_the_bound() -> None:
    names = ["ideal", "vtoken:theta_f=0.1", "naive", "sync", "none"]
    assert sorted(names, key=reclaimer_rank) == ["none", "naive", "sync", "vtoken:theta_f=0.1", "ideal"]


def test_an_empty_table_stays_empty() -> None:
    assert paired(pd.DataFrame()).empty
