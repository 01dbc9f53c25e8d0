"""Pictures as matplotlib axes, each drawn into axes of yours or into a new figure's.

Of a :class:`~sim.RunResult`: :func:`slots_over_time`, :func:`liveness_over_time`, :func:`concurrency_over_time`,
:func:`latency_distribution`, :func:`pool_blocks`, :func:`retained_cdf`; of several that differ in the reclaimer:
:func:`retained_cdf`, :func:`reduction_cdf`. Of the table of :func:`sim.sweep`: :func:`setting_bars`,
:func:`latency_ranges`. Of a :class:`~sim.SearchResult`: :func:`search_probes`. None of them touches pyplot's state.

Within ``with use_style("paper"):`` they draw for a column of a two-column paper; :func:`save` writes what they drew,
with the same bytes each time.

>>> import sim
>>> result = sim.simulate(sim.SimConfig(trace="poisson:rate=8,n=20,prompt=200,output=40", policy="random", budget=0.5))
>>> axes = sim.plots.slots_over_time(result)
>>> axes.get_xlabel()
'simulated time (s)'

:mod:`sim.study.plots` has the pictures of ``vtoken plot`` as well, which are figures of several panels.
"""

from sim.study.plots.concurrency import concurrency_over_time
from sim.study.plots.latency import latency_distribution, latency_ranges
from sim.study.plots.limits import search_probes
from sim.study.plots.liveness import liveness_over_time
from sim.study.plots.pool import pool_blocks
from sim.study.plots.retained import reduction_cdf, retained_cdf
from sim.study.plots.settings import setting_bars
from sim.study.plots.slots import slots_over_time
from sim.study.plots.style import save, use_style

__all__ = [
    "concurrency_over_time",
    "latency_distribution",
    "latency_ranges",
    "liveness_over_time",
    "pool_blocks",
    "reduction_cdf",
    "retained_cdf",
    "save",
    "search_probes",
    "setting_bars",
    "slots_over_time",
    "use_style",
]
