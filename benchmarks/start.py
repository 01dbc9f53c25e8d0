"""How long a user waits for ``vtoken --help``."""

from __future__ import annotations

from benchmarks.child import vtoken
from benchmarks.figures import Figure, best_and_median

__all__ = ["measure"]

PART = "start"
MOST_S = 0.4


def measure(*, quick: bool = False) -> list[Figure]:
    """Start it again and again, after once for the bytecode."""
    vtoken("--help")
    taken = [vtoken("--help") for _ in range(5 if quick else 21)]
    best, median = best_and_median([each.wall_s for each in taken])
    best_cpu, median_cpu = best_and_median([each.cpu_s for each in taken])
    return [
        Figure(PART, "vtoken --help, wall", median, "s", best, most=MOST_S),
        Figure(PART, "vtoken --help, CPU", median_cpu, "s", best_cpu),
    ]
