"""Changes to a trace; each is a pure function from trace to trace.

``rate_scale`` and ``cap_lengths`` look at one request at a time, so they may also be applied to each chunk of a source
(:class:`sim.workload.source.Mapped`); the others need the whole trace.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sim.errors import InputError
from sim.rng import stream
from sim.workload.trace import MAX_TIME_NS, Trace

__all__ = ["cap_lengths", "head", "rate_scale", "shift_to_zero", "spread_ties", "window"]


def head(trace: Trace, n: int) -> Trace:
    """Keep the first ``n`` requests."""
    if n < 1:
        raise InputError(f"head: expected at least 1 request, got {n}")
    return trace[:n]


def window(trace: Trace, from_s: float = 0.0, to_s: float | None = None) -> Trace:
    """Keep the requests that arrive in ``from_s`` (included) .. ``to_s`` (not included); times stay as they are.

    Raises
    ------
    InputError
        If the window is empty or not a window.
    """
    end = MAX_TIME_NS / 1e9 if to_s is None else to_s
    if not 0 <= from_s < end:
        raise InputError(f"window: expected 0 <= from < to, got {from_s} .. {to_s}")
    first, last = np.searchsorted(trace.arrival_ns, [round(from_s * 1e9), round(end * 1e9)], side="left")
    if first == last:
        raise InputError(f"window: no request of {trace.name!r} arrives in {from_s:g} .. {end:g} s")
    return trace[int(first) : int(last)]


def rate_scale(trace: Trace, factor: float) -> Trace:
    """Divide every arrival time by ``factor``: 2 offers the requests twice as fast."""
    if not 0 < factor < np.inf:
        raise InputError(f"rate scale: expected a number above 0, got {factor}")
    if factor == 1:
        return trace
    with np.errstate(over="ignore"):  # infinity is past 146 years, too
        scaled = trace.arrival_ns / factor
    if len(scaled) and scaled[-1] > MAX_TIME_NS:
        raise InputError(f"rate scale: {factor:g} moves arrivals past 146 years")
    return replace(trace, arrival_ns=np.rint(scaled).astype(np.int64))


def cap_lengths(
    trace: Trace, *, prompt: int | None = None, output: int | None = None, total: int | None = None
) -> Trace:
    """Shorten prompts, outputs, and then prompts further until both together fit ``total``.

    Prefix hashes that would reach beyond a shortened prompt are dropped. Every request keeps at least one token of
    each, and an output that leaves no room for the prompt is cut as well.
    """
    for what, bound, least in (("prompt", prompt, 1), ("output", output, 1), ("total", total, 2)):
        if bound is not None and bound < least:
            raise InputError(f"cap: expected {what} of at least {least} tokens, got {bound}")
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    if prompt is not None:
        prompts = np.minimum(prompts, prompt)
    if output is not None:
        outputs = np.minimum(outputs, output)
    if total is not None:
        outputs = np.minimum(outputs, total - 1)
        prompts = np.minimum(prompts, total - outputs)
    hashes = trace.prefix_hashes
    if hashes is not None:
        # A hash is kept if the text it stands for is still whole, or was the prompt's unchanged (partial) end.
        whole = np.where(prompts < trace.prompt_tokens, prompts // trace.hash_tokens, np.iinfo(np.int64).max)
        hashes = [ids[:keep] for ids, keep in zip(hashes, whole.tolist(), strict=True)]
    return replace(trace, prompt_tokens=prompts, output_tokens=outputs, prefix_hashes=hashes)


def spread_ties(trace: Trace, tick_s: float | None = None, seed: int = 0) -> Trace:
    """Spread requests that share a time stamp over the tick of the clock that wrote it.

    Parameters
    ----------
    trace
        The trace.
    tick_s
        Length of a tick. None takes the time up to the next time stamp, the median of those for the last one, and a
        second if there is only one time stamp.
    seed
        Seed of the new times. They are uniform in the tick, in the order of the trace, never past the next time stamp.
    """
    if tick_s is not None and not 0 < tick_s < MAX_TIME_NS / 1e9:
        raise InputError(f"spread: expected a tick above 0 s, got {tick_s}")
    stamps, first, count = np.unique(trace.arrival_ns, return_index=True, return_counts=True)
    if len(stamps) == len(trace):
        return trace
    gaps = np.diff(stamps)
    last = int(np.median(gaps)) if len(gaps) else 10**9
    room = np.append(gaps, last if tick_s is None else round(tick_s * 1e9))
    if tick_s is not None:
        room = np.minimum(room, round(tick_s * 1e9))
    fraction = stream(seed, "workload", "spread").random(len(trace))
    group = np.repeat(np.arange(len(stamps)), count)
    fraction = fraction[np.lexsort((fraction, group))]  # ascending within each group
    fraction[first[count == 1]] = 0.0
    return replace(trace, arrival_ns=trace.arrival_ns + np.floor(fraction * room[group]).astype(np.int64))


def shift_to_zero(trace: Trace) -> Trace:
    """Count time from the first arrival."""
    return replace(trace, arrival_ns=trace.arrival_ns - trace.arrival_ns[0]) if len(trace) else trace
