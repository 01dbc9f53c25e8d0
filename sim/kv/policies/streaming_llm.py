"""StreamingLLM: attention sinks and a window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import EvictionPolicy, policies
from sim.kv.view import View

__all__ = ["StreamingLLM"]


@policies.register("streaming_llm")
@dataclass(frozen=True, slots=True)
class StreamingLLM(EvictionPolicy):
    """Keep the first ``sinks`` tokens and the newest; what lies between dies, oldest first.

    Source: Xiao et al., ICLR 2024 (arXiv 2309.17453); kv_cache.py of mit-han-lab/streaming-llm. Its window is a fixed
    number of tokens; here it is what the budget leaves beside the sinks. A budget of ``sinks`` tokens or fewer keeps
    fewer sinks, never none of the newest.

    Parameters
    ----------
    sinks
        Oldest tokens that stay. Default as in the paper.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise InputError(f"streaming_llm: sinks: expected 0 or more, got {self.sinks}")

    def select(self, view: View, excess: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take the run behind the sinks."""
        first = view.start + np.minimum(self.sinks, view.keep - 1)
        ends = np.cumsum(excess)
        return np.arange(ends[-1]) + np.repeat(first - (ends - excess), excess), excess
