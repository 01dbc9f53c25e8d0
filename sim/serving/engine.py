"""The engine: one SimPy process for the steps, one for each copy.

SimPy handles what waits (steps, idle time, copies): at most a few events a step, however many tokens. Arrivals are
taken over at step boundaries, where the only one who could look at them looks. At one instant the order is: results of
the step that ends, evictions, copies that are complete, new repack plans, arrivals, the next schedule.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from sim.errors import InputError, NoProgressError
from sim.jit import njit
from sim.kv.cache import KVCache
from sim.kv.events import Kind, KVEventLog
from sim.kv.policies.base import EvictionPolicy
from sim.kv.reclaim.base import Pressure, Reclaimer
from sim.kv.repack import RepackPlan
from sim.kv.state import H, State
from sim.kv.view import View
from sim.rng import request_key
from sim.serving.copy import CopyCost
from sim.serving.cost import StepCost
from sim.serving.metrics import LivenessSamples, RequestLog, StepLog, liveness_classes
from sim.serving.scheduler import RequestState, Scheduler, W
from sim.workload.source import Source

__all__ = ["Budget", "Engine", "Outcome", "StepObserver"]

Progress = Callable[[int, int | None, float], None]


class StepObserver(Protocol):
    """Sees every step: after it was scheduled, and after its results were applied."""

    def scheduled(self, engine: Engine) -> None:
        """Look at the state that a GPU would see."""

    def applied(self, engine: Engine, finished: int) -> None:
        """Look at the state after the step; ``finished`` requests have ended so far."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many tokens a request may keep: a share of its length, or a number (if not 0)."""

    share: float = 1.0
    tokens: int = 0


@dataclass(slots=True)
class _Copy:
    """A launch on the copy stream."""

    plans: list[RepackPlan]
    wall_ns: int
    end_ns: int
    """When it is complete."""
    bandwidth_ns: int
    left_ns: float
    """Bandwidth work not yet paid for by steps that it overlapped."""


@dataclass(slots=True)
class Outcome:
    """What a run gave."""

    summary: dict[str, Any]
    requests: dict[str, NDArray[Any]]
    steps: dict[str, NDArray[Any]]
    liveness: dict[str, NDArray[Any]]
    pool_snapshot: dict[str, Any] | None
    events: KVEventLog | None
    simpy_events: int
    notes: list[str] = field(default_factory=list)


@njit
def _complete(
    rows: np.ndarray,
    header: np.ndarray,
    pool: tuple[int, int],
    running: np.ndarray,
    count: int,
    dt_ns: int,
    now_ns: int,
    max_model_len: int,
    lists: np.ndarray,
    levels: np.ndarray,
    work: np.ndarray,
    told: tuple[int, int, int, int],
) -> tuple[int, int, int, int]:
    """Apply the results of a step: note levels and holdings, append produced tokens, sort requests by what happened.

    Parameters
    ----------
    pool
        Blocks that can be handed out, and slots a block. (A kernel that takes the whole state pays 2 us for it.)
    lists
        int64[3, max running]: rows that finished, that ended their prompt, that decoded.
    levels
        float64, a row of :data:`sim.serving.metrics.STEP_COLUMNS`, to be filled.
    told
        Number of the step, requests waiting, preemptions and nanoseconds of copies so far.

    Returns
    -------
    tuple of int
        How many run on (moved together in ``running``), finished, ended their prompt, decoded.
    """
    usable, size = pool
    used = usable - header[H.FREE]
    levels[0] = told[0]
    levels[1] = 1
    levels[2] = (now_ns - dt_ns) / 1e9
    levels[3] = dt_ns / 1e9
    levels[4] = count
    levels[5] = told[1]
    levels[6] = used
    levels[7] = header[H.FREE]
    levels[8] = used - header[H.IN_TABLES]
    levels[9] = header[H.LIVE]
    levels[10] = header[H.WRITTEN] - header[H.LIVE]
    levels[11] = header[H.IN_TABLES] * size - header[H.WRITTEN]
    levels[12] = work[W.TOKENS]
    levels[13] = work[W.SEQS]
    levels[14] = told[2]
    levels[15] = header[H.FREED_BY_DEATH]
    levels[16] = header[H.FREED_BY_REPACK]
    levels[17] = header[H.EVICTED]
    levels[18] = header[H.MOVED]
    levels[19] = told[3] / 1e9
    finished, ended, decoded = lists[0], lists[1], lists[2]
    on, done, prompts, decodes = 0, 0, 0, 0
    for i in range(count):
        row = running[i]
        record = rows[row]
        if record.decode_from > 0:
            held = record.blocks
            record.decode_ns += dt_ns
            record.block_ns += float(held) * dt_ns
            record.over_ns += held / ((record.live + size - 1) // size) * dt_ns
            record.peak = max(record.peak, held)
        scheduled = record.sched > 0
        record.sched = 0
        if scheduled and record.computed == record.length:
            record.length += 1
            record.produced += 1
            if record.produced == 1:
                record.first_token_ns = now_ns
            if record.produced >= record.target or record.length >= max_model_len:
                finished[done] = row
                done += 1
                continue
            if record.decode_from == 0:
                record.decode_from = record.computed
                ended[prompts] = row
                prompts += 1
            else:
                decoded[decodes] = row
                decodes += 1
        running[on] = row
        on += 1
    return on, done, prompts, decodes


@njit
def _histogram(s: State, running: np.ndarray, count: int, classes: np.ndarray, out: np.ndarray) -> None:
    """Count the blocks in tables by class; ``classes`` gives the class for each number of live slots."""
    out[:] = 0
    for i in range(count):
        for index in range(s.rows[running[i]].blocks):
            out[classes[s.blocks[s.table[running[i], index]].live]] += 1


class _Arrivals:
    """The requests of a source, one after the other."""

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


class Engine:
    """Serves the requests of a source and measures.

    Parameters
    ----------
    source
        Where requests come from (:class:`sim.workload.Source`).
    scheduler
        The scheduler, with its cache.
    policy, budget, reclaimer
        Who dies, how much may live, and what happens to the slots.
    attention
        Attention model, for policies that look at attention; None otherwise.
    step_cost, copy_cost
        What steps and copies cost.
    score_reads
        What it costs a policy to see attention: share of the KV that each step reads again.
    seed
        Seed of everything random that is not the trace.
    observer
        Sees every step.
    progress
        Called a few times a second with (requests done, requests in all if known, simulated seconds).
    """

    def __init__(
        self,
        *,
        source: Source,
        scheduler: Scheduler,
        policy: EvictionPolicy,
        budget: Budget,
        reclaimer: Reclaimer,
        attention: Any,
        step_cost: StepCost,
        copy_cost: CopyCost,
        score_reads: float = 0.0,
        seed: int = 0,
        observer: StepObserver | None = None,
        progress: Progress | None = None,
    ) -> None:
        if policy.evicts and not reclaimer.evicts:
            raise InputError(f"reclaimer {reclaimer.name!r} keeps every token: use it with policy 'full'")
        self.scheduler = scheduler
        self.cache: KVCache = scheduler.cache
        self.env = simpy.Environment()
        self.step = 0
        self.copies = 0
        self._source = source
        self._policy = policy
        self._observes = policy.evicts and type(policy).observe is not EvictionPolicy.observe
        self._budget = budget
        self._reclaimer = reclaimer
        self._attention = attention
        self._step_cost = step_cost
        self._copy_cost = copy_cost
        self._score_reads = score_reads if policy.attends else 0.0
        self._observer = observer
        self._progress = progress
        self._arrivals = _Arrivals(source, seed)
        self._copy: _Copy | None = None
        self._copy_ended: Any = None
        self._requests = RequestLog()
        self._steps = StepLog()
        self._liveness = LivenessSamples()
        self._snapshot: dict[str, Any] | None = None
        self._before: tuple[Any, ...] | None = None
        self._snapshot_gain = 0
        self._preempted_total = 0
        self._copy_ns = 0
        self._tokens_copied = 0
        self._cancelled = 0
        self._committed = 0
        self._finished = 0
        self._waiting_at_last_arrival = 0
        self._simpy_events = 0
        self._lists = np.zeros((3, 64), np.int64)
        self._counts = np.zeros(6, np.int64)
        self._classes = liveness_classes(self.cache.block_size)
        self._pool = (self.cache.pool.usable_blocks, self.cache.block_size)
        self._shown = 0.0
        self._refusal = ""

    @property
    def now_ns(self) -> int:
        """Simulated time."""
        return int(self.env.now)

    @property
    def preempted_total(self) -> int:
        """Preemptions so far."""
        return self._preempted_total

    def run(self) -> Outcome:
        """Serve everything.

        Raises
        ------
        NoProgressError
            If something waits for what can never come.
        """
        started = time.perf_counter()
        self.env.process(self._serve())
        self.env.run()
        if self._progress is not None:
            self._progress(len(self._requests), len(self._requests), self.now_ns / 1e9)
        return self._outcome(time.perf_counter() - started)

    # -- the process ---------------------------------------------------------------------------------------------------

    def _serve(self) -> Generator[Any, Any, None]:
        scheduler = self.scheduler
        work = scheduler.work
        while True:
            self.cache.store.s.header[H.NOW] = self.now_ns
            self._take_arrivals()
            scheduler.schedule()
            if scheduler.preempted or scheduler.refused:
                self._preempted_total += len(scheduler.preempted)
                self._take_refused()
            if work[W.TOKENS] == 0:
                if scheduler.preempted:
                    continue
                if self._copy is not None:
                    self._copy_ended = self.env.event()
                    arrival = self._arrivals.next_ns
                    if arrival is None:
                        yield self._copy_ended
                    else:
                        # Whichever comes first: a copy that nobody waits for holds up no arrival.
                        self._simpy_events += 2
                        yield self._copy_ended | self.env.timeout(arrival - self.now_ns)
                    self._copy_ended = None
                    self._pass_fence()
                    continue
                if scheduler.num_running:
                    stuck = scheduler.states[int(scheduler.running[0])]
                    raise NoProgressError(f"request {stuck.req_id!r} runs but can neither compute a token nor end")
                if scheduler.waiting:
                    # Everything is free and it does not fit: it never will.
                    scheduler.refused.append(scheduler.waiting.popleft())
                    self._take_refused()
                    continue
                arrival = self._arrivals.next_ns
                if arrival is None:
                    return
                if self.step:
                    self._steps.idle_s += (arrival - self.now_ns) / 1e9
                self._simpy_events += 1
                yield self.env.timeout(arrival - self.now_ns)
                continue
            if self._observer is not None:
                self._observer.scheduled(self)
            dt_ns = self._price()
            self._simpy_events += 1
            yield self.env.timeout(dt_ns)
            self._apply(dt_ns)

    def _price(self) -> int:
        """Return how long the scheduled step takes, beside the copy in flight if there is one."""
        tokens, seqs, kv_read, pairs, _ = self.scheduler.work.tolist()
        header = self.cache.store.s.header
        if header[H.LOGGING]:
            self.cache.store.reserve_events(1)
            self._log_step(tokens)
        if self._score_reads:
            # FlashAttention keeps its probabilities to itself: to get them, keys are read and multiplied once more.
            kv_read += int(self._score_reads * kv_read)
            pairs += int(self._score_reads * pairs)
        dt_ns, memory_ns = self._step_cost.step_ns(tokens, seqs, kv_read, pairs)
        copy = self._copy
        if copy is not None and copy.left_ns > 0:
            dt_ns += self._copy_cost.stretch_ns(dt_ns, memory_ns, int(copy.left_ns))
            copy.left_ns -= dt_ns * copy.bandwidth_ns / max(copy.wall_ns, 1)
        return dt_ns

    def _log_step(self, tokens: int) -> None:
        from sim.kv.blocks import emit

        emit(self.cache.store.s, int(Kind.STEP), -1, self.step, tokens)

    def _take_arrivals(self) -> None:
        arrivals = self._arrivals
        if arrivals.next_ns is None:
            return
        now = self.now_ns
        while arrivals.next_ns is not None and arrivals.next_ns <= now:
            state = arrivals.pop()
            obstacle = self._obstacle(state)
            if obstacle:
                self._refusal = self._refusal or f"request {state.req_id!r}: {obstacle}"
                self.scheduler.refused.append(state)
            else:
                self.scheduler.waiting.append(state)
            if arrivals.next_ns is None:
                self._waiting_at_last_arrival = len(self.scheduler.waiting)
        if self.scheduler.refused:
            self._take_refused()

    def _obstacle(self, state: RequestState) -> str:
        """Say why the request can never be served; nothing if its least footprint is within the limits."""
        limits, size = self.scheduler.limits, self.cache.block_size
        if state.prompt_tokens < 1 or state.output_tokens < 1:
            return "it has no prompt or asks for no output"
        if state.prompt_tokens >= limits.max_model_len:
            return (
                f"its prompt of {state.prompt_tokens} tokens leaves no room below max_model_len {limits.max_model_len}"
            )
        tokens = state.prompt_tokens
        if not self._policy.evicts:
            # The last output token is never written.
            tokens = min(tokens + state.output_tokens, limits.max_model_len) - 1
        need, most = -(-tokens // size), self.cache.pool.usable_blocks - int(self.cache.store.s.header[H.RESERVE])
        return f"its {tokens} tokens need {need} KV blocks, the pool has {most} for requests" if need > most else ""

    def _take_refused(self) -> None:
        for state in self.scheduler.refused:
            outgrown = f"request {state.req_id!r}: its {state.length} tokens do not fit the pool, even alone"
            self._refusal = self._refusal or outgrown
            self._log_request(state, finished=False)
        self.scheduler.refused.clear()

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def _apply(self, dt_ns: int) -> None:
        now = self.now_ns
        scheduler = self.scheduler
        s = self.cache.store.s
        s.header[H.NOW] = now
        count = scheduler.num_running
        start_ns = now - dt_ns
        if start_ns >= self._liveness.next_ns:
            _histogram(s, scheduler.running, count, self._classes, self._counts)
            self._liveness.add(start_ns, self._counts)
        if self._lists.shape[1] < len(scheduler.running):
            self._lists = np.zeros((3, len(scheduler.running)), np.int64)
        steps = self._steps
        scheduler.num_running, done, prompts, decodes = _complete(
            s.rows,
            s.header,
            self._pool,
            scheduler.running,
            count,
            dt_ns,
            now,
            scheduler.limits.max_model_len,
            self._lists,
            steps.buffer[steps.filled],
            scheduler.work,
            (self.step, len(scheduler.waiting), self._preempted_total, self._copy_ns),
        )
        steps.filled += 1
        if steps.filled == len(steps.buffer):
            steps.flush()
        if done:
            for row in self._lists[0, :done].tolist():
                self._finish(scheduler.states[row])
        if self._policy.evicts:
            self._evict(self._lists[1, :prompts], self._lists[2, :decodes])
            self._pass_fence()
            running = scheduler.running[: scheduler.num_running]
            pressure = Pressure(len(running), scheduler.wanted_blocks)
            plans = self._reclaimer.after_step(self.cache, running, pressure, self._copy is not None)
            if plans:
                self._launch(plans)
                self._pass_fence()  # a copy that takes no time is complete
        self.step += 1
        if self._observer is not None:
            self._observer.applied(self, self._finished)
        if self._progress is not None and self.step % 256 == 0 and time.monotonic() - self._shown > 0.2:
            self._shown = time.monotonic()
            self._progress(len(self._requests), self._source.total, now / 1e9)

    def _finish(self, state: RequestState) -> None:
        length = int(self.cache.store.s.rows[state.row]["length"])
        self.scheduler.leave(state, Kind.FINISH, length)
        self._finished += 1
        self._log_request(state, finished=True)

    def _evict(self, ended: NDArray[np.int64], decoded: NDArray[np.int64]) -> None:
        """Let the policy look and choose, and kill what it chose."""
        cache, policy, budget = self.cache, self._policy, self._budget
        if len(ended):
            view = cache.view(ended, budget.share, budget.tokens, self._attention)
            if self._attention is not None:
                self._attention.begin(view)
            policy.begin(view)
            self._evict_excess(view)
            cache.trim_cells(ended)
        if len(decoded):
            view = cache.view(decoded, budget.share, budget.tokens, self._attention)
            if self._observes:
                policy.observe(view)
            self._evict_excess(view)

    def _evict_excess(self, view: View) -> None:
        view, excess = view.over_budget()
        if len(view):
            victims, counts = self._policy.select(view, excess)
            self.cache.evict_cells(view.row, victims, counts)

    # -- copies --------------------------------------------------------------------------------------------------------

    def _launch(self, plans: list[RepackPlan]) -> None:
        if self._copy is not None:
            raise RuntimeError(f"reclaimer {self._reclaimer.name!r} planned a launch while another is in flight")
        gain = sum(plan.gain for plan in plans)
        if gain > self._snapshot_gain:
            owners = self._owners()
            for plan in plans:
                owners[plan.destinations] = -1  # set aside just now: still free in the picture of before
            self._before = (self.now_ns / 1e9, self.cache.pool.live_counts(), owners)
        tokens = sum(plan.tokens for plan in plans)
        wall, bandwidth = self._copy_cost.copy_ns(tokens), self._copy_cost.bandwidth_ns(tokens)
        self._copy = _Copy(plans, wall, self.now_ns + wall, bandwidth, float(bandwidth))
        self.scheduler.plans = plans
        self._copy_ns += wall
        self._tokens_copied += tokens
        self.copies += 1
        self._simpy_events += 3
        self.env.process(self._run_copy(self._copy))

    def _run_copy(self, copy: _Copy) -> Generator[Any, Any, None]:
        yield self.env.timeout(copy.wall_ns)
        if self._copy is copy and self._copy_ended is not None:
            self._copy_ended.succeed()

    def _pass_fence(self) -> None:
        """Put copies that are complete into effect: what runs next reads the new layout."""
        copy = self._copy
        # By the clock, not by whether its process has run: at equal times that would depend on who began first.
        if copy is None or self.now_ns < copy.end_ns:
            return
        self.cache.store.s.header[H.NOW] = self.now_ns
        freed = 0
        for plan in copy.plans:
            gain = self.cache.apply_moves(plan)
            freed += gain
            self._committed += gain > 0
            self._cancelled += gain == 0
        if self._before is not None and freed > self._snapshot_gain:
            clock_s, live, owner = self._before
            self._snapshot = {
                "clock_s": clock_s,
                "live_before": live,
                "owner_before": owner,
                "live_after": self.cache.pool.live_counts(),
                "owner_after": self._owners(),
            }
            self._snapshot_gain = freed
        self._before = None
        self._copy = None
        self.scheduler.plans = []

    def _owners(self) -> NDArray[np.int32]:
        """Return int32[N]: the request that holds each block, -1 where it is free."""
        s = self.cache.store.s
        owner = s.rows["ordinal"][np.maximum(s.blocks["owner"], 0)]
        return np.where(s.blocks["ref"] > 0, owner, -1).astype(np.int32)

    # -- results -------------------------------------------------------------------------------------------------------

    def _log_request(self, state: RequestState, *, finished: bool) -> None:
        totals = state.totals
        arrival = state.arrival_ns / 1e9
        nan = math.nan
        first, end = totals.get("first_token_ns"), self.now_ns / 1e9
        ttft = first / 1e9 - arrival if first is not None else nan
        e2e = end - arrival if finished else nan
        several = finished and state.produced > 1
        decode = float(totals.get("decode_ns", 0)) or nan
        self._requests.add(
            state.req_id,
            (
                state.ordinal,
                finished,
                arrival,
                state.admitted_ns / 1e9 - arrival if state.admitted_ns >= 0 else nan,
                ttft,
                (e2e - ttft) / (state.produced - 1) if several else nan,
                e2e,
                end if finished else nan,
                state.prompt_tokens,
                state.produced,
                state.preemptions,
                state.recomputed_tokens,
                state.cached_tokens,
                totals.get("block_ns", nan) / decode,
                totals.get("peak", 0) or nan,
                totals.get("blocks", nan),
                totals.get("over_ns", nan) / decode,
                totals.get("evicted", 0),
                totals.get("moved", 0),
            ),
        )

    def _outcome(self, wall_s: float) -> Outcome:
        from sim.serving.summary import summarise

        if self._copy is not None:
            raise NoProgressError("the run ended with a copy in flight: this is a defect of the engine")
        s = self.cache.store.s
        header = s.header
        totals = [self._preempted_total, *(int(header[k]) for k in _TOTALS), self._copy_ns / 1e9]
        self._steps.finish(np.array(totals, float))
        requests = self._requests.columns()
        counts = {
            "preemptions": self._preempted_total,
            "blocks_freed_by_death": int(header[H.FREED_BY_DEATH]),
            "blocks_freed_by_repack": int(header[H.FREED_BY_REPACK]),
            "tokens_evicted": int(header[H.EVICTED]),
            "tokens_moved": int(header[H.MOVED]),
            "tokens_copied": self._tokens_copied,
            "repacks_committed": self._committed,
            "repacks_cancelled": self._cancelled,
            "repack_launches": self.copies,
            "copy_time_s": self._copy_ns / 1e9,
        }
        summary = summarise(requests, self._steps, counts, self._waiting_at_last_arrival)
        summary["first_refusal"] = self._refusal or None
        summary["wall_s"] = wall_s
        return Outcome(
            summary,
            requests,
            self._steps.columns(),
            self._liveness.columns(),
            self._snapshot,
            self.cache.event_log() if header[H.LOGGING] else None,
            self._simpy_events,
        )


_TOTALS = (H.FREED_BY_DEATH, H.FREED_BY_REPACK, H.EVICTED, H.MOVED)
