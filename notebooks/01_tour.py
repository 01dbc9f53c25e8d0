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
# # A tour: from a trace to a decision
#
# One server, one trace, one policy: what is there to win back, and is it worth it? Five minutes, no GPU.

# %%
# %matplotlib inline
import sim

# %% [markdown]
# ## The load
# Two thousand requests of a conversation service come with the package; a file of your own, or a generator, works the
# same.

# %%
trace = sim.read_trace("default")
print(trace.describe().text())

# %% [markdown]
# ## One server, three ways to treat dead tokens
# H2O keeps half of each request's tokens. The server is short of memory: 0.3 of an H100, requests four times as fast.

# %%
base = sim.SimConfig(trace="default", head=300, rate_scale=4.0, gpu_memory_utilization=0.3, policy="h2o", budget=0.5)
table = sim.sweep({**base.model_dump(include=base.model_fields_set), "reclaimer": ["naive", "vtoken", "ideal"]})
table[["reclaimer", "retained_blocks_mean", "mean_running", "requests_per_s", "e2e_s_p95"]].round(3)

# %% [markdown]
# ## The same requests, paired
# What a request loses depends on itself alone, so reclaimers can be compared run by run, and request by request.

# %%
table.set_index("reclaimer")[["retained_blocks_mean_vs_naive", "e2e_s_p95_vs_naive"]].round(3)

# %%
naive, vtoken = (sim.simulate(base.replace(reclaimer=name)) for name in ("naive", "vtoken"))
axes = sim.plots.reduction_cdf([naive, vtoken])
axes.get_figure()

# %% [markdown]
# ## Where the slots went

# %%
axes = sim.plots.slots_over_time(vtoken)
axes.get_figure()

# %% [markdown]
# ## Does it meet a bound?
# The highest rate at which 95 % of the requests end within 30 seconds, offered the same requests faster or slower.

# %%
fields = {**base.model_dump(include=base.model_fields_set), "reclaimer": ["naive", "vtoken"], "rate_scale": 1.0}
fields.pop("head")
found = sim.search_sla(fields, "e2e_p95=30", low=2, high=40, duration_s=60, least_s=10, tolerance=0.1, checks=1)
found.answers[["label", "sla_throughput", "fails", "vs_naive", "probes"]].round(2)

# %%
axes = sim.plots.search_probes(found)
axes.get_figure()
