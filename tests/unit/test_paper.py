"""The paper's claims: what is run, how a claim is judged, and what is written about it."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from sim.cli import main
from sim.errors import InputError
from sim.study.paper import claims_frame, markdown, reproduce, setups, size_named, verdict, worlds_frame, write
from sim.study.paper.beyond import head_to_head
from sim.study.paper.claims import CLAIMS, in_worlds
from sim.study.paper.evidence import Evidence, Figure, Limit, figure, interval
from sim.study.paper.pictures import draw
from sim.study.paper.setups import ALWAYS, FRONTIER, LENGTHS, SIZES, Server, combined, native_parts, parts
from sim.study.paper.verdict import CANNOT_SAY, FAILS, HOLDS, Claim, Judgement, World, near, reaches

SMALL = dataclasses.replace(
    SIZES["smoke"],
    servers=(Server("llama-3.1-8b", 0.35),),
    requests={"sharegpt": 6, "longbench": 2},
    seeds=(0, 1),
    varied={"headroom": (0.1,)},
)


def judged(*holds: bool | None) -> Judgement:
    worlds = tuple(
        World({"": "short", "load": str(n)}, Figure(0.1 * n, 0.1 * n - 0.01, 0.1 * n + 0.01), each)
        for n, each in enumerate(holds)
    )
    claim = Claim("key", "what", "+10 %", "A", "rule", "%", lambda _: worlds, lambda _, __: "why")
    return Judgement(claim, worlds, "why")


def test_a_claim_holds_in_every_world_or_in_none_or_cannot_be_said():
    assert judged(True, True).verdict == HOLDS
    assert judged(False, False).verdict == FAILS
    assert judged(True, False).verdict == CANNOT_SAY
    assert judged().verdict == CANNOT_SAY
    assert judged(None, None).verdict == CANNOT_SAY
    assert (judged(True, False, True).count, judged(None).count, judged().count) == ("2 of 3", "-", "-")


def test_where_a_claim_holds_is_said_when_it_depends_with_worlds_gathered():
    assert judged(True, False, True).where == "short, load 0 | 2"
    assert judged(True, True).where == ""
    assert judged(False, False).where == ""


def test_ours_is_the_range_over_worlds_with_the_spread_over_seeds():
    assert judged(True, False, True).ours == "+0.0 ±1.0 .. +20.0 ±1.0 %"
    assert judged().ours == "-"


def test_a_bound_is_reached_within_the_spread_in_its_direction():
    assert reaches(Figure(0.35, 0.33, 0.38), 0.373)
    assert not reaches(Figure(0.35, 0.33, 0.37), 0.373)
    assert reaches(Figure(-0.26, -0.28, -0.24), -0.272)
    assert not reaches(Figure(-0.26, -0.27, -0.24), -0.272)


def test_means_are_alike_within_a_quarter_of_the_papers_or_their_spread():
    assert near(Figure(0.15, 0.15, 0.15), 0.189)
    assert not near(Figure(0.14, 0.14, 0.14), 0.189)
    assert near(Figure(0.1, 0.0, 0.2), 0.189)
    assert verdict.NEAR == 0.25


def test_the_interval_of_one_seed_is_a_point_and_missing_figures_are_left_out():
    assert interval(np.array([2.0, np.nan])) == Figure(2.0, 2.0, 2.0)
    assert np.isnan(interval(np.array([np.nan])).mean)
    found = interval(np.array([1.0, 2.0, 3.0]))
    assert (found.mean, found.low, found.high) == (2.0, 1.0, 3.0)


def test_a_figure_over_set_ups_has_the_spread_of_its_seeds_means():
    table = pd.DataFrame({"seed": [0, 0, 1, 1], "x": [1.0, 3.0, 2.0, 4.0]})
    assert figure(table, "x") == Figure(2.5, 2.0, 3.0)


def test_the_longest_of_the_papers_policies_decides(monkeypatch):
    monkeypatch.setattr("sim.study.paper.claims.lines_of_code", lambda source: 60 if "Scissorhands" in source else 10)
    found = judge("lines", Evidence(pd.DataFrame(), [], [], {}))
    assert (found.worlds[0].figure.mean, found.worlds[0].cell, found.verdict) == (60, "scissorhands", FAILS)
    assert "h2o 10, scissorhands 60, random 10" in found.why


@pytest.mark.parametrize("name", SIZES)
def test_one_sweep_makes_the_runs_of_all_parts(name):
    size = SIZES[name]
    rates = {(server, lengths): 2.0 for server in setups._servers(size) for lengths in LENGTHS}
    wanted = parts(size, rates)
    runs = {config_hash for part in wanted for config_hash, _ in part.runs()}
    assert {run.config_hash for run in combined(wanted).expand().runs} == runs
    native = {config_hash for part in native_parts(size) for config_hash, _ in part.runs()}
    assert native < runs
    assert {run.config_hash for run in combined(native_parts(size)).expand().runs} == native


def test_loads_are_shares_of_what_the_server_does_without_eviction():
    rates = {(server, lengths): 8.0 for server in setups._servers(SMALL) for lengths in LENGTHS}
    main_part = next(part for part in parts(SMALL, rates) if part.name == "main")
    assert main_part.tags["load"] == 1.2
    assert main_part.fields["trace"].startswith("poisson:rate=9.6,")


def test_every_claim_has_a_figure_of_the_papers_and_a_name_of_its_own():
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS) > 20
    assert {claim.source for claim in CLAIMS} == {"A", "B", "C"}
    assert all(claim.paper and claim.what for claim in CLAIMS)


def frontier(found: dict[tuple[str, str], float]) -> Evidence:
    """Evidence with nothing but the frontier's first row."""
    row = FRONTIER[0]
    limits = [(row, Limit((), "full", 0.0, "none", 5.0))]
    limits += [(row, Limit((), policy, 0.5, reclaimer, value)) for (policy, reclaimer), value in found.items()]
    return Evidence(pd.DataFrame(), limits, [], {})


def judge(key: str, evidence: Evidence) -> Judgement:
    return Judgement.of(next(claim for claim in CLAIMS if claim.key == key), evidence)


def test_a_row_of_the_frontier_holds_where_both_of_its_figures_come_out():
    evidence = frontier({("h2o", "vtoken"): 8.0, ("h2o", ALWAYS): 11.0, ("h2o", "reuse+vtoken"): 8.0})
    found = judge("frontier_llama_35", evidence)
    assert [world.holds for world in found.worlds] == [True, False]
    assert found.where == "policy h2o, evicting 0.5, repack under pressure"
    ratio = judge("frontier_ratio", evidence)
    assert [(world.figure.mean, world.holds) for world in ratio.worlds] == [(1.6, False), (2.2, True)]
    assert judge("frontier_llama_50", evidence).verdict == CANNOT_SAY


def test_the_gain_in_sla_throughput_is_of_pairs_and_the_most_of_a_world_counts():
    server = Server("llama-3.1-8b", 0.35)
    rates = {("h2o", "naive"): 2.0, ("h2o", "vtoken"): 2.2, ("random", "naive"): 1.0, ("random", "vtoken"): 1.4}
    rates |= {(policy, ALWAYS): 2.0 for policy in ("h2o", "random")}
    sla = [Limit((server, "longbench", 0.8), policy, 0.5, name, value) for (policy, name), value in rates.items()]
    found = judge("sla", Evidence(pd.DataFrame(), [], sla, {}))
    assert [(world.name, world.figure.mean) for world in found.worlds] == [
        ("longbench, under pressure, load of the baseline 0.8", 1.4),
        ("longbench, repack always, load of the baseline 0.8", 2.0),
    ]
    assert found.verdict == HOLDS
    assert found.worlds[0].cell == "random evicting 0.5, llama-3.1-8b, 0.35 of the memory"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("paper")
    found = reproduce(out, SMALL, workers=0)
    return out, found, write(found, out)


def test_all_runs_are_made_once_and_files_are_the_same_again(made, tmp_path):
    out, found, paths = made
    assert found.made == len(list((out / "runs").glob("*.parquet")))
    before = {path.name: path.read_bytes() for path in paths}
    again = reproduce(out, SMALL, workers=0)
    assert again.made == 0
    assert {path.name: path.read_bytes() for path in write(again, out)} == before
    names = {path.name for path in draw(again, tmp_path)}
    assert names == {"retained.png", "throughput.png", "sensitivity.png"}


def test_every_claim_is_judged_and_worlds_are_what_was_told(made):
    _, found, _ = made
    claims = claims_frame(found.judgements)
    assert claims["claim"].tolist() == [claim.key for claim in CLAIMS]
    assert set(claims["verdict"]) <= {HOLDS, FAILS, CANNOT_SAY}
    worlds = worlds_frame(found.judgements)
    mine = worlds[worlds["claim"] == "retained_least"]["world"].tolist()
    assert "longbench, repack always, memory 0.35, load 1.2" in mine
    assert "sharegpt, headroom 10 %, memory 0.35, load 1.2" in mine
    assert len(mine) == len(set(mine)) == 6


def test_changes_are_against_the_paired_naive_run(made):
    _, found, _ = made
    table = found.evidence.part("main")
    one = table[(table["policy"] == "random") & (table["ratio"] == 0.5) & (table["seed"] == 1)]
    one = one[one["lengths"] == "longbench"].set_index("reclaimer")
    naive, ours = one.loc["naive"], one.loc["reuse+vtoken"]
    change = ours["retained_blocks_mean"] / naive["retained_blocks_mean"] - 1
    assert ours["retained_blocks_mean_change"] == pytest.approx(change)
    assert -0.52 < change < -0.47
    assert ours["naive_fragmentation"] == naive["fragmentation_mean"]


def test_one_shot_random_eviction_at_work_always_saves_the_share_that_is_evicted(made):
    """Closed form: a dense cache saves a share r of the blocks of one with holes everywhere."""
    _, found, _ = made
    table = found.evidence.part("main")
    mine = table[(table["policy"] == "random") & (table["reclaimer"] == ALWAYS) & (table["lengths"] == "longbench")]
    for ratio, group in mine.groupby("ratio"):
        assert -group["retained_blocks_mean_change"].mean() == pytest.approx(ratio, abs=0.03)


def test_worlds_hold_runs_of_vtoken_alone_each_once(made):
    _, found, _ = made
    groups = [group for _, group in in_worlds(found.evidence.part("main", "variant"))]
    assert all(group["reclaimer"].str.startswith("vtoken").all() for group in groups)
    assert all(group["reclaimer"].nunique() == 1 for group in groups)
    pairs = head_to_head(found.evidence)
    assert (pairs["better"] + pairs["worse"] <= pairs["pairs"]).all()
    assert (pairs["pairs"] == 2 * 3 * 3 * 2).all()


def test_the_page_has_a_line_for_each_claim_and_says_where_it_depends(made):
    _, found, _ = made
    text = markdown(found)
    for each in found.judgements:
        assert f"| {each.claim.what} ({each.claim.source}) | {each.claim.paper} |" in text
        assert not each.where or f"Holds with: {each.where}." in text
    assert "nan" not in text.lower()


def test_a_size_that_is_none_is_one_line():
    with pytest.raises(InputError, match=r"^size 'quik': expected default or quick or smoke; did you mean 'quick'\?$"):
        size_named("quik")


@pytest.mark.parametrize("words", [["--size", "quik"], ["--quick", "--size", "smoke"]])
def test_the_command_refuses_what_it_cannot_use(words, capsys, tmp_path):
    assert main(["reproduce", "--out", str(tmp_path / "out"), *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_prints_json_with_every_claim(made, monkeypatch, capsys):
    out, _, _ = made
    monkeypatch.setitem(SIZES, "smoke", SMALL)
    assert main(["reproduce", "--out", str(out), "--size", "smoke", "--workers", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert [each["claim"] for each in json.loads(captured.out)["claims"]] == [claim.key for claim in CLAIMS]
    assert captured.err.splitlines()[-1].startswith("0 runs made; ")


def evidence_of(*rows: dict[str, object]) -> Evidence:
    """Evidence of made-up runs; what a row does not say is as in the paper's set-up."""
    told = {
        "part": "main", "model": "mistral-7b", "memory": 0.35, "lengths": "longbench", "load": 1.2,
        "variant": setups.BASE, "policy": "h2o", "ratio": 0.5, "reclaimer": "vtoken", "seed": 0,
    }  # fmt: skip
    return Evidence(pd.DataFrame([told | row for row in rows]), [], [], {})


def test_the_ends_of_a_range_are_of_the_weakest_and_the_strongest_set_up():
    evidence = evidence_of(
        {"policy": "h2o", "requests_per_s_change": 0.11},
        {"policy": "random", "requests_per_s_change": 0.40},
        {"policy": "scissorhands", "requests_per_s_change": 0.05, "load": 0.8},
        {"policy": "random", "requests_per_s_change": 0.01, "model": "llama-3.1-8b"},
        {"policy": "random", "requests_per_s_change": 0.02, "reclaimer": "reuse+vtoken"},
    )
    least, most = judge("mistral_throughput_least", evidence), judge("mistral_throughput_most", evidence)
    assert [(world.figure.mean, world.holds) for world in least.worlds] == [(0.11, True), (0.05, False)]
    assert [(world.figure.mean, world.holds) for world in most.worlds] == [(0.40, True), (0.05, False)]
    assert most.worlds[0].cell == "random evicting 0.5, mistral-7b"
    assert least.where == "longbench, under pressure, memory 0.35, load 1.2"


def test_the_least_of_a_reduction_is_the_smallest():
    evidence = evidence_of({"e2e_s_p95_change": -0.3}, {"e2e_s_p95_change": -0.05, "policy": "random"})
    least, most = judge("mistral_p95_least", evidence), judge("mistral_p95_most", evidence)
    assert (least.worlds[0].figure.mean, least.verdict) == (-0.05, FAILS)
    assert (most.worlds[0].figure.mean, most.verdict) == (-0.3, HOLDS)


def test_a_mean_is_over_the_set_ups_of_one_model():
    rows = [
        {"model": "llama-3.1-8b", "policy": name, "requests_per_s_change": x} for name, x in (("a", 0.1), ("b", 0.3))
    ]
    found = judge("llama_throughput", evidence_of(*rows, {"requests_per_s_change": 9.0}))
    assert [(world.figure.mean, world.holds) for world in found.worlds] == [(0.2, True)]


def test_utilisation_is_counted_in_points_and_as_a_share():
    found = judge("utilisation_mistral", evidence_of({"fragmentation_mean": 0.3, "naive_fragmentation": 0.5}))
    points, share = found.worlds
    assert (points.figure.mean, points.holds) == (pytest.approx(0.2), True)
    assert (share.figure.mean, share.holds) == (pytest.approx(0.4), False)
    assert found.where == "longbench, under pressure, memory 0.35, load 1.2, counted in points"


def test_a_repack_that_frees_no_more_than_it_takes_is_found():
    good = {"repacks_committed": 4, "blocks_freed_by_repack": 9}
    bad = {"repacks_committed": 4, "blocks_freed_by_repack": 3, "load": 0.8}
    none = {"repacks_committed": 0, "blocks_freed_by_repack": 0, "load": setups.ALL_AT_ONCE}
    assert [world.holds for world in judge("each_repack_wins", evidence_of(good, bad, none)).worlds] == [True, False]


def test_shared_prefixes_and_fragmentation_are_judged_by_cell():
    shared = evidence_of(
        {"part": "prefix", "lengths": "512 of 2,448 shared", "retained_blocks_mean_change": -0.42},
        {"part": "prefix", "lengths": "2048 of 2,448 shared", "retained_blocks_mean_change": -0.2},
    )
    assert judge("prefix", shared).where == "512 of 2,448 shared, under pressure, evicting 0.5, policy h2o"
    long = evidence_of(
        {"part": "16k", "fragmentation_mean": 0.5, "reclaimer": "naive"},
        {"part": "16k", "fragmentation_mean": 0.3, "reclaimer": "naive", "ratio": 0.3},
    )
    assert [world.holds for world in judge("fragmentation_16k", long).worlds] == [True, False]


def test_what_has_no_figure_of_the_papers_is_shown_and_not_judged():
    table = evidence_of(
        {"part": "variant", "retained_blocks_mean_change": -0.2},
        {"part": "variant", "retained_blocks_mean_change": -0.1, "variant": "theta_f 0.4"},
        {"part": "variant", "retained_blocks_mean_change": -0.3, "variant": "block_size 48"},
    )
    found = judge("theta_f", table)
    assert [(world.name, world.figure.mean) for world in found.worlds] == [("as told", -0.2), ("theta_f 0.4", -0.1)]
    assert (found.verdict, found.count) == (CANNOT_SAY, "-")
