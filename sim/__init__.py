"""vtoken-sim: how to evict and reclaim KV-cache memory, decided before a GPU hour is spent.

>>> from sim import SimConfig, simulate
>>> result = simulate(SimConfig(trace="poisson:rate=4,n=50,prompt=300,output=60", policy="random", budget=0.5))
>>> result.summary["finished"]
50
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.errors import InputError, NoProgressError
    from sim.study.config import SimConfig
    from sim.study.result import RunResult
    from sim.study.run import simulate
    from sim.workload.source import open_source, read_trace
    from sim.workload.trace import Trace

__all__ = [
    "InputError",
    "NoProgressError",
    "RunResult",
    "SimConfig",
    "Trace",
    "open_source",
    "read_trace",
    "simulate",
]

_HOMES = {
    "InputError": "sim.errors",
    "NoProgressError": "sim.errors",
    "RunResult": "sim.study.result",
    "SimConfig": "sim.study.config",
    "Trace": "sim.workload.trace",
    "open_source": "sim.workload.source",
    "read_trace": "sim.workload.source",
    "simulate": "sim.study.run",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command's ``--help`` needs none of numpy, numba or pandas."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
