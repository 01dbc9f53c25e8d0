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
# # Calibration: what a step costs, how that is known, and how far off it is
#
# Step and copy times come from a cost profile. This notebook looks at one made of NVIDIA's published kernel
# measurements, and at one measured on a CPU, with its predictions beside what the same CPU took. No figure here was
# measured on a GPU of ours.

# %%
# %matplotlib inline
import pandas as pd

import sim
from sim.serving.cost import build_step_cost
from sim.serving.hardware import get_hardware
from sim.serving.models import get_model
from sim.serving.profile import FIGURES, load_profile
from sim.serving.profile_cost import find_profile

# %% [markdown]
# ## A profile that comes along
# Each figure says whether it is measured or assumed.

# %%
profile = load_profile(find_profile("h100", "llama-3.1-8b"))
kinds = pd.Series({name: profile.kind(name) for name in FIGURES}, name="kind")
kinds.to_frame()

# %%
{name: made.source for name, made in profile.provenances.items()}

# %% [markdown]
# ## What it says of a step
# 64 requests decode, each with so many tokens in the cache; and the same from the datasheet's roofline.

# %%
model, hardware = get_model("llama-3.1-8b"), get_hardware("h100")
costs = {name: build_step_cost(name, model=model, hardware=hardware) for name in ("profile:h100", "roofline")}
held = [128, 512, 2048, 8192]
steps = pd.DataFrame(
    {name: [cost.step_ns(64, 64, 64 * n, 64 * n)[0] / 1e6 for n in held] for name, cost in costs.items()},
    index=pd.Index(held, name="tokens held by each"),
)
steps.round(2)

# %% [markdown]
# ## How well the laws give back the tables
# Absolute errors in per cent on measurements that the fit did not see (experiment 08).

# %%
checks = pd.read_csv("../experiments/08_kernel_laws/checks.csv")
checks[checks["question"] == "the law, held out"].set_index("device")

# %% [markdown]
# ## Predicted and measured, on a CPU
# Experiment 09: calibrate, simulate a trace that the fit has not seen, replay it with real keys and values, compare
# step by step. A toy model on one thread; it shows that the loop closes, and says nothing about a GPU.

# %%
runs = pd.read_csv("../experiments/09_closing_the_loop/runs.csv")
runs[["run", "steps", "predicted_s", "measured_s", "difference", "spread_of_5_runs", "median_ape_of_a_step"]]

# %%
measured = pd.read_csv("../experiments/09_closing_the_loop/steps.csv")
times = measured[["predicted_ns", "measured_ns"]] / 1e6
axes = times.plot.scatter("measured_ns", "predicted_ns", s=4, alpha=0.4)
axes.axline((1, 1), (2, 2), color="black", linewidth=0.8)
axes.set(xlabel="measured (ms)", ylabel="predicted (ms)", title="Steps of the first run, h2o + vtoken")
axes.get_figure().set_size_inches(4.5, 4)

# %% [markdown]
# ## Does it matter?
# The same trace with three step costs: what a simulation says about latency is as good as its profile, what it says
# about blocks depends little on it.

# %%
table = sim.sweep(
    {
        "trace": "default",
        "head": 200,
        "policy": "h2o",
        "budget": 0.5,
        "reclaimer": "vtoken",
        "gpu_memory_utilization": 0.3,
        "step_cost": ["profile:h100", "roofline", "auto:step_overhead_s=0.004"],
    }
)
table[["step_cost", "tpot_s_mean", "e2e_s_p95", "retained_blocks_mean", "fragmentation_mean"]].round(4)

# %% [markdown]
# On your GPU, `vtoken calibrate --out mine.json` measures a profile, and `--step-cost profile:mine.json` uses it.
