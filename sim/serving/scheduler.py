"""vLLM V1's scheduler rules: continuous batching, chunked prefill, FCFS, preemption by recompute of the latest.

Running requests are served first, in order; the hot loop over them is one kernel. What happens seldom (preemption,
admission) is plain Python. With nothing evicted the result agrees with vLLM 0.32 step by step and block id by block id
(tests/differential). Where memory is reclaimed there are three more rules, without effect otherwise: headroom is
never given to requests, blocks on their way back from a copy are waited for rather than preempted for, and admission
leaves alone what running prompts are about to take.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.arena import make_room
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.holes import holes_of
from sim.kv.prefix import PrefixCache, chain
from sim.kv.repack import RepackPlan
from sim.kv.state import ROW, YIELDS, H, State
from sim.kv.tokens import append_one, append_tokens, reuse_one, reuse_slot, tail_of
from sim.serving.batch import Batch
from sim.serving.limits import Limits
from sim.serving.request import RequestState

__all__ = ["Scheduler", "W"]


class _Work(NamedTuple):
    """Indices into the work of a step: what the cost model and the metrics want to know."""

    TOKENS: int = 0  # scheduled tokens
    SEQS: int = 1  # scheduled requests
    KV_READ: int = 2  # slots that attention reads, dead ones in listed blocks included
    PAIRS: int = 3  # query-key pairs
    TOKENS_LEFT: int = 4  # of the step's token budget
    SIZE: int = 5


W = _Work()


_NEEDS_BLOCKS = 1
_NEEDS_CELLS = 2


@njit
def _serve_running(
    running: np.ndarray,
    count: int,
    at: int,
    max_model_len: int,
    threshold: int,
    late: bool,
    work: np.ndarray,
    *state: Any,
) -> tuple[int, int]:
    """Schedule running requests from index ``at`` on; stop at the first that cannot be served.

    Parameters
    ----------
    state
        The fields of the cache's :class:`sim.kv.state.State`: taken one by one they cost half of what the tuple costs.

    Returns
    -------
    tuple of int
        The index it stopped at and why: 0 at the end, else what is missing.
    """
    s = State(*state)
    size = s.block_size
    # Taken out of the tuple once: each time costs a reference count.
    rows, header = s.rows, s.header
    tail = tail_of(s)
    logging = header[H.LOGGING] > 0
    reusing = len(s.holes) > 0
    stalls = header[H.STALLS] > 0
    missing = 0
    reused = 0
    scheduled, left, seqs, kv_read, pairs, single = 0, work[W.TOKENS_LEFT], 0, 0, 0, 0
    while at < count and left > 0:
        row = running[at]
        record = rows[row]
        tokens = min(record.length - record.computed, left, max_model_len - 1 - record.computed)
        if 0 < threshold < tokens:
            tokens = threshold
        # Asynchronous scheduling counts a token as produced once it is sure to come: the last one may be on its way.
        stalled = stalls and record.plan >= 0
        if tokens <= 0 or stalled or (late and record.produced >= record.target):
            at += 1
            continue
        again = reusing and tokens == 1 and holes_of(s, row) > 0
        short = 0 if again else record.written + tokens - record.blocks * size
        if short > 0 and (short + size - 1) // size > header[H.FREE] - header[H.RESERVE]:
            missing = _NEEDS_BLOCKS
            break
        if (
            record.tracked
            and record.start + record.live + tokens > record.origin + record.cap
            and not make_room(s, row, tokens)
        ):
            missing = _NEEDS_CELLS
            break
        if again and logging:
            reuse_slot(s, row)
        elif again:
            reuse_one(tail, s.holes, row, size)
            reused += 1
        elif tokens == 1 and -size < short <= 0 and not logging:
            append_one(tail, row, size)
            single += 1
        else:
            append_tokens(s, row, tokens)
        record.sched = tokens
        scheduled += tokens
        left -= tokens
        seqs += 1
        kv_read += record.written
        pairs += tokens * (record.written - tokens) + tokens * (tokens + 1) // 2
        at += 1
    header[H.LIVE] += single + reused
    header[H.WRITTEN] += single
    work[W.TOKENS] += scheduled
    work[W.TOKENS_LEFT] = left
    work[W.SEQS] += seqs
    work[W.KV_READ] += kv_read
    work[W.PAIRS] += pairs
    return at, missing


@njit
def _renew(rows: np.ndarray, running: np.ndarray, count: int) -> None:
    """Forget what the step before scheduled."""
    for i in range(count):
        rows[running[i]].sched = 0


@njit
def _count_ahead(rows: np.ndarray, running: np.ndarray, count: int, in_flight: int) -> None:
    """Note each row's part in the batch just made, and count its token as produced: the next schedule builds on it.

    Source: vLLM's AsyncScheduler, whose ``num_output_placeholders`` are the tokens counted here that have no results.
    """
    for i in range(count):
        record = rows[running[i]]
        part = 0
        if record.sched > 0:
            part = 1
            if record.computed == record.length:
                part = YIELDS
                record.length += 1
                record.produced += 1
        if in_flight:
            record.ahead = part
        else:
            record.flying = part


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
        self.in_flight: deque[Batch] = deque()
        """Batches without results, oldest first: none or one while the next is scheduled."""
        self._threshold = 0

    # -- a step --------------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Fill ``work`` and each row's ``sched`` for the next step; allocate its blocks; preempt and admit."""
        self.work.fill(0)
        self.work[W.TOKENS_LEFT] = self.limits.max_num_batched_tokens
        self.wanted_blocks = 0
        self.preempted.clear()
        self._threshold = self.limits.long_prefill_token_threshold
        if self._threshold and self.num_running + len(self.waiting) <= 1:
            self._threshold = 0  # it keeps long prompts from starving others: whoever is alone gets the whole budget
        late = self.limits.async_scheduling
        if late:
            _renew(self.cache.store.s.rows, self.running, self.num_running)
        all_served = self._serve_running()
        if self.waiting and all_served and not self.preempted:
            self._admit()
        if late:
            _count_ahead(self.cache.store.s.rows, self.running, self.num_running, len(self.in_flight))

    def _serve_running(self) -> bool:
        """Schedule the running requests; return False if one of them waits for the blocks of a copy."""
        store, limits = self.cache.store, self.limits
        at = 0
        all_served = True
        while True:
            # Each time: a preemption fills the log too.
            store.reserve_events(2 * self.num_running + limits.max_num_batched_tokens)
            s = store.s
            at, missing = _serve_running(
                self.running,
                self.num_running,
                at,
                limits.max_model_len,
                self._threshold,
                limits.async_scheduling,
                self.work,
                *s,
            )
            if self.prefix is not None:
                self.prefix.forget_taken()
            if not missing:
                break
            row = int(self.running[at])
            tokens = min(
                int(s.rows[row]["length"] - s.rows[row]["computed"]),
                int(self.work[W.TOKENS_LEFT]),
                self._threshold or self.limits.max_num_batched_tokens,
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
            own = s.rows[row]
            hopeless = victim == 0 and not self.plans and own["decode_from"] == 0 and own["flying"] != YIELDS
            self._preempt(victim, for_ever=hopeless)
            if victim == at:
                break
        if self.prefix is not None:
            # Before anybody is admitted who may want them.
            self.prefix.publish_rows(self.running[: self.num_running], results=False)
        return all_served

    def _on_their_way(self) -> int:
        """Return the blocks that come back when the copies in flight are done (trap 24)."""
        return self.cache.coming_back(self.plans)

    def _preempt(self, index: int, *, for_ever: bool) -> None:
        """Take the memory of a running request; it waits again, before all others, or is refused ``for_ever``."""
        row = int(self.running[index])
        state = self.states[row]
        record = self.cache.store.s.rows[row]
        computed = int(record["computed"])
        if record["flying"] == YIELDS:
            self.in_flight[0].owed.append(state)
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
        state.keep_statistics(record)
        for plan in self.plans:
            if plan.row == state.row and not plan.cancelled:
                self.cache.cancel(plan)
        self.cache.close(state.row, kind, value)
        del self.states[state.row]
        state.row = -1

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        limits, size = self.limits, self.cache.block_size
        left = int(self.work[W.TOKENS_LEFT])
        while self.waiting and left > 0 and self.num_running < limits.max_num_seqs:
            state = self.waiting[0]
            hits, free_hits = self._find_prefix(state) if self.prefix is not None else ([], 0)
            computed = len(hits) * size
            tokens = min(state.length - computed, left)
            if 0 < self._threshold < tokens:
                tokens = self._threshold
            whole = state.length if limits.reserve_full_prompt else computed + tokens
            need = -(-whole // size) - len(hits) + free_hits
            have = self.cache.pool.available_blocks
            if self.cache.tracked:
                have -= self._promised()
            if limits.watermark and self.num_running:
                have -= int(limits.watermark * len(self.cache.store.s.blocks))
            if need > have:
                self.wanted_blocks = max(self.wanted_blocks, need - have)
                return
            self.waiting.popleft()
            self._start(state, hits, tokens)
            left -= tokens

    def _start(self, state: RequestState, hits: list[int], tokens: int) -> None:
        """Put a waiting request among the running ones and allocate its first tokens."""
        cache = self.cache
        cached = len(hits) * cache.block_size
        row = cache.open(state.ordinal, state.key, state.length, state.output_tokens, state.produced)
        cache.note(Kind.ADMIT, state.ordinal, cached, state.length - cached)
        state.row = row
        if state.admitted_ns < 0:
            state.admitted_ns = int(cache.store.s.header[H.NOW])
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
            self.prefix.enter(row, state.identities, len(hits))
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
        if self.prefix is not None:
            self.prefix.publish_rows(self.running[self.num_running - 1 : self.num_running], results=False)

    def _promised(self) -> int:
        """Return the blocks that running prompts are about to take (trap 17); vLLM does not count them."""
        return int(_missing(self.cache.store.s.rows, self.running, self.num_running, self.cache.block_size))

    # -- prefix caching ------------------------------------------------------------------------------------------------

    def _identities(self, state: RequestState) -> NDArray[np.int64]:
        """Return the identities of all blocks that the request may ever fill: one call costs as much as hundreds."""
        blocks = (state.prompt_tokens + state.output_tokens) // self.cache.block_size
        if len(state.identities) < blocks:
            state.identities = chain(
                state.identities,
                blocks,
                block_size=self.cache.block_size,
                prompt_tokens=state.prompt_tokens,
                hashes=state.hashes,
                hash_tokens=self.hash_tokens,
                owner=state.ordinal,
            )
        return state.identities

    def _find_prefix(self, state: RequestState) -> tuple[list[int], int]:
        """Return cached blocks for the start of the request, and how many are free; one token is left to compute."""
        assert self.prefix is not None
        most = (state.length - 1) // self.cache.block_size
        return self.prefix.find(self._identities(state), most), self.prefix.free_found

    def publish_results(self) -> None:
        """Publish the blocks of which the last token becomes known with the results of the oldest batch."""
        if self.prefix is not None:
            self.prefix.publish_rows(self.running[: self.num_running], results=True)


_FIELDS = ROW.names or ()
