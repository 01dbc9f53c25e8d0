"""The loop's two commands: calibrate on this device, and validate a profile on an event log."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_validate.device import Device, find_device, read_clocks, steady
from sim.errors import InputError
from sim.kv.event_file import EventFile
from sim.serving.models import Model, get_model
from sim.serving.profile import CostProfile, dump_profile, load_profile

__all__ = ["run_calibrate", "run_validate"]

EXIT_BEYOND_TOLERANCE = 1
CPU_ROUNDS = 9
"""Times that each case is measured on a CPU; on a GPU twice."""


class _Line:
    """One line on standard error that is written over, or written now and then where nobody watches."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last = 0.0
        self._watched = sys.stderr.isatty()

    def tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (0.2 if self._watched else 10.0):
            return
        self._last = now
        end = "\r" if self._watched else "\n"
        print(f"{now - self._began:5.0f} s  {text:<70}", end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._watched:
            print(" " * 80, end="\r", file=sys.stderr, flush=True)


# ---- calibrate -------------------------------------------------------------------------------------------------------


def run_calibrate(
    *,
    out: Path,
    model: str = "llama-3.1-8b",
    device: str = "cuda",
    dtype: str = "bf16",
    block_size: int = 16,
    attention: str = "auto",
    mover: str = "auto",
    quick: bool = False,
    memory: float = 0.6,
    rows: Path | None = None,
    seed: int = 0,
) -> int:
    """Measure a device, fit, write a cost profile, and print its figures.

    Parameters
    ----------
    out
        Profile to write; it is there whole or not at all.
    model, device, dtype, block_size, attention, mover
        What is measured, and with what.
    quick
        A third of the shapes, each for a third of the time.
    memory
        Share of the free memory that KV pool and weights may take.
    rows
        CSV to write every measurement to.
    seed
        Of contents, places and orders.

    Returns
    -------
    int
        Exit code.

    Raises
    ------
    InputError
        If something given cannot be used; nothing is written then.
    """
    from gpu_validate.bench import TorchBench
    from gpu_validate.calibrate import calibrate, predicted_steps
    from gpu_validate.report import figure_table, write_json, write_rows, write_whole

    if not 0 < memory <= 0.95:
        raise InputError(f"memory: expected a share in (0, 0.95], got {memory}")
    for path in (out, rows):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{path}: its folder does not exist")
    preset, where = get_model(model), find_device(device)
    steady(where)
    sweep = _sweep(preset, where, dtype, quick, memory)
    line = _Line()
    bench = TorchBench(
        preset,
        where,
        sweep,
        dtype=dtype,
        block_size=block_size,
        attention=attention,
        mover=mover,
        quick=quick,
        seed=seed,
    )
    source = "vtoken calibrate " + shlex.join(
        ["--device", device, "--model", model, "--dtype", dtype, *(["--quick"] if quick else [])]
    )
    calibration = calibrate(
        bench,
        sweep,
        source=source,
        rounds=2 if where.is_cuda else CPU_ROUNDS // (3 if quick else 1),
        tell=lambda what, done, total: line.tell(f"{done} of {total}: {what}"),
    )
    line.clear()
    write_whole(out, dump_profile(calibration.profile))
    write_json(out.with_suffix(".facts.json"), calibration.facts)
    if rows is not None:
        write_rows(rows, calibration.rows)
    _print_table(figure_table(calibration))
    for what, off in {
        "whole steps, held out from the last fit": calibration.steps,
        "whole steps, finished profile": predicted_steps(calibration.profile, preset, calibration),
    }.items():
        if off is not None:
            print(f"{what}: {off.mean:.1%} mean, {off.median:.1%} median, {off.p90:.1%} p90, {off.max:.1%} max")
    drift = calibration.facts["drift"]
    print(f"drift between the two samples of a case: {drift['median']:.1%} median, {drift['p90']:.1%} p90")
    print(f"device copy rate: {calibration.facts['plain_copy_bytes_per_s'] / 1e9:,.1f} GB/s (read and written)")
    print(f"written: {out}, {out.with_suffix('.facts.json').name}" + (f", {rows}" if rows is not None else ""))
    return 0


def _sweep(model: Model, device: Device, dtype: str, quick: bool, memory: float) -> Any:
    """Choose the shapes that fit the memory."""
    from gpu_validate.dtypes import get_dtype
    from gpu_validate.matrices import Matrices
    from gpu_validate.sweeps import designed

    kind = "cuda" if device.is_cuda else "cpu"
    token_bytes = get_dtype(dtype).token_bytes(model.layers, model.kv_heads, model.head_dim)
    rest = memory * device.memory_bytes - Matrices.bytes_needed(model, 8192, dtype)
    # A toy does not need all there is.
    capacity = min(int(rest / token_bytes), 1 << 13 if kind == "cpu" else 1 << 20)
    least = 4096
    if capacity < least:
        raise InputError(
            f"{device.spec} has {device.memory_bytes / 2**30:.1f} GiB free: weights of {model.name} and a KV pool of "
            f"{least} tokens do not fit into a share of {memory:g} of it; take a smaller model or a larger share"
        )
    return designed(kind, capacity=capacity, max_len=model.max_model_len, quick=quick)


def _print_table(lines: list[tuple[str, str, str, str, str]]) -> None:
    widths = [max(len(line[k]) for line in lines) for k in range(5)]
    for line in lines:
        name, value, unit, n, error = line
        print(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {unit:<{widths[2]}}  {n:>{widths[3]}}  {error}".rstrip())


# ---- validate --------------------------------------------------------------------------------------------------------


def run_validate(
    *,
    events: Path,
    profile: Path,
    device: str = "cuda",
    tolerance: float = 0.1,
    repeat: int = 5,
    steps: str | None = None,
    out: Path | None = None,
    attention: str = "auto",
    mover: str = "auto",
    lookahead: int = 64,
) -> int:
    """Replay an event log some times over, and set the times of its steps against what a profile says.

    Parameters
    ----------
    events
        Log written by ``vtoken run --events``.
    profile
        Profile written by :func:`run_calibrate` on this device.
    device, attention, mover
        Where and with what the log is replayed.
    tolerance
        Largest relative difference of the total time.
    repeat
        Times that the log is replayed; a step's time is the median of them (on a CPU the 20th percentile).
    steps
        ``A:B``: only steps A to B - 1.
    out
        Folder for steps.csv, summary.json, report.md and validation.png.
    lookahead
        Steps that are read from the log before they are played, so that reading is not between them.

    Returns
    -------
    int
        0, or 1 if the difference is beyond the tolerance.

    Raises
    ------
    InputError
        If log, profile and device do not go together, or something cannot be used.
    """
    from gpu_validate.program import Program
    from gpu_validate.timing import usual_quantile
    from gpu_validate.validate import compare, log_facts, predict
    from sim.serving.profile_cost import ProfileCopyCost, ProfileStepCost

    if not 0 < tolerance < 1:
        raise InputError(f"tolerance: expected a share in (0, 1), got {tolerance}")
    if repeat < 1:
        raise InputError(f"repeat: expected at least 1, got {repeat}")
    costs, log, where = load_profile(profile), EventFile(events), find_device(device)
    model = get_model(costs.model)
    _check_pair(costs, profile, log, where)
    steady(where)
    chosen = parse_steps(steps)
    works = (work for work in Program(log) if chosen is None or chosen[0] <= work.step < chosen[1])
    predicted = predict(works, ProfileStepCost.of(costs, model), ProfileCopyCost.of(costs, model))
    if not len(predicted):
        raise InputError(f"{events}: it has no step in {steps}")
    measured, played = _play(log, model, costs, where, chosen, repeat, attention, mover, lookahead)
    if measured.shape[1] != len(predicted):
        raise RuntimeError(f"{measured.shape[1]} steps were replayed, {len(predicted)} predicted")
    comparison = compare(predicted, measured, log_facts(log), quantile=usual_quantile(where.spec))
    summary = {
        "events": events.name,
        "profile": profile.name,
        "measured_on": {
            "device": where.name,
            "versions": where.versions,
            "date": time.strftime("%Y-%m-%d"),
        },
        "calibrated_on": costs.provenances[costs.step_overhead_ns.provenance].device,
        **comparison.summary(tolerance),
        "quantile_of_repeated_steps": usual_quantile(where.spec),
        "replay": played,
    }
    print(describe(summary))
    if out is not None:
        _write(out, comparison, summary, tolerance, f"{where.name}, {events.name}")
    return 0 if summary["within_tolerance"] else EXIT_BEYOND_TOLERANCE


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """Return the two ends of ``A:B``; None for None.

    Raises
    ------
    InputError
        If it is not that.
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.strip().isdecimal() and last.strip().isdecimal() and int(first) < int(last)):
        raise InputError(f"steps {text!r}: expected A:B with 0 <= A < B, as in 100:200")
    return int(first), int(last)


def sha256(path: Path) -> str:
    """Return the digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_pair(profile: CostProfile, path: Path, log: EventFile, device: Device) -> None:
    """Refuse what cannot be compared."""
    if {log.path.name, sha256(log.path)} & set(profile.fitted_on):
        raise InputError(f"cost profile {path} was fitted on {log.path.name}: give a log that the fit has not seen")
    if log.model and log.model != profile.model:
        raise InputError(f"cost profile {path} is of model {profile.model}, the log {log.path} of {log.model}")
    if log.block_size != profile.block_size:
        raise InputError(
            f"cost profile {path} is of blocks of {profile.block_size} tokens, the log {log.path} of {log.block_size}"
        )
    measured_on = profile.provenances[profile.step_overhead_ns.provenance].device
    if measured_on != device.name:
        raise InputError(f"cost profile {path} is of {measured_on!r}, this device is {device.name!r}: calibrate here")


def _play(
    log: EventFile,
    model: Model,
    profile: CostProfile,
    device: Device,
    steps: tuple[int, int] | None,
    repeat: int,
    attention: str,
    mover: str,
    lookahead: int,
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Replay a log once to check it and to warm up, then time ``repeat`` runs: float64[repeat, n], and facts."""
    from gpu_validate.options import Options
    from gpu_validate.program import Program
    from gpu_validate.replay import replay
    from gpu_validate.step_times import StepTimes
    from gpu_validate.timing import without_gc
    from gpu_validate.yardstick import slower_now

    line = _Line()
    options = Options(
        device=device.spec,
        dtype=profile.kv_dtype,
        attention=attention,
        mover=mover,
        steps=steps,
        graph=device.is_cuda and attention != "sdpa",
        matrices=True,
    )
    facts = Program(log).check()
    # Checked: after each step the layout that the kernels read is the simulator's, block for block.
    checked = replay(
        log, model, options, facts=facts, progress=lambda what, done, total: line.tell(f"{what}: {done} of {total}")
    )
    timed = dataclasses.replace(options, check=False, lookahead=lookahead)
    slower = [slower_now(profile, model, device)]
    clocks = {"before": read_clocks(device)}
    times: list[NDArray[np.float64]] = []
    host, copies = [], []

    def tell(what: str, done: int, total: int) -> None:
        line.tell(f"run {len(times) + 1} of {repeat}: {what} {done} of {total}")

    for _ in range(repeat):
        observer = StepTimes(cuda=device.is_cuda)
        with without_gc():
            report = replay(
                log,
                model,
                timed,
                facts=facts,
                observer=observer,
                progress=tell,
            )
        times.append(observer.times_ns())
        host.append(observer.host_ns())
        copies.append([values.sum() for values in observer.copies()])
    line.clear()
    slower.append(slower_now(profile, model, device))
    clocks["after"] = read_clocks(device)
    tables_ns, plan_ns = np.median(np.array(host), axis=0).tolist()
    moved, copy_ns = np.median(np.array(copies), axis=0).tolist()
    return np.stack(times), {
        "layouts_checked": checked.layouts_checked,
        "tokens_seen_moved": checked.tokens_seen_moved,
        "timed": report.to_dict(),
        "clocks": clocks,
        "slower_than_profile": slower,
        "host_tables_ns": tables_ns,
        "host_plan_ns": plan_ns,
        "copied_tokens": moved,
        "copy_bytes_per_s": 2 * moved * profile.kv_bytes_per_token(model) / copy_ns * 1e9 if copy_ns else None,
    }


def describe(summary: dict[str, Any]) -> str:
    """Return the table that is printed, as Markdown."""
    from gpu_validate.report import markdown

    lines = [("steps", "number", "predicted, s", "measured, s", "difference", "median APE", "p90 APE")]
    for name, group in summary["groups"].items():
        lines.append(
            (
                name,
                f"{group['steps']:,}",
                f"{group['predicted_s']:.4g}",
                f"{group['measured_s']:.4g}",
                f"{group['difference']:+.1%}",
                f"{group['median_ape']:.1%}",
                f"{group['p90_ape']:.1%}",
            )
        )
    log = summary["log"]
    verdict = "within" if summary["within_tolerance"] else "BEYOND"
    before, after = summary["replay"]["slower_than_profile"]
    repeated = "It was run once."
    if summary["repeats"] > 1:
        repeated = (
            f"{summary['repeats']} repeated runs differ by {summary['spread_of_repeated_totals']:.1%} in total, "
            f"a step by {summary['median_spread_of_a_step']:.1%} (median)."
        )
    return (
        markdown(lines)
        + f"\nTotal time {summary['difference']:+.1%}: {verdict} the tolerance of {summary['tolerance']:.0%}. "
        f"{repeated}\n"
        f"The device's own change: matrices take {before - 1:+.1%} against the profile before these runs, "
        f"{after - 1:+.1%} after.\n"
        f"Memory pressure: at most {log['peak_held_share']:.0%} of {log['num_blocks'] - 1:,} blocks held, "
        f"{log['preemptions']:,} preemptions, {log['repacks_committed']:,} repacks that moved {log['tokens_moved']:,} "
        f"tokens, {log['tokens_evicted']:,} tokens evicted."
    )


def _write(out: Path, comparison: Any, summary: dict[str, Any], tolerance: float, title: str) -> None:
    from gpu_validate.picture import draw
    from gpu_validate.report import write_json, write_steps, write_whole

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot make the folder: {error.strerror}") from None
    write_steps(out / "steps.csv", comparison)
    write_json(out / "summary.json", summary)
    write_whole(out / "report.md", f"# {title}\n\n{describe(summary)}\n")
    draw(comparison, out / "validation.png", title=title, tolerance=tolerance)
