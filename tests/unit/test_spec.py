"""A sweep's specification: expansion, order, duplicates, includes and excludes, flags, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import InputError
from sim.study.spec import SweepSpec


def rows(spec: SweepSpec) -> list[tuple[str, str, str, int]]:
    return [(c.policy, c.keeps, c.reclaimer, c.seed) for c in (run.config for run in spec.expand().runs)]


def test_grid_is_expanded_in_its_written_order_with_seeds_innermost() -> None:
    spec = SweepSpec(grid={"reclaimer": ["vtoken", "naive"], "budget": [0.5, 0.3]}, seeds=[1, 0])
    assert rows(spec) == [
        ("h2o", keeps, reclaimer, seed)
        for reclaimer in ("vtoken", "naive")
        for keeps in ("0.5", "0.3")
        for seed in (1, 0)
    ]


def test_duplicates_are_dropped_by_hash() -> None:
    plan = SweepSpec(base={"policy": "full"}, grid={"budget": [0.3, 0.5, 0.7]}, seeds=[0, 1]).expand()
    assert (len(plan.runs), plan.duplicates) == (2, 4)


def test_exclude_matches_partially_and_sees_defaults() -> None:
    spec = SweepSpec(
        base={"block_size": 16},
        grid={"policy": ["full", "h2o"], "reclaimer": ["none", "naive"]},
        exclude=[{"policy": "h2o", "reclaimer": "none"}, {"policy": ["full"], "reclaimer": "naive", "seed": 0}],
        seeds=[0, 1],
    )
    plan = spec.expand()
    assert plan.excluded == 3
    assert rows(spec) == [
        ("full", "all", "none", 0),
        ("full", "all", "none", 1),
        ("full", "all", "naive", 1),
        ("h2o", "0.5", "naive", 0),
        ("h2o", "0.5", "naive", 1),
    ]
    assert SweepSpec(grid={"budget": [0.3]}, exclude=[{"policy": "random"}]).expand().excluded == 0


def test_include_adds_runs_outside_the_grid_with_lists_of_their_own() -> None:
    spec = SweepSpec(
        grid={"policy": ["h2o"]},
        include=[{"policy": "full", "reclaimer": "none"}, {"policy": "random", "budget": [0.2, 0.4], "seed": 9}],
    )
    assert rows(spec) == [
        ("h2o", "0.5", "vtoken", 0),
        ("full", "all", "none", 0),
        ("random", "0.2", "vtoken", 9),
        ("random", "0.4", "vtoken", 9),
    ]


def test_one_flag_fixes_a_field_and_several_are_an_axis() -> None:
    spec = SweepSpec(base={"budget": 0.5, "block_size": 16}, grid={"policy": ["h2o", "random"]}, seeds=[0, 1])
    changed = spec.with_flags({"policy": ["random"], "budget_tokens": [8, 16], "seed": [7]})
    assert changed.base == {"block_size": 16, "policy": "random"}
    assert changed.grid == {"budget_tokens": [8, 16]}
    assert changed.seeds == [7]
    assert spec.base == {"budget": 0.5, "block_size": 16}


def test_reads_toml(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(
        'name = "first"\nseeds = [0, 1]\n[base]\nhead = 10\n[grid]\npolicy = ["h2o", "full"]\n'
        '[[exclude]]\npolicy = "full"\n[[include]]\npolicy = "full"\nreclaimer = "none"\n'
    )
    spec = SweepSpec.from_toml(path)
    assert spec.name == "first"
    assert rows(spec) == [("h2o", "0.5", "vtoken", s) for s in (0, 1)] + [("full", "all", "none", s) for s in (0, 1)]
    assert SweepSpec.from_dict(spec.to_dict()) == spec


def test_a_seed_in_base_is_the_only_seed(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text("[base]\nseed = 4\n")
    assert SweepSpec.from_toml(path).seeds == [4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gird]\n", "unknown part 'gird': expected base, grid, seeds, exclude, include, name; did you mean 'grid'?"),
        ("[grid]\npolcy = ['h2o']\n", "grid: unknown field 'polcy'; did you mean 'policy'?"),
        ("[base]\npolcy = 'h2o'\n", "base: unknown field 'polcy'; did you mean 'policy'?"),
        ("[grid]\npolicy = 'h2o'\n", "grid.policy: expected a list of at least one value, got 'h2o'"),
        ("[grid]\npolicy = []\n", "grid.policy: expected a list of at least one value"),
        ("[grid]\nseed = [1]\n", "list the seeds as seeds = "),
        ("seeds = 3\n", "seeds: expected a list of whole numbers"),
        ("seeds = [0, -1]\n", "seeds: expected a list of whole numbers"),
        ("seeds = [true]\n", "seeds: expected a list of whole numbers"),
        ("base = 3\n", "base: expected a table"),
        ("[exclude]\npolicy = 'h2o'\n", "exclude: expected a list of tables, write [[exclude]]"),
        ("[[exclude]]\n", "exclude 1: expected at least one field"),
        ("[[include]]\nx = 1\n", "include 1: unknown field 'x'"),
        ("[base]\nbudget = 0.5\n[grid]\nbudget = [0.3]\n", "budget: given in base and in grid"),
    ],
)
def test_a_bad_specification_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        SweepSpec.from_toml(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_combination_that_means_nothing_says_which_and_how_to_leave_it_out() -> None:
    spec = SweepSpec(grid={"policy": ["full", "h2o"], "reclaimer": ["none"]})
    with pytest.raises(InputError, match=r"policy h2o, reclaimer none.*\[\[exclude\]\]"):
        spec.expand()


def test_excluding_everything_is_refused() -> None:
    with pytest.raises(InputError, match="no run is left: 1 excluded"):
        SweepSpec(grid={"policy": ["h2o"]}, exclude=[{"policy": "h2o"}]).expand()


def test_what_a_combination_cannot_be_names_the_file(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text('[base]\nbudget = "half"\n')
    spec = SweepSpec.from_toml(path)
    with pytest.raises(InputError, match=r"spec\.toml: seed 0: budget: expected a valid number, got 'half'"):
        spec.expand()
    assert "where" not in spec.to_dict()
    assert SweepSpec.from_dict(spec.to_dict()) == spec
