"""Histograms aggregated from ServeGen's client data (alibaba/ServeGen; Apache-2.0)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.rng import stream
from sim.workload.json_text import json_object
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.trace import HASH_TOKENS, MAX_TOKENS, Trace


@trace_readers.register("servegen")
@dataclass(frozen=True)
class ServeGen(TraceReader):
    """JSON: histograms of lengths and the request rate in windows of a day, to be sampled."""

    summary: ClassVar[str] = (
        "ServeGen json: hist of lengths and rate_per_window (req/s), sampled with the seed as a Poisson process"
    )

    def matches(self, head: Head) -> bool:
        """Recognise the histograms."""
        return head.text.lstrip()[:1] == "{" and '"hist"' in head.text and '"input_tokens"' in head.text

    def read(self, path: Path, how: Reading) -> ServeGenSource:
        """Read the histograms."""
        data = json_object(path)
        hist = data.get("hist")
        if not isinstance(hist, dict):
            raise InputError(f"{path}: field 'hist': expected an object of histograms")
        starts, rates = _mapping(data, "rate_per_window", str(path))
        if len(starts) < 2 or starts[0] < 0:
            raise InputError(f"{path}: field 'rate_per_window': expected at least two windows, from 0 s on")
        prompt = _Histogram(*_mapping(hist, "input_tokens", f"{path}: hist"), f"{path}: hist.input_tokens")
        output = _Histogram(*_mapping(hist, "output_tokens", f"{path}: hist"), f"{path}: hist.output_tokens")
        return ServeGenSource(path.name, how.seed, starts, rates, prompt, output)


def _mapping(holder: dict[str, Any], key: str, where: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the sorted keys and the values of an object of numbers."""
    value = holder.get(key)
    try:
        if not isinstance(value, dict) or not value:
            raise ValueError
        keys = np.array([float(k) for k in value])
        masses = np.array(list(value.values()), np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{where}: field {key!r}: expected an object of numbers, such as {{'600': 18.4}}") from None
    if not (np.isfinite(keys).all() and np.isfinite(masses).all() and (masses >= 0).all() and masses.sum() > 0):
        raise InputError(f"{where}: field {key!r}: expected finite numbers of at least 0, some above")
    order = np.argsort(keys)
    return keys[order], masses[order]


class _Histogram:
    """Draws lengths by their mass."""

    def __init__(self, values: NDArray[np.float64], masses: NDArray[np.float64], where: str) -> None:
        if values[0] < 1 or values[-1] > MAX_TOKENS:
            raise InputError(f"{where}: expected lengths of 1 .. 2**31 - 1, got {values[0]:g} .. {values[-1]:g}")
        self._values = np.rint(values).astype(np.int64)
        self._cumulative = np.cumsum(masses) / masses.sum()

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        at = np.searchsorted(self._cumulative, rng.random(n), side="right")
        drawn: NDArray[np.int64] = self._values[np.minimum(at, len(self._values) - 1)]
        return drawn


class ServeGenSource:
    """A day of requests drawn from histograms: a Poisson process whose rate is constant in each window.

    Parameters
    ----------
    name
        Name of the file.
    seed
        Seed of arrivals and lengths.
    starts
        Start of each window in s (float64[w]); the last window is as long as the one before.
    rates
        Requests per second in each window (float64[w]).
    prompt, output
        What lengths are drawn from, independently of each other.
    """

    hash_tokens = HASH_TOKENS
    total: int | None = None
    notes: tuple[str, ...] = (
        "drawn from histograms: arrivals are Poisson within a window, prompt and output lengths independent",
    )

    def __init__(
        self,
        name: str,
        seed: int,
        starts: NDArray[np.float64],
        rates: NDArray[np.float64],
        prompt: _Histogram,
        output: _Histogram,
    ) -> None:
        self.name = name
        self._seed = seed
        self._starts = starts
        self._rates = rates
        self._prompt = prompt
        self._output = output

    def chunks(self, size: int = 8192) -> Iterator[Trace]:
        """Yield the day window by window, in pieces of at most ``size`` requests."""
        arrivals = stream(self._seed, "workload", "arrivals")
        prompts, outputs = stream(self._seed, "workload", "prompt"), stream(self._seed, "workload", "output")
        widths = np.append(np.diff(self._starts), self._starts[-1] - self._starts[-2])
        first = 0
        for start, width, rate in zip(self._starts.tolist(), widths.tolist(), self._rates.tolist(), strict=True):
            n = int(arrivals.poisson(rate * width))
            times = np.sort(np.rint((start + width * arrivals.random(n)) * 1e9).astype(np.int64))
            window = Trace(
                times,
                self._prompt.draw(prompts, n),
                self._output.draw(outputs, n),
                name=self.name,
                notes=self.notes,
                first=first,
            )
            first += n
            yield from window.chunks(size)
