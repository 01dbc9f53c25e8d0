"""How many whole pages token eviction frees when nothing is repacked: simulated, in closed form, and from captures.

Three ways to hold a request under a ceiling ``c``, each with all tokens written at the end of a context of N:

- ``grow``: a prompt of 64 tokens, then one token a step; at most c x current length stay alive.
- ``fixed``: the same, but at most c x N tokens stay alive, so that nothing dies before the context has come that far.
- ``prompt``: all but the last 128 tokens are the prompt; its end takes all of it under the ceiling at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.study.config import SimConfig
from sim.study.run import simulate
from sim.workload.trace import Trace

CEILINGS = (0.60, 0.50, 0.40, 0.30, 0.25)
PAGE_SIZES = (16, 32, 64)
MODEL = "llama-3.2-1b"
HEAVY_ONLY = "h2o:recent=0.000001"
"""H2O without its window: only the newest token is safe."""
PROMPT_TOKENS = 64
LAST_TOKENS = 128


# -- closed form: deaths that know nothing of each other ---------------------------------------------------------------


def expected_freed(context: float, ceiling: float, page: int, recent: float) -> float:
    """Return how many whole pages die if the dead are drawn evenly from all tokens outside the recent window.

    ``ceiling * context`` tokens live, the share ``recent`` of them in the window. Of the others a share q is dead, and
    a page of S of them with probability q^S.
    """
    outside = 1 - recent * ceiling
    return outside * context / page * ((1 - ceiling) / outside) ** page


def first_page(ceiling: float, page: int, recent: float) -> float:
    """Return the context from which on :func:`expected_freed` is 1 page or more."""
    return 1 / expected_freed(1, ceiling, page, recent)


# -- simulated ---------------------------------------------------------------------------------------------------------


def freed(policy: str, arm: str, ceiling: float, page: int, contexts: Sequence[int]) -> pd.DataFrame:
    """Serve requests of each context (16, or 8 beyond 2,048 tokens) with naive reclamation; return a row a context.

    A request's freed pages are those that its context fills less those that it holds at its end.
    """
    if arm == "fixed":
        return pd.concat([_serve(policy, arm, ceiling, page, [context]) for context in contexts], ignore_index=True)
    return _serve(policy, arm, ceiling, page, contexts)


def _serve(policy: str, arm: str, ceiling: float, page: int, contexts: Sequence[int]) -> pd.DataFrame:
    # Texts differ: one request of a context would say little.
    context = np.concatenate([np.full(16 if n <= 2048 else 8, n, np.int64) for n in contexts])
    prompt = context - LAST_TOKENS if arm == "prompt" else np.full_like(context, PROMPT_TOKENS)
    # The last output token is never written.
    trace = Trace(np.zeros_like(context), prompt, context - prompt + 1)
    pages = -(-context // page)
    result = simulate(
        SimConfig(
            model=MODEL,
            policy=policy,
            reclaimer="naive",
            block_size=page,
            kv_blocks=int(pages.sum()) + len(context) + 2,
            max_num_batched_tokens=int(context.sum()),
            # Time plays no part here.
            step_cost="linear:base_s=0.001,per_token_s=0",
            **({"budget_tokens": math.ceil(ceiling * contexts[0])} if arm == "fixed" else {"budget": ceiling}),
        ),
        trace,
    )
    assert result.summary["preemptions"] == 0
    each = pages - result.requests["retained_blocks_finish"]
    evicted = result.requests["tokens_evicted"]
    rows = pd.DataFrame({"context": context, "pages": pages, "evicted": evicted, "freed": each, "none": each == 0})
    table = rows.groupby("context", as_index=False).mean()
    table["requests"] = rows.groupby("context").size().to_numpy()
    for name, value in reversed({"policy": policy, "arm": arm, "ceiling": ceiling, "page_size": page}.items()):
        table.insert(0, name, value)
    return table


# -- what a real model kept --------------------------------------------------------------------------------------------


def replay(capture: Path, policy: str, ceiling: float, page: int) -> tuple[int, int]:
    """Serve one request with the recorded attention of a capture; return pages freed and pages filled."""
    with np.load(capture) as arrays:
        prompt, generated = int(arrays["P"]), int(arrays["G"])
    written = prompt + generated - 1
    result = simulate(
        SimConfig(
            model=MODEL,
            policy=policy,
            budget=ceiling,
            reclaimer="naive",
            block_size=page,
            kv_blocks=written // page + 4,
            attention=f"recorded:{capture}",
            step_cost="linear:base_s=0.001,per_token_s=0",
        ),
        Trace(np.zeros(1, np.int64), np.array([prompt]), np.array([generated])),
    )
    pages = -(-written // page)
    return pages - int(result.requests["retained_blocks_finish"][0]), pages


def kept(capture: Path, scope: str) -> dict[float, NDArray[np.bool_]]:
    """Return bool[units, tokens] for each ratio: what H2O kept, one set for all (``global``) or a set a ``layer``."""
    with np.load(capture) as arrays:
        tokens = int(arrays["P"]) + int(arrays["G"])
        bits = np.unpackbits(arrays[f"kept_h2o_{scope}"], axis=-1)[..., :tokens].astype(bool)
        return dict(zip(arrays["ratios"].round(3).tolist(), bits, strict=True))


def dead_pages(live: NDArray[np.bool_], page: int) -> int:
    """Return how many pages of ``live`` (bool[tokens]) hold no live token."""
    pages = np.zeros(-(-len(live) // page) * page, bool)
    pages[: len(live)] = live
    return int((~pages.reshape(-1, page).any(axis=1)).sum())


def shared_table(captures: Iterable[Path], units: Sequence[int], draws: int = 64) -> pd.DataFrame:
    """Let ``units`` layers, drawn at random, share one page table: a slot is free when each of them dropped its token.

    Returns a row a (ratio, page size, units): means over captures and draws.
    """
    rng = np.random.default_rng(0)
    rows = []
    for capture in captures:
        for ratio, layers in kept(capture, "layer").items():
            for count in units:
                # All layers can be drawn in one way only.
                for _ in range(draws if count < len(layers) else 1):
                    live = layers[rng.choice(len(layers), count, replace=False)].any(axis=0)
                    for page in PAGE_SIZES:
                        pages = -(-len(live) // page)
                        rows.append((ratio, page, count, live.mean(), dead_pages(live, page), pages))
    table = pd.DataFrame(rows, columns=["ceiling", "page_size", "layers", "live", "freed", "pages"])
    table["zero"] = table.freed == 0
    mean = table.groupby(["ceiling", "page_size", "layers"], as_index=False).mean()
    mean["freed_pct"] = 100 * mean.freed / mean.pages
    return mean


def measured(folder: Path) -> pd.DataFrame:
    """Return what H2O left of the pages of one table, by who had a set of its own; over captures and checkpoints.

    ``live`` is the mean share of tokens that anybody keeps, ``freed_pct`` the mean and ``most_pct`` the largest share
    of pages that everybody dropped.
    """
    frame = pd.read_parquet(folder / "fragmentation.parquet")
    frame = frame[(frame.pol == "h2o") & frame.bs.isin(PAGE_SIZES)]
    frame = frame.assign(u_dead=100 * frame.u_dead).rename(columns={"gran": "set_of_each", "bs": "page_size"})
    return frame.groupby(["set_of_each", "ratio", "page_size"], as_index=False).agg(
        live=("union_live", "mean"), freed_pct=("u_dead", "mean"), most_pct=("u_dead", "max")
    )
