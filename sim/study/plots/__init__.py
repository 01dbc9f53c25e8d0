"""Pictures of runs and sweeps; every function returns matplotlib figures or axes and leaves pyplot alone."""

from sim.study.plots.block_map import block_map_around_repack
from sim.study.plots.concurrency import concurrency_over_time
from sim.study.plots.directory import plot_directory, run_figures, sweep_figures
from sim.study.plots.latency import latency_by_setting, latency_cdf
from sim.study.plots.liveness import liveness_over_time
from sim.study.plots.pool import pool_before_after
from sim.study.plots.retained import paired_reduction, reduction_cdf, retained_cdf
from sim.study.plots.settings import (
    bars_by_setting,
    concurrency_by_setting,
    fragmentation_by_setting,
    retained_by_setting,
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
    "liveness_over_time",
    "paired_reduction",
    "plot_directory",
    "pool_before_after",
    "reduction_cdf",
    "retained_by_setting",
    "retained_cdf",
    "run_figures",
    "slots_over_time",
    "sweep_figures",
    "throughput_by_setting",
]
