"""What reclaimers, attention models, cost models and trace readers have to keep to, as checks over any of them.

:mod:`sim.study.conformance` has those for policies. All take a specification, so that another package's tests can run
them over what it adds, and raise :class:`ConformanceError` with what went wrong:

>>> from sim.study.plugin_checks import check_attention, check_step_cost
>>> check_attention("uniform")
>>> check_step_cost("linear:base_s=0.01,per_token_s=1e-5")
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.kv.cache import KVCache
from sim.kv.events import Kind, KVEventLog
from sim.kv.reclaim import reclaimers
from sim.kv.reclaim.base import Reclaimer
from sim.kv.replay import Replay, ReplayError
from sim.kv.view import View
from sim.rng import request_key
from sim.serving.attention import build_attention
from sim.serving.copy import build_copy_cost
from sim.serving.cost import build_step_cost
from sim.serving.hardware import get_hardware
from sim.serving.models import get_model
from sim.study.config import SimConfig
from sim.study.conformance import ConformanceError
from sim.study.run import simulate
from sim.workload.readers import reader_for
from sim.workload.source import read_lengths
from sim.workload.trace import Trace

__all__ = [
    "ConformanceError",
    "check_attention",
    "check_copy_cost",
    "check_reclaimer",
    "check_step_cost",
    "check_trace_reader",
]

# A step's memory bandwidth is idle, so that copies delay nothing and all reclaimers see the same clock.
_SMALL = SimConfig(
    trace="poisson:rate=20,n=12,prompt=150,output=60",
    policy="random",
    budget=0.5,
    block_size=8,
    step_cost="linear:base_s=0.01,per_token_s=0,memory_share=0",
)


def _require(condition: bool, spec: str, what: str) -> None:
    if not condition:
        raise ConformanceError(f"{spec}: {what}")


def check_reclaimer(spec: str, **settings: Any) -> None:
    """Run requests under a reclaimer: with copies at once, slow ones, and a pool so small that some are preempted.

    Every event is judged by :class:`sim.kv.replay.Replay`: no token lost or doubled, no move in effect before its copy
    is complete, no repack that frees nothing. All requests end, equal runs are equal, and unless the reclaimer chooses
    victims itself those are who dies under ``naive``.

    Parameters
    ----------
    spec
        The reclaimer.
    settings
        Fields of the configuration that it needs, such as ``block_size=1``.

    Raises
    ------
    ConformanceError
        That says what went wrong.
    InputError
        If there is no such reclaimer.
    """
    reclaimer = reclaimers.build(spec)
    if not reclaimer.evicts:
        settings = {"policy": "full", "budget": None, **settings}
    large, small = (slots // settings.get("block_size", _SMALL.block_size) for slots in (16_000, 640))
    naive = _events(spec, {"reclaimer": "naive" if reclaimer.evicts else spec, "kv_blocks": large, **settings})
    for copy_s, blocks in itertools.product(("0", "2e-5", "2e-4"), (large, small)):
        changes = {"reclaimer": spec, "copy_cost": f"linear:per_token_s={copy_s}", "kv_blocks": blocks, **settings}
        log = _events(spec, changes)
        told = f"copies of {copy_s} s a token, {blocks} blocks"
        same = np.array_equal(log.records, _events(spec, changes).records)
        _require(bool(same), spec, f"two equal runs differ ({told})")
        if type(reclaimer).choose is Reclaimer.choose and blocks == large:
            _require(_deaths(log) == _deaths(naive), spec, f"others die than under naive ({told})")


def _events(spec: str, changes: dict[str, Any]) -> KVEventLog:
    """Return the events of a run, judged."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events.npz"
        summary = simulate(_SMALL.replace(**changes), events=file).summary
        log = KVEventLog.load(file)
    _require(summary["finished"] == summary["requests"], spec, "requests are not finished")
    try:
        holders = Replay.of(log).holders
    except ReplayError as error:
        raise ConformanceError(f"{spec}: {error}") from error
    _require(not holders, spec, "blocks are held when everything is done")
    return log


def _deaths(log: KVEventLog) -> list[tuple[int, int]]:
    dead = log.records[log.records["kind"] == Kind.EVICT]
    return sorted(zip(dead["req"].tolist(), dead["a"].tolist(), strict=True))


def check_attention(spec: str) -> None:
    """Ask an attention model about prompts of several lengths, together and each alone.

    What it writes is finite and not negative; :meth:`attend` and :meth:`query` sum to 1 over a request,
    :meth:`accumulated` to its length; a request gets the same in a batch and alone, and the same again.

    Raises
    ------
    ConformanceError
        That says what went wrong.
    InputError
        If there is no such model.
    """
    lengths = (1, 2, 17, 64, 150)
    together = _asked(spec, lengths, range(len(lengths)))
    again = _asked(spec, lengths, range(len(lengths)))
    for which, length in enumerate(lengths):
        alone = _asked(spec, lengths, [which])
        for name, (rows, want) in together.items():
            row = rows[which]
            told = f"{name}, a prompt of {length}"
            _require(bool(np.isfinite(row).all() and (row >= 0).all()), spec, f"{told}: negative, or not a number")
            total = float(row.sum(dtype=np.float64))
            expected = float(want(length))
            _require(abs(total - expected) <= 1e-4 * max(expected, 1), spec, f"{told}: sums to {total}, not {expected}")
            _require(bool(np.array_equal(row, alone[name][0][0])), spec, f"{told}: not the same in a batch and alone")
            _require(bool(np.array_equal(row, again[name][0][which])), spec, f"{told}: not the same twice")


def _asked(spec: str, lengths: tuple[int, ...], which: Any) -> dict[str, tuple[list[NDArray[np.float32]], Any]]:
    """Return what a model answers about these requests, and what each answer has to sum to."""
    model = build_attention(spec)
    cache = KVCache(2000, 16, columns=tuple(model.columns))
    rows = np.array([cache.open(k, request_key(3, k), lengths[k], 10) for k in which])
    for k, row in zip(which, rows.tolist(), strict=True):
        cache.sync_new_tokens(row, lengths[k])
        cache.store.s.rows[row]["decode_from"] = lengths[k]
    view = cache.view(rows, 0.5, 0, model)
    model.begin(view)
    found: dict[str, tuple[list[NDArray[np.float32]], Any]] = {}

    def keep(name: str, out: NDArray[np.float32], want: Any) -> None:
        found[name] = ([out[s : s + n].copy() for s, n in zip(view.start, view.n, strict=True)], want)

    out = _buffer(view)
    model.accumulated(view, out)
    keep("accumulated", out, lambda length: length)
    for back in (0, 3):
        out = _buffer(view)
        model.query(view, back, out)
        keep(f"query {back}", out, lambda length, back=back: 1 if back < length else 0)
    out = _buffer(view)
    model.attend(view, out)
    keep("attend", out, lambda _: 1)
    return found


def _buffer(view: View) -> NDArray[np.float32]:
    return np.zeros(len(view.position), np.float32)


def check_step_cost(spec: str, *, model: str = "llama-3.1-8b", hardware: str = "h100") -> None:
    """Ask what steps of many sizes take.

    Times are whole nanoseconds, a step takes at least one of them, its memory is busy no longer than it lasts, equal
    questions have equal answers, and more tokens of one kind, all else equal, are never cheaper.

    Raises
    ------
    ConformanceError
        That says what went wrong.
    InputError
        If there is no such cost.
    """
    cost = build_step_cost(spec, model=get_model(model), hardware=get_hardware(hardware))
    again = build_step_cost(spec, model=get_model(model), hardware=get_hardware(hardware))
    for seqs, held in itertools.product((1, 7, 256), (1, 1000, 30_000)):
        before = 0
        for chunk in (0, 512, 8000):
            # seqs - 1 requests decode, one computes `chunk` tokens of its prompt, or decodes, too.
            tokens = seqs - 1 + max(chunk, 1)
            pairs = seqs * held + chunk * (chunk + 1) // 2
            answer = cost.step_ns(tokens, seqs, seqs * held, pairs)
            told = f"{seqs} requests of {held} tokens, {chunk} of a prompt"
            step_ns, memory_ns = answer
            _require(type(step_ns) is int and type(memory_ns) is int, spec, f"expected two ints, got {answer}: {told}")
            _require(step_ns >= 1 and 0 <= memory_ns <= step_ns, spec, f"{step_ns} ns, memory {memory_ns} ns: {told}")
            _require(again.step_ns(tokens, seqs, seqs * held, pairs) == answer, spec, f"not the same twice: {told}")
            _require(step_ns >= before, spec, f"cheaper than with fewer tokens: {told}")
            before = step_ns


def check_copy_cost(spec: str, *, model: str = "llama-3.1-8b", hardware: str = "h100") -> None:
    """Ask what copies of many sizes take, alone and beside a step.

    Times are whole nanoseconds and not negative, nothing costs nothing but a launch, more tokens are never faster, a
    copy is no faster beside a step than alone, and a step beside a copy is never shorter.

    Raises
    ------
    ConformanceError
        That says what went wrong.
    InputError
        If there is no such cost.
    """
    cost = build_copy_cost(spec, model=get_model(model), hardware=get_hardware(hardware))
    before = (0, 0, 0)
    for tokens in (1, 2, 100, 4096, 100_000):
        answer = cost.copy_ns(tokens), cost.alone_ns(tokens), cost.bandwidth_ns(tokens)
        told = f"{tokens} tokens take {answer[0]} ns beside a step, {answer[1]} alone, {answer[2]} of bandwidth"
        _require(all(type(each) is int and each >= 0 for each in answer), spec, f"expected ints of at least 0: {told}")
        _require(answer[0] >= answer[1], spec, f"faster beside a step than alone: {told}")
        _require(all(now >= then for now, then in zip(answer, before, strict=True)), spec, f"faster than fewer: {told}")
        before = answer
        for step_ns, memory_ns in ((10_000_000, 0), (10_000_000, 7_000_000), (10_000_000, 10_000_000), (0, 0)):
            longer = cost.stretch_ns(step_ns, memory_ns, answer[2])
            _require(type(longer) is int and longer >= 0, spec, f"a step gets {longer} ns longer: {told}")


def check_trace_reader(name: str, path: str | os.PathLike[str]) -> None:
    """Read a sample of the format, and files that are not of it.

    The sample is recognised as ``name`` by its content and reads the same twice; arrivals do not go back, and every
    request has at least one token of prompt and of output. The canonical format is not taken for this one.

    Parameters
    ----------
    name
        Of the reader.
    path
        The sample.

    Raises
    ------
    ConformanceError
        That says what went wrong.
    InputError
        If there is no such reader, or it refuses the sample.
    """
    path = Path(path)
    _require(reader_for(path).name == name, name, f"{path} is taken for {reader_for(path).name!r}")
    first, second = (read_lengths(path, format=name) for _ in range(2))
    for column in ("prompt_tokens", "output_tokens"):
        values = getattr(first, column)
        _require(len(values) > 0 and bool((values >= 1).all()), name, f"{column} of less than 1, or no request")
        _require(bool(np.array_equal(values, getattr(second, column))), name, f"{column} are not the same twice")
    if isinstance(first, Trace):
        _require(bool((np.diff(first.arrival_ns) >= 0).all()), name, "arrivals go back")
    with tempfile.TemporaryDirectory() as folder:
        canonical = Path(folder) / "trace.csv"
        canonical.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,10,5\n")
        _require(reader_for(canonical).name == "canonical", name, "takes the canonical format for its own")
