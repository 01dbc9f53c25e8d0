"""Workloads: requests, traces, readers and writers of trace files, generators."""

from sim.workload.describe import Description, describe
from sim.workload.generate import GeneratedSource, Generator, generators
from sim.workload.lengths import LengthDistribution, parse_lengths
from sim.workload.request import Request
from sim.workload.source import Lengths, Mapped, Source, limit, open_source, read_trace
from sim.workload.trace import Trace
from sim.workload.write import write_trace

__all__ = [
    "Description",
    "GeneratedSource",
    "Generator",
    "LengthDistribution",
    "Lengths",
    "Mapped",
    "Request",
    "Source",
    "Trace",
    "describe",
    "generators",
    "limit",
    "open_source",
    "parse_lengths",
    "read_trace",
    "write_trace",
]
