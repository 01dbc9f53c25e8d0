"""The engine: one SimPy process for the steps, one for each copy.

SimPy handles what waits (steps, idle time, copies): at most a few events a step, however many tokens. Arrivals are
taken over at step boundaries, where the only one who could look at them looks. At one instant the order is: results of
the step that ends, evictions, copies that are complete, new repack plans, arrivals, the next schedule.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from sim.errors import InputError, NoProgressError
from sim.kv.cache import KVCache
from sim.kv.events import Kind, KVEventLog
from sim.kv.policies.base import EvictionPolicy, check_granularity
from sim.kv.policies.batch_budget import BatchBudget
from sim.kv.reclaim.base import Pressure, Reclaimer
from sim.kv.state import H
from sim.kv.view import View
from sim.serving.accounting import complete, histogram
from sim.serving.arrivals import Arrivals
from sim.serving.attention.base import check_signals
from sim.serving.ballots import Ballots
from sim.serving.batch import Batch
from sim.serving.copies import CopyStream
from sim.serving.copy import CopyCost
from sim.serving.cost import StepCost
from sim.serving.metrics import LivenessSamples, RequestLog, StepLog, liveness_classes
from sim.serving.request import RequestState
from sim.serving.scheduler import Scheduler
from sim.serving.summary import request_row, summarise, whole_number
from sim.serving.work import W
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
    """How many tokens a request may keep: a share of its length, or a number (if not 0).

    ``together``: all that decode may keep the sum of it, and their tokens compete for it.
    """

    share: float = 1.0
    tokens: int = 0
    together: bool = False


@dataclass(slots=True)
class Outcome:
    """What a run gave.

    Attributes
    ----------
    summary
        The figures of ``vtoken run --json`` that the engine knows (docs/metrics.md has the definitions).
    requests, steps, liveness, pool_snapshot
        As in :class:`sim.study.result.RunResult`.
    events
        What happened to KV memory, if the cache kept a log.
    simpy_events
        Events that went through SimPy's queue.
    """

    summary: dict[str, Any]
    requests: dict[str, NDArray[Any]]
    steps: dict[str, NDArray[Any]]
    liveness: dict[str, NDArray[Any]]
    pool_snapshot: dict[str, Any] | None
    events: KVEventLog | None
    simpy_events: int


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
        Attention model, for policies that look at attention, keys or values; None otherwise.
    step_cost, copy_cost
        What steps and copies cost.
    score_reads
        What it costs a policy to see attention: share of the KV that each step reads again.
    ballots
        What units have dropped, where they decide alone and share the cache's block tables.
    table_us
        Time of a step for each block table of a request that it schedules, beyond the first, in microseconds.
    evict_every
        Decode steps of a request from one eviction to the next.
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
        ballots: Ballots | None = None,
        table_us: float = 0.0,
        evict_every: int = 1,
        seed: int = 0,
        observer: StepObserver | None = None,
        progress: Progress | None = None,
    ) -> None:
        if policy.evicts and not reclaimer.evicts:
            raise InputError(f"reclaimer {reclaimer.name!r} keeps every token: use it with policy 'full'")
        units = (scheduler.cache if ballots is None else ballots).units
        check_granularity(policy, units)
        check_signals(policy, attention, units)
        self.scheduler = scheduler
        self.cache: KVCache = scheduler.cache
        self.cache.store.s.header[H.KEPT] = reclaimer.keep_blocks
        reclaimer.check(self.cache, policy)
        if reclaimer.reuses:
            self.cache.reuse_slots()
        self.cache.store.s.header[H.STALLS] = reclaimer.stalls
        if reclaimer.keep_blocks and scheduler.limits.prefix_caching:
            raise InputError(f"{reclaimer.name}: keep_blocks: requests that share blocks cannot keep empty ones; use 0")
        self.env = simpy.Environment()
        self.step = 0
        self.copies = CopyStream(self.env, scheduler, copy_cost)
        self._source = source
        self._policy = policy
        self._observes = policy.evicts and type(policy).observe is not EvictionPolicy.observe
        self._allots = type(policy).allot is not EvictionPolicy.allot
        self._chooses = type(policy).reads is not EvictionPolicy.reads
        self._budget = budget
        self._reclaimer = reclaimer
        self._attention = attention
        self.step_cost = step_cost
        self._score_reads = score_reads if policy.attends and policy.every == 1 and not policy.prompt_only else 0.0
        self._score_ns = getattr(step_cost, "score_ns", None) if policy.every > 1 else None
        self._scored = [0, 0]
        self._choose = (
            policy.select
            if type(reclaimer).choose is Reclaimer.choose
            else functools.partial(reclaimer.choose, self.cache if ballots is None else ballots, policy)
        )
        units = self.cache.units
        self._units = units.count
        self._weight = int(units.weight_of.sum())
        # Tokens die by their windows in groups that have one; policy and reclaimer have to do with the others alone.
        self._deciding = units.window_of == 0
        self._windows = not self._deciding.all()
        if policy.evicts and not self._deciding.any():
            raise InputError(f"policy {policy.name!r} evicts, but every layer has a window and keeps that: use 'full'")
        # Where the policy looks: who decides has a token table of its own.
        self._ballots = scheduler.ballots = ballots
        self._tokens: KVCache = self.cache if ballots is None else ballots
        self._batch_budget = self._one_budget(policy, reclaimer) if budget.together and policy.evicts else None
        self._deciders = int(self._deciding.sum()) if ballots is None else ballots.units.count
        self._table_ns = table_us * 1e3 * (units.tables - 1)
        self._evict_every = evict_every
        self._listed = 0
        part, whole = units.token_share
        self._copy_token_ns = copy_cost.bandwidth_ns(1 << 20) / (1 << 20) * part / whole
        self._short_ns = math.inf
        self._pause_ns = 0
        self._observer = observer
        self._progress = progress
        self._arrivals = Arrivals(source, seed)
        self._requests = RequestLog(self._units)
        self._steps = StepLog(units=self._units)
        self._liveness = LivenessSamples(units=self._units)
        self._preempted_total = 0
        self._finished = 0
        self._waiting_at_last_arrival = 0
        self._simpy_events = 0
        self._lists = np.zeros((3, 64), np.int64)
        self._counts = np.zeros(6, np.int64)
        self._classes = liveness_classes(self.cache.block_size)
        self._pool = (self.cache.pool.usable_blocks, self.cache.block_size)
        self._shown = 0.0
        self._refusal = ""
        # Real vLLM's recorded runs add their clock up as float64 seconds: where an arrival falls on the end of a step,
        # that sum decides which step takes it in. `linear`, the cost of those runs, gives the seconds to do the same.
        self._step_s: Callable[[int], float] | None = getattr(step_cost, "step_s", None)
        self._clock_s = 0.0
        self._late = scheduler.limits.async_scheduling
        self._batch_at_hand = Batch(scheduler.work)

    def _one_budget(self, policy: EvictionPolicy, reclaimer: Reclaimer) -> BatchBudget:
        if self._tokens.units.count > 1:
            raise InputError(
                "budget_scope batch: layers or heads that decide alone, or have windows, cannot share a budget; "
                "use granularity shared and a model of full attention"
            )
        if type(reclaimer).choose is not Reclaimer.choose:
            raise InputError(f"budget_scope batch: reclaimer {reclaimer.name!r} has a say in who dies; use another")
        return BatchBudget(policy)

    @property
    def now_ns(self) -> int:
        """Simulated time."""
        return int(self.env.now)

    @property
    def clock_s(self) -> float:
        """Simulated time in seconds; with the step cost ``linear`` added up in floating point."""
        return self.now_ns / 1e9 if self._step_s is None else self._clock_s

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
        in_flight = scheduler.in_flight
        arrivals = self._arrivals
        header = self.cache.store.s.header
        while True:
            now = self.now_ns
            header[H.NOW] = now
            if arrivals.next_ns is not None and arrivals.next_ns <= now:
                self._take_arrivals(now)
            scheduler.schedule()
            if scheduler.preempted or scheduler.refused:
                self._preempted_total += len(scheduler.preempted)
                self._take_refused()
            if work[W.TOKENS]:
                if self._observer is not None:
                    self._observer.scheduled(self)
                batch = self._batch()
                if self._late:
                    in_flight.append(batch)
                    if len(in_flight) == 1:
                        continue  # the device gets its next batch before this one is done
                    batch = in_flight.popleft()
            elif in_flight:
                self.step += 1  # vLLM counts a schedule with nothing left to decide
                batch = in_flight.popleft()
            else:
                if scheduler.preempted:
                    continue
                if not (yield from self._wait()):
                    return
                continue
            dt_ns = self._duration_ns(batch, now)
            self._simpy_events += 1
            yield self.env.timeout(dt_ns)
            self._apply(batch, now + dt_ns, dt_ns)

    def _wait(self) -> Generator[Any, Any, bool]:
        """Wait for a copy or an arrival, or refuse what can never be served; return whether there is more to do."""
        scheduler = self.scheduler
        arrival = self._arrivals.next_ns
        if self.copies.busy:
            ended = self.copies.ended()
            # Whichever comes first: a copy that nobody waits for holds up no arrival.
            yield ended if arrival is None else ended | self.env.timeout(arrival - self.now_ns)
            self._simpy_events += 3
            self._clock_s = self.now_ns / 1e9
            self.copies.pass_fence()
            return True
        if scheduler.num_running:
            stuck = scheduler.states[int(scheduler.running[0])]
            raise NoProgressError(f"request {stuck.req_id!r} runs but can neither compute a token nor end")
        if scheduler.waiting:
            # Everything is free and it does not fit: it never will.
            scheduler.refused.append(scheduler.waiting.popleft())
            self._take_refused()
            return True
        if arrival is None:
            return False
        if self.step:
            self._steps.idle_s += (arrival - self.now_ns) / 1e9
        self._simpy_events += 1
        yield self.env.timeout(arrival - self.now_ns)
        self._clock_s = arrival / 1e9
        return True

    def _batch(self) -> Batch:
        """Return what was scheduled, with its price."""
        work = self.scheduler.work
        tokens, seqs, kv_read, pairs, _, listed = work.tolist()
        self._listed += listed
        # In the log each row of a request is a sequence.
        self.cache.note(Kind.STEP, -1, self.step, tokens * self._units)
        if self._chooses:
            unread = self._unread()
            kv_read -= unread
            pairs -= unread
        if self._weight > 1:
            kv_read, pairs = round(kv_read / self._weight), round(pairs / self._weight)
        if self._reclaimer.attention_factor != 1.0:
            pairs += int((self._reclaimer.attention_factor - 1) * kv_read)
            kv_read = int(self._reclaimer.attention_factor * kv_read)
        if self._score_reads:
            # FlashAttention keeps its probabilities to itself: to get them, keys are read and multiplied once more.
            kv_read += int(self._score_reads * kv_read)
            pairs += int(self._score_reads * pairs)
        batch = Batch(work.copy()) if self._late else self._batch_at_hand
        batch.step, batch.tokens = self.step, tokens
        batch.step_ns, batch.memory_ns = self.step_cost.step_ns(tokens, seqs, kv_read, pairs)
        if self._table_ns:
            batch.tables_ns = round(seqs * self._table_ns)
            batch.step_ns += batch.tables_ns
        self.step += 1
        return batch

    def _unread(self) -> int:
        """Return how many of the slots that decode steps could read the policy leaves out."""
        running = self._choosing(self.scheduler.running[: self.scheduler.num_running])
        records = self.cache.store.s.rows[running]
        decoding = (records["sched"] == 1) & (records["decode_from"] > 0)
        view = self.cache.view(running[decoding], self._budget.share, self._budget.tokens)
        slots = records["written"][decoding].astype(np.int64)
        unread: NDArray[np.int64] = slots - self._policy.reads(slots, view.keep)
        return int((unread * self.cache.units.weight_of[view.row % self._units]).sum())

    def _choosing(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the rows that policy and reclaimer have to do with: all but groups with a window."""
        return rows[self._deciding[rows % self._units]] if self._windows else rows

    def _duration_ns(self, batch: Batch, now: int) -> int:
        """Return how long a step takes that begins now, beside the copy in flight if there is one."""
        longer_ns, self._pause_ns = self._pause_ns, 0
        if self.copies.busy:
            longer_ns += self.copies.stretch_ns(batch.step_ns, batch.memory_ns)
        if self._step_s is None:
            return batch.step_ns + longer_ns
        self._clock_s += self._step_s(batch.tokens) + (longer_ns + batch.tables_ns) / 1e9
        return round(self._clock_s * 1e9) - now

    def _take_arrivals(self, now: int) -> None:
        arrivals = self._arrivals
        while arrivals.next_ns is not None and arrivals.next_ns <= now:
            if self._step_s is not None and arrivals.next_ns / 1e9 > self._clock_s:
                break
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
        limits = self.scheduler.limits
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
        need = self.scheduler.blocks_for(tokens)
        most = self.cache.pool.usable_blocks - int(self.cache.store.s.header[H.RESERVE])
        return f"its {tokens} tokens need {need} KV blocks, the pool has {most} for requests" if need > most else ""

    def _take_refused(self) -> None:
        for state in self.scheduler.refused:
            outgrown = f"request {state.req_id!r}: its {state.length} tokens do not fit the pool, even alone"
            self._refusal = self._refusal or outgrown
            self._log_request(state, finished=False)
        self.scheduler.refused.clear()

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def _apply(self, batch: Batch, now: int, dt_ns: int) -> None:
        scheduler = self.scheduler
        s = self.cache.store.s
        s.header[H.NOW] = now
        count = scheduler.num_running
        start_ns = now - dt_ns
        if start_ns >= self._liveness.next_ns:
            histogram(s, scheduler.running, count, self._classes, self._counts)
            self._liveness.add(start_ns, self._counts)
        if self._lists.shape[1] < len(scheduler.running):
            self._lists = np.zeros((3, len(scheduler.running)), np.int64)
        if self._late:
            scheduler.publish_results()
        steps = self._steps
        scheduler.num_running, done, prompts, decodes = complete(
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
            batch.work,
            (batch.step, len(scheduler.waiting), self._preempted_total, self.copies.busy_ns),
            self._late,
            self._units if self._units > 1 else None,
        )
        steps.filled += 1
        if steps.filled == len(steps.buffer):
            steps.flush()
        if done:
            for row in self._lists[0, :done].tolist():
                self._finish(scheduler.states[row])
        for state in batch.owed:
            self._deliver(state)
        if self._policy.evicts:
            self._evict(self._choosing(self._lists[1, :prompts]), self._choosing(self._lists[2, :decodes]))
            if self._score_ns is not None:
                requests, pairs = self._scored
                self._pause_ns += self._score_ns(-(-requests // self._deciders), -(-pairs // self._deciders))
                self._scored = [0, 0]
            self.copies.pass_fence()
            running = self._choosing(scheduler.running[: scheduler.num_running])
            self._pause_ns += self.copies.stop_ns(*self._reclaimer.repack_now(self.cache, running))
            # The next step may be a short one, whatever this one was: what falls at once and rises by a tenth a step.
            self._short_ns = min(batch.step_ns, 1.1 * self._short_ns)
            copyable = self._short_ns / self._copy_token_ns if self._copy_token_ns else math.inf
            pressure = Pressure(scheduler.num_running, scheduler.wanted_blocks, copyable)
            plans = self._reclaimer.after_step(self.cache, running, pressure, self.copies.busy)
            if plans:
                after = scheduler.in_flight[0].step_ns if scheduler.in_flight else 0
                self.copies.launch(plans, after)
                self.copies.pass_fence()  # a copy that takes no time is complete
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

    def _deliver(self, state: RequestState) -> None:
        """Hand a token to a request that was preempted while the token was on its way, and that may need no more."""
        if state.produced == 1:
            state.totals["first_token_ns"] = self.now_ns
        if state.produced >= state.output_tokens or state.length >= self.scheduler.limits.max_model_len:
            self.scheduler.waiting.remove(state)
            for unit in range(self._units):
                self.cache.note(Kind.FINISH, state.ordinal * self._units + unit, state.length)
            self._finished += 1
            self._log_request(state, finished=True)

    def _evict(self, ended: NDArray[np.int64], decoded: NDArray[np.int64]) -> None:
        """Let the policy look and choose, and kill what it chose."""
        tokens, policy, budget = self._tokens, self._policy, self._budget
        if len(ended):
            rows = self._units_of(ended)
            view = tokens.view(rows, budget.share, budget.tokens, self._attention)
            if self._attention is not None:
                self._attention.begin(view)
            policy.begin(view)
            if self._batch_budget is None:
                self._evict_excess(view)
                tokens.trim_cells(rows)
                if tokens is not self.cache:
                    self.cache.trim_cells(ended)
        if len(decoded) and not policy.prompt_only:
            view = tokens.view(self._units_of(decoded), budget.share, budget.tokens, self._attention)
            if self._observes:
                policy.observe(view)
            if self._batch_budget is None:
                if self._evict_every > 1:
                    view = view.subset((view.length - view.prompt) % self._evict_every == 0)
                self._evict_excess(view)
        if self._batch_budget is not None:
            running = self.scheduler.running[: self.scheduler.num_running]
            decoding = running[tokens.store.s.rows["decode_from"][running] > 0]
            view = tokens.view(decoding, budget.share, budget.tokens, self._attention)
            tokens.evict_cells(decoding, *self._batch_budget.select(view))
            tokens.trim_cells(ended)

    def _units_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of what decides in these requests, which the policy looks at."""
        return rows if self._ballots is None else self._ballots.follow(self.cache, rows)

    def _evict_excess(self, view: View) -> None:
        if self._allots:
            view.keep[:] = self._policy.allot(view)
        view, excess = view.over_budget()
        if len(view):
            victims, counts = self._choose(view, excess)
            if self._score_ns is not None:
                scored = view.n[counts > 0]
                self._scored[0] += len(scored)
                self._scored[1] += int((scored**2).sum()) if self._policy.compares else 0
            if self._ballots is None:
                self.cache.evict_cells(view.row, victims, counts)
            else:
                self._ballots.drop(self.cache, view.row, victims, counts)

    # -- results -------------------------------------------------------------------------------------------------------

    def _log_request(self, state: RequestState, *, finished: bool) -> None:
        row = request_row(state, self.now_ns, finished=finished, units=self._units)
        self._requests.add(state.req_id, row)

    def _outcome(self, wall_s: float) -> Outcome:
        copies, header = self.copies, self.cache.store.s.header
        totals = [self._preempted_total, *(int(header[k]) for k in _TOTALS), copies.busy_ns / 1e9]
        self._steps.finish(np.array(totals, float))
        requests = self._requests.columns()

        def whole(count: int) -> float:
            return whole_number(count / self._units)

        counts = {
            "preemptions": self._preempted_total,
            "blocks_freed_by_death": whole(int(header[H.FREED_BY_DEATH])),
            "blocks_freed_by_repack": whole(int(header[H.FREED_BY_REPACK])),
            "tokens_evicted": whole(int(header[H.EVICTED])),
            "tokens_moved": whole(int(header[H.MOVED])),
            "tokens_copied": whole(copies.tokens_copied),
            "repacks_committed": copies.committed,
            "repacks_cancelled": copies.cancelled,
            "repack_launches": copies.launches + copies.stops,
            "copy_time_s": copies.busy_ns / 1e9,
            "copy_delay_s": copies.delay_ns / 1e9,
            "tables_per_request": self.cache.units.tables,
            "block_table_bytes": 4 * self._listed * self.cache.units.tables / self._units / max(self.step, 1),
        }
        summary = summarise(requests, self._steps, counts, self._waiting_at_last_arrival)
        summary["steps"] = self.step
        summary["first_refusal"] = self._refusal or None
        summary["wall_s"] = wall_s
        return Outcome(
            summary,
            requests,
            self._steps.columns(),
            self._liveness.columns(),
            copies.snapshot,
            self.cache.event_log() if header[H.LOGGING] else None,
            self._simpy_events + 3 * copies.launches,
        )


_TOTALS = (H.FREED_BY_DEATH, H.FREED_BY_REPACK, H.EVICTED, H.MOVED)
