"""Predicted against measured: every step of an event log, priced as the engine prices it, beside what a device took.

The costs are the engine's own objects (:mod:`sim.serving.profile_cost`, :class:`sim.serving.copy.Beside`); there is no
second cost model here. What a log does not have is left out on both sides: waiting for arrivals, and policies' scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_validate.program import Fence, InPlace, Launch, StepWork
from sim.kv.events import Events, Kind
from sim.serving.copy import Beside, CopyCost
from sim.serving.cost import StepCost
from sim.serving.fit import errors

__all__ = ["COLUMNS", "Comparison", "Predicted", "compare", "log_facts", "predict"]

Floats = NDArray[np.float64]

COLUMNS = (
    "step",
    "tokens",
    "seqs",
    "kv_read_tokens",
    "attention_pairs",
    "copied_tokens",
    "beside_copy",
    "predicted_ns",
    "stretch_ns",
    "wait_ns",
    "pause_ns",
)
"""What is known of each step before it is measured; all times in ns, all int64.

``predicted_ns`` is the whole; of it ``stretch_ns`` is due to a copy beside the step, ``wait_ns`` to a fence whose copy
was not done yet, and ``pause_ns`` to copies in place that everybody waits for.
"""


@dataclass(frozen=True)
class Predicted:
    """The steps of a log and their prices.

    Attributes
    ----------
    columns
        int64[n] by the names of :data:`COLUMNS`.
    """

    columns: dict[str, NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.columns["step"])

    @property
    def total_ns(self) -> int:
        """All steps together."""
        return int(self.columns["predicted_ns"].sum())


class _Copies:
    """The copies of a log in the order of its fences; one launch at a time, as the engine has them."""

    def __init__(self, cost: CopyCost) -> None:
        self._cost = cost
        self._flying: list[tuple[tuple[int, ...], Beside, int]] = []
        self.pause_ns = 0
        self.wait_ns = 0
        self.copied = 0

    def take(self, work: StepWork, now_ns: int) -> None:
        """Do what comes before a step that begins now, as far as time goes."""
        self.pause_ns = self.wait_ns = self.copied = 0
        for action in work.before:
            if isinstance(action, Launch):
                beside = Beside(self._cost, len(action.source))
                begins_ns = now_ns + self.wait_ns + self.pause_ns
                self._flying.append((action.plans, beside, begins_ns + beside.wall_ns))
                self.copied += len(action.source)
            elif isinstance(action, Fence):
                passed = [entry for entry in self._flying if set(entry[0]) & set(action.plans)]
                for entry in passed:
                    self.wait_ns += max(0, entry[2] - now_ns - self.wait_ns - self.pause_ns)
                    self._flying.remove(entry)
            elif isinstance(action, InPlace):
                self.pause_ns += self._cost.alone_ns(len(action.source))
                self.copied += len(action.source)

    def stretch_ns(self, step_ns: int, memory_ns: int) -> int:
        """Return how much longer the step gets because of what flies beside it."""
        return sum(beside.stretch_ns(step_ns, memory_ns) for _, beside, _ in self._flying)

    @property
    def busy(self) -> bool:
        """Whether a copy flies."""
        return bool(self._flying)


def predict(steps: Iterable[StepWork], step_cost: StepCost, copy_cost: CopyCost) -> Predicted:
    """Price the steps of a program.

    Parameters
    ----------
    steps
        In order.
    step_cost, copy_cost
        As the engine is given them.
    """
    copies = _Copies(copy_cost)
    rows = []
    now_ns = 0
    for work in steps:
        copies.take(work, now_ns)
        read, pairs = work.kv_read_tokens, work.attention_pairs
        step_ns, memory_ns = step_cost.step_ns(work.tokens, work.seqs, read, pairs)
        beside = copies.busy
        stretch_ns = copies.stretch_ns(step_ns, memory_ns) if beside else 0
        whole = step_ns + stretch_ns + copies.wait_ns + copies.pause_ns
        shape = (work.step, work.tokens, work.seqs, read, pairs, copies.copied, beside)
        rows.append((*shape, whole, stretch_ns, copies.wait_ns, copies.pause_ns))
        now_ns += whole
    table = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
    return Predicted({name: table[:, k].copy() for k, name in enumerate(COLUMNS)})


@dataclass(frozen=True)
class Comparison:
    """Predicted against measured.

    Attributes
    ----------
    predicted
        The steps.
    measured_ns
        float64[repeats, n].
    typical_ns
        float64[n]: what stands for the repeats.
    groups
        By group of steps: how many, predicted and measured time, their relative difference, and the absolute relative
        errors of the steps.
    spread
        Of the repeated runs' total times, from the least to the most, as a share of their median.
    step_spread
        The same of a step, the median over the steps.
    facts
        What the log holds.
    """

    predicted: Predicted
    measured_ns: Floats
    typical_ns: Floats
    groups: dict[str, dict[str, float]]
    spread: float
    step_spread: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def difference(self) -> float:
        """Predicted total over measured total, less 1."""
        return self.groups["all"]["difference"]

    def summary(self, tolerance: float) -> dict[str, Any]:
        """Return what is written as JSON."""
        return {
            "within_tolerance": abs(self.difference) <= tolerance,
            "tolerance": tolerance,
            "difference": self.difference,
            "spread_of_repeated_totals": self.spread,
            "median_spread_of_a_step": self.step_spread,
            "repeats": len(self.measured_ns),
            "groups": self.groups,
            "log": self.facts,
        }


def compare(
    predicted: Predicted, measured_ns: Floats, facts: dict[str, Any] | None = None, *, quantile: float = 0.5
) -> Comparison:
    """Set the predicted steps against the measured ones.

    Parameters
    ----------
    predicted
        n steps.
    measured_ns
        float64[repeats, n].
    facts
        To be handed on.
    quantile
        Which of the repeated times of a step stands for it: see :func:`gpu_validate.timing.usual_quantile`.
    """
    columns = predicted.columns
    typical = np.quantile(measured_ns, quantile, axis=0)
    prefill = columns["tokens"] > columns["seqs"]
    copying = (columns["beside_copy"] > 0) | (columns["pause_ns"] > 0)
    masks = {
        "all": np.ones(len(predicted), np.bool_),
        "decode only": ~prefill & ~copying,
        "with prefill": prefill & ~copying,
        "with a copy": copying,
    }
    totals = measured_ns.sum(axis=1)
    spreads = np.ptp(measured_ns, axis=0) / typical
    return Comparison(
        predicted,
        measured_ns,
        typical,
        {
            name: _group(columns["predicted_ns"][mask].astype(np.float64), typical[mask])
            for name, mask in masks.items()
            if mask.any()
        },
        spread=float(np.ptp(totals) / np.median(totals)),
        step_spread=float(np.median(spreads)),
        facts=facts or {},
    )


def _group(predicted_ns: Floats, measured_ns: Floats) -> dict[str, float]:
    off = errors(predicted_ns, measured_ns)
    return {
        "steps": len(predicted_ns),
        "predicted_s": float(predicted_ns.sum() / 1e9),
        "measured_s": float(measured_ns.sum() / 1e9),
        "difference": float(predicted_ns.sum() / measured_ns.sum() - 1),
        "mean_ape": off.mean,
        "median_ape": off.median,
        "p90_ape": off.p90,
        "max_ape": off.max,
    }


def log_facts(log: Events) -> dict[str, Any]:
    """Count what says how hard memory was pressed: preemptions, repacks, evictions, and the peak of held blocks."""
    counts = np.zeros(max(Kind) + 1, np.int64)
    used = peak = 0
    for records in log.chunks():
        kinds = np.asarray(records["kind"], np.int64)
        counts += np.bincount(kinds, minlength=len(counts))
        # A block is held from ALLOC, SHARE or RESERVE to FREE; a shared one counts once for each table.
        change = np.isin(kinds, (Kind.ALLOC, Kind.SHARE, Kind.RESERVE)).astype(np.int64) - (kinds == Kind.FREE)
        running = used + np.cumsum(change)
        if len(running):
            used, peak = int(running[-1]), max(peak, int(running.max()))
    return {
        "events": int(counts.sum()),
        "steps": int(counts[Kind.STEP]),
        "requests_finished": int(counts[Kind.FINISH]),
        "preemptions": int(counts[Kind.PREEMPT]),
        "tokens_evicted": int(counts[Kind.EVICT]),
        "repacks_planned": int(counts[Kind.PLAN]),
        "repacks_committed": int(counts[Kind.COMMIT]),
        "tokens_moved": int(counts[Kind.MOVE]),
        "peak_held_blocks": peak,
        "num_blocks": log.num_blocks,
        "peak_held_share": peak / (log.num_blocks - 1),
    }
