"""Run the paper's set-ups, and judge its claims by what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sim.errors import InputError, RunFailedError, did_you_mean
from sim.progress import Progress
from sim.study.concurrency import Concurrency
from sim.study.executors import Executor, Kept
from sim.study.paper.claims import CLAIMS
from sim.study.paper.evidence import Capacity, Evidence, Limit, evidence_table, grouped
from sim.study.paper.setups import (
    SIZES,
    FrontierRow,
    Part,
    Server,
    Size,
    combined,
    frontier_specs,
    native_parts,
    parts,
    sla_specs,
)
from sim.study.paper.verdict import Judgement
from sim.study.search import Finding, Group, Question, groups, search
from sim.study.sla import SlaThroughput, parse_bound
from sim.study.store import Store
from sim.study.sweep import sweep, working

__all__ = ["Reproduction", "reproduce", "size_named"]

TOLERANCE = 0.03


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """What came out.

    Attributes
    ----------
    size
        How much was run.
    judgements
        One a claim, in their order.
    evidence
        What they rest on.
    made
        Runs made now.
    """

    size: Size
    judgements: tuple[Judgement, ...]
    evidence: Evidence
    made: int


def size_named(name: str) -> Size:
    """Return a size by its name.

    Raises
    ------
    InputError
        If there is none of this name.
    """
    if name not in SIZES:
        raise InputError(f"size {name!r}: expected {' or '.join(SIZES)}{did_you_mean(name, SIZES)}")
    return SIZES[name]


def reproduce(
    out: str | Path,
    size: Size,
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Make every run of the paper's set-ups that ``out`` does not hold yet, and judge the claims.

    Stopping at any moment, by whatever means, loses at most the runs in flight: the same call goes on. What comes out
    does not depend on where runs are made, nor on how many at once.

    Parameters
    ----------
    out
        Directory of the runs, as of a sweep; ``vtoken results`` and ``vtoken report`` read it.
    size
        How much to run.
    workers, executor, progress
        As for :func:`sim.study.sweep.sweep`.

    Raises
    ------
    InputError
        If the directory cannot be used.
    RunFailedError
        If a run failed; the others are kept.
    WorkersError
        If the executor has lost its workers. What was finished is kept.
    """
    progress = Progress(None, "runs") if progress is None else progress
    with working(executor, workers, ()) as place:
        return _reproduce(Path(out), size, Kept(place), progress)


def _reproduce(out: Path, size: Size, executor: Executor, progress: Progress) -> Reproduction:
    store = Store(out)

    def run(wanted: Sequence[Part]) -> int:
        report = sweep(combined(wanted), out, executor=executor, progress=progress)
        if report.failures:
            first = report.failures[0]
            raise RunFailedError(f"{len(report.failures)} runs failed; {first.config_hash}: {first.error}")
        return len(report.outcomes)

    progress.message("what each server does without eviction")
    made = run(native_parts(size))
    capacity = _capacity(size, store)
    wanted = parts(size, capacity)
    progress.message("the set-ups")
    made += run(wanted)

    progress.message("limits")
    rows, fits = _frontier_questions(size)
    asked, bounds = _sla_questions(size, capacity)
    report = search([*fits, *bounds], out, checks=0, executor=executor, progress=progress, tell=False)
    for finding in report.findings:
        if finding.error is not None:
            raise RunFailedError(f"{finding.group.label}: {finding.error}")
    made += report.made
    frontier = [(row, _limit((), each)) for row, each in zip(rows, report.findings, strict=False)]
    sla = [_limit(about, each) for about, each in zip(asked, report.findings[len(rows) :], strict=True)]
    evidence = Evidence(evidence_table(wanted, store), frontier, sla, _half_used(wanted, store))
    return Reproduction(size, tuple(Judgement.of(claim, evidence) for claim in CLAIMS), evidence, made)


def _capacity(size: Size, store: Store) -> Capacity:
    """Return requests a second of each server without eviction, all requests there at once: the mean over seeds."""
    table = evidence_table(native_parts(size), store)
    found = grouped(table, ("model", "memory", "lengths"))
    return {
        (Server(model, memory), lengths): float(group["requests_per_s"].mean())
        for (model, memory, lengths), group in found
    }


def _frontier_questions(size: Size) -> tuple[list[FrontierRow], list[tuple[Group, Question]]]:
    rows: list[FrontierRow] = []
    questions: list[tuple[Group, Question]] = []
    for spec, row in frontier_specs(size):
        for group in groups(spec):
            rows.append(row)
            questions.append((group, Concurrency(group)))
    return rows, questions


def _sla_questions(
    size: Size, capacity: Capacity
) -> tuple[list[tuple[Server, str, float]], list[tuple[Group, Question]]]:
    about: list[tuple[Server, str, float]] = []
    questions: list[tuple[Group, Question]] = []
    bounds = (parse_bound("paper"),)
    for spec, rate, what in sla_specs(size, capacity):
        for group in groups(spec):
            about.append(what)
            asked = SlaThroughput(
                group,
                bounds,
                low=rate / 8,
                high=rate * 8,
                tolerance=TOLERANCE,
                least_s=size.sla_least_s,
                baseline_rate=rate,
            )
            questions.append((group, asked))
    return about, questions


def _limit(about: tuple[Server, str, float] | tuple[()], finding: Finding) -> Limit:
    config, found = finding.group.config, finding.found
    value = 0.0 if found is None or found.value is None else float(found.value)
    ratio = 0.0 if config.budget is None else round(1 - config.budget, 6)
    return Limit(about, config.policy, ratio, config.reclaimer, value)


def _half_used(wanted: Sequence[Part], store: Store) -> dict[tuple[str, str, str], float]:
    """Return the share of blocks that are at most half alive at the last sample of each run with a long context."""
    shares: dict[tuple[str, str, str], list[float]] = {}
    for part in wanted:
        if part.name != "16k":
            continue
        for config_hash, config in part.runs():
            assert config.budget is not None
            last = {name: float(values[-1]) for name, values in store.load(config_hash).liveness.items()}
            del last["clock_s"]
            key = (part.tags["lengths"], f"{1 - config.budget:g}", config.policy)
            shares.setdefault(key, []).append((last["empty"] + last["q1"] + last["q2"]) / sum(last.values()))
    return {key: sum(values) / len(values) for key, values in shares.items()}
