"""The interpreter of KV events: what memory looks like after each of them, and whether they were lawful.

Plain dictionaries and no kernel, on purpose: it shares no code with what writes the events, so that it can judge it. It
checks the invariants of the paper (I1 to I4) at every event:

I1 no token is lost or doubled; I2 a live token has one slot and a slot at most one live token (of one request);
I3 a moved token is read at its new place only after the copy is complete; I4 plans in flight do not overlap, and each
ends with strictly fewer blocks or without effect.

Where prefixes are shared: a block that several tables list is never written, nor filled by a move; the plans of a group
have the same sources, which are all of one another's readers, and end together with strictly fewer blocks in use; and a
cached block that a request is given holds, slot by slot, the tokens that the request would compute there, written by a
request that had not evicted anything.

What it remembers is what is alive: of a request that has ended, one bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sim.kv.blocks import Why
from sim.kv.events import EVENT, Events, Kind

__all__ = ["FIELDS", "Replay", "ReplayError"]

FIELDS = list(EVENT.names or ())[1:]
"""Of an event, what :meth:`Replay.apply` takes: all but the time."""


class ReplayError(ValueError):
    """An event that cannot have happened; the message names it and what was expected."""


@dataclass(slots=True)
class _Request:
    table: list[int] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    """Logical position -> slot of each live token."""
    written: int = 0
    length: int = 0
    """Tokens appended so far, dead or alive: the next logical position."""
    alive: bool = True
    pure: bool = True
    """It has evicted nothing: what it computes is what any request with these tokens would compute."""


@dataclass(slots=True)
class _Plan:
    req: int
    tokens: int
    sources: list[int] = field(default_factory=list)
    destinations: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    """Blocks that stay in the table while the copy writes into their dead slots."""
    moves: int = 0
    copied: bool = False
    cancelled: bool = False
    group: _Group | None = None


@dataclass(slots=True)
class _Group:
    plans: list[_Plan] = field(default_factory=list)
    committed: int = 0
    freed: int = 0
    kept: int = 0


class Replay:
    """Applies events one by one.

    Parameters
    ----------
    block_size, num_blocks
        Of the pool.
    same
        ``same(a, b, n)``: whether requests ``a`` and ``b`` begin with the same ``n`` tokens. Without it a cached block
        is not asked whose prompt it holds.
    """

    def __init__(self, block_size: int, num_blocks: int, same: Callable[[int, int, int], bool] | None = None) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.requests: dict[int, _Request] = {}
        self.plans: dict[int, _Plan] = {}
        self.holders: dict[int, int] = {}
        """Block -> tables that list it (0: a copy alone uses it)."""
        self.tokens: dict[int, dict[int, int]] = {}
        """Slot -> {request: logical position}; more than one only where a prefix is shared."""
        self.contents: dict[int, tuple[int, int, bool]] = {}
        """Slot -> what was written to it last: (request, logical position, whether the request was pure)."""
        self.count = 0
        self.step = -1
        """Number of the last step."""
        self._scheduled = 0  # tokens since then
        self._same = same
        self._reads: Counter[int] = Counter()  # block -> plans in flight that copy from it
        self._fills: dict[int, _Plan] = {}  # block -> the plan that copies to it
        self._ended: dict[int, int] = {}  # a thousand requests a number, a bit each
        self._handlers: dict[int, Callable[[int, int, int], None]] = {
            int(kind): getattr(self, f"_{kind.name.lower()}") for kind in Kind
        }

    @classmethod
    def of(cls, log: Events, same: Callable[[int, int, int], bool] | None = None) -> Replay:
        """Replay a whole log and check the end."""
        replay = cls(log.block_size, log.num_blocks, same)
        for records in log.chunks():
            replay.apply(records[FIELDS].tolist())
        replay.check()
        return replay

    def apply(self, events: Iterable[tuple[int, int, int, int]]) -> None:
        """Apply events (kind, req, a, b).

        Raises
        ------
        ReplayError
            If one breaks an invariant or makes no sense here.
        """
        handlers = self._handlers
        for kind, req, a, b in events:
            try:
                handlers[kind](req, a, b)
            except (ReplayError, KeyError, IndexError, ValueError, StopIteration) as error:
                name = Kind(kind).name if kind in handlers else f"unknown kind {kind}"
                what = str(error) if isinstance(error, ReplayError) else f"nothing is there: {error}"
                raise ReplayError(f"event {self.count} ({name} req={req} a={a} b={b}): {what}") from error
            self.count += 1

    def check(self) -> None:
        """Compare the two directions of the token table, and the blocks with those who hold them."""
        held: dict[int, int] = {}
        for number, request in self.requests.items():
            _need(len(set(request.table)) == len(request.table), f"request {number} lists a block twice")
            for block in request.table:
                held[block] = held.get(block, 0) + 1
            for position, slot in request.slots.items():
                _need(self.tokens[slot].get(number) == position, f"request {number} lost token {position}")
                _need(slot // self.block_size in request.table, f"token {position} of {number} is outside its table")
        reads: Counter[int] = Counter()
        for plan in self.plans.values():
            reads.update(plan.sources)
            for block in plan.destinations:
                _need(self.holders.get(block) == 0, f"destination {block} is held by a table before the commit")
            for block in plan.destinations + plan.targets:
                _need(self._fills[block] is plan, f"block {block} is filled by another plan")
        _need(reads == self._reads, "blocks that copies read are miscounted")
        filled = sum(len(p.destinations) + len(p.targets) for p in self.plans.values())
        _need(len(self._fills) == filled, "a copy fills nothing")
        _need({b: n for b, n in self.holders.items() if n} == held, "blocks held differ from blocks listed")
        count = sum(len(owners) for owners in self.tokens.values())
        _need(count == sum(len(r.slots) for r in self.requests.values()), "slots hold tokens of nobody")

    def table(self, req: int) -> list[int]:
        """Return the block table of a request."""
        return self.requests[req].table

    # -- handlers ------------------------------------------------------------------------------------------------------

    def _step(self, req: int, number: int, tokens: int) -> None:
        _need(number > self.step, f"step {self.step} was before it")
        _need(tokens == self._scheduled, f"{self._scheduled} tokens were written for it")
        self.step = number
        self._scheduled = 0

    def _admit(self, req: int, a: int, b: int) -> None:
        _need(req not in self.requests or not self.requests[req].alive, "it is admitted already")
        _need(not self._has_ended(req), "it is done")
        self.requests[req] = _Request()

    def _share(self, req: int, block: int, b: int) -> None:
        request = self._live(req)
        size = self.block_size
        first = len(request.table) * size
        _need(request.written == first == request.length, "a cached block comes behind computed tokens")
        self.holders[block] = self.holders.get(block, 0) + 1
        request.table.append(block)
        for offset in range(size):
            writer, position, pure = self.contents.get(block * size + offset, (-1, -1, False))
            _need(position == first + offset, f"slot {offset} holds token {position}, not {first + offset}")
            _need(pure, f"slot {offset} was written after an eviction")
            _need(self._same is None or self._same(writer, req, first + size), f"it holds the prompt of {writer}")
            self._place(req, first + offset, block * size + offset, shared=True)
        request.written += size
        request.length += size

    def _alloc(self, req: int, block: int, b: int) -> None:
        self._take(block)
        self.holders[block] = 1
        self._live(req).table.append(block)

    def _append(self, req: int, first: int, count: int) -> None:
        request = self._live(req)
        size, slots, tokens, contents, pure = self.block_size, request.slots, self.tokens, self.contents, request.pure
        _need(first == request.length, f"the next logical position is {request.length}")
        _need(count > 0, "no token is written")
        end = first + count
        while first < end:
            index, offset = divmod(request.written, size)
            block = request.table[index]
            _need(not self._in_flight(block), f"block {block} is being copied")
            _need(self.holders[block] == 1, f"block {block} is shared")
            fit = min(end - first, size - offset)
            slot = block * size + offset
            for position in range(first, first + fit):
                _need(slot not in tokens, f"slot {slot} holds a live token")
                tokens[slot] = {req: position}
                slots[position] = slot
                contents[slot] = req, position, pure
                slot += 1
            request.written += fit
            first += fit
        request.length += count
        self._scheduled += count

    def _reuse(self, req: int, position: int, slot: int) -> None:
        request = self._live(req)
        block = slot // self.block_size
        _need(position == request.length, f"the next logical position is {request.length}")
        _need(block in request.table, f"block {block} is not in the table")
        _need(not self._in_flight(block), f"block {block} is being copied")
        _need(self.holders[block] == 1, f"block {block} is shared")
        index = request.table.index(block)
        _need(index * self.block_size + slot % self.block_size < request.written, "it was never written")
        self._place(req, position, slot)
        self.contents[slot] = req, position, False
        request.length += 1
        self._scheduled += 1

    def _evict(self, req: int, position: int, slot: int) -> None:
        request = self._live(req)
        if request.slots.get(position) != slot:
            raise ReplayError(f"token {position} is at {request.slots.get(position)}")
        del request.slots[position]
        request.pure = False
        self._remove(req, slot)

    def _free(self, req: int, block: int, why: int) -> None:
        request = self.requests.get(req, _Request(alive=False))  # one that has ended, of which a copy ends now
        # A request that is back may have found a block in the cache that a copy of its former life still reads.
        if block in request.table and why != Why.CANCEL:
            mine = [p.sources + p.targets for p in self.plans.values() if p.req == req and not p.cancelled]
            _need(not any(block in blocks for blocks in mine), "a copy in flight uses it")
            if request.alive:
                self._need_empty(req, block)
                index = request.table.index(block)
                # A whole block's slots; of the tail those written, of a block kept behind it none.
                request.written -= max(0, min(self.block_size, request.written - index * self.block_size))
            else:
                self._forget(req, request, block)
            request.table.remove(block)
            self.holders[block] -= 1
            self._drop_if_gone(req)
        else:
            for number, plan in self.plans.items():
                if plan.req == req and block in plan.sources + plan.destinations + plan.targets:
                    _need(plan.copied, f"plan {number} still copies")
                    if block in plan.sources:
                        plan.sources.remove(block)
                        self._unread(block)
                    else:
                        (plan.targets if block in plan.targets else plan.destinations).remove(block)
                        del self._fills[block]
                    self._drop_plan_if_gone(number, plan)
                    break
            else:
                _need(False, f"request {req} does not hold it (why={why})")
        if self.holders[block] == 0 and not self._in_flight(block):
            del self.holders[block]
            _need(why != Why.REPACK or not self._occupied(block), "tokens are left in it")

    def _plan(self, req: int, number: int, tokens: int) -> None:
        _need(number not in self.plans, "the number is taken")
        _need(all(p.req != req or p.cancelled for p in self.plans.values()), "a plan of this request is in flight")
        self._live(req)
        self.plans[number] = _Plan(req, tokens)

    def _group(self, req: int, number: int, first: int) -> None:
        plan = self.plans[number]
        _need(plan.req == req and not plan.sources, "it has sources already")
        plan.group = _Group() if number == first else self.plans[first].group
        _need(plan.group is not None, f"plan {first} is of no group")
        assert plan.group is not None
        plan.group.plans.append(plan)

    def _source(self, req: int, block: int, number: int) -> None:
        mine = self.plans[number]
        if self._in_flight(block):
            others = [p for p in self.plans.values() if p.group is None or p.group is not mine.group]
            _need(all(block not in p.sources + p.destinations + p.targets for p in others), "another plan uses it")
        _need(mine.group is not None or self.holders[block] == 1, "it is shared")
        _need(block in self._live(req).table, "it is not in the table")
        mine.sources.append(block)
        self._reads[block] += 1

    def _reserve(self, req: int, block: int, number: int) -> None:
        self._take(block)
        plan = self.plans[number]
        plan.destinations.append(block)
        self._fills[block] = plan
        for slot in self._slots(block):
            self.contents.pop(slot, None)  # the copy writes there, whatever becomes of the plan

    def _target(self, req: int, block: int, number: int) -> None:
        plan = self.plans[number]
        _need(not self._in_flight(block), "another plan uses it")
        _need(self.holders[block] == 1 and block in self._live(req).table, "it is shared, or of somebody else")
        plan.targets.append(block)
        self._fills[block] = plan
        for slot in self._slots(block):
            if slot not in self.tokens:
                self.contents.pop(slot, None)

    def _copied(self, req: int, number: int, b: int) -> None:
        plan = self.plans[number]
        _need(not plan.copied, "it was copied already")
        if plan.group is not None:
            given = [p.sources for p in plan.group.plans if not p.copied and not p.cancelled]
            _need(all(sources == given[0] for sources in given), "the sources of its group differ")
        plan.copied = True
        if plan.cancelled:
            self._drop_plan_if_gone(number, plan)

    def _move(self, req: int, source: int, target: int) -> None:
        request = self._live(req)
        tokens = self.tokens
        owners = tokens[source]
        position = owners[req]
        block = target // self.block_size
        if block in self._fills:
            plan = self._fills[block]
            _need(plan.req == req and plan.copied and not plan.cancelled, "its plan is not ready")
            _need(source // self.block_size in plan.sources, "the source is not in the plan")
            if block in plan.targets:
                index = request.table.index(block)
                _need(index * self.block_size + target % self.block_size < request.written, "it was never written")
            plan.moves += 1
        elif self.holders.get(block) != 1 or block in self._reads or block not in request.table:
            _need(block in request.table, f"block {block} is not in the table")
            raise ReplayError(f"block {block} is shared or being copied")
        elif source // self.block_size in self._reads:
            raise ReplayError(f"block {source // self.block_size} is being copied, to somewhere else")
        if target in tokens:
            raise ReplayError(f"slot {target} holds a live token")
        del owners[req]
        if not owners:
            del tokens[source]
        tokens[target] = {req: position}
        request.slots[position] = target
        self.contents[target] = self.contents[source]

    def _commit(self, req: int, number: int, index: int) -> None:
        plan = self.plans[number]
        request = self._live(req)
        _need(plan.copied and not plan.cancelled and plan.req == req, "it is not ready")
        kept = [block for block in plan.destinations if self._occupied(block)]
        table = request.table
        _need(table[index] == plan.sources[0], "the first source is not where it says")
        _need([block for block in table if block in plan.sources] == plan.sources, "sources are not in table order")
        freed = 0
        for block in plan.sources:
            self._need_empty(req, block)
            self.holders[block] -= 1
            freed += self.holders[block] == 0
        if plan.group is None:
            _need(len(kept) < freed, "it frees no block")
        else:
            self._commit_of(plan.group, freed, len(kept))
        gone = len(plan.sources) - len(kept)
        tail = table[-1] in plan.sources
        table[:] = [block for block in table if block not in plan.sources]
        table[index:index] = kept
        request.written -= gone * self.block_size
        if tail and kept and table[-1] == kept[-1]:
            # Behind the last token of the last destination slots are free, if it is where tokens are appended.
            size = self.block_size
            fill = min(size, plan.tokens - plan.destinations.index(kept[-1]) * size)
            request.written = (len(table) - 1) * size + fill
        self._leave_targets(plan)
        for block in kept:
            self.holders[block] = 1
            plan.destinations.remove(block)
            del self._fills[block]

    def _commit_of(self, group: _Group, freed: int, kept: int) -> None:
        """Count one plan of a group; with the last one the group must have freed more blocks than it took."""
        group.committed += 1
        group.freed += freed
        group.kept += kept
        if group.committed == sum(not plan.cancelled for plan in group.plans):
            _need(group.kept < group.freed, "its group frees no block")

    def _cancel(self, req: int, number: int, b: int) -> None:
        plan = self.plans[number]
        _need(not plan.cancelled, "it was cancelled already")
        _need(plan.group is None or not plan.group.committed, "others of its group took effect")
        plan.cancelled = True
        if plan.copied:
            for block in plan.sources:
                self._unread(block)
            plan.sources.clear()  # they stay in the table
            self._leave_targets(plan)
            self._drop_plan_if_gone(number, plan)

    def _defer(self, req: int, block: int, b: int) -> None:
        request = self.requests[req]
        mine = [p.sources + p.targets for p in self.plans.values() if p.req == req]
        _need(any(block in blocks for blocks in mine), "no copy uses it")
        self._forget(req, request, block)
        request.table.remove(block)
        self.holders[block] -= 1
        self._drop_if_gone(req)

    def _leave(self, req: int) -> None:
        self._live(req).alive = False

    def _preempt(self, req: int, a: int, b: int) -> None:
        self._leave(req)

    def _finish(self, req: int, a: int, b: int) -> None:
        _need(not self._has_ended(req), "it is done already")
        if self.requests[req].alive:
            self._leave(req)  # if not, it was preempted with its last token on its way
        self._ended[req >> 10] = self._ended.get(req >> 10, 0) | 1 << (req & 1023)
        self._drop_if_gone(req)

    def _pack(self, req: int, written: int, b: int) -> None:
        request = self._live(req)
        size = self.block_size
        if all(self.holders[block] == 1 and not self._in_flight(block) for block in request.table):
            _need(written == len(request.slots), f"{len(request.slots)} tokens are alive")
        else:
            tail = [slot % size for slot in request.slots.values() if slot // size == request.table[-1]]
            _need(written == (len(request.table) - 1) * size + max(tail) + 1, "it ends elsewhere")
        request.written = written

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _live(self, req: int) -> _Request:
        request = self.requests.get(req)
        if request is None or not request.alive:
            raise ReplayError(f"request {req} has no table")
        return request

    def _has_ended(self, req: int) -> bool:
        return bool(self._ended.get(req >> 10, 0) >> (req & 1023) & 1)

    def _drop_if_gone(self, req: int) -> None:
        """Forget a request that is done and has given back its last block."""
        if not self.requests[req].table and self._has_ended(req):
            del self.requests[req]

    def _drop_plan_if_gone(self, number: int, plan: _Plan) -> None:
        if not plan.sources and not plan.destinations and not plan.targets:
            del self.plans[number]

    def _leave_targets(self, plan: _Plan) -> None:
        for block in plan.targets:
            del self._fills[block]
        plan.targets.clear()

    def _take(self, block: int) -> None:
        _need(0 < block < self.num_blocks, f"block {block} is not in the pool")
        _need(block not in self.holders, f"block {block} is in use")
        self.holders[block] = 0

    def _in_flight(self, block: int) -> bool:
        return block in self._reads or block in self._fills

    def _unread(self, block: int) -> None:
        """One copy fewer reads the block."""
        self._reads[block] -= 1
        if not self._reads[block]:
            del self._reads[block]

    def _slots(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def _occupied(self, block: int) -> bool:
        return any(slot in self.tokens for slot in self._slots(block))

    def _need_empty(self, req: int, block: int) -> None:
        left = [self.tokens[slot][req] for slot in self._slots(block) if req in self.tokens.get(slot, ())]
        _need(not left, f"tokens {left[:3]} are left in block {block}")

    def _forget(self, req: int, request: _Request, block: int) -> None:
        """Take the tokens of a request out of a block that it gives back."""
        for slot in self._slots(block):
            if req in self.tokens.get(slot, ()):
                del request.slots[self.tokens[slot][req]]
                self._remove(req, slot)

    def _place(self, req: int, position: int, slot: int, *, shared: bool = False) -> None:
        owners = self.tokens.setdefault(slot, {})
        _need(shared or not owners, f"slot {slot} holds a live token")
        owners[req] = position
        self.requests[req].slots[position] = slot

    def _remove(self, req: int, slot: int) -> None:
        owners = self.tokens[slot]
        del owners[req]
        if not owners:
            del self.tokens[slot]


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ReplayError(otherwise)
