"""CPU of one step under every reclaimer, in timeouts and against naive: an even batch, and long contexts."""

from __future__ import annotations

from benchmarks.figures import Figure, best_and_median
from benchmarks.steps import BATCH, LIVE, LONG, LONG_LIVE, LONG_NAME, Case

__all__ = ["CASES", "measure"]

PART = "reclaimers"
BY = "naive"
BLOCK = 16
ALWAYS = "vtoken:repack_when=always"
CASES = (
    BY,
    "page",
    "token",
    "ideal",
    "sync",
    "stall",
    "vtoken",
    ALWAYS,
    f"{ALWAYS},layout=fill",
    f"{ALWAYS},layout=scattered",
    f"{ALWAYS},plan=gain",
    f"{ALWAYS},layout=fill,plan=gain",
    "reuse",
    "reuse+vtoken",
)
"""Under H2O, whose dead lie scattered. Nothing waits for memory: to see a plan at work it must always be wanted."""


def _cases(reclaimer: str) -> tuple[Case, Case]:
    size = 1 if reclaimer == "token" else BLOCK
    settings = {"policy": "h2o", "reclaimer": reclaimer, "block_size": size}
    return (
        Case(
            f"h2o, {reclaimer}, batch {BATCH} x {LIVE:,}",
            settings | {"budget_tokens": LIVE, "kv_blocks": 20_000 * BLOCK // size},
            short=40,
            long=240,
        ),
        Case(
            f"h2o, {reclaimer}, {LONG_NAME}",
            settings | {"budget_tokens": LONG_LIVE, "kv_blocks": 100_000 * BLOCK // size},
            prompts=LONG,
            short=8,
            long=72,
        ),
    )


def measure(*, quick: bool = False) -> list[Figure]:
    """Measure all reclaimers in turn, each as often as others."""
    cases = {name: _cases(name) for name in CASES}
    for pair in cases.values():
        pair[0].engine(pair[0].short).run()  # compile, or load what was compiled: until there is a block to win
    taken: dict[str, list[tuple[float, float]]] = {case.name: [] for pair in cases.values() for case in pair}
    for _ in range(1 if quick else 3):
        for pair in cases.values():
            for case in pair:
                taken[case.name].append(case.step_s())
    figures = []
    for pair in cases.values():
        for case, other in zip(pair, cases[BY], strict=True):
            rows = taken[case.name]
            best, median = best_and_median([step / unit for step, unit in rows])
            by = best_and_median([(a / u) / (b / v) for (a, u), (b, v) in zip(rows, taken[other.name], strict=True)])[1]
            step_us = best_and_median([step * 1e6 for step, _ in rows])[1]
            note = f"{step_us:,.1f} us; {by:.2f} times {BY}"
            figures.append(Figure(PART, case.name, median, "timeouts a step", best, note=note))
    return figures
