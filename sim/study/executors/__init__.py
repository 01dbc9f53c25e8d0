"""Where runs are made: in this process, in processes of this machine, on a Dask cluster."""

from sim.study.executors.base import Executor, Lost, Made, RunFunction, WorkersError
from sim.study.executors.cluster import DaskCluster
from sim.study.executors.kept import Kept
from sim.study.executors.local import InProcess, LocalPool, default_workers

__all__ = [
    "DaskCluster",
    "Executor",
    "InProcess",
    "Kept",
    "LocalPool",
    "Lost",
    "Made",
    "RunFunction",
    "WorkersError",
    "default_workers",
]
