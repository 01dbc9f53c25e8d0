"""A run in one flat dictionary: the figures of ``vtoken run --json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.serving.metrics import StepLog, percentiles
from sim.serving.request import RequestState

__all__ = ["load_state", "request_row", "summarise", "whole_number"]


def summarise(
    requests: Mapping[str, NDArray[Any]], steps: StepLog, counts: Mapping[str, float], waiting_at_last_arrival: int
) -> dict[str, Any]:
    """Reduce what was measured.

    Parameters
    ----------
    requests
        Columns of :class:`sim.serving.metrics.RequestLog`.
    steps
        All steps.
    counts
        Totals that the engine counted.
    waiting_at_last_arrival
        Requests waiting when the last one arrived.
    """
    done = requests["status"] == "finished"
    total = len(done)
    finished = {name: values[done] for name, values in requests.items()}
    output = int(finished["output_tokens"].sum())
    start = float(requests["arrival_s"].min(initial=np.inf))
    makespan = float(finished["finish_s"].max(initial=start) - start) if total else 0.0
    steps_per_level = {name: steps.mean(name) for name in ("running", "waiting", "used_blocks")}
    allocated = steps.allocated_s or 1.0
    return {
        "requests": total,
        "finished": int(done.sum()),
        "refused": int(total - done.sum()),
        "load_state": load_state(requests, waiting_at_last_arrival, steps),
        "steps": steps.steps,
        "makespan_s": makespan,
        "output_tokens": output,
        "output_tokens_per_s": output / makespan if makespan else 0.0,
        "requests_per_s": int(done.sum()) / makespan if makespan else 0.0,
        "peak_running": int(steps.peak[4]),
        "mean_running": steps_per_level["running"],
        "peak_waiting": int(steps.peak[5]),
        "mean_waiting": steps_per_level["waiting"],
        "retained_blocks_mean": _mean(finished["retained_blocks"]),
        "retained_blocks_peak_mean": _mean(finished["retained_blocks_peak"]),
        "over_retention_mean": _mean(finished["over_retention"]),
        "fragmentation_mean": steps.weighted_fragmentation / allocated,
        "dead_fraction_mean": steps.weighted_dead / allocated,
        "tail_slack_mean": steps.weighted_tail / allocated,
        "used_blocks_mean": steps_per_level["used_blocks"],
        "used_blocks_peak": whole_number(float(steps.peak[6])),
        "recomputed_tokens": int(requests["recomputed_tokens"].sum()),
        "cached_tokens": int(requests["cached_tokens"].sum()),
        **counts,
        "queue_time_s": percentiles(finished["queue_s"]),
        "ttft_s": percentiles(finished["ttft_s"]),
        "tpot_s": percentiles(finished["tpot_s"]),
        "e2e_s": percentiles(finished["e2e_s"]),
    }


def whole_number(value: float) -> float:
    """Return a number as an integer if it is one: what several units have in common is counted in parts."""
    return int(value) if value.is_integer() else value


def request_row(state: RequestState, now_ns: int, *, finished: bool, units: int = 1) -> tuple[Any, ...]:
    """Return what is kept of a request that ends now, in the order of :data:`sim.serving.metrics.REQUEST`.

    ``units`` blocks of the request are one of the whole model; its tokens are still those of all units.
    """
    totals, nan = state.totals, math.nan
    arrival, end = state.arrival_ns / 1e9, now_ns / 1e9
    first = totals.get("first_token_ns")
    ttft = first / 1e9 - arrival if first is not None else nan
    e2e = end - arrival if finished else nan
    decode = float(totals.get("decode_ns", 0)) or nan
    return (
        state.ordinal,
        finished,
        arrival,
        state.admitted_ns / 1e9 - arrival if state.admitted_ns >= 0 else nan,
        ttft,
        (e2e - ttft) / (state.produced - 1) if finished and state.produced > 1 else nan,
        e2e,
        end if finished else nan,
        state.prompt_tokens,
        state.produced,
        state.preemptions,
        state.recomputed_tokens,
        state.cached_tokens,
        totals.get("block_ns", nan) / units / decode,
        (totals.get("peak", 0) or nan) / units,
        totals.get("blocks", nan) / units,
        totals.get("over_ns", nan) / decode,
        totals.get("evicted", 0),
        totals.get("moved", 0),
    )


def load_state(requests: Mapping[str, NDArray[Any]], waiting_at_last_arrival: int, steps: StepLog) -> str:
    """Say whether the system kept up with the arrivals.

    ``stable``: fewer than one request was waiting on average. ``overloaded``: when the last request arrived more than a
    twentieth of all were still waiting and the queue had been growing: requests of the second half waited half as long
    again as those of the first; beyond saturation, latency depends on how long one watches. ``backlogged``: anything
    between (and all requests at once).
    """
    queue = requests["queue_s"]
    total = len(queue)
    if steps.mean("waiting") < 1:
        return "stable"
    arrival = requests["arrival_s"]
    if arrival.max() == arrival.min() or waiting_at_last_arrival <= total / 20:
        return "backlogged"
    half = total // 2
    first, second = (np.nanmean(part) if np.isfinite(part).any() else 0.0 for part in (queue[:half], queue[half:]))
    return "overloaded" if second > 1.5 * first else "backlogged"


def _mean(values: NDArray[np.float64]) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None
