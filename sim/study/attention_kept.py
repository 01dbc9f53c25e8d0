"""How much of what a full cache's queries would look at is still there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.view import View
from sim.serving.engine import Engine

__all__ = ["AttentionKept"]


class AttentionKept:
    """Measures, as an observer of a run, the share of full attention that falls on live tokens (docs/metrics.md).

    The attention model is asked for the attention of a decode step's query over all tokens so far, dead ones included,
    as the full cache would have it. Open loop: what was evicted changes neither that query nor what is generated. It
    costs as much as an attending policy over a full cache, so a run does it only when asked to.

    >>> from sim.serving.attention import build_attention
    >>> from sim.study.config import SimConfig
    >>> from sim.study.run import build_engine
    >>> config = SimConfig(policy="h2o", budget=0.3, head=5)
    >>> kept = AttentionKept(build_attention(config.attention))
    >>> outcome = build_engine(config, observer=kept).run()
    >>> all(0.3 < share < 1 for share in kept.by_request().values())
    True

    Parameters
    ----------
    model
        Attention model: that of the run, or another.
    every
        Look at every so many-th step.

    Raises
    ------
    InputError
        If ``every`` is less than 1.
    """

    def __init__(self, model: Any, every: int = 1) -> None:
        if every < 1:
            raise InputError(f"attention kept: every: expected at least 1 step, got {every}")
        self._model = model
        self._every = every
        self._totals: dict[int, NDArray[np.float64]] = {}

    def by_request(self) -> dict[int, float]:
        """Return the mean over its decode steps that were looked at, by the request's number in order of arrival.

        Requests that were not seen to decode are left out.
        """
        return {ordinal: float(total / steps) for ordinal, (total, steps) in sorted(self._totals.items())}

    def scheduled(self, engine: Engine) -> None:
        """Look at what the step's queries see."""
        if engine.step % self._every:
            return
        cache, scheduler = engine.cache, engine.scheduler
        running = scheduler.running[: scheduler.num_running]
        rows = cache.store.s.rows[running]
        rows = rows[(rows["decode_from"] > 0) & (rows["sched"] == 1)]
        if len(rows) == 0:
            return
        attention, start = self._full(rows)
        for b in range(len(rows)):
            mine = slice(int(rows["start"][b]), int(rows["start"][b] + rows["live"][b]))
            alive = cache.store.s.position[mine] if cache.tracked else slice(None, int(rows["computed"][b]))
            kept = attention[start[b] : start[b] + int(rows["computed"][b])][alive].sum(dtype=np.float64)
            total = self._totals.setdefault(int(rows["ordinal"][b]), np.zeros(2))
            total += kept, 1

    def applied(self, engine: Engine, finished: int) -> None:
        """Do nothing: what died only matters to the next step."""

    def _full(self, rows: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return float32[sum of lengths], the attention of these rows' newest queries over all of their tokens."""
        length = rows["computed"].astype(np.int64)
        start = np.cumsum(length) - length
        cells = int(length.sum())
        position = (np.arange(cells) - np.repeat(start, length)).astype(np.int32)
        numbers = np.array([np.arange(len(rows)), start, length, length, rows["decode_from"], length], np.int64)
        columns = {name: np.zeros(cells, np.float32) for name in self._model.columns}
        view = View(numbers, rows["key"].copy(), position, columns, np.zeros((2, cells), np.float32), self._model)
        self._model.begin(view)
        return view.attention(), start
