"""What each block of the pool holds at chosen moments of a log: the frames of a block map.

The interpreter of :mod:`sim.kv.replay` does the work; here it is asked which blocks changed from one moment to the
next, so that a frame costs what has changed and not what the pool has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from sim.kv.blocks import Why
from sim.kv.events import CHUNK, Kind, KVEventLog
from sim.kv.replay import FIELDS, Replay

__all__ = ["BlockStates", "Frame", "Role", "frames"]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


class Role(IntEnum):
    """What a block is used for."""

    FREE = 0
    """It is in the pool's free list."""
    HELD = 1
    """One table lists it."""
    SHARED = 2
    """Several tables list it."""
    SOURCE = 3
    """A table lists it, and a copy in flight reads it."""
    DESTINATION = 4
    """No table lists it yet: a copy in flight fills it."""
    TARGET = 5
    """A table lists it, and a copy in flight writes into its dead slots."""
    LEFT = 6
    """No table lists it any more, but a copy in flight still reads it."""


class Frame(NamedTuple):
    """The pool at one moment, as the difference to the frame before (to an empty pool for the first one).

    Attributes
    ----------
    event
        Events that had happened.
    time_ns
        Of the last of them.
    step
        Number of the last step begun; -1 before the first.
    blocks
        int64[n], rising: the blocks that may have changed.
    role
        uint8[n]: :class:`Role`.
    written
        int64[n]: slots from the block's first on that were ever written for its table; the others are tail slack.
    owner
        int64[n]: number of a request whose table lists it, or whose copy uses it; -1 for a free block.
    live
        uint8[n, ceil(S / 8)]: bit ``i % 8`` of byte ``i // 8`` says whether slot ``i`` holds a live token.
    ideal_blocks
        Blocks that the live tokens would take if each table were dense.
    table_blocks
        Blocks listed in tables, a shared one once for each.
    moved_from, moved_to
        Blocks that live tokens left or reached since the frame before, by repacking.
    """

    event: int
    time_ns: int
    step: int
    blocks: Ints
    role: np.ndarray[tuple[int], np.dtype[np.uint8]]
    written: Ints
    owner: Ints
    live: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    ideal_blocks: int
    table_blocks: int
    moved_from: Ints
    moved_to: Ints


class BlockStates(Replay):
    """Replay that knows which blocks changed since :meth:`take` was last called.

    Parameters
    ----------
    block_size, num_blocks
        Of the pool.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, num_blocks)
        self._touched: set[int] = set()
        self._owner: dict[int, int] = {}
        self._changed_hands: set[int] = set()
        """Blocks that several tables list or did: the last owner may have left one of these to another."""

    def apply_records(self, records: np.ndarray) -> None:
        """Apply an array of :data:`sim.kv.events.EVENT`.

        Raises
        ------
        ReplayError
            If an event cannot have happened.
        """
        kinds, a, b, size = records["kind"], records["a"], records["b"], self.block_size
        in_b = b[np.isin(kinds, (Kind.EVICT, Kind.REUSE, Kind.MOVE))] // size
        in_a = a[kinds == Kind.MOVE] // size
        named = a[
            np.isin(kinds, (Kind.SHARE, Kind.ALLOC, Kind.FREE, Kind.SOURCE, Kind.RESERVE, Kind.DEFER, Kind.TARGET))
        ]
        self._touched.update(np.unique(np.concatenate((in_a, in_b, named))).tolist())
        self.apply(records[FIELDS].tolist())

    def take(self) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """Return the blocks that may have changed since the last call, rising, and the state of each.

        Returns
        -------
        blocks, states
            A state is (role, written, owner, live slots as the bits of a number); see :class:`Frame`.
        """
        blocks = sorted(self._touched)
        self._touched.clear()
        return blocks, [self._state(block) for block in blocks]

    def dense(self) -> tuple[int, int]:
        """Return the blocks that the live tokens would take if each table were dense, and those that tables list."""
        size = self.block_size
        requests = [request for request in self.requests.values() if request.table]
        return sum(-(-len(request.slots) // size) for request in requests), sum(len(r.table) for r in requests)

    def _state(self, block: int) -> tuple[int, int, int, int]:
        holders = self.holders.get(block)
        if holders is None:
            return int(Role.FREE), 0, -1, 0
        owner = self._owner[block]
        if holders == 0 and block in self._fills:
            return int(Role.DESTINATION), 0, owner, 0
        if holders == 0:
            readers = [plan.req for plan in self.plans.values() if block in plan.sources]
            return int(Role.LEFT), 0, owner if owner in readers else readers[0], 0
        tokens, live, bit = self.tokens, 0, 1
        for slot in self._slots(block):
            if slot in tokens:
                live |= bit
            bit <<= 1
        if block in self._changed_hands:
            owner = self._reader(block, owner)
        role = Role.SHARED if holders > 1 else Role.HELD
        if block in self._fills:
            role = Role.TARGET
        elif block in self._reads:
            role = Role.SOURCE
        return int(role), self._written(block, owner), owner, live

    def _reader(self, block: int, owner: int) -> int:
        """Return a request whose table lists the block: the one that took it last, if it still does."""
        known = self.requests.get(owner)
        if known is None or block not in known.table:
            owner = next((req for req, request in self.requests.items() if block in request.table), owner)
        return owner

    def _written(self, block: int, owner: int) -> int:
        """Return how many slots of a block were written; only those at the end of a table are not full."""
        request = self.requests[owner]
        full, rest = divmod(request.written, self.block_size)
        if block not in request.table[full:]:
            return self.block_size
        return rest if request.table[full] == block else 0

    # -- handlers of events that change blocks which they do not name --------------------------------------------------

    def _alloc(self, req: int, block: int, b: int) -> None:
        super()._alloc(req, block, b)
        self._owner[block] = req
        self._changed_hands.discard(block)

    def _reserve(self, req: int, block: int, number: int) -> None:
        super()._reserve(req, block, number)
        self._owner[block] = req
        self._changed_hands.discard(block)

    def _share(self, req: int, block: int, b: int) -> None:
        super()._share(req, block, b)
        self._owner[block] = req
        self._changed_hands.add(block)

    def _append(self, req: int, first: int, count: int) -> None:
        request, size = self._live(req), self.block_size
        before = request.written
        super()._append(req, first, count)
        self._touched.update(request.table[before // size : (request.written - 1) // size + 1])

    def _commit(self, req: int, number: int, index: int) -> None:
        plan = self.plans[number]
        self._touched.update(plan.sources, plan.destinations, plan.targets)
        super()._commit(req, number, index)
        self._touched.update(self._live(req).table[-2:])

    def _cancel(self, req: int, number: int, b: int) -> None:
        plan = self.plans[number]
        self._touched.update(plan.sources, plan.destinations, plan.targets)
        super()._cancel(req, number, b)

    def _pack(self, req: int, written: int, b: int) -> None:
        super()._pack(req, written, b)
        self._touched.update(self._live(req).table[-2:])


def frames(log: KVEventLog, events: Sequence[int]) -> Iterator[Frame]:
    """Yield the pool at chosen moments of a log.

    Parameters
    ----------
    log
        The events.
    events
        How many of them have happened at each moment, rising.

    Raises
    ------
    ReplayError
        If an event cannot have happened.
    """
    states = BlockStates(log.block_size, log.num_blocks)
    width = -(-log.block_size // 8)
    first = 0
    for last in events:
        records = log.records[first:last]
        for part in range(0, len(records), CHUNK):
            states.apply_records(records[part : part + CHUNK])
        blocks, values = states.take()
        role, written, owner, live = zip(*values, strict=True) if values else ((), (), (), ())
        moved_from, moved_to = _moved(records, log.block_size)
        yield Frame(
            event=int(last),
            time_ns=int(log.records["time_ns"][last - 1]) if last else 0,
            step=states.step,
            blocks=np.array(blocks, np.int64),
            role=np.array(role, np.uint8),
            written=np.array(written, np.int64),
            owner=np.array(owner, np.int64),
            live=np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in live), np.uint8).reshape(-1, width),
            **dict(zip(("ideal_blocks", "table_blocks"), states.dense(), strict=True)),
            moved_from=moved_from,
            moved_to=moved_to,
        )
        first = last


def _moved(records: np.ndarray, block_size: int) -> tuple[Ints, Ints]:
    """Return the blocks that a repack emptied or took tokens from, and those that it filled."""
    moves = records[records["kind"] == Kind.MOVE]
    source, target = moves["a"] // block_size, moves["b"] // block_size
    other = source != target
    emptied = records["a"][(records["kind"] == Kind.FREE) & (records["b"] == Why.REPACK)]
    moved_from = np.union1d(source[other], emptied)
    return moved_from.astype(np.int64), np.setdiff1d(target[other], moved_from).astype(np.int64)
