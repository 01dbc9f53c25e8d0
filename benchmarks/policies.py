"""CPU of one step under every policy, in timeouts and against h2o: an even batch, and long contexts."""

from __future__ import annotations

from benchmarks.figures import Figure, best_and_median
from benchmarks.steps import BATCH, LIVE, LONG, LONG_LIVE, LONG_NAME, Case, by_live_token
from sim.kv.policies import policies

__all__ = ["measure"]

PART = "policies"
BY = "h2o"
MOST = 4.0
"""A policy that keeps a score a token may cost that much more than h2o."""
LONG_MOST = 2.0
"""A live token may cost that much more in long contexts than in the even batch. By capacity it would be 7 times."""
EVERY = 128
"""Steps between the turns of those that have turns: the runs differ by a multiple of it."""


BATCH_BUDGET = ", one budget"
"""What is behind the name of a policy whose requests share their budget."""


def _cases(name: str) -> tuple[Case, Case]:
    policy = name.removesuffix(BATCH_BUDGET)
    settings = {"policy": policy, "reclaimer": "vtoken" if policies.get(policy).evicts else "none"}
    if policy != name:
        settings["budget_scope"] = "batch"
    return (
        Case(
            f"{name}, batch {BATCH} x {LIVE:,}",
            settings | {"budget_tokens": LIVE, "kv_blocks": 40_000},
            short=40,
            long=40 + 2 * EVERY,
        ),
        Case(
            f"{name}, {LONG_NAME}",
            settings | {"budget_tokens": LONG_LIVE, "kv_blocks": 120_000},
            prompts=LONG,
            short=8,
            long=8 + EVERY,
        ),
    )


def measure(*, quick: bool = False) -> list[Figure]:
    """Measure all policies in turn, each as often as others."""
    names = [BY, *(name for name in policies.names() if name not in (BY, "full") and not policies.get(name).splits)]
    names += [name + BATCH_BUDGET for name in names if getattr(policies.build(name), "pools", False)]
    cases = {name: _cases(name) for name in names}
    for pair in cases.values():
        pair[0].engine(4).run()  # compile, or load what was compiled before
    taken: dict[str, list[tuple[float, float]]] = {case.name: [] for pair in cases.values() for case in pair}
    for _ in range(1 if quick else 3):
        for pair in cases.values():
            for case in pair:
                taken[case.name].append(case.step_s())
    figures = []
    for name, pair in cases.items():
        bounded = name != BY and bool(policies.build(name.removesuffix(BATCH_BUDGET)).columns)
        for case, other in zip(pair, cases[BY], strict=True):
            rows = taken[case.name]
            best, median = best_and_median([step / unit for step, unit in rows])
            step_us = best_and_median([step * 1e6 for step, _ in rows])[1]
            note = f"{step_us:,.1f} us"
            figures.append(Figure(PART, case.name, median, "timeouts a step", best, note=note))
            if bounded:
                ratios = [(a / u) / (b / v) for (a, u), (b, v) in zip(rows, taken[other.name], strict=True)]
                best, median = best_and_median(ratios)
                figures.append(Figure(PART, f"{case.name}, by {BY}", median, "ratio", best, most=MOST))
        figures.append(_by_live_token(name, pair, taken))
    return figures


def _by_live_token(name: str, pair: tuple[Case, Case], taken: dict[str, list[tuple[float, float]]]) -> Figure:
    """Compare a live token of the long contexts with one of the even batch."""
    even, long = (by_live_token(case, taken[case.name]) for case in pair)
    best, median = best_and_median([a / b for a, b in zip(long, even, strict=True)])
    policy = policies.build(name.removesuffix(BATCH_BUDGET))
    # One that acts at the end of the prompt alone does nothing in the steps counted here.
    most = LONG_MOST if policy.columns and not policy.prompt_only else None
    return Figure(PART, f"{name}, a live token of the second by one of the first", median, "ratio", best, most=most)
