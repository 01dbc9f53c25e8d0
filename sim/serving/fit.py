"""The laws of a cost profile, and how their figures are fitted to measurements: numpy and scipy alone.

All fits make the relative error small (a time that is off by a tenth counts alike at 10 us and at 10 ms), weigh single
wild measurements down (soft L1), and keep every figure at or above 0. Errors are those on measurements that the fit did
not see: five fits, each to four fifths. Intervals are 95 %, from the residuals and the curvature at the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from sim.errors import InputError
from sim.serving.profile import OVERLAP, Errors, Figure

__all__ = [
    "Fitted",
    "attention_ns",
    "errors",
    "fit_attention",
    "fit_copy",
    "fit_curve",
    "fit_linear",
    "fit_prefill",
    "fit_ratio",
]

FOLDS = 5
NOISE = 0.03
"""Relative error from which on a measurement counts less than by its square."""

Floats = NDArray[np.float64]
Law = Callable[[Floats, Floats], Floats]


@dataclass(frozen=True)
class Fitted:
    """What a fit gives.

    Attributes
    ----------
    values, intervals
        The figures by name, and their 95 % confidence intervals.
    n
        Measurements.
    error
        On measurements held out; None where there are fewer than two a figure.
    held_out
        float64[n]: what was predicted for each measurement by the fit that did not see it; empty where there is none.
    """

    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    n: int
    error: Errors | None
    held_out: Floats

    def figure(self, name: str, provenance: str, *, scale: float = 1.0, note: str = "") -> Figure:
        """Return one value as a profile's figure.

        Parameters
        ----------
        name
            Which.
        provenance
            Name of its provenance in the profile.
        scale
            Factor on the value: the number of layers, where one was measured.
        note
            Where it does not hold.
        """
        low, high = self.intervals[name]
        return Figure(
            value=_digits(self.values[name] * scale),
            provenance=provenance,
            n=self.n,
            error=self.error,
            interval=(_digits(low * scale), _digits(high * scale)),
            note=note,
        )


def _digits(value: float) -> float:
    """Keep six digits: more would differ between versions of the libraries."""
    return float(f"{value:.6g}")


def errors(predicted: ArrayLike, measured: ArrayLike) -> Errors:
    """Return mean, median, 90th percentile and maximum of the absolute relative errors.

    Raises
    ------
    InputError
        If there is nothing to compare.
    """
    measured = np.asarray(measured, np.float64)
    off = np.abs(np.asarray(predicted, np.float64) / measured - 1)
    if not off.size:
        raise InputError("fit: expected at least one measurement, got none")
    parts = (off.mean(), np.median(off), np.quantile(off, 0.9), off.max())
    return Errors(*(round(float(part), 4) for part in parts))


def attention_ns(
    kv_ns: ArrayLike, sequences: ArrayLike, launch_ns: float, sequence_ns: float, free_sequences: ArrayLike
) -> Floats:
    """Return the time of decode attention.

    Parameters
    ----------
    kv_ns
        Time of the bytes alone.
    sequences
        Sequences in the batch.
    launch_ns, sequence_ns, free_sequences
        The kernel without work; each sequence beyond those that multiprocessors take at once.
    """
    beyond = np.maximum(np.subtract(sequences, free_sequences, dtype=np.float64), 0.0) * sequence_ns
    both = np.asarray(kv_ns, np.float64) ** OVERLAP + beyond**OVERLAP
    return np.asarray(launch_ns + both ** (1 / OVERLAP), np.float64)


def fit_attention(
    kv_bytes: ArrayLike,
    sequences: ArrayLike,
    ns: ArrayLike,
    *,
    free_sequences: ArrayLike = 0.0,
    cache_bytes: float = 0.0,
) -> Fitted:
    """Fit decode attention: a launch, the bytes, and each sequence beyond the free ones.

    Parameters
    ----------
    kv_bytes, sequences, ns
        float64[n]: bytes of KV read and written, sequences of the batch, time.
    free_sequences
        Sequences that run beside each other at no cost: multiprocessors over KV heads. One number, or one a
        measurement.
    cache_bytes
        Where the same buffers were read again and again: measurements below this many bytes came from the cache, and
        get a launch and a rate of their own. 0 if the cache was kept out.

    Returns
    -------
    Fitted
        ``launch_ns``, ``ns_per_byte``, ``sequence_ns``; with ``cache_bytes`` also ``cached_launch_ns`` and
        ``cached_ns_per_byte``.
    """
    kv, seqs, free, time = _columns(kv_bytes, sequences, free_sequences, ns)
    names = ["launch_ns", "ns_per_byte", "sequence_ns"]
    start = [time.min(), max((time / np.maximum(kv, 1.0)).min(), 1e-9), max((time / seqs).min(), 1e-3)]
    cached = kv < cache_bytes
    if cached.any() and not cached.all():
        names += ["cached_launch_ns", "cached_ns_per_byte"]
        start += [start[0], start[1] / 2]

    def law(p: Floats, x: Floats) -> Floats:
        launch, rate = np.where(x[:, 0] < cache_bytes, p[-2:, None], p[:2, None]) if len(p) > 3 else p[:2, None]
        return np.asarray(launch + attention_ns(x[:, 0] * rate, x[:, 1], 0.0, float(p[2]), x[:, 2]), np.float64)

    return _fit(law, names, start, np.stack([kv, seqs, free], axis=1), time)


def fit_prefill(tokens: ArrayLike, pairs: ArrayLike, ns: ArrayLike, *, known_ns: ArrayLike = 0.0) -> Fitted:
    """Fit prefill attention: a launch, each token, and each query-key pair.

    Parameters
    ----------
    tokens, pairs, ns
        float64[n]: tokens beyond one a sequence, pairs beyond one a slot read, time.
    known_ns
        Part of the time that other figures explain (the bytes of KV).

    Returns
    -------
    Fitted
        ``launch_ns``, ``ns_per_token``, ``ns_per_pair``.
    """
    token, pair, known, time = _columns(tokens, pairs, known_ns, ns)
    columns = {"launch_ns": np.ones_like(time), "ns_per_token": token, "ns_per_pair": pair}
    return fit_linear(columns, time, known_ns=known)


def fit_copy(bytes_: ArrayLike, scattered: ArrayLike, ns: ArrayLike) -> Fitted:
    """Fit a token copy: a launch, and the bytes read and written, apart for scattered and for neighbouring tokens.

    Returns
    -------
    Fitted
        ``launch_ns``, ``contiguous_ns_per_byte``, ``scattered_ns_per_byte``.
    """
    moved, apart, time = _columns(bytes_, scattered, ns)
    apart = (apart != 0).astype(np.float64)
    columns = {
        "launch_ns": np.ones_like(time),
        "contiguous_ns_per_byte": moved * (1 - apart),
        "scattered_ns_per_byte": moved * apart,
    }
    return fit_linear(columns, time)


def fit_ratio(explained_ns: ArrayLike, measured_ns: ArrayLike) -> Fitted:
    """Fit ``measured = ratio * explained``; the figure is called ``ratio``."""
    explained, time = _columns(explained_ns, measured_ns)
    return fit_linear({"ratio": explained}, time)


def fit_linear(columns: Mapping[str, ArrayLike], ns: ArrayLike, *, known_ns: ArrayLike = 0.0) -> Fitted:
    """Fit a sum of columns, each times a figure of its name.

    Parameters
    ----------
    columns
        float64[n] by name.
    ns
        Times, all above 0.
    known_ns
        A part that is not fitted.

    Raises
    ------
    InputError
        If lengths differ, a time is not positive, or there are fewer measurements than figures.
    """
    *parts, known, time = _columns(*columns.values(), known_ns, ns)
    names = list(columns)
    start = [max(float(time.mean()) / max(float(part.mean()), 1e-300), 1e-300) / len(names) for part in parts]

    def law(p: Floats, x: Floats) -> Floats:
        return np.asarray(x[:, :-1] @ p + x[:, -1], np.float64)

    return _fit(law, names, start, np.stack([*parts, known], axis=1), time)


def fit_curve(
    counts: ArrayLike, ns: ArrayLike, tolerance: float = 0.01
) -> tuple[tuple[tuple[int, float], ...], Errors | None]:
    """Reduce times at some counts to the points of a :class:`~sim.serving.profile.Curve`.

    Parameters
    ----------
    counts, ns
        int64[n], float64[n]: several times at one count become their median.
    tolerance
        Points are left out where the line between their neighbours is no further off than this share.

    Returns
    -------
    points, error
        The points; and how far the line between its neighbours is off at each inner count (None with two counts).
    """
    x_all, time = _columns(counts, ns)
    x = np.unique(x_all)
    if len(x) < 2:
        raise InputError(f"fit: a curve needs times at two counts at least, got {len(x)}")
    y = np.array([np.median(time[x_all == count]) for count in x])
    y[-1] = max(y[-1], y[-2])  # it is extrapolated from there
    between = [float(np.interp(x[i], x[[i - 1, i + 1]], y[[i - 1, i + 1]])) for i in range(1, len(x) - 1)]
    kept = _thin(x, y, tolerance)
    kept = sorted({*kept, len(x) - 2, len(x) - 1})
    points = tuple((round(float(x[i])), _digits(float(y[i]))) for i in kept)
    return points, errors(between, y[1:-1]) if between else None


def _thin(x: Floats, y: Floats, tolerance: float) -> list[int]:
    """Return the points that a polyline needs to be within ``tolerance`` everywhere: the worst point is added first."""
    kept, open_ends = {0, len(x) - 1}, [(0, len(x) - 1)]
    while open_ends:
        first, last = open_ends.pop()
        inner = slice(first + 1, last)
        off = np.abs(np.interp(x[inner], x[[first, last]], y[[first, last]]) / y[inner] - 1)
        if off.size and off.max() > tolerance:
            worst = first + 1 + int(off.argmax())
            kept.add(worst)
            open_ends += [(first, worst), (worst, last)]
    return sorted(kept)


# ---- least squares ---------------------------------------------------------------------------------------------------


def _columns(*columns: ArrayLike) -> list[Floats]:
    """Return float64[n] each; the last one is the measured time."""
    arrays = [np.asarray(column, np.float64) for column in columns]
    n = arrays[-1].size
    for array in arrays:
        if array.size not in (1, n):
            raise InputError(f"fit: expected columns of {n} measurements, got one of {array.size}")
        if not np.isfinite(array).all():
            raise InputError("fit: expected finite numbers")
    if not n or (arrays[-1] <= 0).any():
        raise InputError("fit: expected measured times above 0, at least one")
    return [np.array(np.broadcast_to(array.reshape(-1), (n,))) for array in arrays]


def _solve(law: Law, start: Sequence[float], x: Floats, time: Floats) -> Floats:
    """Return the figures at the optimum."""
    scale = np.asarray(start, np.float64)

    def off(p: Floats) -> Floats:
        return law(p * scale, x) / time - 1

    found = least_squares(
        off,
        np.ones(len(scale)),
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=NOISE,
        ftol=1e-12,
        xtol=1e-12,
        gtol=1e-12,
    )
    return np.asarray(np.where(found.x > 1e-9, found.x, 0.0) * scale, np.float64)  # the solver stops short of a bound


def _deviations(law: Law, values: Floats, x: Floats, time: Floats) -> Floats:
    """Return the standard errors of the figures: the sandwich of an M-estimator, which asks for no one noise level."""
    off = law(values, x) / time - 1
    unit = np.where(values > 0, values, 1e-12)  # figures differ by ten orders of magnitude
    jacobian = np.empty((len(time), len(values)))
    for k in range(len(values)):
        step = np.zeros(len(values))
        step[k] = 1e-6 * unit[k]
        jacobian[:, k] = (law(values + step, x) - law(values, x)) / time / 1e-6
    stretch = 1 + (off / NOISE) ** 2
    bread = np.linalg.pinv((jacobian.T * stretch**-1.5) @ jacobian)
    pull = off / np.sqrt(stretch)
    meat = (jacobian.T * pull**2) @ jacobian * len(time) / max(len(time) - len(values), 1)
    return np.asarray(np.sqrt(np.maximum(np.diag(bread @ meat @ bread), 0.0)) * unit, np.float64)


def _fit(law: Law, names: Sequence[str], start: Sequence[float], x: Floats, time: Floats) -> Fitted:
    """Fit all, and each four fifths for the error on the last one."""
    n = len(time)
    if n < len(names):
        raise InputError(f"fit: {len(names)} figures need as many measurements, got {n}")
    values = _solve(law, start, x, time)
    deviations = _deviations(law, values, x, time)
    held = np.empty(0)
    if n >= 2 * len(names) and n >= FOLDS:
        fold = np.random.default_rng(0).permutation(n) % FOLDS
        held = np.empty(n)
        for k in range(FOLDS):
            seen = _solve(law, start, x[fold != k], time[fold != k])
            held[fold == k] = law(seen, x[fold == k])
    return Fitted(
        values={name: float(value) for name, value in zip(names, values, strict=True)},
        intervals={
            name: (max(float(value - 1.96 * dev), 0.0), float(value + 1.96 * dev))
            for name, value, dev in zip(names, values, deviations, strict=True)
        },
        n=n,
        error=errors(held, time) if held.size else None,
        held_out=held,
    )
