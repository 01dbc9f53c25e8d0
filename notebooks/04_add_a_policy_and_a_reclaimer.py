# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Add a policy and a reclaimer
#
# Both are frozen dataclasses whose fields are their parameters. Here they are registered for this process; a package of
# your own names them as entry points instead (docs/plugins.md).

# %%
# %matplotlib inline
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import sim
from sim.kv.policies import ScorePolicy, policies
from sim.kv.reclaim import Reclaimer, reclaimers
from sim.study.conformance import check_policy
from sim.study.plugin_checks import check_reclaimer

# %% [markdown]
# ## A policy is a score
# The tokens with the lowest score die. This one keeps what lies near a multiple of `every`, and the newest.


# %%
@dataclass(frozen=True, slots=True)
class Ladder(ScorePolicy):
    """Keep the newest tokens, and of the others those that lie nearest behind a rung."""

    rung: int = 32
    newest: int = 16

    def score(self, view):
        return -(view.position % self.rung).astype(np.float32)

    def protect(self, view):
        return np.zeros(len(view), np.int64), np.full(len(view), self.newest, np.int64)


Ladder = policies.register("ladder")(Ladder)

# %% [markdown]
# ## A reclaimer says when to repack whom
# This one repacks whoever has most dead slots, once that would free `blocks` blocks.


# %%
@dataclass(frozen=True, slots=True)
class Worst(Reclaimer):
    """Repack the request with most dead slots, one at a time."""

    needs_headroom: ClassVar[bool] = True
    blocks: int = 2

    def after_step(self, cache, rows, pressure, busy):
        if busy or len(rows) == 0:
            return []
        records = cache.store.s.rows[rows]
        dead = records["blocks"] * cache.block_size - records["live"]
        worst = int(np.argmax(dead))
        room = cache.pool.free_blocks - max(cache.pool.available_blocks, 0)
        plan = cache.plan_repack(int(rows[worst]), room) if dead[worst] > self.blocks * cache.block_size else None
        return [] if plan is None else [plan]


Worst = reclaimers.register("worst")(Worst)

# %% [markdown]
# ## Do they keep to what all have to?
# The checks that every policy and reclaimer of the package passes. Silence is good news.

# %%
check_policy("ladder:rung=16")
check_reclaimer("worst")

# %% [markdown]
# ## Run them, beside what there is

# %%
table = sim.sweep(
    {
        "trace": "default",
        "head": 150,
        "kv_blocks": 4000,
        "rate_scale": 4.0,
        "policy": ["ladder:rung=32", "ladder:rung=16", "h2o"],
        "budget": 0.5,
        "reclaimer": ["naive", "worst", "vtoken", "ideal"],
    }
)
table[["policy", "reclaimer", "retained_blocks_mean", "retained_blocks_mean_vs_naive", "tokens_moved"]].round(3)

# %%
axes = sim.plots.setting_bars(table, "retained_blocks_mean")
axes.get_figure()

# %% [markdown]
# With rungs as long as a block, the first half of every block stays alive: none empties, and packing wins half of them
# back. With rungs of two blocks every other block empties by itself, and there is nothing left to pack.
