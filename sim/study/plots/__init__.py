"""Pictures of runs and sweeps; every function returns matplotlib figures or axes and leaves pyplot alone."""

from sim.study.plots.block_map import block_map_around_repack
from sim.study.plots.concurrency import concurrency_over_time
from sim.study.plots.directory import plot_directory, run_figures, sweep_figures
from sim.study.plots.latency import latency_by_setting, latency_cdf, latency_distribution, latency_ranges
from sim.study.plots.limits import search_probes
from sim.study.plots.liveness import liveness_over_time
from sim.study.plots.pool import pool_before_after, pool_blocks
from sim.study.plots.retained import paired_reduction, reduction_cdf, retained_cdf
from sim.study.plots.settings import (
    bars_by_setting,
    concurrency_by_setting,
    fragmentation_by_setting,
    retained_by_setting,
    setting_bars,
    throughput_by_setting,
)
from sim.study.plots.slots import slots_over_time

__all__ = [
    "bars_by_setting",
    "block_map_around_repack",
    "concurrency_by_setting",
    "concurrency_over_time",
    "fragmentation_by_setting",
    "latency_by_setting",
    "latency_cdf",
    "latency_distribution",
    "latency_ranges",
    "liveness_over_time",
    "paired_reduction",
    "plot_directory",
    "pool_before_after",
    "pool_blocks",
    "reduction_cdf",
    "retained_by_setting",
    "retained_cdf",
    "run_figures",
    "search_probes",
    "setting_bars",
    "slots_over_time",
    "sweep_figures",
    "throughput_by_setting",
]
