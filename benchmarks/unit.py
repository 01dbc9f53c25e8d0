"""The unit: CPU time of one SimPy ``env.timeout``, event loop included, on this machine and in this process."""

from __future__ import annotations

import time
from collections.abc import Generator

import simpy

__all__ = ["timeout_s"]


def timeout_s(count: int = 60_000) -> float:
    """Return the CPU seconds that one timeout of a process takes, over ``count`` of them in a row.

    Other work of the machine makes both this and what is measured slower. So the parts take it right before and right
    after each measurement and divide by the mean of the two.
    """

    def wait(env: simpy.Environment) -> Generator[simpy.Event]:
        for _ in range(count):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(wait(env))
    start_s = time.process_time()
    env.run()
    return (time.process_time() - start_s) / count
