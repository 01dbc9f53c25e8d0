# %% [markdown]
# # A tour: from a trace to a decision
#
# Cells of a notebook in jupytext's percent format: open it as a notebook, or run it as a script. A test runs it.

# %%
from sim import SimConfig, read_trace, simulate
from sim.study.plots import slots_over_time

# %% [markdown]
# ## The load
# Two thousand requests of a conversation service come with the package; a file of your own, or a generator, works the
# same.

# %%
trace = read_trace("default")
print(trace.describe().text())

# %% [markdown]
# ## One server, three ways to treat dead tokens
# H2O keeps half of each request's tokens. The server is short of memory: 0.3 of an H100, requests four times as fast.

# %%
base = SimConfig(trace="default", head=300, rate_scale=4.0, gpu_memory_utilization=0.3, policy="h2o", budget=0.5)
results = {name: simulate(base.replace(reclaimer=name)) for name in ("naive", "vtoken", "ideal")}

# %%
for name, result in results.items():
    figures = result.summary
    print(
        f"{name:7} holds {figures['retained_blocks_mean']:5.1f} blocks a request, "
        f"{figures['mean_running']:5.1f} run at once, p95 end to end {figures['e2e_s']['p95']:6.2f} s"
    )

# %% [markdown]
# ## The same requests, paired
# What a request loses depends on itself alone, so reclaimers can be compared request by request.

# %%
naive, vtoken = (results[name].requests_frame().set_index("req_id") for name in ("naive", "vtoken"))
change = vtoken["retained_blocks"] / naive["retained_blocks"] - 1
print(change.describe(percentiles=[0.1, 0.5, 0.9]).round(3))

# %% [markdown]
# ## Where the slots went

# %%
axes = slots_over_time(results["vtoken"])
