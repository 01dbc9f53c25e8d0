"""Figures that say what a workload is like."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.workload.trace import Trace

__all__ = ["Description", "Spread", "describe"]

_WINDOWS_S = (1, 10, 60)
_LEAST_WINDOWS = 10


@dataclass(frozen=True)
class Spread:
    """Mean, extremes and percentiles of one column."""

    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: NDArray[np.int64]) -> Spread:
        """Summarise an array that is not empty."""
        p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        mean, std = float(values.mean()), float(values.std())
        return cls(mean, std, float(values.min()), p50, p90, p95, p99, float(values.max()))


@dataclass(frozen=True)
class Description:
    """What a trace is like.

    Attributes
    ----------
    name, requests, duration_s
        Name, number of requests, time from the first to the last arrival.
    rate_per_s
        Gaps per second: (requests - 1) / duration; None without duration.
    peak_rate_per_s
        Most arrivals in a second, seconds counted from the first arrival.
    prompt_tokens, output_tokens, total_tokens
        Lengths.
    gap_cv
        Coefficient of variation of the gaps between arrivals; 1 for a Poisson process.
    dispersion
        Variance / mean of the number of arrivals in windows of so many seconds; 1 for a Poisson process, larger
        where load comes in waves. Windows of which the trace has fewer than ten are left out.
    equal_times
        Share of gaps that are 0.
    sessions
        Number of different sessions, or None.
    prefix_reuse
        Share of prompt tokens inside leading blocks that an earlier request already had (what an endless cache would
        save), or None without hashes.
    hash_tokens
        Prompt tokens that one hash covers, or None.
    notes
        What the reader left out, changed or estimated.
    """

    name: str
    requests: int
    duration_s: float
    rate_per_s: float | None
    peak_rate_per_s: float
    prompt_tokens: Spread
    output_tokens: Spread
    total_tokens: Spread
    gap_cv: float | None
    dispersion: dict[str, float]
    equal_times: float
    sessions: int | None
    prefix_reuse: float | None
    hash_tokens: int | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """Return the figures as a table in plain text."""
        rows = [
            ("requests", f"{self.requests:,}"),
            ("duration", f"{self.duration_s:,.3f} s"),
            ("rate", f"{_number(self.rate_per_s)} /s, at most {self.peak_rate_per_s:g} in one second"),
            ("gaps", f"CV {_number(self.gap_cv)} (Poisson: 1), {self.equal_times:.1%} are zero"),
        ]
        if self.dispersion:
            figures = ", ".join(f"{value:.2f} over {width}" for width, value in self.dispersion.items())
            rows.append(("dispersion", f"{figures} (Poisson: 1)"))
        if self.sessions is not None:
            rows.append(("sessions", f"{self.sessions:,}"))
        if self.prefix_reuse is not None:
            rows.append(
                ("prefix reuse", f"{self.prefix_reuse:.1%} of prompt tokens, blocks of {self.hash_tokens} tokens")
            )
        lines = [self.name, *(f"  {label:<13}{value}" for label, value in rows), ""]
        columns = [field.name for field in dataclasses.fields(Spread)]
        lines.append(f"  {'tokens':<13}" + "".join(f"{name:>10}" for name in columns))
        for label, spread in (
            ("prompt", self.prompt_tokens),
            ("output", self.output_tokens),
            ("total", self.total_tokens),
        ):
            lines.append(f"  {label:<13}" + "".join(f"{getattr(spread, name):>10,.0f}" for name in columns))
        if self.notes:
            lines += ["", *(f"  note: {note}" for note in self.notes)]
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def describe(trace: Trace) -> Description:
    """Summarise a trace.

    Raises
    ------
    InputError
        If it is empty.
    """
    if not len(trace):
        raise InputError(f"trace {trace.name!r} holds no requests")
    since = trace.arrival_ns - trace.arrival_ns[0]
    duration = float(since[-1]) / 1e9
    gaps = np.diff(since) / 1e9
    hashed = trace.prefix_hashes is not None
    return Description(
        name=trace.name,
        requests=len(trace),
        duration_s=duration,
        rate_per_s=len(gaps) / duration if duration else None,
        peak_rate_per_s=float(np.unique(since // 10**9, return_counts=True)[1].max()),
        prompt_tokens=Spread.of(trace.prompt_tokens),
        output_tokens=Spread.of(trace.output_tokens),
        total_tokens=Spread.of(trace.prompt_tokens + trace.output_tokens),
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and duration else None,
        dispersion={
            f"{width} s": _dispersion(since, width) for width in _WINDOWS_S if duration >= width * _LEAST_WINDOWS
        },
        equal_times=float((gaps == 0).mean()) if len(gaps) else 0.0,
        sessions=None if trace.session is None else len({s for s in trace.session if s is not None}),
        prefix_reuse=_prefix_reuse(trace) if hashed else None,
        hash_tokens=trace.hash_tokens if hashed else None,
        notes=trace.notes,
    )


def _dispersion(since_ns: NDArray[np.int64], width_s: int) -> float:
    """Variance / mean of arrivals per window, over whole windows; empty windows are not stored."""
    width = width_s * 10**9
    windows = int(since_ns[-1] // width)
    count = np.unique(since_ns[since_ns < windows * width] // width, return_counts=True)[1].astype(np.float64)
    mean = count.sum() / windows
    return float(((count**2).sum() / windows - mean**2) / mean)


def _prefix_reuse(trace: Trace) -> float:
    """Share of prompt tokens in leading blocks seen in an earlier request."""
    assert trace.prefix_hashes is not None
    sizes = np.array([len(ids) for ids in trace.prefix_hashes])
    if not sizes.sum():
        return 0.0
    flat = np.concatenate(trace.prefix_hashes)
    owner = np.repeat(np.arange(len(trace)), sizes)
    _, first, which = np.unique(flat, return_index=True, return_inverse=True)
    fresh = owner[first[which]] == owner  # the id's first request is this one
    start = np.cumsum(sizes) - sizes
    at = np.flatnonzero(fresh)
    end = np.append(at, len(flat))[np.searchsorted(at, start)]  # the first fresh block from the request's start on
    leading = np.minimum(end - start, sizes)
    tokens = np.minimum(leading * trace.hash_tokens, trace.prompt_tokens)
    return float(tokens.sum() / trace.prompt_tokens.sum())
