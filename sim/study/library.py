"""What a script or a notebook calls: sweeps and searches as data frames.

:func:`sim.study.sweep.sweep` and :func:`sim.study.search.search`, beneath, say more about how they went.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sim.errors import RunFailedError
from sim.progress import Progress
from sim.study.concurrency import TAKEN as TAKEN_BY_CONCURRENCY
from sim.study.concurrency import Concurrency
from sim.study.config import SimConfig
from sim.study.search import Group, Question, groups
from sim.study.search import search as search_all
from sim.study.sla import TAKEN as TAKEN_BY_SLA
from sim.study.sla import SlaThroughput, parse_bound
from sim.study.spec import SweepSpec
from sim.study.store import Store
from sim.study.sweep import sweep as sweep_all
from sim.study.tables import BASELINE, paired

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SearchResult", "SpecLike", "search_concurrency", "search_sla", "sweep"]

SpecLike: TypeAlias = SweepSpec | SimConfig | Mapping[str, Any] | str | os.PathLike[str]
"""What to run: a specification, the path of its TOML file, one configuration, or fields with a value or a list of
values each (``{"policy": ["h2o", "random"], "budget": 0.5, "seed": [0, 1]}``)."""


@dataclasses.dataclass(frozen=True, eq=False)
class SearchResult:
    """Limits that were found, and every probe on the way there.

    Attributes
    ----------
    metric
        What was searched, as docs/metrics.md calls it: ``max_concurrency`` or ``sla_throughput``.
    unit
        Of its values.
    answers
        One row a search: its configuration, ``<metric>`` (the highest value that holds; missing if none does),
        ``fails`` (the lowest that fails), ``outside`` ("below" or "above" the range, or None), ``monotone``,
        ``probes``, and ``vs_naive``, the ratio to the same search with naive reclamation.
    probes
        One row a probe: ``search`` (row of ``answers``), ``label``, ``value``, ``holds``, ``why``, and figures.
    """

    metric: str
    unit: str
    answers: pd.DataFrame
    probes: pd.DataFrame

    @property
    def answer(self) -> float | None:
        """The limit, if there was one search; None if nothing in its range holds.

        Raises
        ------
        ValueError
            If there were several: see ``answers``.
        """
        if len(self.answers) != 1:
            raise ValueError(f"there are {len(self.answers)} searches: their answers are in .answers")
        value = self.answers[self.metric].iloc[0]
        return None if value is None or value != value else float(value)


def sweep(
    spec: SpecLike,
    out: str | os.PathLike[str] | None = None,
    *,
    workers: int = 0,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Make every run of a sweep and return its table.

    Parameters
    ----------
    spec
        What to run.
    out
        Directory of the sweep: runs that are there are not made again, and it can be read with ``vtoken results`` and
        ``vtoken plot``. A temporary one, gone afterwards, if None.
    workers
        Processes; 0 to run in this one. Each worker imports the calling program's main module, so a script that asks
        for workers must do so under ``if __name__ == "__main__":``.
    progress
        Where to say how far it is.

    Returns
    -------
    pandas.DataFrame
        One row a run, in the order of the specification: ``config_hash``, every field of the configuration, every
        figure of the summary (``ttft_s_p95`` for ``{"ttft_s": {"p95": ..}}``), and ``<figure>_vs_naive``, the change
        against the paired run with naive reclamation as a share. Equal for equal specifications, whatever the workers.

    Raises
    ------
    InputError
        If the specification or the directory cannot be used.
    RunFailedError
        If a run failed; the others are in ``out``.

    Examples
    --------
    >>> import sim
    >>> table = sim.sweep({"trace": "poisson:rate=8,n=20,prompt=200,output=40", "policy": "random", "budget": 0.5,
    ...                    "reclaimer": ["naive", "ideal"]})
    >>> table[["policy", "budget", "reclaimer", "finished"]]
       policy  budget reclaimer  finished
    0  random     0.5     naive        20
    1  random     0.5     ideal        20
    >>> bool(table["retained_blocks_mean_vs_naive"].iloc[1] < 0)
    True
    """
    wanted = _spec(spec)
    with _directory(out) as directory:
        report = sweep_all(wanted, directory, workers=workers, progress=progress)
        if report.failures:
            first = report.failures[0]
            raise RunFailedError(
                f"{len(report.failures)} of {len(report.plan.runs)} runs failed; {first.config_hash}: {first.error}"
            )
        table = paired(Store(directory).frame()[0])
    order = [run.config_hash for run in report.plan.runs]
    return table.set_index("config_hash", drop=False).loc[order].reset_index(drop=True)


def search_concurrency(
    spec: SpecLike,
    out: str | os.PathLike[str] | None = None,
    *,
    load: Literal["burst", "sustained"] = "burst",
    rounds: int = 3,
    low: int = 1,
    high: int | None = None,
    checks: int = 2,
    workers: int = 0,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the most requests that decode together without a preemption.

    Parameters
    ----------
    spec
        What to search: one search for each combination of its fields, over all of its seeds together.
    out
        Directory of the probes' runs, as for :func:`sweep`.
    load
        ``burst``: N requests at once. ``sustained``: N clients that send ``rounds`` requests one after the other.
    rounds
        Requests a client sends.
    low, high
        Range of N; what the trace holds if ``high`` is None.
    checks
        Probes beyond the final bracket, on either side, that must agree with it.
    workers, progress
        As for :func:`sweep`.

    Returns
    -------
    SearchResult
        With ``metric`` "max_concurrency".

    Raises
    ------
    InputError
        If something given cannot be used.
    RunFailedError
        If a run failed and that is no answer.

    Examples
    --------
    >>> import sim
    >>> config = sim.SimConfig(trace="poisson:rate=1,n=40,prompt=256,output=64", kv_blocks=200)
    >>> found = sim.search_concurrency(config)
    >>> found.answer
    15.0
    >>> bool(found.probes.query("holds")["value"].max() == found.answer)
    True
    """
    asked: list[tuple[Group, Question]] = [
        (group, Concurrency(group, load=load, rounds=rounds, low=low, high=high))
        for group in groups(_spec(spec), taken=TAKEN_BY_CONCURRENCY)
    ]
    return _search(asked, out, checks, workers, progress)


def search_sla(
    spec: SpecLike,
    sla: str | Sequence[str],
    out: str | os.PathLike[str] | None = None,
    *,
    low: float | None = None,
    high: float | None = None,
    tolerance: float = 0.02,
    duration_s: float | None = None,
    least_s: float = 60.0,
    baseline: str = BASELINE,
    baseline_rate: float | None = None,
    checks: int = 2,
    workers: int = 0,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the highest arrival rate, in requests a second, at which latencies keep within bounds.

    Parameters
    ----------
    spec
        What to search, as for :func:`search_concurrency`.
    sla
        ``e2e_p95=20`` (seconds), ``e2e_p95=1.05x`` (times the baseline's), ``paper`` (that one); several must hold
        together.
    out
        Directory of the probes' runs, as for :func:`sweep`.
    low, high
        Range of rates, requests/s; a 64th of the trace's own and 64 times that if None.
    tolerance
        How far apart the bracket's ends may be, as a share.
    duration_s
        Serve the requests that arrive in this time at every rate (s); the whole trace if None.
    least_s
        Arrivals must last this long (s), or the rate is out of the range.
    baseline
        Reclaimer that multiples are of; all else is the same.
    baseline_rate
        Requests/s that the baseline is offered; the trace's own if None.
    checks, workers, progress
        As for :func:`search_concurrency`.

    Returns
    -------
    SearchResult
        With ``metric`` "sla_throughput".

    Raises
    ------
    InputError
        If something given cannot be used.
    RunFailedError
        If a run failed and that is no answer.

    Examples
    --------
    >>> import sim
    >>> trace, step = "poisson:rate=20,n=60,prompt=300,output=30", "linear:base_s=0.01,per_token_s=1e-5"
    >>> config = sim.SimConfig(trace=trace, step_cost=step)
    >>> found = sim.search_sla(config, "ttft_p95=0.1", low=10, high=400, least_s=0.1, tolerance=0.2)
    >>> found.metric, found.unit
    ('sla_throughput', 'requests/s')
    >>> bool(found.answers["sla_throughput"].iloc[0] < found.answers["fails"].iloc[0])
    True
    """
    bounds = tuple(parse_bound(text) for text in ([sla] if isinstance(sla, str) else sla))
    asked: list[tuple[Group, Question]] = [
        (
            group,
            SlaThroughput(
                group,
                bounds,
                low=low,
                high=high,
                tolerance=tolerance,
                duration_s=duration_s,
                least_s=least_s,
                baseline=baseline,
                baseline_rate=baseline_rate,
            ),
        )
        for group in groups(_spec(spec), taken=TAKEN_BY_SLA)
    ]
    return _search(asked, out, checks, workers, progress)


def _search(
    asked: Sequence[tuple[Group, Question]],
    out: str | os.PathLike[str] | None,
    checks: int,
    workers: int,
    progress: Progress | None,
) -> SearchResult:
    with _directory(out) as directory:
        report = search_all(asked, directory, checks=checks, workers=workers, progress=progress)
    for each in report.findings:
        if each.error is not None:
            raise RunFailedError(f"{each.group.label}: {each.error}")
    question = asked[0][1]
    return SearchResult(question.name, question.unit, report.answers(), report.probes())


def _spec(spec: SpecLike) -> SweepSpec:
    """Return the specification that is meant."""
    if isinstance(spec, SweepSpec):
        return spec
    if isinstance(spec, SimConfig):
        given = {name: getattr(spec, name) for name in spec.model_fields_set}
        return SweepSpec.from_dict({"base": given})
    if isinstance(spec, Mapping):
        parts = {field.name for field in dataclasses.fields(SweepSpec)}
        if spec.keys() & parts:
            return SweepSpec.from_dict(spec)
        return SweepSpec().with_flags(
            {name: value if isinstance(value, list | tuple) else [value] for name, value in spec.items()}
        )
    return SweepSpec.from_toml(Path(spec))


@contextlib.contextmanager
def _directory(out: str | os.PathLike[str] | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="vtoken-") as directory:
        yield Path(directory)
