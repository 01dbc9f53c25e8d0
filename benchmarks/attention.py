"""``python -m benchmarks.attention``: what the synthetic attention model costs, best of many calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sim.kv.cache import KVCache
from sim.kv.units import ONE_UNIT, Units
from sim.serving.attention import build_attention

BATCH = 128
LIVE = 1024


def main() -> None:
    """Print the times."""
    _print("", ONE_UNIT, BATCH)
    _print("layers of 4 requests: ", Units(BATCH // 4, 1), 4)


def _print(title: str, units: Units, requests: int) -> None:
    model = build_attention("synthetic")
    cache = KVCache(20_000, 16, columns=model.columns, units=units)
    first = [cache.open(i, 7919 * i + 13, LIVE, 64) for i in range(requests)]
    rows = np.concatenate([cache.bundle(row) for row in first])
    for row in rows:
        cache.sync_new_tokens(row, LIVE)
        cache.store.s.rows[row]["decode_from"] = LIVE

    def best_us(call: Callable[[Any], object], which: Any = rows) -> float:
        best = float("inf")
        for _ in range(200):
            view = cache.view(which, model=model)
            started = time.perf_counter()
            call(view)
            best = min(best, time.perf_counter() - started)
        return best * 1e6

    begin = best_us(model.begin)
    tokens = BATCH * LIVE
    print(f"{title}attend, {BATCH} x {LIVE:,}: {best_us(lambda view: view.attention()):.1f} us")
    print(f"{title}attend, nobody: {best_us(lambda view: view.attention(), rows[:0]):.1f} us")
    print(f"{title}begin: {begin * 1e3 / tokens:.1f} ns a token")
    print(f"{title}accumulated: {best_us(lambda view: view.accumulated()) * 1e3 / tokens:.1f} ns a token")


if __name__ == "__main__":
    main()
