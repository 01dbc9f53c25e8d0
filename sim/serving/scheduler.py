"""vLLM V1's scheduler rules: continuous batching, chunked prefill, FCFS, preemption by recompute of the latest.

Running requests are served first, in order; the hot loop over them is one kernel. What happens seldom (preemption,
admission) is plain Python. With nothing evicted the result agrees with vLLM 0.32 step by step and block id by block id
(tests/differential). Where memory is reclaimed there are three more rules, without effect otherwise: headroom is
never given to requests, blocks on their way back from a copy are waited for rather than preempted for, and admission
leaves alone what running prompts are about to take.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.jit import njit
from sim.kv.arena import make_room
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.holes import holes_of
from sim.kv.prefix import PrefixCache, chain
from sim.kv.repack import RepackPlan
from sim.kv.state import ROW, YIELDS, H, State
from sim.kv.tokens import append_one, append_tokens, reuse_one, reuse_slot, tail_of
from sim.serving.ballots import Ballots
from sim.serving.batch import Batch
from sim.serving.bundles import pairs_of, serve_bundles
from sim.serving.limits import Limits
from sim.serving.request import RequestState
from sim.serving.work import NEEDS_BLOCKS, NEEDS_CELLS, W

__all__ = ["Scheduler", "W"]


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
    scheduled, left, seqs, kv_read, pairs, listed, single = 0, work[W.TOKENS_LEFT], 0, 0, 0, 0, 0
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
            missing = NEEDS_BLOCKS
            break
        if (
            record.tracked
            and record.start + record.live + tokens > record.origin + record.cap
            and not make_room(s, row, tokens)
        ):
            missing = NEEDS_CELLS
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
        listed += record.blocks
        at += 1
    header[H.LIVE] += single + reused
    header[H.WRITTEN] += single
    work[W.TOKENS] += scheduled
    work[W.TOKENS_LEFT] = left
    work[W.SEQS] += seqs
    work[W.KV_READ] += kv_read
    work[W.PAIRS] += pairs
    work[W.LISTED] += listed
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
def _missing(rows: np.ndarray, running: np.ndarray, count: int, size: int, most: np.ndarray) -> int:
    """Return the blocks that running prompts lack for all of their tokens; ``most`` is what a unit holds at most."""
    blocks: int = 0
    for i in range(count):
        record = rows[running[i]]
        if record.decode_from == 0:
            blocks += max(0, min((record.length + size - 1) // size, most[i % len(most)]) - record.blocks)
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
        self.running = np.zeros(64 * cache.units.count, np.int64)
        """Rows: those of a request side by side."""
        self.num_running = 0
        """Rows in ``running``."""
        self.states: dict[int, RequestState] = {}
        """Running requests, by their (first) row."""
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
        self.ballots: Ballots | None = None
        """What units have dropped, if they share a block table."""
        self._threshold = 0
        units = cache.units
        if limits.prefix_caching and units.count > 1:
            raise InputError(
                f"prefix_caching: requests share blocks of the whole model, and here each of {units.count} units has "
                "block tables of its own; switch it off"
            )
        self._windows, self._weights = units.window_of, units.weight_of
        self._windowed = bool(self._windows.any())
        self._bundled = units.count > 1 or self._windowed
        self._most = self._most_blocks()
        self._unsettled = np.zeros(0, np.int64)

    def _most_blocks(self) -> NDArray[np.int64]:
        """Return int64[U]: the most blocks that a request holds in each unit, as far as they are bounded.

        A window's tokens, those of the steps on their way, and one block since a window begins anywhere in one
        (vLLM's ``SlidingWindowSpec.max_admission_blocks_per_request``).
        """
        limits, size = self.limits, self.cache.block_size
        steps = 2 if limits.async_scheduling else 1
        tokens = np.minimum(self._windows - 1 + steps * limits.max_num_batched_tokens, limits.max_model_len)
        return np.where(self._windows > 0, -(-tokens // size) + 1, np.iinfo(np.int64).max)

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that a request of so many tokens holds at most, over all units, while nothing is evicted.

        Of a unit with a window that is less than the tokens take at once, from some length on.
        """
        return int(np.minimum(-(-tokens // self.cache.block_size), self._most).sum())

    # -- a step --------------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Fill ``work`` and each row's ``sched`` for the next step; allocate its blocks; preempt and admit."""
        self.work.fill(0)
        self.work[W.TOKENS_LEFT] = self.limits.max_num_batched_tokens
        self.wanted_blocks = 0
        self.preempted.clear()
        self._threshold = self.limits.long_prefill_token_threshold
        if self._threshold and len(self.states) + len(self.waiting) <= 1:
            self._threshold = 0  # it keeps long prompts from starving others: whoever is alone gets the whole budget
        late = self.limits.async_scheduling
        if self._bundled:
            self._note_unsettled()
        if late:
            _renew(self.cache.store.s.rows, self.running, self.num_running)
        all_served = self._serve_running()
        if self.waiting and all_served and not self.preempted:
            self._admit()
        if late:
            _count_ahead(self.cache.store.s.rows, self.running, self.num_running, len(self.in_flight))

    def _note_unsettled(self) -> None:
        """Keep how many tokens of each row are on the device: where a window ends depends on it."""
        rows = self.cache.store.s.rows
        if len(self._unsettled) < len(rows):
            self._unsettled = np.zeros(len(rows), np.int64)
        if self.limits.async_scheduling and self._windowed:
            self._unsettled[:] = rows["sched"] if self.in_flight else 0

    def _serve_bundles(self, at: int) -> tuple[int, int]:
        """Do the work of :func:`_serve_running` where requests have several rows, or windows."""
        limits = self.limits
        return serve_bundles(
            self.running,
            self.num_running,
            at,
            self._windows,
            self._weights,
            self._unsettled,
            limits.max_model_len,
            self._threshold,
            limits.async_scheduling,
            self.work,
            *self.cache.store.s,
        )

    def _serve_running(self) -> bool:
        """Schedule the running requests; return False if one of them waits for the blocks of a copy."""
        store, limits, units = self.cache.store, self.limits, len(self._windows)
        at = 0
        all_served = True
        while True:
            # Each time: a preemption fills the log too. With windows tokens die, and let go of blocks.
            dying = 2 * int(store.s.header[H.LIVE]) if self._windowed else 0
            store.reserve_events(2 * self.num_running + units * limits.max_num_batched_tokens + dying)
            s = store.s
            if self._bundled:
                at, missing = self._serve_bundles(at)
            else:
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
            rows = self.cache.bundle(row)
            tokens = min(
                int(s.rows[row]["length"] - s.rows[row]["computed"]),
                int(self.work[W.TOKENS_LEFT]),
                self._threshold or self.limits.max_num_batched_tokens,
            )
            if missing == NEEDS_CELLS:
                for each in rows:
                    if not make_room(store.s, each, tokens):
                        self.cache.grow_cells(each, tokens)
                continue
            needed = sum(self.cache.blocks_needed(each, tokens) for each in rows)
            short = needed - self.cache.pool.available_blocks
            self.wanted_blocks = max(self.wanted_blocks, short)
            if short <= self._on_their_way():
                at += units  # not this time: a copy under way brings back more than is missing
                all_served = False
                continue
            victim = self.num_running - units
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
        """Take the memory of the running request at ``index``; it waits again, first in line, or is refused."""
        row = int(self.running[index])
        state = self.states[row]
        record = self.cache.store.s.rows[row]
        computed = int(record["computed"])
        if record["flying"] == YIELDS:
            self.in_flight[0].owed.append(state)
        self.num_running -= len(self._windows)
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
        bundle = self.cache.bundle(state.row)
        for row in bundle[1:]:
            other = self.cache.store.s.rows[row]
            for name in ("evicted", "moved", "blocks", "live"):
                record[name] += int(other[name])
        state.keep_statistics(record)
        for plan in self.plans:
            if plan.row in bundle and not plan.cancelled:
                self.cache.cancel(plan)
        self.cache.close(state.row, kind, value)
        if self.ballots is not None:
            self.ballots.leave(state.row)
        del self.states[state.row]
        state.row = -1

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        limits, size = self.limits, self.cache.block_size
        left = int(self.work[W.TOKENS_LEFT])
        while self.waiting and left > 0 and len(self.states) < limits.max_num_seqs:
            state = self.waiting[0]
            hits, free_hits = self._find_prefix(state) if self.prefix is not None else ([], 0)
            computed = len(hits) * size
            tokens = min(state.length - computed, left)
            if 0 < self._threshold < tokens:
                tokens = self._threshold
            whole = state.length if limits.reserve_full_prompt else computed + tokens
            need = self.blocks_for(whole) - len(hits) + free_hits
            have = self.cache.pool.available_blocks
            if self.cache.tracked:
                have -= self._promised()
            if limits.watermark and self.states:
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
        bundle = cache.bundle(row)
        for each in bundle:
            cache.note(Kind.ADMIT, int(cache.store.s.rows[each]["ordinal"]), cached, state.length - cached)
        state.row = row
        if state.admitted_ns < 0:
            state.admitted_ns = int(cache.store.s.header[H.NOW])
        if not state.preemptions:
            state.cached_tokens = cached
        self.states[row] = state
        if hits:
            cache.share_blocks(row, hits)
        work = self.work
        cache.store.reserve_events(len(bundle) * (tokens + 2))
        s = cache.store.s
        for each, window, weight in zip(bundle, self._windows.tolist(), self._weights.tolist(), strict=True):
            append_tokens(s, each, tokens)
            record = s.rows[each]
            record["sched"] = tokens
            work[W.KV_READ] += weight * (cached + tokens)
            work[W.PAIRS] += weight * pairs_of(0, tokens, cached + tokens, window)
            work[W.LISTED] += record["blocks"]
        if self.prefix is not None:
            self.prefix.forget_taken()
            self.prefix.enter(row, state.identities, len(hits))
        work[W.TOKENS] += tokens
        work[W.TOKENS_LEFT] -= tokens
        work[W.SEQS] += 1
        if self.num_running == len(self.running):
            self.running = np.concatenate([self.running, np.zeros_like(self.running)])
        self.running[self.num_running : self.num_running + len(bundle)] = bundle
        self.num_running += len(bundle)
        if self.prefix is not None:
            self.prefix.publish_rows(self.running[self.num_running - 1 : self.num_running], results=False)

    def _promised(self) -> int:
        """Return the blocks that running prompts are about to take (trap 17); vLLM does not count them."""
        rows, size = self.cache.store.s.rows, self.cache.block_size
        return int(_missing(rows, self.running, self.num_running, size, self._most))

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
