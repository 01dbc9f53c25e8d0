"""vLLM V1's scheduler rules: continuous batching, chunked prefill, FCFS, preemption by recompute of the latest.

Running requests are served first, in order; the hot loop over them is one kernel. What happens seldom (preemption,
admission) is plain Python. With nothing evicted the result agrees with vLLM 0.32 step by step and block id by block id
(tests/differential). Where memory is reclaimed there are three more rules, without effect otherwise: headroom is
never given to requests, blocks on their way back from a copy are waited for rather than preempted for, and admission
leaves alone what running prompts are about to take.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sim.errors import InputError
from sim.jit import njit
from sim.kv.blocks import emit
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.prefix import PrefixCache, chain
from sim.kv.repack import RepackPlan
from sim.kv.state import ROW, H, State
from sim.kv.tokens import append_one, append_tokens, make_room, tail_of

__all__ = ["Limits", "RequestState", "Scheduler", "W"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step and a request; names and defaults are vLLM's."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 1 << 30
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    long_prefill_token_threshold: int = 0
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise InputError(f"max_model_len: expected at least 2, got {self.max_model_len}")
        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark: expected a share in [0, 1), got {self.watermark}")
        if self.long_prefill_token_threshold < 0:
            raise InputError(
                f"long_prefill_token_threshold: expected 0 (off) or more, got {self.long_prefill_token_threshold}"
            )


class _Work(NamedTuple):
    """Indices into the work of a step: what the cost model and the metrics want to know."""

    TOKENS: int = 0  # scheduled tokens
    SEQS: int = 1  # scheduled requests
    KV_READ: int = 2  # slots that attention reads, dead ones in listed blocks included
    PAIRS: int = 3  # query-key pairs
    TOKENS_LEFT: int = 4  # of the step's token budget
    SIZE: int = 5


W = _Work()


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from its arrival to its end. What changes every step is in its row of the cache."""

    ordinal: int
    req_id: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    key: int
    hashes: tuple[int, ...] = ()
    length: int = 0
    produced: int = 0
    row: int = -1
    admitted_ns: int = -1
    preemptions: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    published: int = 0
    identities: list[int] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    """Statistics of rows it has lost to preemption."""


_NEEDS_BLOCKS = 1
_NEEDS_CELLS = 2


@njit
def _serve_running(
    s: State, running: np.ndarray, count: int, at: int, max_model_len: int, threshold: int, work: np.ndarray
) -> tuple[int, int]:
    """Schedule running requests from index ``at`` on; stop at the first that cannot be served.

    Returns
    -------
    tuple of int
        The index it stopped at and why: 0 at the end, else what is missing.
    """
    size = s.block_size
    # Taken out of the tuple once: each time costs a reference count.
    rows, header = s.rows, s.header
    tail = tail_of(s)
    while at < count and work[W.TOKENS_LEFT] > 0:
        row = running[at]
        record = rows[row]
        tokens = min(record.length - record.computed, work[W.TOKENS_LEFT], max_model_len - 1 - record.computed)
        if 0 < threshold < tokens:
            tokens = threshold
        if tokens <= 0:
            at += 1
            continue
        short = record.written + tokens - record.blocks * size
        if short > 0 and (short + size - 1) // size > header[H.FREE] - header[H.RESERVE]:
            return at, _NEEDS_BLOCKS
        if record.start + record.live + tokens > record.origin + record.cap and not make_room(s, row, tokens):
            return at, _NEEDS_CELLS
        before = record.written
        if tokens == 1 and short <= 0 and not header[H.LOGGING]:
            append_one(tail, row, size)
        else:
            append_tokens(s, row, tokens)
        record.sched = tokens
        work[W.TOKENS] += tokens
        work[W.TOKENS_LEFT] -= tokens
        work[W.SEQS] += 1
        work[W.KV_READ] += record.written
        work[W.PAIRS] += tokens * before + tokens * (tokens + 1) // 2
        at += 1
    return at, 0


@njit
def _missing(rows: np.ndarray, running: np.ndarray, count: int, size: int) -> int:
    """Return the blocks that running prompts lack for all of their tokens."""
    blocks: int = 0
    for i in range(count):
        record = rows[running[i]]
        if record.decode_from == 0:
            blocks += (record.length + size - 1) // size - record.blocks
    return blocks


class Scheduler:
    """Decides, before each step, who computes how many tokens.

    Parameters
    ----------
    cache
        The KV cache.
    limits
        The limits.
    hash_tokens
        Tokens that one prefix hash of a request covers.
    """

    def __init__(self, cache: KVCache, limits: Limits, hash_tokens: int = 512) -> None:
        self.cache = cache
        self.limits = limits
        self.hash_tokens = hash_tokens
        self.waiting: deque[RequestState] = deque()
        self.running = np.zeros(64, np.int64)
        self.num_running = 0
        self.states: dict[int, RequestState] = {}
        self.plans: list[RepackPlan] = []
        """Repacks in flight."""
        self.work = np.zeros(W.SIZE, np.int64)
        self.wanted_blocks = 0
        """Blocks by which the last allocation that failed in this step fell short."""
        self.preempted: list[RequestState] = []
        """Requests that lost their memory in this step."""
        self.refused: list[RequestState] = []
        """Requests that can never be served; the engine takes them from here."""
        self.prefix = PrefixCache(cache.store) if limits.prefix_caching else None

    # -- a step --------------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Fill ``work`` and each row's ``sched`` for the next step; allocate its blocks; preempt and admit."""
        self.work[:] = 0
        self.work[W.TOKENS_LEFT] = self.limits.max_num_batched_tokens
        self.wanted_blocks = 0
        self.preempted.clear()
        all_served = self._serve_running()
        if self.waiting and all_served and not self.preempted:
            self._admit()
        if self.prefix is not None:
            self._publish()

    def _serve_running(self) -> bool:
        """Schedule the running requests; return False if one of them waits for the blocks of a copy."""
        at = 0
        all_served = True
        while True:
            # Each time: a preemption fills the log too.
            self.cache.store.reserve_events(2 * self.num_running + self.limits.max_num_batched_tokens)
            s = self.cache.store.s
            at, missing = _serve_running(
                s,
                self.running,
                self.num_running,
                at,
                self.limits.max_model_len,
                self.limits.long_prefill_token_threshold,
                self.work,
            )
            if self.prefix is not None:
                self.prefix.forget_taken()
            if not missing:
                return all_served
            row = int(self.running[at])
            tokens = min(
                int(s.rows[row]["length"] - s.rows[row]["computed"]),
                int(self.work[W.TOKENS_LEFT]),
                self.limits.long_prefill_token_threshold or self.limits.max_num_batched_tokens,
            )
            if missing == _NEEDS_CELLS:
                self.cache.grow_cells(row, tokens)
                continue
            short = self.cache.blocks_needed(row, tokens) - self.cache.pool.available_blocks
            self.wanted_blocks = max(self.wanted_blocks, short)
            if short <= self._on_their_way():
                at += 1  # not this time: a copy under way brings back more than is missing
                all_served = False
                continue
            victim = self.num_running - 1
            # Alone, and not even its prompt fits: it had everything there is.
            hopeless = victim == 0 and not self.plans and int(s.rows[row]["decode_from"]) == 0
            self._preempt(victim, for_ever=hopeless)
            if victim == at:
                return all_served

    def _on_their_way(self) -> int:
        """Return the blocks that come back when the copies in flight are done (trap 24)."""
        return sum(len(p.destinations) + p.deferred if p.cancelled else len(p.sources) for p in self.plans)

    def _preempt(self, index: int, *, for_ever: bool) -> None:
        """Take the memory of a running request; it waits again, before all others, or is refused ``for_ever``."""
        row = int(self.running[index])
        state = self.states[row]
        computed = int(self.cache.store.s.rows[row]["computed"])
        self.num_running -= 1
        self.leave(state, Kind.PREEMPT, computed)
        if for_ever:
            self.refused.append(state)
            return
        state.preemptions += 1
        state.recomputed_tokens += computed
        self.waiting.appendleft(state)
        self.preempted.append(state)

    def leave(self, state: RequestState, kind: Kind, value: int) -> None:
        """Free everything a running request holds and keep its statistics; the caller takes it off ``running``."""
        # One call for all of its fields: each one alone costs as much.
        record = dict(zip(_FIELDS, self.cache.store.s.rows[state.row].item(), strict=True))
        state.length, state.produced = record["length"], record["produced"]
        keep_statistics(state.totals, record)
        for plan in self.plans:
            if plan.row == state.row and not plan.cancelled:
                self.cache.cancel(plan)
        self.cache.close(state.row, kind, value)
        del self.states[state.row]
        state.row = -1
        state.published = 0

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        limits = self.limits
        while self.waiting and self.work[W.TOKENS_LEFT] > 0 and self.num_running < limits.max_num_seqs:
            state = self.waiting[0]
            hits = self._find_prefix(state)
            computed = len(hits) * self.cache.block_size
            tokens = min(state.length - computed, int(self.work[W.TOKENS_LEFT]))
            if limits.long_prefill_token_threshold:
                tokens = min(tokens, limits.long_prefill_token_threshold)
            whole = state.length if limits.reserve_full_prompt else computed + tokens
            blocks = self.cache.store.s.blocks
            need = -(-whole // self.cache.block_size) - len(hits) + sum(int(blocks[b]["ref"]) == 0 for b in hits)
            have = self.cache.pool.available_blocks - self._promised()
            if self.num_running:
                have -= int(limits.watermark * len(blocks))
            if need > have:
                self.wanted_blocks = max(self.wanted_blocks, need - have)
                return
            self.waiting.popleft()
            self._start(state, hits, tokens)

    def _start(self, state: RequestState, hits: list[int], tokens: int) -> None:
        """Put a waiting request among the running ones and allocate its first tokens."""
        cache = self.cache
        cached = len(hits) * cache.block_size
        row = cache.open(state.ordinal, state.key, state.length, state.output_tokens, state.produced)
        cache.store.reserve_events(1)
        emit(cache.store.s, int(Kind.ADMIT), state.ordinal, cached, state.length - cached)
        state.row = row
        if state.admitted_ns < 0:
            state.admitted_ns = int(cache.store.s.header[H.NOW])
        state.published = len(hits)
        if not state.preemptions:
            state.cached_tokens = cached
        self.states[row] = state
        if hits:
            cache.share_blocks(row, hits)
        cache.store.reserve_events(tokens + 2)
        s = cache.store.s
        append_tokens(s, row, tokens)
        if self.prefix is not None:
            self.prefix.forget_taken()
            self._publish_row(state)
        s.rows[row]["sched"] = tokens
        work = self.work
        work[W.TOKENS] += tokens
        work[W.TOKENS_LEFT] -= tokens
        work[W.SEQS] += 1
        work[W.KV_READ] += cached + tokens
        work[W.PAIRS] += tokens * cached + tokens * (tokens + 1) // 2
        if self.num_running == len(self.running):
            self.running = np.concatenate([self.running, np.zeros_like(self.running)])
        self.running[self.num_running] = row
        self.num_running += 1

    def _promised(self) -> int:
        """Return the blocks that running prompts are about to take (trap 17); vLLM does not count them."""
        if not self.cache.tracked:
            return 0
        return int(_missing(self.cache.store.s.rows, self.running, self.num_running, self.cache.block_size))

    # -- prefix caching ------------------------------------------------------------------------------------------------

    def _identities(self, state: RequestState, blocks: int) -> list[int]:
        chain(
            state.identities,
            blocks,
            block_size=self.cache.block_size,
            prompt_tokens=state.prompt_tokens,
            hashes=state.hashes,
            hash_tokens=self.hash_tokens,
            owner=state.ordinal,
        )
        return state.identities

    def _find_prefix(self, state: RequestState) -> list[int]:
        """Return cached blocks for the start of the request; at least one token is left to compute."""
        if self.prefix is None:
            return []
        most = (state.length - 1) // self.cache.block_size
        return self.prefix.find(self._identities(state, most)[:most])

    def _publish(self) -> None:
        """Publish the blocks that this step fills."""
        s = self.cache.store.s
        rows = self.running[: self.num_running]
        records = s.rows[rows]
        for row in rows[(records["sched"] > 0) & (records["computed"] % self.cache.block_size < records["sched"])]:
            self._publish_row(self.states[int(row)])

    def _publish_row(self, state: RequestState) -> None:
        assert self.prefix is not None
        s = self.cache.store.s
        full = int(s.rows[state.row]["computed"]) // self.cache.block_size
        if full > state.published:
            identities = self._identities(state, full)
            for index in range(state.published, full):
                self.prefix.publish(int(s.table[state.row, index]), identities[index])
            state.published = full


_FIELDS = ROW.names or ()


def keep_statistics(totals: dict[str, Any], record: dict[str, Any]) -> None:
    """Add a row's statistics to those of the rows that the request had before."""
    for name in ("decode_ns", "block_ns", "over_ns", "evicted", "moved"):
        totals[name] = totals.get(name, 0) + record[name]
    totals["peak"] = max(totals.get("peak", 0), record["peak"])
    totals["blocks"] = record["blocks"]
    totals["live"] = record["live"]
    if record["first_token_ns"]:
        totals["first_token_ns"] = record["first_token_ns"]
