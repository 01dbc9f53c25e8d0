"""One request at a time: the simulator against queueing theory.

python experiments/07_queue/run.py            simulate: waits.csv, distribution.csv, the picture, the tables
python experiments/07_queue/run.py --draw     the picture and the tables again, from the files
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.study.config import SimConfig
from sim.study.plots.style import legend_beside, new_figure, save, styled
from sim.study.run import simulate

HERE = Path(__file__).parent
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9)
SEEDS = 5
REQUESTS = 40_000
BATCH = 8_000
"""Waits of neighbours are alike, so means of this many are what is compared."""
BASE_S, PER_TOKEN_S = 0.010, 1e-4
COLOURS = ("#882255", "#999933", "#44AA99", "#661100", "#332288")
MOMENTS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits, in service times, at which distributions are compared."""


@dataclass(frozen=True)
class Service:
    """How long a request keeps the server busy, and the workload that gives it."""

    title: str
    prompt: str
    output: str
    per_token_s: float
    times_s: NDArray[np.float64]
    chances: NDArray[np.float64]

    @property
    def mean_s(self) -> float:
        """Return E[S]."""
        return float(self.times_s @ self.chances)

    @property
    def square(self) -> float:
        """Return E[S^2], in s^2."""
        return float(self.times_s**2 @ self.chances)


SERVICES = {
    # One step each.
    "constant": Service("constant (M/D/1)", "5", "1", 0.0, np.array([BASE_S]), np.ones(1)),
    # One step, longer with a longer prompt.
    "prompt": Service(
        "prompts of 1 to 1,000 tokens (M/G/1)",
        "uniform:1:1000",
        "1",
        PER_TOKEN_S,
        BASE_S + PER_TOKEN_S * np.arange(1, 1001),
        np.full(1000, 1e-3),
    ),
    # One step for nine requests of ten, 21 for the tenth.
    "output": Service(
        "outputs of 1 or 21 tokens (M/G/1)",
        "5",
        "1@0.9+21@0.1",
        0.0,
        BASE_S * np.array([1, 21]),
        np.array([0.9, 0.1]),
    ),
}


def mean_wait(load: float, service: Service) -> float:
    """Return the mean wait in seconds: Pollaczek and Khinchine, lambda E[S^2] / (2 (1 - load))."""
    return load / service.mean_s * service.square / (2 * (1 - load))


def no_longer_than(x: float, load: float) -> float:
    """Return the chance of waiting at most ``x`` service times in M/D/1 (Erlang's formula)."""
    terms = (((load * (k - x)) ** k) / math.factorial(k) * math.exp(-load * (k - x)) for k in range(int(x) + 1))
    return (1 - load) * sum(terms)


def serve(service: Service, load: float, seed: int, requests: int) -> dict[str, NDArray[np.float64]]:
    """Serve Poisson arrivals one at a time; return the columns of the requests."""
    config = SimConfig(
        trace=f"poisson:rate={load / service.mean_s!r},n={requests},prompt={service.prompt},output={service.output}",
        policy="full",
        reclaimer="none",
        kv_blocks=1000,
        max_num_seqs=1,
        step_cost=f"linear:base_s={BASE_S},per_token_s={service.per_token_s}",
        seed=seed,
    )
    return simulate(config).requests


def estimate(values: NDArray[np.float64], batch: int = BATCH) -> tuple[float, float]:
    """Return the mean and its standard error, from means of batches."""
    means = values.reshape(-1, batch).mean(axis=1)
    return float(means.mean()), float(means.std(ddof=1) / math.sqrt(len(means)))


def measure() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return mean waits of every service and load, and the distribution of waits in M/D/1."""
    waits, shares = [], []
    for name, service in SERVICES.items():
        for load in LOADS:
            # Seeds of its own for each point, or all of them would be off to the same side.
            seeds = range(SEEDS * len(waits), SEEDS * (len(waits) + 1))
            queue = np.concatenate([serve(service, load, seed, REQUESTS)["queue_s"] for seed in seeds])
            mean, error = estimate(queue)
            theory = mean_wait(load, service)
            waits.append((name, load, service.mean_s, theory, mean, error, mean / theory - 1, (mean - theory) / error))
            if name == "constant":
                for x in MOMENTS:
                    share, spread = estimate(queue <= x * service.mean_s + 1e-9)
                    shares.append((load, x, no_longer_than(x, load), share, spread))
    columns = ["service", "load", "mean_service_s", "theory_s", "simulated_s", "standard_error_s", "relative", "errors"]
    names = ["load", "service_times", "theory", "simulated", "standard_error"]
    return pd.DataFrame(waits, columns=columns), pd.DataFrame(shares, columns=names)


@styled
def draw(waits: pd.DataFrame, shares: pd.DataFrame, path: Path) -> None:
    """Mean waits over the load, and the tail of the waits in M/D/1; lines are theory, marks are simulated."""
    figure = new_figure(10.5, 3.8)
    left, right = figure.subplots(1, 2)
    loads = np.linspace(0, 0.92, 200)
    for (name, service), colour in zip(SERVICES.items(), COLOURS, strict=False):
        some, unit = waits[waits.service == name], service.mean_s
        left.plot(loads, [mean_wait(x, service) / unit for x in loads], color=colour, lw=1.2)
        error = 1.96 * some.standard_error_s / unit
        left.errorbar(some.load, some.simulated_s / unit, error, fmt="o", ms=4, color=colour, label=service.title)
    left.set_xlabel("utilisation")
    left.set_ylabel("mean wait (mean service times)")
    left.set_ylim(0, 32)
    left.set_title("mean wait; lines: Pollaczek-Khinchine")
    left.legend(loc="upper left")
    moments = np.linspace(0, 10, 400)
    for (load, some), colour in zip(shares.groupby("load"), COLOURS, strict=True):
        right.plot(moments, [1 - no_longer_than(x, float(load)) for x in moments], color=colour, lw=1.2)
        error = 1.96 * some.standard_error
        right.errorbar(some.service_times, 1 - some.simulated, error, fmt="o", ms=4, color=colour, label=f"{load:.1f}")
    right.set_yscale("log")
    right.set_ylim(1e-3, 1)
    right.set_xlabel("wait (service times)")
    right.set_ylabel("share of requests that wait longer")
    right.set_title("M/D/1; lines: Erlang")
    legend_beside(right, title="utilisation")
    save(figure, path)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="do not simulate again")
    if not parser.parse_args().draw:
        waits, shares = measure()
        waits.round(6).to_csv(HERE / "waits.csv", index=False)
        shares.round(6).to_csv(HERE / "distribution.csv", index=False)
    waits, shares = pd.read_csv(HERE / "waits.csv"), pd.read_csv(HERE / "distribution.csv")
    draw(waits, shares, HERE / "waits.png")
    print(waits.to_string(index=False), end="\n\n")
    print(shares.to_string(index=False))


if __name__ == "__main__":
    main()
