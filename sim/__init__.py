"""vtoken-sim: how to evict and reclaim KV-cache memory, decided before a GPU hour is spent.

>>> from sim import SimConfig, simulate
>>> result = simulate(SimConfig(trace="poisson:rate=4,n=50,prompt=300,output=60", policy="random", budget=0.5))
>>> result.summary["finished"]
50

The names in ``__all__`` are the library: :func:`simulate` runs one configuration, :func:`sweep` many,
:func:`ranked` says which of them to take, :func:`search_concurrency` and :func:`search_sla` find limits; tables are
pandas data frames, and :mod:`sim.plots` draws into matplotlib axes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim import plots
    from sim.errors import InputError, NoProgressError, RunFailedError
    from sim.study.config import SimConfig
    from sim.study.library import SearchResult, search_concurrency, search_sla, sweep
    from sim.study.ranking import ranked
    from sim.study.result import RunResult
    from sim.study.run import simulate
    from sim.study.spec import SweepSpec
    from sim.workload.source import open_source, read_trace
    from sim.workload.trace import Trace

__all__ = [
    "InputError",
    "NoProgressError",
    "RunFailedError",
    "RunResult",
    "SearchResult",
    "SimConfig",
    "SweepSpec",
    "Trace",
    "open_source",
    "plots",
    "ranked",
    "read_trace",
    "search_concurrency",
    "search_sla",
    "simulate",
    "sweep",
]

_HOMES = {
    "InputError": "sim.errors",
    "NoProgressError": "sim.errors",
    "RunFailedError": "sim.errors",
    "RunResult": "sim.study.result",
    "SearchResult": "sim.study.library",
    "SimConfig": "sim.study.config",
    "SweepSpec": "sim.study.spec",
    "Trace": "sim.workload.trace",
    "open_source": "sim.workload.source",
    "ranked": "sim.study.ranking",
    "read_trace": "sim.workload.source",
    "search_concurrency": "sim.study.library",
    "search_sla": "sim.study.library",
    "simulate": "sim.study.run",
    "sweep": "sim.study.library",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command's ``--help`` needs none of numpy, numba or pandas."""
    if name == "plots":
        return importlib.import_module("sim.plots")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Name what can be imported, before it has been."""
    return sorted({*globals(), *__all__})
