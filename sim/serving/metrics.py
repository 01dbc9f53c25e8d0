"""What a run measures, with bounded memory: levels of every step, a row a request, samples of the pool.

Definitions are those of docs/metrics.md. Means over a run are weighted by time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LIVENESS",
    "REQUEST",
    "STEP_COLUMNS",
    "LivenessSamples",
    "RequestLog",
    "StepLog",
    "liveness_classes",
    "percentiles",
]

# Order matters: the kernel that closes a step fills a row of these (sim.serving.accounting).
STEP_COLUMNS = (
    "step",
    "n_steps",
    "clock_s",
    "dt_s",
    "running",
    "waiting",
    "used_blocks",
    "free_blocks",
    "reserved_blocks",
    "live_slots",
    "dead_slots",
    "tail_slots",
    "sched_tokens",
    "sched_reqs",
    "preemptions",
    "freed_by_death",
    "freed_by_repack",
    "evicted",
    "moved",
    "copy_s",
)
_LEVELS = slice(4, 12)
_OF_UNITS = [*range(6, 12), *range(15, 19)]
"""Columns that count blocks, slots or tokens: with several units, those of one unit."""
_SUMS = [1, 3, *range(12, 20)]
_RUNNING_TOTALS = slice(14, 20)

REQUEST = np.dtype(
    [
        ("ordinal", "i8"),
        ("finished", "?"),
        ("arrival_s", "f8"),
        ("queue_s", "f8"),
        ("ttft_s", "f8"),
        ("tpot_s", "f8"),
        ("e2e_s", "f8"),
        ("finish_s", "f8"),
        ("prompt_tokens", "i8"),
        ("output_tokens", "i8"),
        ("preemptions", "i8"),
        ("recomputed_tokens", "i8"),
        ("cached_tokens", "i8"),
        ("retained_blocks", "f8"),
        ("retained_blocks_peak", "f8"),
        ("retained_blocks_finish", "f8"),
        ("over_retention", "f8"),
        ("tokens_evicted", "i8"),
        ("tokens_moved", "i8"),
    ]
)

LIVENESS = ("clock_s", "empty", "q1", "q2", "q3", "q4", "full")


class StepLog:
    """Levels of each step, in at most ``most`` rows.

    The last six columns come in as totals so far and leave as increments. When there are too many rows, neighbours are
    merged in pairs, levels as time-weighted means, times and counts as sums; ``n_steps`` says of how many steps.

    Parameters
    ----------
    most
        Rows to keep at most; even.
    units
        How many blocks, or tokens, of the cache make one of the whole model.
    """

    def __init__(self, most: int = 65_536, units: int = 1) -> None:
        self._most = most
        self._units = units
        self._merge = 1
        self._rows = [np.zeros((0, len(STEP_COLUMNS)))]
        self._kept = 0
        self._totals = np.zeros(6)
        self.buffer = np.zeros((2048, len(STEP_COLUMNS)))
        self.filled = 0
        self.steps = 0
        self.weighted: NDArray[np.float64] = np.zeros(len(STEP_COLUMNS))
        """Sums over steps of level * dt."""
        self.time_s = 0.0
        """Time in steps."""
        self.idle_s = 0.0
        """Time between them, when nothing runs, waits or holds a block."""
        self.weighted_fragmentation = 0.0
        self.weighted_dead = 0.0
        self.weighted_tail = 0.0
        self.allocated_s = 0.0
        """Time during which any block was allocated."""
        self.peak: NDArray[np.float64] = np.zeros(len(STEP_COLUMNS))

    def flush(self) -> None:
        """Take over what is in :attr:`buffer`."""
        rows = self.buffer[: self.filled].copy()
        self.filled = 0
        if not len(rows):
            return
        if self._units > 1:
            rows[:, _OF_UNITS] /= self._units
        totals = np.vstack([self._totals, rows[:, _RUNNING_TOTALS]])
        self._totals = totals[-1]
        rows[:, _RUNNING_TOTALS] = np.diff(totals, axis=0)
        self._account(rows)
        # The buffer is flushed when full and at the end: its length is a multiple of any `_merge` but for the last
        # time.
        self._rows.append(_merge(rows, self._merge))
        self._kept += len(self._rows[-1])
        if self._kept > self._most:
            self._rows = [_merge(np.vstack(self._rows), 2)]
            self._merge *= 2
            self._kept = len(self._rows[0])

    def finish(self, totals: NDArray[np.float64]) -> None:
        """Flush, and add what happened after the last step (``totals``: the last six columns) to the last row."""
        self.flush()
        totals = totals / [1, *(self._units,) * 4, 1]
        self._rows = [np.vstack(self._rows)]
        if len(self._rows[0]):
            self._rows[0][-1, _RUNNING_TOTALS] += totals - self._totals

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the rows, a column each; counts as integers where they are whole by nature."""
        whole = {"step", "n_steps", "sched_tokens", "sched_reqs", "preemptions"}
        if self._units == 1:
            whole |= {"freed_by_death", "freed_by_repack", "evicted", "moved"}
        rows = np.vstack(self._rows)
        return {
            name: rows[:, k].astype(np.int64) if name in whole else rows[:, k].copy()
            for k, name in enumerate(STEP_COLUMNS)
        }

    def mean(self, column: str) -> float:
        """Return the time-weighted mean of a level over the whole run, idle time included."""
        time_s = self.time_s + self.idle_s
        return float(self.weighted[STEP_COLUMNS.index(column)] / time_s) if time_s else 0.0

    def _account(self, rows: NDArray[np.float64]) -> None:
        dt = rows[:, 3]
        self.steps += len(rows)
        self.time_s += float(dt.sum())
        self.weighted += (rows * dt[:, None]).sum(axis=0)
        self.peak = np.maximum(self.peak, rows.max(axis=0))
        live, dead, tail = rows[:, 9], rows[:, 10], rows[:, 11]
        slots = live + dead + tail
        some = slots > 0
        weight = dt[some] / slots[some]
        self.weighted_dead += float((dead[some] * weight).sum())
        self.weighted_tail += float((tail[some] * weight).sum())
        self.weighted_fragmentation += float(((dead[some] + tail[some]) * weight).sum())
        self.allocated_s += float(dt[some].sum())


def _merge(rows: NDArray[np.float64], by: int) -> NDArray[np.float64]:
    """Merge each ``by`` neighbouring rows into one (the last group may be smaller)."""
    if by == 1 or not len(rows):
        return rows
    starts = np.arange(0, len(rows), by)
    out: NDArray[np.float64] = rows[starts].copy()
    dt = rows[:, 3]
    weight: NDArray[np.float64] = np.add.reduceat(dt, starts)
    weight[weight == 0] = 1
    out[:, _LEVELS] = np.add.reduceat(rows[:, _LEVELS] * dt[:, None], starts) / weight[:, None]
    for k in _SUMS:
        out[:, k] = np.add.reduceat(rows[:, k], starts)
    return out


class RequestLog:
    """A row a request, in the order in which they ended; ``units`` of its tokens are one of the whole model."""

    def __init__(self, units: int = 1) -> None:
        self._units = units
        self._rows = np.zeros(1024, REQUEST)
        self._ids: list[str] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, req_id: str, values: tuple[Any, ...]) -> None:
        """Append one row; ``values`` in the order of :data:`REQUEST`."""
        count = len(self._ids)
        if count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[count] = values
        self._ids.append(req_id)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the rows in arrival order, a column each, with ``req_id`` and ``status``."""
        rows = self._rows[: len(self._ids)]
        order = np.argsort(rows["ordinal"], kind="stable")
        rows = rows[order]
        ids = np.array(self._ids, dtype=object)[order]
        status = np.where(rows["finished"], "finished", "refused").astype(object)
        columns: dict[str, NDArray[Any]] = {"req_id": ids, "status": status}
        columns |= {name: rows[name].copy() for name in REQUEST.names or () if name not in ("ordinal", "finished")}
        if self._units > 1:
            for name in ("tokens_evicted", "tokens_moved"):
                columns[name] = columns[name] / self._units
        return columns


class LivenessSamples:
    """How full the allocated blocks are, at fewer than ``most`` moments evenly spread over the run.

    When there are too many samples every second one is dropped and the distance doubled, so that a run of any length
    ends with between ``most / 2`` and ``most`` of them. ``units`` as :class:`StepLog` has it.
    """

    def __init__(self, most: int = 256, every_ns: int = 250_000_000, units: int = 1) -> None:
        self._units = units
        self._most = most
        self._every_ns = every_ns
        self._samples: list[tuple[float, ...]] = []
        self.next_ns = 0

    def add(self, now_ns: int, counts: NDArray[np.int64]) -> None:
        """Keep the histogram ``counts`` (int64[6], as :data:`LIVENESS` names them) of this moment."""
        self._samples.append((now_ns / 1e9, *counts.tolist()))
        if len(self._samples) == self._most:
            self._samples = self._samples[::2]
            self._every_ns *= 2
        self.next_ns = now_ns + self._every_ns

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the samples, a column each."""
        rows = np.array(self._samples, float).reshape(-1, len(LIVENESS))
        rows[:, 1:] /= self._units
        whole = np.int64 if self._units == 1 else np.float64
        return {name: rows[:, k].astype(whole if k else float) for k, name in enumerate(LIVENESS)}


def liveness_classes(block_size: int) -> NDArray[np.int64]:
    """Return int64[S + 1]: the class in :data:`LIVENESS` (0: empty, .. 5: full) for each number of live slots."""
    live = np.arange(block_size + 1)
    classes: NDArray[np.int64] = -(-4 * live // block_size)
    classes[-1] = 5
    return classes


def percentiles(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Return mean, p50, p90, p95 and p99 of the values that are numbers; None for each if there are none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
    p50, p90, p95, p99 = np.percentile(values, [50, 90, 95, 99])
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p95": float(p95), "p99": float(p99)}
