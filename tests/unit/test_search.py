"""Searches: what a probe is, when it holds, what is run, what is written, and what is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sim import cli
from sim.errors import InputError
from sim.study.concurrency import TAKEN, Concurrency, decoding_together, in_service
from sim.study.config import SimConfig
from sim.study.result import RunResult
from sim.study.run import NOBODY_SERVED, simulate
from sim.study.search import Group, groups, search
from sim.study.sla import Bound, SlaThroughput, parse_bound
from sim.study.spec import SweepSpec
from sim.study.store import Store
from tests.support import made_up
from tests.support.sweeps import contents

EVEN = "poisson:rate=10,n=600,prompt=9,output=9"


def group(seeds: tuple[int, ...] = (0,), **fields: Any) -> Group:
    return Group(SimConfig(**{"trace": EVEN, "policy": "random", **fields}), seeds, "it")


def rows(*requests: tuple[float, float, float]) -> dict[str, np.ndarray]:
    """Return columns of (admitted, first token, end); NaN for what did not happen."""
    columns = np.array(requests, float).reshape(-1, 3).T
    return {"arrival_s": np.zeros(columns.shape[1])} | dict(
        zip(("queue_s", "ttft_s", "finish_s"), columns, strict=True)
    )


# -- who is there together ---------------------------------------------------------------------------------------------


def test_decoding_is_from_the_first_token_to_the_last() -> None:
    assert decoding_together(rows((0, 1, 5), (0, 2, 6), (0, 4, 7))) == 3
    assert decoding_together(rows((0, 1, 5), (0, 2, 6), (0, 5, 7))) == 2, "one ends as the other begins"
    assert decoding_together(rows((0, 1, 2), (2, 3, 4), (4, 5, 6))) == 1
    assert decoding_together(rows((0, 1, 5), (0, np.nan, np.nan))) == 1
    assert decoding_together(rows()) == 0


def test_in_service_is_from_admission_to_the_end() -> None:
    together = rows((0, 1, 4), (0, 1, 4), (4, 5, 8), (4, 5, 8))
    assert in_service(together, 2) == 2
    gap = rows((0, 1, 4), (0, 1, 4), (6, 7, 8), (6, 7, 8))
    assert in_service(gap, 2) == pytest.approx(2 * 4 / 6)
    assert in_service(rows((0, 1, 4), (0, 1, 4)), 2) == 2
    assert np.isnan(in_service(rows((0, 1, 4), (np.nan, np.nan, np.nan)), 2))


# -- concurrency -------------------------------------------------------------------------------------------------------


def judged(question: Concurrency, value: int, **changes: Any) -> tuple[bool, str]:
    """Judge runs as they are, but for changes to the summary of the last."""
    results = [simulate(config) for config in question.configs(value)]
    results[-1] = dataclasses.replace(results[-1], summary=results[-1].summary | changes)
    verdict = question.judge(value, results)
    return verdict.holds, verdict.why


def test_a_burst_is_the_first_requests_at_once_and_the_scheduler_may_run_them_all() -> None:
    (config,) = Concurrency(group()).configs(7)
    assert (config.head, config.max_num_seqs) == (7, 7)
    result = simulate(config)
    assert len(result.requests["req_id"]) == 7
    assert not result.requests["arrival_s"].any()


def test_every_seed_must_hold() -> None:
    question = Concurrency(group(seeds=(0, 3)))
    assert [config.seed for config in question.configs(2)] == [0, 3]
    assert judged(question, 2) == (True, "all decode together, no preemption")
    assert judged(question, 2, preemptions=1) == (False, "1 preemptions")
    assert judged(question, 2, refused=1, first_refusal="request '0': too long") == (
        False,
        "1 refused, request '0': too long",
    )


def test_who_starts_only_when_another_has_ended_is_not_together_with_it() -> None:
    # Two prompts of 20 blocks in a pool of 30, outputs of 9 tokens: the second waits until the first has ended.
    question = Concurrency(group(trace="poisson:rate=1,n=9,prompt=320,output=9", kv_blocks=31, policy="full"))
    assert judged(question, 1)[0]
    assert judged(question, 2) == (False, "never more than 1 decode together, the others wait")


def test_a_request_that_waits_and_still_meets_the_others_is_together_with_them() -> None:
    # In steps of 16 tokens one prompt after the other is computed; admission is not at once, decoding is together.
    options: dict[str, Any] = {"trace": "poisson:rate=1,n=9,prompt=64,output=200", "max_num_batched_tokens": 16}
    question = Concurrency(group(**options))
    results = [simulate(config) for config in question.configs(5)]
    assert results[0].requests["queue_s"].max() > 0
    assert question.judge(5, results).holds


def test_sustained_clients_are_a_queue_behind_n_places() -> None:
    question = Concurrency(group(), "sustained", rounds=4)
    (config,) = question.configs(5)
    assert (config.head, config.max_num_seqs) == (20, 5)
    assert question.axis.high == 600 // 4
    result = simulate(config)
    verdict = question.judge(5, [result])
    assert verdict.holds
    assert verdict.figures["in_service_mean"] == pytest.approx(5, rel=0.01)
    # With a second between the end of a request and the start of the next, five are not served all the time.
    late = dict(result.requests)
    late["queue_s"] = late["queue_s"] + np.where(late["queue_s"] > 0, late["finish_s"].max(), 0)
    slow = question.judge(5, [dataclasses.replace(result, requests=late)])
    assert not slow.holds
    assert "in service on average" in slow.why or "decode together" in slow.why


def test_the_trace_bounds_the_range() -> None:
    assert Concurrency(group()).axis.high == 600
    assert Concurrency(group(), high=50).axis.high == 50
    assert Concurrency(group(trace="poisson:rate=10,duration_s=2,prompt=9,output=9")).axis.high < 60
    with pytest.raises(InputError, match="expected at least 700 requests to put 700 in service, it has 600"):
        Concurrency(group(), low=700)
    with pytest.raises(InputError, match="'burst' or 'sustained'"):
        Concurrency(group(), "steady")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rounds"):
        Concurrency(group(), "sustained", rounds=0)


def test_not_even_one_fits(tmp_path: Path) -> None:
    about = group(trace="poisson:rate=1,n=9,prompt=320,output=9", kv_blocks=5)
    (finding,) = search([(about, Concurrency(about))], tmp_path, workers=0).findings
    assert finding.error is None
    assert finding.found is not None
    assert (finding.found.value, finding.found.outside) == (None, "below")
    assert finding.probes[0].verdict.why.startswith(NOBODY_SERVED)


# -- rates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("e2e_p95=20", Bound("e2e", "p95", 20.0)),
        ("ttft_p99=1.5", Bound("ttft", "p99", 1.5)),
        ("queue_time_mean=0.1", Bound("queue_time", "mean", 0.1)),
        ("tpot_p50=2x", Bound("tpot", "p50", 2.0, relative=True)),
        ("paper", Bound("e2e", "p95", 1.05, relative=True)),
    ],
)
def test_bounds_are_read(text: str, bound: Bound) -> None:
    assert parse_bound(text) == bound


@pytest.mark.parametrize("text", ["", "e2e", "e2e_p95", "e2e_p95=", "e2e_p95=x", "e2e_p95=-1", "e2e_p95=inf", "p95=1"])
def test_bounds_that_mean_nothing(text: str) -> None:
    with pytest.raises(InputError, match="sla"):
        parse_bound(text)


def question(seeds: tuple[int, ...] = (0,), sla: str = "e2e_p95=20", **options: Any) -> SlaThroughput:
    fields = options.pop("fields", {})
    return SlaThroughput(group(seeds, **fields), (parse_bound(sla),), **{"least_s": 10.0, **options})


def test_a_rate_is_the_mean_rate_of_the_trace() -> None:
    asked = question(seeds=(0, 1))
    runs = asked.configs(25.0)
    assert [run.seed for run in runs] == [0, 1]
    for run in runs:
        arrival_s = simulate(run).requests["arrival_s"]
        assert 599 / (arrival_s.max() - arrival_s.min()) == pytest.approx(25.0, rel=1e-6)


def test_a_duration_takes_as_many_requests_as_arrive_in_it() -> None:
    for rate in (5.0, 20.0):
        (run,) = question(duration_s=20.0).configs(rate)
        arrival_s = simulate(run).requests["arrival_s"]
        assert run.head == len(arrival_s)
        assert arrival_s.max() - arrival_s.min() <= 20.0
        assert run.head == pytest.approx(20 * rate, rel=0.3)


def test_rates_at_which_the_trace_is_too_short_are_out_of_range() -> None:
    assert question(least_s=10.0).axis.high == pytest.approx(59.9)
    assert question(duration_s=30.0).axis.high == pytest.approx(599 / 30, rel=1e-3)
    assert question(high=20.0).axis.high == 20
    with pytest.raises(InputError, match="lasts less than 1000 s at any rate above"):
        question(least_s=1000.0, low=5.0)
    with pytest.raises(InputError, match="lasts less than 30 s at the baseline's rate"):
        question(sla="paper", least_s=30.0, baseline_rate=40.0)
    with pytest.raises(InputError, match="no rate to change"):
        question(fields={"trace": "poisson:rate=1,n=1,prompt=5,output=5"})
    with pytest.raises(InputError, match="at least one bound"):
        SlaThroughput(group(), ())


def test_the_baseline_is_one_run_for_all_reclaimers_and_rates() -> None:
    vtoken = question(sla="paper", fields={"reclaimer": "vtoken", "theta_f": 0.1, "headroom_blocks": 9})
    naive = question(sla="paper", fields={"reclaimer": "naive"})
    baselines = {asked.configs(rate)[-1].hash() for asked in (vtoken, naive) for rate in (3.0, 30.0)}
    assert len(baselines) == 1
    assert vtoken.configs(3.0)[0].theta_f == 0.1
    assert naive.configs(naive.given_rate)[0].hash() in baselines
    other = question(sla="paper", baseline_rate=4.0, fields={"reclaimer": "naive"})
    assert other.configs(30.0)[-1].hash() == naive.configs(4.0)[0].hash()
    assert len(question().configs(3.0)) == 1, "without a relative bound there is no baseline"


def test_the_baseline_at_its_own_rate_is_itself(tmp_path: Path) -> None:
    """One run stands for both sides then."""
    about = group(reclaimer="naive")
    limits = {"low": 10.0, "high": 10.0, "baseline_rate": 10.0, "least_s": 10.0}
    question = SlaThroughput(about, (parse_bound("e2e_p95=1x"),), **limits)
    (finding,) = search([(about, question)], tmp_path, workers=0).findings
    assert [probe.verdict.figures["e2e_p95_ratio"] for probe in finding.probes] == [1.0]
    assert [len(probe.runs) for probe in finding.probes] == [1]
    assert finding.found is not None
    assert finding.found.value == 10


def with_latency(p95: float | None, state: str = "stable") -> RunResult:
    result = made_up.result(SimConfig(policy="random"), requests=5, steps=5)
    summary = result.summary | {"e2e_s": {"p95": p95}, "load_state": state}
    return dataclasses.replace(result, summary={"preemptions": 0, **summary})


def test_a_bound_is_met_by_the_mean_over_seeds() -> None:
    asked = question(seeds=(0, 1), sla="e2e_p95=20")
    assert asked.judge(1.0, [with_latency(15), with_latency(25)]).holds
    broken = asked.judge(1.0, [with_latency(15), with_latency(26)])
    assert (broken.holds, broken.why) == (False, "e2e_p95 20.5 s > 20 s")


def test_a_relative_bound_is_met_pair_by_pair() -> None:
    asked = question(seeds=(0, 1), sla="e2e_p95=1.1x")
    runs = [with_latency(10), with_latency(30), with_latency(10), with_latency(25)]
    verdict = asked.judge(1.0, runs)
    assert verdict.holds, "1.0 and 1.2 are 1.1 on average"
    assert verdict.figures["e2e_p95_ratio"] == pytest.approx(1.1)
    assert not asked.judge(1.0, [with_latency(10.1), *runs[1:]]).holds


def test_a_growing_queue_does_not_hold_whatever_the_latency() -> None:
    asked = question()
    assert asked.judge(1.0, [with_latency(1, "backlogged")]).holds
    assert asked.judge(1.0, [with_latency(1, "overloaded")]).why == "overloaded"
    both = question(seeds=(0, 1)).judge(1.0, [with_latency(1), with_latency(1, "overloaded")])
    assert not both.holds


def test_a_latency_that_nobody_has_cannot_be_bounded() -> None:
    with pytest.raises(InputError, match="no request has a e2e"):
        question().judge(1.0, [with_latency(None)])


# -- searches ----------------------------------------------------------------------------------------------------------


class Threshold:
    """N requests hold up to a limit; each probe is one made-up run for each seed."""

    name, unit, notes, start = "limit", "requests", (), 1

    def __init__(self, about: Group, limit: int, high: int = 64) -> None:
        from sim.study.bisection import Axis

        self.axis = Axis(1, high, whole=True)
        self._about, self._limit = about, limit

    def configs(self, value: float) -> list[SimConfig]:
        return [self._about.config.replace(seed=seed, head=int(value)) for seed in self._about.seeds]

    def judge(self, value: float, results: list[RunResult]) -> Any:
        from sim.study.search import Verdict

        assert [result.config.seed for result in results] == list(self._about.seeds)
        return Verdict(value <= self._limit, "as told", {"requests": len(results)})

    def refused(self, error: str) -> None:
        assert error


def asked(limits: tuple[int, ...] = (5, 9), seeds: tuple[int, ...] = (0, 1)) -> list[Any]:
    found = groups(SweepSpec(base={"policy": "random"}, grid={"reclaimer": ["naive", "vtoken"]}, seeds=list(seeds)))
    return [(about, Threshold(about, limit)) for about, limit in zip(found, limits, strict=True)]


def test_groups_are_configurations_with_all_their_seeds() -> None:
    spec = SweepSpec(base={"policy": "h2o"}, grid={"budget": [0.3, 0.5], "kv_blocks": [100, 200]}, seeds=[4, 2])
    found = groups(spec)
    assert [(about.config.budget, about.config.kv_blocks) for about in found] == [
        (0.3, 100),
        (0.3, 200),
        (0.5, 100),
        (0.5, 200),
    ]
    assert {about.seeds for about in found} == {(4, 2)}
    assert found[1].label == "h2o keeping 0.3, vtoken; kv_blocks 200"
    odd = SweepSpec(base={"policy": "h2o"}, grid={"theta_f": [0.1, 0.2, 0.3]}, include=[{"block_size": 32}])
    assert [about.label for about in groups(odd)] == [
        "h2o keeping 0.5, vtoken; theta_f 0.1",
        "h2o keeping 0.5, vtoken; theta_f 0.2",
        "h2o keeping 0.5, vtoken; theta_f 0.3",
        "h2o keeping 0.5, vtoken; block_size 32; theta_f 0.25",
    ]
    with pytest.raises(InputError, match="head: the search sets it"):
        groups(SweepSpec(grid={"head": [3, 4]}), taken=TAKEN)


def test_one_worker_two_workers_and_none_give_the_same_bytes(tmp_path: Path) -> None:
    for workers in (0, 1, 2):
        report = search(asked(), tmp_path / str(workers), workers=workers, run=made_up.simulate)
        assert [each.found.value for each in report.findings if each.found] == [5, 9]
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "2")
    assert {"search.json", "answers.csv", "probes.csv"} < contents(tmp_path / "0").keys()


def test_a_search_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    whole = search(asked(), tmp_path / "whole", workers=0, run=made_up.simulate)
    calls = 0

    def stopping(config: SimConfig) -> RunResult:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise KeyboardInterrupt
        return made_up.simulate(config)

    with pytest.raises(KeyboardInterrupt):
        search(asked(), tmp_path / "parts", workers=0, run=stopping)
    rest = search(asked(), tmp_path / "parts", workers=0, run=made_up.simulate)
    assert (rest.found_done, rest.made) == (6, whole.made - 6)
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    again = search(asked(), tmp_path / "parts", workers=0, run=stopping)
    assert (again.made, again.found_done) == (0, whole.made)
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_a_failed_run_ends_its_search_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP_REFUSES", "7")
    (first, _), (second, _) = asked(), asked(seeds=(7,))
    report = search([first, second], tmp_path, workers=0, run=made_up.simulate)
    assert report.findings[0].found is not None
    assert (report.findings[1].found, report.findings[1].error) == (None, "seed 7 is refused")
    answers = report.answers()
    assert answers["limit"].tolist()[0] == 5
    assert answers["error"].tolist()[1] == "seed 7 is refused"


def test_answers_are_paired_with_naive(tmp_path: Path) -> None:
    search(asked(limits=(5, 9)), tmp_path, workers=0, run=made_up.simulate)
    answers = pd.read_csv(tmp_path / "answers.csv")
    assert answers["limit"].tolist() == [5, 9]
    assert answers["vs_naive"].tolist() == [1.0, 1.8]
    probes = pd.read_csv(tmp_path / "probes.csv")
    assert set(probes["search"]) == {0, 1}
    assert probes.groupby("search")["holds"].sum().min() > 1
    written = json.loads((tmp_path / "search.json").read_text())["searches"]
    assert [each["value"] for each in written] == [5, 9]
    assert all(Store(tmp_path).path(run).exists() for each in written for p in each["probes"] for run in p["runs"])


# -- the command -------------------------------------------------------------------------------------------------------

SMALL = [
    "--trace",
    "poisson:rate=1,n=40,prompt=64,output=20",
    "--kv-blocks",
    "40",
    "--policy",
    "random",
    "--workers",
    "1",
]


def test_concurrency_prints_json_alone_and_tells_its_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["search", "concurrency", *SMALL, "--reclaimer", "naive", "--reclaimer", "ideal", "--checks", "1"]
    assert cli.main([*command, "--out", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    naive, ideal = json.loads(captured.out)["searches"]
    assert (naive["metric"], naive["unit"], naive["outside"], naive["monotone"]) == (
        "max_concurrency",
        "requests",
        "",
        True,
    )
    assert naive["fails"] == naive["value"] + 1
    assert naive["value"] <= ideal["value"]
    assert naive["config"]["reclaimer"] == "naive"
    for probe in naive["probes"]:
        assert f"naive: {probe['value']} requests: {'holds' if probe['holds'] else 'fails'}, " in captured.err
    assert cli.main([*command, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "max_concurrency (requests)" in captured.out
    assert captured.err.splitlines()[-1].startswith("0 runs made, ")


def test_ends_of_the_range_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["search", "concurrency", *SMALL, "--quiet"]
    assert cli.main([*command, "--out", str(tmp_path / "a"), "--to", "3"]) == 0
    captured = capsys.readouterr()
    assert "the highest of the range, 3 requests, holds: the limit is higher" in captured.err
    assert "above the range" in captured.out
    assert cli.main([*command, "--out", str(tmp_path / "b"), "--from", "30"]) == 0
    captured = capsys.readouterr()
    assert "the lowest of the range, 30 requests, fails: " in captured.err
    assert "below the range" in captured.out


def test_sla_throughput_says_what_its_baseline_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["--trace", "poisson:rate=1,n=300,prompt=64,output=20", *SMALL[2:]]
    command = ["search", "sla-throughput", *trace, "--sla", "paper", "--reclaimer", "ideal", "--min-duration-s", "1"]
    options = ["--baseline-rate", "3", "--tolerance", "0.5", "--checks", "0"]
    options += ["--step-cost", "linear:base_s=0.01,per_token_s=0"]
    assert cli.main([*command, *options, "--out", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    (answer,) = json.loads(captured.out)["searches"]
    assert "the baseline is reclaimer naive at 3 requests/s, whatever the rate probed" in captured.err
    assert answer["metric"] == "sla_throughput"
    probes = {probe["value"]: probe for probe in answer["probes"]}
    held = probes[answer["value"]]
    assert held["e2e_p95_ratio"] <= 1.05
    assert answer["fails"] <= 1.5 * answer["value"]
    assert not probes[answer["fails"]]["holds"]
    assert held["e2e_p95_baseline_s"] == probes[answer["fails"]]["e2e_p95_baseline_s"]
