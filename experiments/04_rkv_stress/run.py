"""Simulate R-KV's vLLM stress benchmark and compare, row by row.

python experiments/04_rkv_stress/run.py          requests.csv, differences.csv, sensitivity.csv, rkv_stress.png
python experiments/04_rkv_stress/run.py --fit    host.csv, fit.csv: what the fitted costs were chosen from
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim import RunResult, SimConfig, simulate
from sim.rng import stream
from sim.study.plots.style import new_figure, policy_colour, save, styled
from sim.workload.trace import Trace
from sim.workload.write import write_trace

HERE = Path(__file__).parent
MEASURED = HERE.parents[1] / "tests" / "data" / "rkv_stress.csv"

REQUESTS, OUTPUT_TOKENS = 256, 1024
PROMPT_TOKENS, PROMPT_SPREAD = 697, 22
"""Mean, from R-KV's RESULTS_H100.md: (total - output tokens/s) x time / requests; spread: that of GSM8K's questions."""
GAP_S = 1e-3
"""Between requests: `LLM.generate` tokenises and submits them one by one while the engine runs already."""
LOG_EVERY_S = 10.0
SMALLER = 124 / 134
"""R-KV's pool at the same memory."""
BUDGET, BUFFER, BLOCK = 256, 128, 16
KEPT = (BUDGET + BUFFER + BLOCK) // BLOCK
"""Blocks that R-KV's port leaves to a request once it has been compacted."""
COSTS = {"profile": (5e-3, 0.5e-3), "roofline": (5e-3, 1e-3)}
"""Step costs, each with its two fitted figures: of R-KV's hooks in every step, and of each compaction, in s."""
HOST_S = (1e-3, 6e-6)
"""What the profile's share of the host is a multiple of: of a step, and of each sequence."""


def requests(gap_s: float = GAP_S, mean: int = PROMPT_TOKENS, spread: float = PROMPT_SPREAD, seed: int = 0) -> Trace:
    """Return the workload."""
    prompts = np.rint(stream(seed, "prompts").normal(mean, spread, REQUESTS)).astype(np.int64)
    arrivals = np.rint(np.arange(REQUESTS) * gap_s * 1e9).astype(np.int64)
    return Trace(arrivals, prompts, np.full(REQUESTS, OUTPUT_TOKENS))


def config(
    pool_tokens: int,
    method: str,
    *,
    costs: str = "profile",
    step_s: float | None = None,
    request_s: float | None = None,
    host: float | None = None,
    kept: int = KEPT,
    missing_tokens: int | None = None,
    **changes: Any,
) -> SimConfig:
    """Return one row's configuration; nothing but pool and method differs between rows.

    Parameters
    ----------
    costs
        A key of :data:`COSTS`.
    step_s, request_s
        In place of its two figures.
    host
        The factor on :data:`HOST_S`, in place of the profile's.
    missing_tokens
        By how much R-KV's pool is smaller, if not by a share.
    changes
        Other fields of the configuration.
    """
    scores = [
        fitted if given is None else given for fitted, given in zip(COSTS[costs], (step_s, request_s), strict=True)
    ]
    step_cost = f"{costs}:path=h100," if costs == "profile" else f"{costs}:"
    step_cost += f"score_step_s={scores[0]:g},score_request_s={scores[1]:g}"
    if host is not None:
        step_cost += f",step_overhead_s={host * HOST_S[0]:g},sequence_overhead_s={host * HOST_S[1]:g}"
    fields: dict[str, Any] = {
        "model": "qwen2.5-math-7b",
        "hardware": "h100",
        "kv_blocks": pool_tokens // BLOCK,
        "block_size": BLOCK,
        "max_model_len": 2048,
        "max_num_batched_tokens": 16_384,
        "async_scheduling": True,
        "policy": "full",
        "reclaimer": "none",
        "step_cost": step_cost,
    }
    if method == "r_kv":
        smaller = pool_tokens * SMALLER if missing_tokens is None else pool_tokens - missing_tokens
        fields |= {
            "policy": f"r_kv:buffer={BUFFER}",
            "budget_tokens": BUDGET,
            "reclaimer": f"sync:keep_blocks={kept}",
            "kv_blocks": int(smaller) // BLOCK,
        }
    return SimConfig(**(fields | changes))


def logged(result: RunResult, phase_s: float = 0.0) -> list[int]:
    """Return "Running" as vLLM's log shows it.

    vLLM looks at the clock after each step and logs if 10 s have passed since it last did, counted from its first look,
    after the first step. It shows the requests that run on, without those that have just finished.

    Parameters
    ----------
    phase_s
        By how much later (or, negative, earlier) the first look is.
    """
    steps = result.steps
    ends = steps["clock_s"] + steps["dt_s"]
    finished = np.bincount(np.searchsorted(ends, result.requests["finish_s"] - 1e-7), minlength=len(ends))
    running: NDArray[np.int64] = (steps["running"] - finished).astype(np.int64)
    last, shown = ends[0] + phase_s, []
    for end, count in zip(ends.tolist(), running.tolist(), strict=True):
        if end - last >= LOG_EVERY_S:
            last = end
            shown.append(count)
    return shown


def row(
    pool_tokens: int, method: str, source: Trace, phases_s: tuple[float, ...] = (0.0,), **options: Any
) -> dict[str, Any]:
    """Simulate one row."""
    result = simulate(config(pool_tokens, method, **options), source)
    peaks = [max(logged(result, phase)) for phase in phases_s]
    summary = result.summary
    return {
        "pool_tokens": pool_tokens,
        "method": method,
        "peak_concurrency": max(logged(result)),
        "lowest_peak": min(peaks),
        "highest_peak": max(peaks),
        "true_peak": summary["peak_running"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "steps": summary["steps"],
        "preemptions": summary["preemptions"],
        "compactions": summary["repacks_committed"],
        "rounds": summary["repack_launches"],
        "seconds": summary["makespan_s"],
    }


def measured() -> pd.DataFrame:
    """Read what R-KV's authors measured."""
    return pd.read_csv(MEASURED, comment="#")


def compare(**options: Any) -> pd.DataFrame:
    """Simulate all rows and put them beside the measured ones; differences in per cent of the measured figure."""
    table = measured()
    source = requests(**{name: options.pop(name) for name in ("gap_s", "mean", "spread", "seed") if name in options})
    phases = tuple(np.arange(-1.0, 1.01, 0.25))
    rows = [
        row(pool, method, source, phases, **options)
        for pool, method in zip(table.pool_tokens, table.method, strict=True)
    ]
    table = table.merge(pd.DataFrame(rows), on=["pool_tokens", "method"], suffixes=("_measured", ""))
    for name in ("peak_concurrency", "output_tokens_per_s"):
        table[f"{name}_off_percent"] = 100 * (table[name] / table[f"{name}_measured"] - 1)
    return table


VARIANTS: dict[str, dict[str, Any]] = {
    "as stated": {},
    "all 256 in the first instant": {"gap_s": 0.0},
    "2 ms between requests": {"gap_s": 2e-3},
    "prompts of 690": {"mean": 690},
    "prompts of 704": {"mean": 704},
    "prompts all alike": {"spread": 0.0},
    "another draw of prompts": {"seed": 1},
    "8,192 tokens a step": {"max_num_batched_tokens": 8192},
    "synchronous scheduling": {"async_scheduling": False},
    "R-KV's pool 10,000 tokens smaller": {"missing_tokens": 10_000},
    "R-KV's pool as large": {"missing_tokens": 0},
    "R-KV gives back all that is free": {"kept": 0},
    "scoring at what its bytes cost": {"step_s": 0.0, "request_s": 0.0},
}


def sensitivity() -> pd.DataFrame:
    """Change one assumption at a time: differences from the measured figures, in per cent."""
    parts = []
    for name, options in VARIANTS.items():
        table = compare(**options)
        off = {f"{m} {p // 1000}k": (c, t) for m, p, c, t in zip(
            table.method, table.pool_tokens, table.peak_concurrency_off_percent, table.output_tokens_per_s_off_percent,
            strict=True,
        )}  # fmt: skip
        parts += [
            {"variant": name, "figure": figure, **{key: round(values[i], 1) for key, values in off.items()}}
            for i, figure in enumerate(("peak concurrency", "output tokens/s"))
        ]
    return pd.DataFrame(parts)


def fit_host() -> pd.DataFrame:
    """Return the differences of full retention's four throughputs, in per cent, over the host's share."""
    source, table = requests(), measured().query("method == 'full'")
    parts = []
    for host in (0.0, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0):
        parts.append({"host": host, **_off(table, "full", source, host=host)})
    return pd.DataFrame(parts)


def fit() -> pd.DataFrame:
    """Return the differences of R-KV's four throughputs, in per cent, over a grid of the two figures."""
    source, table = requests(), measured().query("method == 'r_kv'")
    return pd.DataFrame(
        {
            "costs": costs,
            "score_step_ms": round(1e3 * step_s, 3),
            "score_request_ms": round(1e3 * request_s, 3),
            **_off(table, "r_kv", source, costs=costs, step_s=step_s, request_s=request_s),
        }
        for costs in COSTS
        for step_s in (4.5e-3, 5e-3, 5.5e-3, 6e-3, 6.5e-3)
        for request_s in (0.0, 0.5e-3, 1e-3, 1.5e-3)
    )


def _off(table: pd.DataFrame, method: str, source: Trace, **options: Any) -> dict[str, float]:
    """Return by how much each throughput is off, and the largest of these differences, in per cent."""
    off = {
        f"{pool // 1000}k": 100 * (row(pool, method, source, **options)["output_tokens_per_s"] / rate - 1)
        for pool, rate in zip(table.pool_tokens, table.output_tokens_per_s, strict=True)
    }
    return {name: round(value, 2) for name, value in (off | {"worst": max(map(abs, off.values()))}).items()}


@styled
def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw both figures of all rows: measured as bars, simulated as marks, with the range over the log's phase."""
    figure = new_figure(8.6, 3.4)
    panels = figure.subplots(1, 2)
    pools = sorted(table.pool_tokens.unique(), reverse=True)
    for k, (method, label) in enumerate((("full", "full retention"), ("r_kv", "R-KV"))):
        rows = table[table.method == method].set_index("pool_tokens").loc[pools]
        at = np.arange(len(pools)) + (k - 0.5) * 0.38
        for panel, name in zip(panels, ("peak_concurrency", "output_tokens_per_s"), strict=True):
            panel.bar(
                at, rows[f"{name}_measured"], 0.36, color=policy_colour(method), alpha=0.45, label=f"{label}, measured"
            )
            panel.plot(
                at, rows[name], "D", color="black", markerfacecolor=policy_colour(method), label=f"{label}, simulated"
            )
        low, high = rows.peak_concurrency - rows.lowest_peak, rows.highest_peak - rows.peak_concurrency
        panels[0].errorbar(at, rows.peak_concurrency, np.array([low, high]), fmt="none", ecolor="black", capsize=3)
    for panel, title, unit in (
        (panels[0], "Peak concurrency, as the log samples it", "requests"),
        (panels[1], "Throughput over the run", "output tokens/s"),
    ):
        panel.set_title(title)
        panel.set_ylabel(unit)
        panel.set_xticks(range(len(pools)), [f"{pool // 1000}k" for pool in pools])
        panel.set_xlabel("KV pool of full retention, tokens (R-KV: 7 % less)")
        panel.set_ylim(0)
    panels[1].legend(fontsize=7.5)
    save(figure, path)


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="write fit.csv only")
    if parser.parse_args().fit:
        fit_host().to_csv(HERE / "host.csv", index=False)
        fit().to_csv(HERE / "fit.csv", index=False)
        return
    write_trace(requests(), HERE / "requests.csv")
    table = compare()
    both = pd.concat([table.assign(costs="profile"), compare(costs="roofline").assign(costs="roofline")])
    both.round(1).to_csv(HERE / "differences.csv", index=False)
    draw(table, HERE / "rkv_stress.png")
    sensitivity().to_csv(HERE / "sensitivity.csv", index=False)
    print(both.round(1).to_string(index=False))


if __name__ == "__main__":
    main()
