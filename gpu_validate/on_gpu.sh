#!/usr/bin/env bash
# Everything that needs a GPU, within 8 minutes on one H200, and few small files about it.
#
#   gpu_validate/on_gpu.sh prepare      on a machine with the simulator: writes the event logs into $LOGS
#   gpu_validate/on_gpu.sh              on the GPU: needs torch, numpy, scipy and matplotlib, and those logs
#
# Knobs, by environment: PYTHON, DEVICE (cuda), MODEL (llama-3.1-8b), DTYPE (bf16), LOGS (folder of the event logs), OUT
# (folder of the results), WHEELS (folder of wheels to install first, without an index), ATTENTION, BUDGET_S (480),
# LAYERS (of the model in the verified replays), REPEAT (timed replays), QUICK (1: fewer shapes), TOLERANCE (0.1).
# DEVICE=cpu MODEL=toy is the dry run. The GPU's settings are read and never changed.
#
# Exit code: 0 if every target is met or does not apply, 1 if one is missed or a part failed, 2 for bad input.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
DEVICE="${DEVICE:-cuda}"
MODEL="${MODEL:-llama-3.1-8b}"
DTYPE="${DTYPE:-bf16}"
LOGS="${LOGS:-$HERE/out/gpu_logs}"
OUT="${OUT:-$HERE/out/gpu}"
ATTENTION="${ATTENTION:-auto}"
BUDGET_S="${BUDGET_S:-480}"
LAYERS="${LAYERS:-2}"
REPEAT="${REPEAT:-2}"
TOLERANCE="${TOLERANCE:-0.1}"
QUICK="${QUICK:-}"
WHEELS="${WHEELS:-}"
export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

# ---- on the machine with the simulator -------------------------------------------------------------------------------

# Pools are small enough that repacks happen, and preemptions. The longer trace takes two minutes of simulated time; what
# is replayed of it are its steps, half a minute of work for an H200.
prepare() {
    mkdir -p "$LOGS"
    "$PYTHON" - "$MODEL" "$LOGS" <<'PYTHON'
import sys
from pathlib import Path
from sim.study.config import SimConfig
from sim.study.run import simulate

model, folder = sys.argv[1], Path(sys.argv[2])
if model == "toy":
    small = "poisson:rate=200,n=10,prompt=lognormal:60:0.5,output=lognormal:16:0.5"
    traces = {"verify": (small, 18, 128, 0), "validate": (small, 18, 128, 1)}
else:
    short = "gamma:rate=30,cv=2,n=48,prompt=lognormal:400:0.6,output=lognormal:60:0.5"
    long = "gamma:rate=2.5,cv=5,n=300,prompt=lognormal:800:0.7,output=lognormal:120:0.6"
    traces = {"verify": (short, 150, 1024, 0), "validate": (long, 900, 2048, 0)}
for name, (trace, kv_blocks, batched_tokens, seed) in traces.items():
    config = SimConfig(
        model=model, hardware="h200", trace=trace, seed=seed, policy="h2o", budget=0.5, score_reads=0.0,
        reclaimer="vtoken", kv_blocks=kv_blocks, max_num_batched_tokens=batched_tokens,
    )
    path = folder / f"{name}.npz"
    summary = simulate(config, events=path).summary
    print(f"{path}: {path.stat().st_size / 1e3:,.0f} KB, {summary['steps']:,} steps, "
          f"{summary['repacks_committed']:,} repacks, {summary['preemptions']:,} preemptions")
PYTHON
}

# ---- on the GPU ------------------------------------------------------------------------------------------------------

part() {  # NAME, LIMIT_S, COMMAND...: run it within its limit and what is left of the budget
    local name="$1" limit="$2" left status=0 began
    shift 2
    left=$((BUDGET_S - SECONDS))
    if ((left < 5)); then
        echo "$name: skipped, the budget of $BUDGET_S s is used up" | tee -a "$OUT/parts.txt"
        return 0
    fi
    ((limit > left)) && limit=$left
    began=$SECONDS
    timeout --signal=INT --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1 || status=$?
    if ((status == 124 || status == 137)); then
        echo "$name: stopped after its limit of $limit s" | tee -a "$OUT/parts.txt"
    else
        echo "$name: exit $status after $((SECONDS - began)) s" | tee -a "$OUT/parts.txt"
    fi
}

clocks() {
    date -u +"%Y-%m-%d %H:%M UTC"
    if command -v nvidia-smi > /dev/null; then
        nvidia-smi --format=csv --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit,persistence_mode \
            || true
    else
        echo "no nvidia-smi here"
    fi
}

run_all() {
    for log in verify validate; do
        if [[ ! -f "$LOGS/$log.npz" ]]; then
            echo "error: $LOGS/$log.npz: no such file; make it with: $0 prepare" >&2
            exit 2
        fi
    done
    mkdir -p "$OUT"
    rm -f "$OUT"/*.json "$OUT"/*.log "$OUT"/*.txt "$OUT"/report.md
    if [[ -n "$WHEELS" ]]; then
        "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" "$WHEELS"/*.whl
    fi
    {
        "$PYTHON" -c 'import platform, torch; print("python", platform.python_version(), "torch", torch.__version__)'
        clocks
    } > "$OUT/versions.txt" 2>&1
    local gpu=("$PYTHON" -m gpu_validate) quick=()
    [[ -n "$QUICK" ]] && quick=(--quick)
    # Right on the device: bytes of every token, attention's output, layouts, and graphs against kernel by kernel.
    part verify 90 "${gpu[@]}" replay --events "$LOGS/verify.npz" --device "$DEVICE" --dtype "$DTYPE" \
        --attention "$ATTENTION" --layers "$LAYERS" --verify --graph --matrices --out "$OUT/verify.json"
    if [[ "$DEVICE" == cuda* ]]; then
        part verify_paged 60 "${gpu[@]}" replay --events "$LOGS/verify.npz" --device "$DEVICE" --dtype "$DTYPE" \
            --attention paged --layers 2 --verify --graph --visible live --out "$OUT/verify_paged.json"
        part verify_fp8 60 "${gpu[@]}" replay --events "$LOGS/verify.npz" --device "$DEVICE" --dtype fp8 \
            --attention paged --layers 2 --verify --graph --sample 0.2 --out "$OUT/verify_fp8.json"
    fi
    # Block counts of the longer log, every step.
    part layouts 60 "${gpu[@]}" replay --events "$LOGS/validate.npz" --device "$DEVICE" --dtype "$DTYPE" \
        --attention "$ATTENTION" --layers 1 --out "$OUT/layouts.json"
    part calibrate 230 "${gpu[@]}" calibrate --device "$DEVICE" --model "$MODEL" --dtype "$DTYPE" \
        --attention "$ATTENTION" "${quick[@]}" --out "$OUT/profile.json" --rows "$OUT/measurements.csv"
    if [[ -f "$OUT/profile.json" ]]; then
        part validate 200 "${gpu[@]}" validate --events "$LOGS/validate.npz" --profile "$OUT/profile.json" \
            --device "$DEVICE" --attention "$ATTENTION" --repeat "$REPEAT" --tolerance "$TOLERANCE" --out "$OUT/validation"
    else
        echo "validate: skipped, there is no profile" | tee -a "$OUT/parts.txt"
    fi
    clocks > "$OUT/clocks_after.txt" 2>&1
    # The steps of minutes are many lines.
    if [[ -f "$OUT/validation/steps.csv" ]]; then
        gzip --force --no-name "$OUT/validation/steps.csv"
    fi
    "$PYTHON" -m gpu_validate.targets "$OUT" "$DEVICE"
}

case "${1:-run}" in
    prepare) prepare ;;
    run) run_all ;;
    *)
        echo "error: expected 'prepare' or nothing, got '$1'" >&2
        exit 2
        ;;
esac
