"""Calibrate this CPU, simulate a trace that the fit has not seen, replay it, and compare, five times: see README.md.

    OMP_NUM_THREADS=1 python experiments/09_closing_the_loop/run.py

Five to ten minutes on two cores of an AMD EPYC. Beside this file are written cpu.json, measurements.csv, runs.csv,
steps.csv and loop.png; everything else goes into out/.
"""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE / "out"
LENGTHS = "prompt=lognormal:120:0.5,output=lognormal:60:0.5"

# Name: policy and what becomes of dead slots, blocks of the pool, seed of the trace.
RUNS = {
    "h2o + vtoken": (["--policy", "h2o", "--budget", "0.5", "--reclaimer", "vtoken"], 150, 0),
    "h2o + vtoken, smaller pool": (["--policy", "h2o", "--budget", "0.5", "--reclaimer", "vtoken"], 90, 1),
    "h2o + naive": (["--policy", "h2o", "--budget", "0.5", "--reclaimer", "naive"], 150, 2),
    "h2o + sync": (["--policy", "h2o", "--budget", "0.5", "--reclaimer", "sync"], 150, 3),
    "full": (["--policy", "full", "--reclaimer", "none"], 150, 4),
}


def vtoken(*arguments: str, codes: tuple[int, ...] = (0,)) -> None:
    command = [sys.executable, "-m", "sim.cli", *arguments]
    print("vtoken", " ".join(arguments), flush=True)
    done = subprocess.run(command, check=False, cwd=HERE)
    if done.returncode not in codes:
        sys.exit(f"exit {done.returncode}")


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    rows = []
    for number, (name, (flags, kv_blocks, seed)) in enumerate(RUNS.items()):
        folder = f"out/{number}"
        # Each run has a calibration of its own, just before: this machine's speed does not keep for minutes.
        profile = f"out/cpu{number}.json"
        vtoken("calibrate", "--device", "cpu", "--model", "toy", "--out", profile, "--rows", f"out/cpu{number}.csv")
        vtoken(
            *("run", "--model", "toy", "--trace", f"poisson:rate=60,n=60,{LENGTHS}", "--seed", str(seed), *flags),
            *("--kv-blocks", str(kv_blocks), "--max-num-batched-tokens", "256", "--score-reads", "0"),
            *("--step-cost", f"profile:{profile}", "--copy-cost", f"profile:{profile}"),
            *("--events", "--quiet", "--out", folder),
        )
        vtoken(
            *("validate", "--events", f"{folder}/events.parquet", "--profile", profile, "--device", "cpu"),
            *("--tolerance", "0.2", "--repeat", "5", "--out", f"{folder}/validation"),
            codes=(0, 1),
        )
        summary = json.loads((HERE / folder / "validation" / "summary.json").read_text())
        whole, log = summary["groups"]["all"], summary["log"]
        rows.append(
            {
                "run": name,
                "kv_blocks": kv_blocks,
                "seed": seed,
                "steps": whole["steps"],
                "preemptions": log["preemptions"],
                "repacks": log["repacks_committed"],
                "tokens_moved": log["tokens_moved"],
                "predicted_s": round(whole["predicted_s"], 4),
                "measured_s": round(whole["measured_s"], 4),
                "difference": round(whole["difference"], 4),
                "device_before": round(summary["replay"]["slower_than_profile"][0] - 1, 4),
                "device_after": round(summary["replay"]["slower_than_profile"][1] - 1, 4),
                "spread_of_5_runs": round(summary["spread_of_repeated_totals"], 4),
                "median_ape_of_a_step": round(whole["median_ape"], 4),
                "p90_ape_of_a_step": round(whole["p90_ape"], 4),
            }
        )
    with (HERE / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for source, target in {
        "0/validation/steps.csv": "steps.csv",
        "0/validation/validation.png": "loop.png",
        "cpu0.json": "cpu.json",
        "cpu0.csv": "measurements.csv",
    }.items():
        shutil.copy(OUT / source, HERE / target)


if __name__ == "__main__":
    main()
