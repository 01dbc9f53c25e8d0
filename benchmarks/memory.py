"""Memory of a run grows with what runs at once, not with the trace."""

from __future__ import annotations

import json

from benchmarks.child import FailedError, vtoken
from benchmarks.figures import Figure

__all__ = ["measure"]

PART = "memory"
MOST_MIB = 2048.0
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 8
RATE = 400


def measure(*, quick: bool = False) -> list[Figure]:
    """Stream short generated requests through ``vtoken run``, two numbers of them."""
    few, many = (10_000, 100_000) if quick else (100_000, 1_000_000)
    figures = []
    mib: list[float] = []
    for requests in (few, many):
        trace = f"poisson:rate={RATE},n={requests},prompt={PROMPT_TOKENS},output={OUTPUT_TOKENS}"
        taken = vtoken("run", "--policy", "full", "--reclaimer", "none", "--trace", trace, "--json", "--quiet")
        summary = json.loads(taken.output)
        if summary["finished"] != requests:
            raise FailedError(f"vtoken finished {summary['finished']} of {requests} requests")
        mib.append(taken.rss_bytes / 2**20)
        running = f"{summary['mean_running']:.0f} running on average"
        note = f"{taken.cpu_s:.0f} CPU s, {summary['load_state']}, {running}"
        figures.append(Figure(PART, f"{requests:,} generated requests", mib[-1], "MiB", most=MOST_MIB, note=note))
    each = (mib[1] - mib[0]) * 2**20 / (many - few)
    figures.append(Figure(PART, "a request more", each, "bytes", note="its row of the result"))
    return figures
