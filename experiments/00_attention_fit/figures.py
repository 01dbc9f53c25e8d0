"""Figures of an attention model that the search does not look at, beside the same figures of the captures."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from measured import SHARED, Measured
from numpy.typing import NDArray
from simulated import sequence

from sim.rng import request_key
from sim.serving.attention.recorded import Recorded
from sim.serving.attention.synthetic import Synthetic

SINKS, WINDOW = 4, 64


def gini(x: NDArray[np.float64]) -> float:
    """Return the Gini coefficient: 0 where all have the same, 1 where one has everything."""
    rank = 2 * np.arange(1, len(x) + 1) - len(x) - 1
    return float((rank * np.sort(x)).sum() / (len(x) * x.sum()))


def figures(attention: NDArray[np.float32], score: NDArray[np.float32], prompt: int) -> dict[str, float]:
    """Return the figures of one sequence: ``attention`` and ``score`` are those of ``open_loop.run``."""
    generated = attention.shape[1] - prompt
    decode = attention[-generated:].astype(float)
    found = {f"first {SINKS} tokens hold": decode[:, :SINKS].sum(1).mean()}
    for n in (8, 64, 256):
        found[f"last {n} tokens hold"] = np.mean([row[: prompt + g + 1][-n:].sum() for g, row in enumerate(decode)])
    rest = score[SINKS:].astype(float)
    found["score at the end of the prompt, no sink: Gini"] = gini(rest)
    found["the same: share of the top 10 %"] = np.sort(rest)[-len(rest) // 10 :].sum() / rest.sum()
    found["decode, no sink: Gini"] = gini(decode[:, SINKS:prompt].sum(0))
    tops = []
    for first in range(0, generated - WINDOW + 1, WINDOW):
        seen = decode[first : first + WINDOW, SINKS:prompt].sum(0)
        tops.append(seen >= np.quantile(seen, 0.8))
    overlap = [(a & b).sum() / a.sum() for a, b in itertools.pairwise(tops)]
    found[f"top 20 % of adjacent {WINDOW}-query windows overlap"] = np.mean(overlap)
    old = score[: prompt - prompt // 10]
    heavy = np.argsort(old)[-prompt // 10 :]
    found["share of H2O's heavy set at 20 % in the first tenth"] = (heavy < prompt / 10).mean()
    return found


def compared(seeds: range) -> str:
    """Return a markdown table: mean over the captures, mean over requests of their lengths."""
    measured = Measured.read()
    sizes = dict(list(measured.sizes.items())[: measured.at_end])
    real: list[Any] = [
        figures(*sequence(Recorded(str(SHARED / f"{name}.npz")), 0, *size), size[0]) for name, size in sizes.items()
    ]
    ours: list[Any] = [
        figures(*sequence(Synthetic(), request_key(seed, i), *size), size[0])
        for seed in seeds
        for i, size in enumerate(sizes.values())
    ]
    rows = [f"| {name} | {_mean(real, name):.2f} | {_mean(ours, name):.2f} |" for name in real[0]]
    return "\n".join(["| | measured | synthetic |", "|---|---|---|", *rows])


def _mean(found: list[dict[str, float]], name: str) -> float:
    return float(np.mean([one[name] for one in found]))
