"""What a device has to do, step by step, read off a KV event log.

The log is interpreted by :class:`sim.kv.replay.Replay`, the same oracle that judges the simulator in the tests, so that
a program exists of lawful logs only. What comes out are NumPy arrays, a step at a time: what a kernel is given, and
what has to be copied before it.

A step's batch is whoever wrote tokens since the step before. A copy's tokens are not in the log: they are the tokens of
the plan's source blocks that are alive when it is planned, in logical order, and they fill its destinations, or the
dead slots of its targets, one after the other. Each ``MOVE`` that follows is checked to be one of these copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_validate.work import Action, Fence, InPlace, Launch, StepWork, Tokens
from sim.errors import InputError
from sim.kv.events import Events, Kind
from sim.kv.replay import FIELDS, Replay, ReplayError

__all__ = ["Action", "Facts", "Fence", "InPlace", "Launch", "Program", "StepWork", "Tokens"]


@dataclass(slots=True)
class Facts:
    """What a whole log says, counted before anything is done about it."""

    events: int = 0
    steps: int = 0
    first_step: int = 0
    last_step: int = -1
    max_seqs: int = 0
    max_decodes: int = 0
    max_tokens: int = 0
    """Most tokens in a step."""
    max_blocks: int = 0
    """Longest block table."""
    tokens_written: int = 0
    plans: int = 0
    tokens_planned: int = 0
    """Tokens of all plans, as the log counts them."""
    tokens_moved: int = 0
    """MOVE events."""
    tokens_moved_in_place: int = 0
    """Those of them that no plan copied."""


class Program:
    """The steps of a log.

    Parameters
    ----------
    log
        The events.
    live
        Give each step the tokens that are alive for its batch.
    audit_every
        Give every so many steps all tokens alive in the pool; 0 is never.

    Raises
    ------
    InputError
        If a request has several block tables in the log.
    """

    def __init__(self, log: Events, *, live: bool = False, audit_every: int = 0) -> None:
        units = getattr(log, "units", 1)
        if units > 1:
            raise InputError(
                f"the log is of a run with {units} block tables a request (layers, heads or groups of layers): a "
                "replay on a device knows one"
            )
        self.log = log
        self.tail: list[Action] = []
        """What happens behind the last step; known when the steps have been gone through."""
        self._live = live
        self._audit_every = audit_every

    def check(self, progress: Callable[[int, int], None] | None = None) -> Facts:
        """Go through the whole log, and build nothing.

        Parameters
        ----------
        progress
            Called now and then with the events done, and all there are.

        Raises
        ------
        InputError
            If it is not a lawful log of complete steps; the message names the event.
        """
        facts = Facts()
        recorder = _Recorder(self.log.block_size, self.log.num_blocks)
        for _ in self._steps(recorder):
            counts = recorder.wrote.values()
            if not facts.steps:
                facts.first_step = recorder.step
            facts.steps += 1
            facts.max_seqs = max(facts.max_seqs, len(counts))
            facts.max_decodes = max(facts.max_decodes, sum(count == 1 for count in counts))
            facts.max_tokens = max(facts.max_tokens, sum(counts))
            facts.tokens_written += sum(counts)
            longest = max((len(recorder.table(req)) for req in recorder.wrote), default=0)
            facts.max_blocks = max(facts.max_blocks, longest)
            if progress is not None:
                progress(recorder.count, len(self.log))
        if not facts.steps:
            raise InputError(f"{self._where}: no step in {len(self.log):,} events")
        facts.events, facts.last_step = recorder.count, recorder.step
        facts.plans, facts.tokens_planned = recorder.planned, recorder.tokens_planned
        facts.tokens_moved, facts.tokens_moved_in_place = recorder.moved, recorder.moved_in_place
        return facts

    def __iter__(self) -> Iterator[StepWork]:
        recorder = _Recorder(self.log.block_size, self.log.num_blocks)
        self.tail = []
        for number, time_ns in enumerate(self._steps(recorder)):
            work = _work(recorder)
            work.time_ns = time_ns
            if self._live:
                work.live = _live(recorder, work.reqs.tolist())
            if self._audit_every and number % self._audit_every == 0:
                work.audit = _tokens(recorder, list(recorder.tokens))
            yield work
        self.tail = recorder.actions()

    @property
    def _where(self) -> str:
        return str(getattr(self.log, "path", "event log"))

    def _steps(self, recorder: _Recorder) -> Iterator[int]:
        """Interpret the log; stop behind every STEP, with its time."""
        try:
            for records in self.log.chunks():
                events = records[FIELDS].tolist()
                kinds = records["kind"]
                ends = (np.flatnonzero(kinds == Kind.STEP) + 1).tolist()
                for first, last in itertools.pairwise([0, *ends, len(events)]):
                    self._check_order(recorder, kinds[first:last])
                    recorder.apply(events[first:last])
                    if last > first and kinds[last - 1] == Kind.STEP:
                        yield int(records["time_ns"][last - 1])
                        recorder.begin_step()
        except ReplayError as error:
            raise InputError(f"{self._where}: {error}") from None
        if recorder.wrote:
            raise InputError(
                f"{self._where}: truncated: it ends within the step behind step {recorder.step}, "
                f"after {recorder.count:,} events"
            )
        try:
            recorder.check()
        except ReplayError as error:
            raise InputError(f"{self._where}: truncated: after {recorder.count:,} events {error}") from None

    def _check_order(self, recorder: _Recorder, kinds: NDArray[Any]) -> None:
        """Refuse a log in which something else happens between a step's first token and its STEP."""
        writes = np.flatnonzero((kinds == Kind.APPEND) | (kinds == Kind.REUSE))
        first = 0 if recorder.wrote else int(writes[0]) if len(writes) else len(kinds)
        late = np.flatnonzero(_BETWEEN_STEPS[np.clip(kinds[first:], 0, max(Kind))])
        if len(late):
            at = first + int(late[0])
            raise InputError(
                f"{self._where}: event {recorder.count + at} ({Kind(int(kinds[at])).name}): "
                f"not between the tokens of a step and its STEP"
            )


_BETWEEN_STEPS = np.zeros(max(Kind) + 1, np.bool_)
_BETWEEN_STEPS[
    [
        Kind.EVICT,
        Kind.PLAN,
        Kind.GROUP,
        Kind.SOURCE,
        Kind.RESERVE,
        Kind.TARGET,
        Kind.COPIED,
        Kind.MOVE,
        Kind.COMMIT,
        Kind.PACK,
    ]
] = True
"""What happens when a step ends, and never while the next one is put together."""


@dataclass(slots=True)
class _Moves:
    """An action while it grows."""

    what: type[Launch] | type[Fence] | type[InPlace]
    plans: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    listed: list[int] = field(default_factory=list)
    packed: set[int] = field(default_factory=set)
    """Requests whose gaps are closed by it."""

    def done(self) -> Action:
        if self.what is Fence:
            return Fence(tuple(self.plans))
        source, target = np.array(self.source, np.int64), np.array(self.target, np.int64)
        if self.what is InPlace:
            return InPlace(source, target)
        return Launch(tuple(self.plans), tuple(self.counts), source, target, np.array(self.listed, np.int64))


class _Recorder(Replay):
    """The interpreter, taking down what a device has to do about what happens."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, num_blocks)
        self.wrote: dict[int, int] = {}
        """Tokens that requests wrote since the last step, in order."""
        self.reused: dict[int, int] = {}
        """Those of them that wrote one token, into this dead slot."""
        self.planned = 0
        self.tokens_planned = 0
        self.moved = 0
        self.moved_in_place = 0
        self._actions: list[_Moves] = []
        self._copies: dict[int, int] = {}  # slot to -> slot from, of plans that have not ended
        self._targets: dict[int, list[int]] = {}  # plan -> slots to

    def actions(self) -> list[Action]:
        """Return what is to be done since the last step."""
        return [moves.done() for moves in self._actions]

    def begin_step(self) -> None:
        """Begin anew."""
        self.wrote.clear()
        self.reused.clear()
        self._actions.clear()

    def _append(self, req: int, first: int, count: int) -> None:
        if req in self.reused:
            raise ReplayError("a token of this step went into a dead slot: no other one may be beside it")
        super()._append(req, first, count)
        self.wrote[req] = self.wrote.get(req, 0) + count

    def _reuse(self, req: int, position: int, slot: int) -> None:
        # A chunk of tokens sees its own in the order of their slots.
        if req in self.wrote:
            raise ReplayError("it wrote a token in this step: only one by itself goes into a dead slot")
        super()._reuse(req, position, slot)
        self.wrote[req] = 1
        self.reused[req] = slot

    def _plan(self, req: int, number: int, tokens: int) -> None:
        super()._plan(req, number, tokens)
        self.planned += 1
        self.tokens_planned += tokens
        if not tokens:
            self._targets[number] = []

    def _reserve(self, req: int, block: int, number: int) -> None:
        super()._reserve(req, block, number)
        plan = self.plans[number]
        if number in self._targets or plan.targets:
            raise ReplayError("its plan has destinations enough")
        if len(plan.destinations) * self.block_size >= plan.tokens:
            self._launch(number, [slot for block in plan.destinations for slot in self._slots(block)])

    def _target(self, req: int, block: int, number: int) -> None:
        super()._target(req, block, number)
        plan = self.plans[number]
        if plan.destinations:
            raise ReplayError("its plan has destinations")
        if number in self._targets:
            raise ReplayError("its plan has dead slots enough")
        dead = [slot for target in plan.targets for slot in self._slots(target) if slot not in self.tokens]
        if len(dead) >= plan.tokens:
            self._launch(number, dead)
            self._actions[-1].listed += plan.targets

    def _launch(self, number: int, room: list[int]) -> None:
        """Begin the copy of a plan, into the first of these slots."""
        plan = self.plans[number]
        slots = (slot for source in plan.sources for slot in self._slots(source))
        source = [slot for slot in slots if plan.req in self.tokens.get(slot, ())]
        if len(source) != plan.tokens:
            raise ReplayError(f"{len(source)} tokens are alive in its sources, planned were {plan.tokens}")
        source.sort(key=lambda slot: self.tokens[slot][plan.req])
        target = room[: len(source)]
        self._targets[number] = target
        self._copies.update(zip(target, source, strict=True))
        launch = self._open(Launch)
        launch.plans.append(number)
        launch.counts.append(len(source))
        launch.source += source
        launch.target += target

    def _copied(self, req: int, number: int, b: int) -> None:
        plan = self.plans[number]
        if number not in self._targets:
            raise ReplayError("its destinations, or targets, were never all set aside")
        super()._copied(req, number, b)
        if self._targets[number]:
            self._open(Fence).plans.append(number)
        if plan.cancelled:
            self._close(number)

    def _move(self, req: int, source: int, target: int) -> None:
        self.moved += 1
        if target // self.block_size in self._fills:
            super()._move(req, source, target)
            if self._copies.get(target) != source:
                raise ReplayError(f"the copy brought the token of slot {self._copies.get(target)} there")
            return
        super()._move(req, source, target)
        self.moved_in_place += 1
        moves = self._open(InPlace)
        if req in moves.packed:  # twice in a row: what the first wrote, the second may read
            moves = _Moves(InPlace)
            self._actions.append(moves)
        moves.source.append(source)
        moves.target.append(target)

    def _pack(self, req: int, written: int, b: int) -> None:
        super()._pack(req, written, b)
        if self._actions and self._actions[-1].what is InPlace:
            self._actions[-1].packed.add(req)

    def _commit(self, req: int, number: int, index: int) -> None:
        super()._commit(req, number, index)
        self._close(number)

    def _cancel(self, req: int, number: int, b: int) -> None:
        plan = self.plans[number]
        super()._cancel(req, number, b)
        if plan.copied:
            self._close(number)

    def _open(self, what: type[Launch] | type[Fence] | type[InPlace]) -> _Moves:
        """Return the action that goes on, or a new one."""
        if not self._actions or self._actions[-1].what is not what:
            self._actions.append(_Moves(what))
        return self._actions[-1]

    def _close(self, number: int) -> None:
        for slot in self._targets.pop(number):
            del self._copies[slot]


def _work(recorder: _Recorder) -> StepWork:
    """Return the step that the recorder stands behind."""
    size = recorder.block_size
    requests = [recorder.requests[req] for req in recorder.wrote]
    rows = len(requests)
    reqs = np.fromiter(recorder.wrote, np.int64, rows)
    counts = np.fromiter(recorder.wrote.values(), np.int64, rows)
    written = np.fromiter((request.written for request in requests), np.int64, rows)
    length = np.fromiter((request.length for request in requests), np.int64, rows)
    widths = np.fromiter((len(request.table) for request in requests), np.int64, rows)
    table = np.zeros((rows, int(widths.max(initial=0))), np.int32)
    listed = itertools.chain.from_iterable(request.table for request in requests)
    table[np.arange(table.shape[1]) < widths[:, None]] = np.fromiter(listed, np.int32, int(widths.sum()))
    row = np.repeat(np.arange(rows), counts)
    back = np.repeat(np.cumsum(counts), counts) - np.arange(len(row))  # 1 for a row's last token
    index = written[row] - back
    slots = table[row, index // size].astype(np.int64) * size + index % size
    if recorder.reused:
        ends = dict(zip(recorder.wrote, np.cumsum(counts).tolist(), strict=True))
        for req, slot in recorder.reused.items():
            slots[ends[req] - 1] = slot
    return StepWork(
        step=recorder.step,
        reqs=reqs,
        query_tokens=counts.astype(np.int32),
        lengths=written.astype(np.int32),
        block_table=table,
        slots=slots,
        positions=length[row] - back,
        writers=reqs[row],
        before=recorder.actions(),
    )


def _tokens(recorder: _Recorder, slots: list[int]) -> Tokens:
    written = [recorder.contents[slot] for slot in slots]
    writers = np.array([writer for writer, _, _ in written], np.int64)
    positions = np.array([position for _, position, _ in written], np.int64)
    return Tokens(np.array(slots, np.int64), writers, positions, np.zeros(0, np.int64))


def _live(recorder: _Recorder, reqs: list[int]) -> Tokens:
    each = [recorder.requests[req].slots for req in reqs]
    tokens = _tokens(recorder, [slot for slots in each for slot in slots.values()])
    tokens.rows = np.repeat(np.arange(len(each)), [len(slots) for slots in each])
    return tokens
