"""How much of a real model's attention goes to the tokens that a policy keeps.

python experiments/11_policies/kept.py: replays the seven captures of ../shared/attention (with the rows of experiment
00), lets every policy evict, and adds up, query by query, the recorded attention of the full cache on the tokens that
are alive when the query comes. Writes kept.csv beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.kv.cache import KVCache
from sim.kv.policies import EvictionPolicy, ScorePolicy, policies
from sim.kv.policies.paged_eviction import PagedEviction
from sim.kv.policies.scissorhands import Scissorhands
from sim.kv.reclaim import Reclaimer, reclaimers
from sim.kv.view import View
from sim.rng import request_key
from sim.serving.attention.recorded import Recorded

HERE = Path(__file__).parent
CAPTURES = HERE.parents[2] / "shared" / "attention"
ROWS = HERE.parent / "00_attention_fit" / "rows"
BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
BLOCK = 16
SINKS, NEAR = 4, 64
"""Attention to neither the first tokens nor the newest is *far*: what a policy that ranks tokens is for."""
DRAWS = {"random": 8, "random, 4 sinks, half recent": 8, "keyformer": 4}
"""Requests a capture, of those who draw."""
AS_MEASURED = "scissorhands:history=400,threshold=0"
"""The rule that the perplexities of Scissorhands were measured with."""


@dataclasses.dataclass(frozen=True)
class RandomBetween(ScorePolicy):
    """Four sinks and half of the budget newest, the rest by a draw a token: what perplexity was measured with."""

    random: EvictionPolicy = dataclasses.field(default_factory=lambda: policies.build("random"))
    columns: ClassVar[tuple[str, ...]] = policies.get("random").columns

    def begin(self, view: View) -> None:
        """Draw."""
        self.random.begin(view)

    def observe(self, view: View) -> None:
        """Draw for the newest token."""
        self.random.observe(view)

    def score(self, view: View) -> NDArray[np.float32]:
        """Return the draws."""
        assert isinstance(self.random, ScorePolicy)
        return self.random.score(view)

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Protect sinks and half of the budget."""
        return np.full(len(view), SINKS), view.keep // 2


@dataclasses.dataclass(frozen=True)
class PinnedPages(PagedEviction):
    """PagedEviction that never drops the first page."""

    def begin(self, view: View) -> None:
        """Work out the prompt's scores, and make the first page's the highest."""
        PagedEviction.begin(self, view)
        (column,) = self.columns
        for start in view.start:
            view.columns[column][start : start + BLOCK] = 1e9


@dataclasses.dataclass(frozen=True)
class PinnedVotes(Scissorhands):
    """Scissorhands that never drops the first block, for ``page``."""

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Protect the first block and the newest."""
        return np.full(len(view), BLOCK), np.full(len(view), self.recent)


def live_sets(
    policy: EvictionPolicy, reclaimer: Reclaimer, model: Recorded, key: int, budget: float
) -> Iterator[NDArray[np.int32]]:
    """Yield the positions that each decode query of the capture finds alive, its own included, as the engine has it."""
    generated, total = model.captures[0].attention.shape
    prompt = total - generated
    cache = KVCache(total // BLOCK + 8, BLOCK, columns=(*policy.columns, *model.columns))
    row = cache.open(0, key, prompt, generated + 1)
    cache.sync_new_tokens(row, prompt)
    rows, record = np.array([row]), cache.store.s.rows[row : row + 1]
    record["decode_from"] = prompt
    for step in range(generated + 1):
        if step:
            cache.sync_new_tokens(row, 1)
            start, live = int(record["start"][0]), int(record["live"][0])
            yield cache.store.s.position[start : start + live].copy()
        view = cache.view(rows, budget, 0, model)
        if step == 0:
            model.begin(view)
            policy.begin(view)
        elif not policy.prompt_only:
            policy.observe(view)
        over, excess = view.over_budget()
        if len(over) and not (step and policy.prompt_only):
            cache.evict_cells(rows, *reclaimer.choose(cache, policy, over, excess))


def kept(policy: EvictionPolicy, reclaimer: Reclaimer, model: Recorded, key: int, budget: float) -> dict[str, float]:
    """Return means over the queries: attention kept, all and the far part, tokens alive, and whether token 0 is."""
    attention = model.captures[0].attention
    prompt = attention.shape[1] - len(attention)
    all_, far, tokens, sink = [], [], [], []
    for step, alive in enumerate(live_sets(policy, reclaimer, model, key, budget)):
        row = attention[step]
        end = prompt + step + 1 - NEAR
        between = alive[(alive >= SINKS) & (alive < end)]
        all_.append(row[alive].sum() / row.sum())
        far.append(row[between].sum() / row[SINKS:end].sum())
        tokens.append(len(alive) / (prompt + step + 1))
        sink.append(alive[0] == 0)
    means = {"kept": all_, "kept_far": far, "live": tokens, "sink": sink}
    return {name: float(np.mean(values)) for name, values in means.items()} | {"kept_p05": np.percentile(all_, 5)}


def cases() -> Iterator[tuple[str, EvictionPolicy, str]]:
    """Yield name, policy, reclaimer: all that evict, rules that were measured, whole blocks only, and pinned ones."""
    names = [name for name in policies.names() if policies.get(name).evicts and not policies.get(name).splits]
    for name in [*names, AS_MEASURED]:
        yield name, policies.build(name), "naive"
    yield "random, 4 sinks, half recent", RandomBetween(), "naive"
    yield "paged_eviction, first block pinned", PinnedPages(), "naive"
    for name in names:
        if name != "paged_eviction":
            yield name, policies.build(name), "page"
    yield "scissorhands, first block pinned", PinnedVotes(), "page"


def main() -> None:
    """Measure all, and write the table."""
    rows: list[dict[str, Any]] = []
    files = sorted(CAPTURES.glob("*.npz"))
    if not files:
        raise SystemExit(f"{CAPTURES}: no captures here; this experiment needs them")
    for file in files:
        model = Recorded(path=str(file), rows=str(ROWS / file.name))
        for name, policy, reclaimer in cases():
            for budget in BUDGETS:
                draws = [
                    kept(policy, reclaimers.build(reclaimer), model, int(request_key(draw, 0)), budget)
                    for draw in range(DRAWS.get(name, 1))
                ]
                mean = pd.DataFrame(draws).mean().round(4).to_dict()
                rows.append({"capture": file.stem, "policy": name, "reclaimer": reclaimer, "budget": budget, **mean})
    pd.DataFrame(rows).to_csv(HERE / "kept.csv", index=False)


if __name__ == "__main__":
    main()
