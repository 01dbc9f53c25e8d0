"""One request of a workload."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """What arrives at the server: when, how long its prompt is, how many tokens it will emit.

    Attributes
    ----------
    req_id
        A label for results; it need not be unique.
    arrival_ns
        Arrival time in nanoseconds from the start of the trace.
    prompt_tokens, output_tokens
        Lengths, both at least 1.
    prefix_hashes
        One id for each leading run of ``Trace.hash_tokens`` prompt tokens; equal ids mean equal text up to there.
        Tokens beyond the last id are shared with nobody.
    session
        Label of the conversation the request belongs to, or None.
    """

    req_id: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    prefix_hashes: tuple[int, ...] = ()
    session: str | None = None
