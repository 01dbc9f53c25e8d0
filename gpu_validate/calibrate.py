"""From measurements to a cost profile.

What is measured comes from a :class:`Bench`: a real pool on a device, or a made-up device with a known law. Every case
is timed twice, in random order, the parts first: attention, matrices, copies. Then whole steps, in the code path that a
replay takes: what they cost beyond the parts is fitted as fixed, by sequence, by table entry and by prefilled token.
Last, copies beside steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu_validate.device import Device, read_clocks
from gpu_validate.layouts import lengths_of
from gpu_validate.sweeps import Beside, Decode, Prefill, Repack, Step, Sweep
from gpu_validate.timing import Case, Clock, Measured, Op, Sample, measure, usual_quantile
from sim.rng import stream
from sim.serving.copy import contended_stretch
from sim.serving.fit import Fitted, attention_ns, errors, fit_attention, fit_copy, fit_curve, fit_linear
from sim.serving.models import Model
from sim.serving.profile import KV_BYTES, CostProfile, Curve, Errors, Figure, Provenance
from sim.serving.profile_cost import ProfileCopyCost, ProfileStepCost

__all__ = ["Bench", "Calibration", "calibrate"]

PASSES = 5
"""Times that every step is played in a round."""

Tell = Callable[[str, int, int], None]
Floats = NDArray[np.float64]


class Bench(Protocol):
    """What can be timed on a device. Each method puts everything into place and returns the operation.

    Attributes
    ----------
    model, kv_dtype, block_size, device
        What is measured, and on what.
    free_sequences
        Sequences that decode attention takes at once.
    backends
        What does the work: kind to name.
    graph_clock, eager_clock, host_clock
        For operations that are captured into graphs, those launched one by one, and those of the host.
    """

    model: Model
    kv_dtype: str
    block_size: int
    device: Device
    free_sequences: float
    backends: dict[str, str]
    graph_clock: Clock
    eager_clock: Clock
    host_clock: Clock

    def launch(self) -> Op:
        """Launch a kernel that has nothing to do."""
        ...

    def plain_copy(self, size: int) -> Op:
        """Copy ``size`` bytes from one place to another."""
        ...

    def matrices(self, tokens: int) -> Op:
        """Multiply ``tokens`` tokens with the weights of all layers."""
        ...

    def head(self, sequences: int) -> Op:
        """Multiply with the output projection."""
        ...

    def decode(self, shape: Decode) -> Op:
        """Decode attention of one layer."""
        ...

    def decode_eagerly(self) -> bool:
        """Say whether decode attention cannot be captured."""
        ...

    def prefill(self, shape: Prefill) -> Op:
        """Prefill attention of one layer, the new tokens' writes included."""
        ...

    def repack(self, shape: Repack) -> Op:
        """Copy tokens of all layers."""
        ...

    def play(self, shapes: Sequence[Step]) -> Floats:
        """Run whole steps, one after the other as a replay does, and return float64[n]: nanoseconds of each."""
        ...

    def upload(self, shape: Decode) -> Op:
        """Bring a block table and lengths to the device: the host's part."""
        ...

    def steps_of_decode(self, shape: Beside, count: int) -> Op:
        """Run attention and matrices of ``count`` decode steps."""
        ...


@dataclass(frozen=True)
class Row:
    """One measurement, for the file of all of them."""

    series: str
    point: dict[str, float]
    ns: float
    p20_ns: float
    p80_ns: float
    n: int
    drift: float


@dataclass(frozen=True)
class Calibration:
    """What a calibration gives.

    Attributes
    ----------
    profile
        The cost profile.
    rows
        Every measurement.
    steps
        Error of the whole law on whole steps that the closing fit did not see; None if there were too few.
    facts
        What the profile has no place for: rates, host times, drift, clocks.
    """

    profile: CostProfile
    rows: list[Row]
    steps: Errors | None
    facts: dict[str, Any] = field(default_factory=dict)


def calibrate(
    bench: Bench, sweep: Sweep, *, source: str, rounds: int = 2, seed: int = 0, tell: Tell = lambda *_: None
) -> Calibration:
    """Measure everything and fit.

    Parameters
    ----------
    bench
        What is measured.
    sweep
        The shapes.
    source
        The command, for the provenance.
    rounds
        How often each case is timed.
    seed
        Of the orders.
    tell
        Called with (what is being measured, cases done, cases in all).

    Returns
    -------
    Calibration
        The profile is consistent with the step law of :mod:`sim.serving.profile_cost`.
    """
    clocks = {"before": read_clocks(bench.device)}

    def progress(done: int, total: int, case: Case) -> None:
        tell(case.name, done, total)

    quantile = usual_quantile(bench.device.spec)
    measured = measure(list(_alone(bench, sweep)), rounds=rounds, quantile=quantile, seed=seed, tell=progress)
    measured += _play_steps(bench, sweep, rounds, seed, tell)
    series: dict[str, list[Measured]] = {}
    for one in measured:
        series.setdefault(one.name, []).append(one)
    provenance = bench.device.provenance(source)
    parts = _fit_parts(bench, series)
    draft = _profile(bench, parts, provenance)
    closing, profile = _close(bench, draft, series["step"])
    beside = measure(list(_beside(bench, sweep, profile)), rounds=rounds, quantile=quantile, seed=seed, tell=progress)
    profile = _fit_beside(bench, profile, beside)
    clocks["after"] = read_clocks(bench.device)
    everything = [*measured, *beside]
    return Calibration(
        profile=profile,
        rows=[row for one in everything for row in _rows(one)],
        steps=closing.error,
        facts=_facts(bench, series, beside) | {"clocks": clocks, "drift": _drift(everything)},
    )


# ---- what is measured ------------------------------------------------------------------------------------------------


def _alone(bench: Bench, sweep: Sweep) -> Iterable[Case]:
    """Yield the cases in which one thing runs at a time."""
    size = bench.block_size
    graph, eager = bench.graph_clock, bench.eager_clock
    yield Case("launch", {}, graph, bench.launch)
    yield Case("launch, eager", {}, eager, bench.launch)
    for count in sweep.copy_bytes:
        yield Case("plain copy", {"bytes": 2 * count}, graph, _lazy(bench.plain_copy, count))
    for tokens in sweep.tokens:
        yield Case("matrices", {"tokens": tokens}, graph, _lazy(bench.matrices, tokens))
    for sequences in sweep.sequences:
        yield Case("head", {"sequences": sequences}, graph, _lazy(bench.head, sequences))
    for decode in sweep.decode:
        lengths = lengths_of(decode)
        point = {
            "batch": decode.batch,
            "live": decode.live,
            "dead": decode.dead,
            "scattered": decode.scattered,
            "ragged": decode.ragged,
            "kv_read": int(lengths.sum()),
        }
        clock = eager if bench.decode_eagerly() else graph
        yield Case("decode", point, clock, _lazy(bench.decode, decode))
        if clock.name != eager.name and decode.live in (sweep.decode[0].live, 4 * sweep.decode[0].live):
            yield Case("decode, eager", point, eager, _lazy(bench.decode, decode))
        if decode.dead == 0 and decode.scattered:
            host = {"batch": decode.batch, "entries": int((-(-lengths // size)).sum())}
            yield Case("upload", host, bench.host_clock, _lazy(bench.upload, decode))
    for prefill in sweep.prefill:
        read = prefill.batch * (prefill.context + prefill.tokens)
        pairs = prefill.batch * _pairs(prefill.tokens, prefill.context)
        point = {"batch": prefill.batch, "tokens": prefill.batch * prefill.tokens, "kv_read": read, "pairs": pairs}
        yield Case("prefill", point, eager, _lazy(bench.prefill, prefill))
    for repack in sweep.repack:
        moved = 2 * token_bytes(bench) * repack.tokens
        point = {"tokens": repack.tokens, "scattered": repack.scattered, "bytes": moved}
        yield Case("repack", point, graph, _lazy(bench.repack, repack))
        yield Case("repack, eager", point, eager, _lazy(bench.repack, repack))


def _play_steps(bench: Bench, sweep: Sweep, rounds: int, seed: int, tell: Tell) -> list[Measured]:
    """Time whole steps: not one step over and over, but another one each time, as in a replay."""
    measured = []
    for step in sweep.steps:
        lengths = lengths_of(Decode(step.batch, step.live, ragged=True)) + 1
        new = step.prefill
        point = {
            "tokens": step.batch + new,
            "seqs": step.batch + (new > 0),
            "kv_read": int(lengths.sum()) + (step.context + new if new else 0),
            "pairs": int(lengths.sum()) + _pairs(new, step.context),
        }
        measured.append(Measured("step", point, quantile=usual_quantile(bench.device.spec)))
    draws = stream(seed, "calibrate", "steps")
    bench.play(sweep.steps)  # to warm up
    for k in range(PASSES * rounds):
        tell("steps", k, PASSES * rounds)
        order = draws.permutation(len(sweep.steps))
        for i, ns in zip(order.tolist(), bench.play([sweep.steps[i] for i in order]), strict=True):
            measured[i].samples.append(Sample.of(np.array([ns])))
    return measured


def _beside(bench: Bench, sweep: Sweep, profile: CostProfile) -> Iterable[Case]:
    """Yield the cases of copies beside decode steps, which go on for longer than the copy."""
    step_cost, copy_cost = ProfileStepCost.of(profile, bench.model), ProfileCopyCost.of(profile, bench.model)
    clock = bench.graph_clock
    for shape in sweep.beside:
        read = int(lengths_of(Decode(shape.batch, shape.live)).sum())
        step_ns, memory_ns = step_cost.step_ns(shape.batch, shape.batch, read, read)
        count = min(64, max(1, math.ceil(4 * copy_cost.alone_ns(shape.tokens) / step_ns)))
        point = {
            "batch": shape.batch,
            "kv_read": read,
            "tokens": shape.tokens,
            "steps": count,
            "memory_share": min(1.0, memory_ns / step_ns),
        }
        steps = _lazy(bench.steps_of_decode, shape, count)
        copy = _lazy(bench.repack, Repack(shape.tokens))
        yield Case("decode alone", point, clock, steps)
        yield Case("copy alone", point, clock, copy)
        yield Case("decode and copy", point, clock, steps, beside=copy)


def _lazy(make: Callable[..., Op], *arguments: Any) -> Callable[[], Op]:
    return lambda: make(*arguments)


def token_bytes(bench: Bench) -> int:
    """Return bytes of K and V of a token over all layers, as profiles count them: without scales."""
    model = bench.model
    return 2 * model.layers * model.kv_heads * model.head_dim * KV_BYTES[bench.kv_dtype]


def _pairs(tokens: int, context: int) -> int:
    """Return the query-key pairs of new tokens behind a context."""
    return tokens * context + tokens * (tokens + 1) // 2


# ---- fits ------------------------------------------------------------------------------------------------------------


def _columns(measured: Sequence[Measured], *names: str) -> list[Floats]:
    """Return float64[n] of each coordinate, and last of the times in ns."""
    columns = [np.array([float(one.point[name]) for one in measured]) for name in names]
    return [*columns, np.array([one.ns for one in measured])]


@dataclass(frozen=True)
class _Parts:
    """Fits of what was measured alone."""

    attention: Fitted
    prefill: Fitted
    copy: Fitted
    gemm: Curve
    head: Curve
    dead: Fitted | None


def _fit_parts(bench: Bench, series: dict[str, list[Measured]]) -> _Parts:
    layers, token, free = bench.model.layers, token_bytes(bench), bench.free_sequences
    alive = [one for one in series["decode"] if not one.point["dead"]]
    batch, read, ns = _columns(alive, "batch", "kv_read")
    attention = fit_attention(read * token, batch, ns * layers, free_sequences=free)
    values = attention.values

    def attends(read_tokens: Any, sequences: Any) -> Floats:
        kv_ns = np.asarray(read_tokens) * token * values["ns_per_byte"]
        return attention_ns(kv_ns, sequences, values["launch_ns"], values["sequence_ns"], free)

    batch, tokens, read, pairs, ns = _columns(series["prefill"], "batch", "tokens", "kv_read", "pairs")
    # As steps are counted: a token a sequence and a pair a slot read are decode's.
    prefill = fit_linear(
        {"ns_per_token": tokens - batch, "ns_per_pair": pairs - read},
        ns * layers,
        known_ns=np.minimum(attends(read + tokens, batch), ns * layers),
    )
    moved, scattered, ns = _columns(series["repack"], "bytes", "scattered")
    return _Parts(
        attention,
        prefill,
        fit_copy(moved, scattered, ns),
        _curve(series["matrices"], "tokens"),
        _curve(series["head"], "sequences"),
        _fit_dead(series["decode"], attends, layers),
    )


def _curve(measured: list[Measured], coordinate: str) -> Curve:
    counts, ns = _columns(measured, coordinate)
    points, error = fit_curve(counts, ns)
    return Curve(points, "measured", n=sum(one.n for one in measured), error=error)


def _fit_dead(measured: list[Measured], attends: Callable[[Any, Any], Floats], layers: int) -> Fitted | None:
    """Fit what a dead slot costs, as a share of what the law says of a live one."""
    point = [one.point for one in measured]
    whole = {
        (p["batch"], p["live"]): one.ns * layers
        for p, one in zip(point, measured, strict=True)
        if not p["dead"] and p["scattered"] and not p["ragged"]
    }
    dead = [
        (p, one.ns * layers, whole[p["batch"], p["live"]])
        for p, one in zip(point, measured, strict=True)
        if p["dead"] and (p["batch"], p["live"]) in whole
    ]
    if not dead:
        return None
    slots = [attends(p["kv_read"], p["batch"]) - attends(p["batch"] * p["live"], p["batch"]) for p, _, _ in dead]
    return fit_linear({"ratio": slots}, [ns for _, ns, _ in dead], known_ns=[ns for _, _, ns in dead])


def _profile(bench: Bench, parts: _Parts, provenance: Provenance) -> CostProfile:
    """Put the parts together; what whole steps and overlaps say is still missing."""
    assumed = Provenance(
        device=provenance.device,
        date=provenance.date,
        source="not measured: the default of the roofline",
        kind="assumed",
    )

    def default(value: float, note: str = "") -> Figure:
        return Figure(value, "assumed", note=note)

    nothing = Figure(0.0, "measured", note="part of step_overhead_ns")
    attention, prefill, copy = parts.attention, parts.prefill, parts.copy
    return CostProfile(
        model=bench.model.name,
        hardware=bench.device.hardware,
        kv_dtype=bench.kv_dtype,
        block_size=bench.block_size,
        provenances={"measured": provenance, "assumed": assumed},
        step_overhead_ns=nothing,
        sequence_overhead_ns=nothing,
        gemm_ns=parts.gemm,
        head_ns=parts.head,
        attention_launch_ns=attention.figure("launch_ns", "measured"),
        attention_ns_per_byte=attention.figure("ns_per_byte", "measured"),
        attention_sequence_ns=attention.figure("sequence_ns", "measured"),
        attention_free_sequences=Figure(bench.free_sequences, "measured", note="multiprocessors over KV heads"),
        dead_slot_factor=parts.dead.figure("ratio", "measured") if parts.dead else default(1.0),
        prefill_ns_per_token=prefill.figure("ns_per_token", "measured"),
        prefill_ns_per_pair=prefill.figure("ns_per_pair", "measured"),
        copy_launch_ns=copy.figure("launch_ns", "measured"),
        copy_ns_per_byte_scattered=copy.figure("scattered_ns_per_byte", "measured"),
        copy_ns_per_byte_contiguous=copy.figure("contiguous_ns_per_byte", "measured"),
        copy_share=default(0.5),
        copy_interference=default(1.0),
        table_step_ns=nothing,
        table_entry_ns=nothing,
        score_step_ns=default(0.0),
        score_request_ns=default(0.0),
        score_pair_bytes=default(44.0),
    )


def _close(bench: Bench, draft: CostProfile, steps: list[Measured]) -> tuple[Fitted, CostProfile]:
    """Fit what whole steps cost beyond their parts."""
    tokens, seqs, read, pairs, ns = _columns(steps, "tokens", "seqs", "kv_read", "pairs")
    cost = ProfileStepCost.of(draft, bench.model)
    known = np.array(
        [cost.step_ns(*map(int, shape))[0] for shape in zip(tokens, seqs, read, pairs, strict=True)], np.float64
    )
    columns = {"step_ns": np.ones_like(ns), "sequence_ns": seqs, "entry_ns": read / bench.block_size}
    if (tokens > seqs).any():
        columns["token_ns"] = tokens - seqs
    closing = fit_linear(columns, ns, known_ns=known)
    beyond = draft.prefill_ns_per_token
    if "token_ns" in columns:
        more = closing.values["token_ns"]
        low, high = beyond.interval or (beyond.value, beyond.value)
        beyond = dataclasses.replace(beyond, value=beyond.value + more, interval=(low + more, high + more))
    return closing, dataclasses.replace(
        draft,
        step_overhead_ns=closing.figure("step_ns", "measured", note="whole steps beyond their parts"),
        sequence_overhead_ns=closing.figure("sequence_ns", "measured", note="whole steps beyond their parts"),
        table_entry_ns=closing.figure("entry_ns", "measured", note="whole steps beyond their parts"),
        prefill_ns_per_token=beyond,
    )


def _fit_beside(bench: Bench, profile: CostProfile, measured: list[Measured]) -> CostProfile:
    """Fit what copy and decode do to each other."""
    alone = [one for one in measured if one.name == "decode alone"]
    copies = [one for one in measured if one.name == "copy alone"]
    both = [one for one in measured if one.name == "decode and copy"]
    if not both:
        return profile
    launch_ns = profile.copy_launch_ns.value
    copy_ns = np.array([one.ns for one in copies])
    beside_ns = np.array([one.beside_ns for one in both])
    slower = fit_linear(
        {"ratio": np.maximum(copy_ns - launch_ns, 1.0)}, beside_ns, known_ns=np.minimum(launch_ns, 0.99 * beside_ns)
    )
    share = _bounded(1 / max(slower.values["ratio"], 1e-3))
    low, high = (_bounded(1 / max(bound, 1e-3)) for bound in slower.intervals["ratio"][::-1])
    cost = ProfileCopyCost.of(profile, bench.model)
    decode_ns = np.array([one.ns for one in alone])
    explained = [
        contended_stretch(
            round(ns), round(ns * one.point["memory_share"]), cost.bandwidth_ns(int(one.point["tokens"])), share
        )
        for one, ns in zip(alone, decode_ns, strict=True)
    ]
    delay = fit_linear({"ratio": np.maximum(explained, 1.0)}, [one.ns for one in both], known_ns=decode_ns)
    return dataclasses.replace(
        profile,
        copy_share=Figure(
            share, "measured", n=slower.n, error=slower.error, interval=(min(low, share), max(high, share))
        ),
        copy_interference=delay.figure("ratio", "measured", note="decode steps that outlast the copy"),
    )


def _bounded(share: float) -> float:
    """Keep a share inside (0, 1): a copy that is no slower beside a step has nearly all of its speed."""
    return min(0.999, max(0.001, share))


# ---- what there is to tell -------------------------------------------------------------------------------------------


def _rows(one: Measured) -> list[Row]:
    names = [(one.name, one.samples)]
    if one.beside:
        names.append((one.name + ", the copy", one.beside))
    return [
        Row(
            name,
            dict(one.point),
            float(np.quantile([s.median for s in samples], one.quantile)),
            float(np.quantile([s.p20 for s in samples], 0.2)),
            float(np.quantile([s.p80 for s in samples], 0.8)),
            sum(s.n for s in samples),
            one.drift,
        )
        for name, samples in names
    ]


def _drift(measured: list[Measured]) -> dict[str, float]:
    """Return how far the two samples of a case lie apart, over all cases."""
    drift = np.array([one.drift for one in measured])
    return {"median": float(np.median(drift)), "p90": float(np.quantile(drift, 0.9)), "max": float(drift.max())}


def _facts(bench: Bench, series: dict[str, list[Measured]], beside: list[Measured]) -> dict[str, Any]:
    rates = [one.point["bytes"] / one.ns for one in series["plain copy"]]
    best = max(rates)
    facts: dict[str, Any] = {
        "backends": bench.backends,
        "launch_ns": series["launch"][0].ns,
        "launch_eager_ns": series["launch, eager"][0].ns,
        "plain_copy_bytes_per_s": best * 1e9,
        "repack": [
            {
                "tokens": int(one.point["tokens"]),
                "scattered": bool(one.point["scattered"]),
                "ns": one.ns,
                "eager_ns": eager.ns,
                "bytes_per_s": one.point["bytes"] / one.ns * 1e9,
                "of_copy_rate": one.point["bytes"] / one.ns / best,
            }
            for one, eager in zip(series["repack"], series["repack, eager"], strict=True)
        ],
    }
    entries, ns = _columns(series["upload"], "entries")
    facts["upload_host"] = fit_linear({"step_ns": np.ones_like(ns), "entry_ns": entries}, ns).values
    triples = zip(*(iter(beside),) * 3, strict=True)
    facts["beside"] = [
        {
            **one.point,
            "decode_ns": one.ns,
            "decode_beside_ns": both.ns,
            "copy_ns": copy.ns,
            "copy_beside_ns": both.beside_ns,
            "slower": both.ns / one.ns - 1,
            # By bytes alone: the copy's time at the device's copy rate, for as long as both want the memory.
            "bytes_explain": 2 * one.point["tokens"] * token_bytes(bench) / best / one.ns,
        }
        for one, copy, both in triples
    ]
    return facts


def predicted_steps(profile: CostProfile, model: Model, calibration: Calibration) -> Errors:
    """Return the error of the finished profile on the whole steps that were measured."""
    cost = ProfileStepCost.of(profile, model)
    steps = [row for row in calibration.rows if row.series == "step"]
    predicted = [cost.step_ns(*(int(row.point[k]) for k in ("tokens", "seqs", "kv_read", "pairs")))[0] for row in steps]
    return errors(predicted, [row.ns for row in steps])
