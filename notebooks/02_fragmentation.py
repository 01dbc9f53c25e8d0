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
# # Fragmentation: what eviction frees, and what it leaves behind
#
# A block returns to the pool only when all of its tokens are dead. How many do, depends on where a policy kills.

# %%
# %matplotlib inline
import numpy as np

import sim

# %% [markdown]
# ## Half of the tokens die; how many of the blocks come back?
# `naive` is what a server does that frees a block when its last token dies; `ideal` packs the living at no cost.

# %%
server = {"trace": "default", "head": 200, "kv_blocks": 40_000, "budget": 0.5}
policies = ["random", "h2o", "scissorhands", "streaming_llm"]
table = sim.sweep({**server, "policy": policies, "reclaimer": ["naive", "ideal"]})
table[["policy", "reclaimer", "retained_blocks_mean", "fragmentation_mean", "dead_fraction_mean"]].round(3)

# %%
axes = sim.plots.setting_bars(table, "fragmentation_mean")
axes.get_figure()

# %% [markdown]
# StreamingLLM kills a contiguous middle, and its blocks empty. Random kills everywhere, and nearly none does.
#
# ## The closed form of random
# If each token of a block of s dies with probability r, all do with r ** s. The smaller the block, the more come back:

# %%
sizes = np.array([1, 2, 4, 8, 16])
freed = sim.sweep(
    {
        "trace": "poisson:rate=20,n=100,prompt=1024,output=2",
        "kv_blocks": 400_000,
        "policy": "random",
        "budget": 0.5,
        "reclaimer": "naive",
        "block_size": sizes.tolist(),
    }
)
freed = freed.assign(expected=1 - 0.5 ** freed["block_size"].astype(float))
freed = freed.assign(held=freed["retained_blocks_mean"] / np.ceil(1025 / freed["block_size"]))
freed[["block_size", "held", "expected"]].round(3)

# %% [markdown]
# ## The same over time
# Blocks by the share of their slots that are alive. Dark ones hold memory for nobody.

# %%
h2o = sim.SimConfig(**server, policy="h2o", reclaimer="naive")
axes = sim.plots.liveness_over_time(sim.simulate(h2o))
axes.get_figure()

# %% [markdown]
# ## Before and after a repack
# The pool around the repack that freed most, for a server that is short of memory.

# %%
tight = sim.simulate(h2o.replace(reclaimer="vtoken", kv_blocks=1500, rate_scale=4.0))
axes = sim.plots.pool_blocks(tight, "before")
axes.get_figure()

# %%
axes = sim.plots.pool_blocks(tight, "after")
axes.get_figure()
