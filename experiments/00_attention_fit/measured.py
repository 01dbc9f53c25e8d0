"""What a real model's attention did to blocks: the side that the simulation is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import open_loop
import pandas as pd
from numpy.typing import NDArray

SHARED = Path(__file__).parents[3] / "shared" / "attention"
NOT_SHOWN = {"not shown, 1": (1024, 256), "not shown, 2": (1536, 256), "not shown, 3": (555, 384)}
"""P, G of the three captures that the published means include and the folder lacks.

They follow from the published means for StreamingLLM, which depend on the lengths alone: with these three, all 48 come
out to 0.02 points.
"""

Fractions = NDArray[np.float64]
"""[ratio, block size, measure] in percent."""
Table = dict[str, tuple[Fractions, Fractions]]
"""Policy -> fractions at the end of the prompt, fractions in decode (mean over all checkpoints)."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The real model's fractions, mean over some captures or over all: every capture counts the same."""

    sizes: dict[str, tuple[int, int]]
    """Capture -> P, G."""
    at_end: int
    """How many of them, the first ones, the fractions at the end of the prompt are the mean of."""
    table: Table

    @classmethod
    def read(cls, captures: Iterable[str] | None = None, folder: Path = SHARED) -> Measured:
        """Read the measurements; for all captures, those of decode are the published means over ten prompts."""
        path = folder / "fragmentation.parquet"
        frame = pd.read_parquet(path) if path.exists() else pd.read_csv(path.with_suffix(".csv"))
        frame = frame[frame.gran == "global"]
        names = sorted(frame.cap.unique()) if captures is None else list(captures)
        frame = frame[frame.cap.isin(names)]
        ends = frame[frame.when == 0].groupby("cap").n.first()
        sizes = {name: (int(ends[name]), int(frame[frame.cap == name].when.max())) for name in names}
        decode = frame[frame.when > 0]
        if captures is None:
            decode = pd.read_csv(folder / "fragmentation_by_policy.csv")
            decode = decode[decode.gran == "global"].assign(cap="all")
            sizes |= NOT_SHOWN
        at_end, later = _by_policy(frame[frame.when == 0]), _by_policy(decode)
        return cls(sizes, len(names), {name: (at_end[name], later[name]) for name in open_loop.POLICIES})

    @classmethod
    def not_shown(cls) -> Measured:
        """Return what the published means leave for the three captures that they include and the folder lacks.

        In decode, that is; at the end of the prompt nothing is known of them (NaN).
        """
        ten = cls.read()
        seven = cls.read(list(ten.sizes)[: ten.at_end])
        table = {
            name: (np.full_like(ten.table[name][0], np.nan), (10 * ten.table[name][1] - 7 * seven.table[name][1]) / 3)
            for name in ten.table
        }
        return cls(NOT_SHOWN, 3, table)


def _by_policy(frame: pd.DataFrame) -> dict[str, Fractions]:
    shape = (len(open_loop.RATIOS), len(open_loop.BLOCK_SIZES), len(open_loop.MEASURES))
    cells = ["pol", "ratio", "bs"]
    mean = frame.groupby([*cells, "cap"])[list(open_loop.MEASURES)].mean().groupby(cells).mean().mul(100)
    return {str(name): rows.to_numpy(float).reshape(shape) for name, rows in mean.groupby("pol")}
