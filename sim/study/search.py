"""Search limits by simulation: every probe is a finished run in a store, so that a search can be stopped and goes on.

What is asked is a :class:`Question` (:mod:`sim.study.concurrency`, :mod:`sim.study.sla`); how values are chosen is in
:mod:`sim.study.bisection`. Several searches share the workers, and runs that two of them need are made once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sim.errors import InputError
from sim.progress import Progress
from sim.study.bisection import Axis, Found, highest
from sim.study.check import check
from sim.study.config import BUDGETS, SimConfig
from sim.study.executors import Executor, RunFunction
from sim.study.export import write_atomically
from sim.study.result import RunResult, to_json
from sim.study.spec import Run, SweepSpec
from sim.study.store import Store
from sim.study.sweep import opened, outcomes, working
from sim.study.tables import BASELINE, RECLAIM_FIELDS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Finding", "Group", "Probe", "Question", "Report", "Verdict", "groups", "search"]


@dataclasses.dataclass(frozen=True)
class Group:
    """What one search is about: a configuration, and the seeds that every probe of it is run with."""

    config: SimConfig
    seeds: tuple[int, ...]
    label: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a value holds, why, and the figures that say so."""

    holds: bool
    why: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)


class Question(Protocol):
    """A limit to be found."""

    @property
    def name(self) -> str:
        """What is found, as it is called in docs/metrics.md."""
        ...

    @property
    def unit(self) -> str:
        """Of the values."""
        ...

    @property
    def axis(self) -> Axis:
        """Where to search."""
        ...

    @property
    def start(self) -> float:
        """The first value to probe."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the answer must know."""
        ...

    def configs(self, value: float) -> list[SimConfig]:
        """Return the runs that a probe needs, in a fixed order."""
        ...

    def judge(self, value: float, results: list[RunResult]) -> Verdict:
        """Say whether a value holds, from the results of its runs in the same order."""
        ...

    def refused(self, error: str) -> Verdict | None:
        """Say what it means that a run could not be made; None if it ends the search."""
        ...


@dataclasses.dataclass(frozen=True)
class Probe:
    """A value that was tried."""

    value: float
    verdict: Verdict
    runs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The end of one search; ``error`` is a line if a run failed, and there is no answer then."""

    group: Group
    question: Question
    found: Found | None
    probes: tuple[Probe, ...]
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        found = self.found
        return {
            "label": self.group.label,
            "metric": self.question.name,
            "unit": self.question.unit,
            "value": None if found is None else found.value,
            "fails": None if found is None else found.fails,
            "outside": None if found is None else found.outside,
            "monotone": None if found is None else found.monotone,
            "held_above": None if found is None else list(found.held_above),
            "range": [self.question.axis.low, self.question.axis.high],
            "tolerance": None if self.question.axis.whole else self.question.axis.tolerance,
            "seeds": list(self.group.seeds),
            "notes": list(self.question.notes),
            "error": self.error,
            "probes": [
                {
                    "value": probe.value,
                    "holds": probe.verdict.holds,
                    "why": probe.verdict.why,
                    **probe.verdict.figures,
                    "runs": list(probe.runs),
                }
                for probe in self.probes
            ],
            "config": self.group.config.model_dump(),
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """All searches, in the order of their specification.

    Attributes
    ----------
    findings
        One a search.
    made, found_done
        Runs made now; runs that were in the directory before.
    """

    findings: tuple[Finding, ...]
    made: int
    found_done: int

    def answers(self) -> pd.DataFrame:
        """Return a row a search: what its configuration is and what was found, beside the paired naive search's."""
        import pandas as pd

        rows = []
        paired = {_pair(each.group.config): each for each in self.findings if _is_baseline(each.group.config)}
        for each in self.findings:
            about = each.to_dict()
            config = about.pop("config")
            naive = paired.get(_pair(each.group.config))
            base = None if naive is None or naive.found is None else naive.found.value
            row = {key: config[key] for key in ("policy", *BUDGETS, "reclaimer")}
            row |= {"label": about["label"], about["metric"]: about["value"]}
            row |= {key: about[key] for key in ("fails", "outside", "monotone")}
            row |= {f"vs_{BASELINE}": about["value"] / base if base and about["value"] else None}
            row |= {"probes": len(each.probes), "error": about["error"]}
            row |= {key: value for key, value in config.items() if key not in (*row, "seed")}
            rows.append(row)
        return pd.DataFrame(rows)

    def probes(self) -> pd.DataFrame:
        """Return a row a probe."""
        import pandas as pd

        return pd.DataFrame(
            [
                {"search": place, "label": each.group.label, "value": probe.value}
                | {"holds": probe.verdict.holds, "why": probe.verdict.why}
                | {key: value for key, value in probe.verdict.figures.items() if not isinstance(value, list | dict)}
                for place, each in enumerate(self.findings)
                for probe in each.probes
            ]
        )


def groups(spec: SweepSpec, *, taken: Sequence[str] = ()) -> list[Group]:
    """Return the configurations of a specification, each with all of its seeds.

    Parameters
    ----------
    spec
        As for a sweep.
    taken
        Fields that the search sets itself.

    Raises
    ------
    InputError
        If the specification cannot be used, or sets a field that is taken.
    """
    for place in (spec.base, spec.grid, *spec.include):
        for field in taken:
            if field in place:
                raise InputError(f"{field}: the search sets it; leave it out")
    seeds: dict[str, list[int]] = {}
    configs: dict[str, SimConfig] = {}
    for run in spec.expand().runs:
        key = run.config.replace(seed=0).hash()
        configs.setdefault(key, run.config)
        seeds.setdefault(key, []).append(run.config.seed)
    labels = _labels(list(configs.values()))
    return [Group(configs[key], tuple(seeds[key]), label) for key, label in zip(configs, labels, strict=True)]


def search(
    questions: Sequence[tuple[Group, Question]],
    out: str | Path,
    *,
    checks: int = 2,
    workers: int | None = None,
    executor: Executor | None = None,
    run: RunFunction | None = None,
    progress: Progress | None = None,
    tell: bool = True,
) -> Report:
    """Answer every question; runs that ``out`` holds are not made again.

    Stopping at any moment, by whatever means, loses at most the runs in flight: the same call goes on. The answers do
    not depend on the number of workers, nor on how often it was stopped.

    Parameters
    ----------
    questions
        What to search, with what it is about.
    out
        Directory of the runs; ``search.json``, ``answers.csv`` and ``probes.csv`` are written there at the end.
    checks
        Probes beyond the final bracket, on either side (:func:`sim.study.bisection.highest`).
    workers
        Processes; one for each processor if None, 0 to run in this process.
    executor
        Where runs are made, in place of these processes.
    run
        What makes a run; :func:`sim.study.run.simulate` if None.
    progress
        Where to say how far it is: a line a probe, and a count while runs are made.
    tell
        Say that line.

    Raises
    ------
    InputError
        If something in a configuration or the directory cannot be used.
    WorkersError
        If the executor has lost its workers.
    """
    progress = Progress(None, "runs") if progress is None else progress
    if run is None:
        check([config for _, asked in questions for config in asked.configs(asked.axis.clip(asked.start))])
    with opened(out, progress) as (store, finished, _, _):
        before = len(finished)
        searches = [_Search(group, question, checks) for group, question in questions]
        waiting: deque[Run] = deque()
        errors: dict[str, str] = {}
        asked: set[str] = set()
        made = 0
        told = progress if tell else Progress(None, progress.unit)

        def go_on() -> None:
            for each in searches:
                for missing in each.advance(store, finished, errors, told):
                    if missing.config_hash not in asked:
                        asked.add(missing.config_hash)
                        waiting.append(missing)

        go_on()
        with working(executor, workers, list(waiting)) as at_work:
            progress.start()
            for outcome in outcomes(waiting, store, run, at_work, progress):
                made += 1
                if outcome.error is None:
                    finished.add(outcome.config_hash)
                else:
                    errors[outcome.config_hash] = outcome.error
                go_on()
                progress.update(made)
        progress.clear()
        report = Report(tuple(each.finding() for each in searches), made, before)
        _write(store, report)
    return report


class _Search:
    """One search under way."""

    def __init__(self, group: Group, question: Question, checks: int) -> None:
        self._group = group
        self._question = question
        self._steps: Generator[float, bool, Found] = highest(question.axis, question.start, checks)
        self._probes: list[Probe] = []
        self._found: Found | None = None
        self._error: str | None = None
        self._value = next(self._steps)
        self._runs: list[Run] | None = None

    def advance(self, store: Store, finished: set[str], errors: dict[str, str], progress: Progress) -> Iterator[Run]:
        """Judge what can be judged, and yield the runs that are missing for more."""
        while self._found is None and self._error is None:
            if self._runs is None:
                self._runs = [Run(config, config.hash()) for config in self._question.configs(self._value)]
            missing = [run for run in self._runs if run.config_hash not in finished and run.config_hash not in errors]
            if missing:
                yield from missing
                return
            verdict = self._judge(store, errors)
            if verdict is None:
                return
            probe = Probe(self._value, verdict, tuple(dict.fromkeys(run.config_hash for run in self._runs)))
            self._probes.append(probe)
            progress.message(f"{self._group.label}: {self.describe(probe)}")
            self._runs = None
            try:
                self._value = self._steps.send(verdict.holds)
            except StopIteration as end:
                self._found = end.value

    def _judge(self, store: Store, errors: dict[str, str]) -> Verdict | None:
        assert self._runs is not None
        keys = [run.config_hash for run in self._runs]
        for key in keys:
            if key in errors:
                verdict = self._question.refused(errors[key])
                if verdict is None:
                    self._error = errors[key]
                return verdict
        try:
            return self._question.judge(self._value, [store.load(key) for key in keys])
        except InputError as error:
            self._error = str(error)
            return None

    def describe(self, probe: Probe) -> str:
        """Return a probe in words."""
        return (
            f"{probe.value:g} {self._question.unit}: {'holds' if probe.verdict.holds else 'fails'}, {probe.verdict.why}"
        )

    def finding(self) -> Finding:
        return Finding(self._group, self._question, self._found, tuple(self._probes), self._error)


def _write(store: Store, report: Report) -> None:
    content = {"format": 1, "searches": [each.to_dict() for each in report.findings]}
    write_atomically(store.root / "search.json", to_json(content, indent=2) + "\n")
    write_atomically(store.root / "answers.csv", report.answers().to_csv(index=False))
    write_atomically(store.root / "probes.csv", report.probes().to_csv(index=False))


def _labels(configs: Sequence[SimConfig]) -> list[str]:
    """Return what tells the configurations apart: policy, budget, reclaimer, and what most others do not have."""
    shown = {"policy", *BUDGETS, "reclaimer", "seed"}
    counts = {
        name: Counter(getattr(config, name) for config in configs)
        for name in SimConfig.model_fields
        if name not in shown
    }

    def unusual(config: SimConfig) -> list[str]:
        values = {name: getattr(config, name) for name in counts}
        return [f"{name} {value}" for name, value in values.items() if 4 * counts[name][value] < 3 * len(configs)]

    return ["; ".join([config.label, *unusual(config)]) for config in configs]


def _is_baseline(config: SimConfig) -> bool:
    return config.reclaimer.partition(":")[0] == BASELINE


def _pair(config: SimConfig) -> str:
    """Return what paired searches have in common: everything but what happens to dead slots."""
    return to_json({key: value for key, value in config.model_dump().items() if key not in (*RECLAIM_FIELDS, "seed")})
