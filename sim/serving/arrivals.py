"""Requests as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sim.rng import request_key
from sim.serving.request import RequestState
from sim.workload.source import Source

__all__ = ["Arrivals"]


class Arrivals:
    """The requests of a source, one after the other.

    Parameters
    ----------
    source
        Where they come from.
    seed
        Seed of their random draws.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self._chunks = source.chunks()
        self._seed = seed
        self._rows: Iterator[tuple[Any, ...]] = iter(())
        self._next: tuple[Any, ...] | None = None
        self.count = 0
        self.next_ns: int | None = None
        """When the next request arrives; None if there is none."""
        self._advance()

    def pop(self) -> RequestState:
        """Return the next request."""
        assert self._next is not None
        arrival, prompt, output, req_id, hashes = self._next
        ordinal = self.count
        self.count += 1
        state = RequestState(
            ordinal,
            str(ordinal) if req_id is None else str(req_id),
            arrival,
            prompt,
            output,
            request_key(self._seed, ordinal),
            () if hashes is None else tuple(hashes),
            length=prompt,
        )
        self._advance()
        return state

    def _advance(self) -> None:
        while True:
            self._next = next(self._rows, None)
            self.next_ns = None if self._next is None else self._next[0]
            if self._next is not None:
                return
            chunk = next(self._chunks, None)
            if chunk is None:
                return
            none = [None] * len(chunk)
            self._rows = zip(
                chunk.arrival_ns.tolist(),
                chunk.prompt_tokens.tolist(),
                chunk.output_tokens.tolist(),
                none if chunk.req_id is None else list(chunk.req_id),
                none if chunk.prefix_hashes is None else chunk.prefix_hashes,
                strict=True,
            )
