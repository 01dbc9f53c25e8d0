"""Readers of a block map that share nothing with what writes it: one for the page's streams, one for the events."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from sim.kv.block_states import Role
from sim.kv.events import KVEventLog
from sim.kv.replay import FIELDS, Replay


class State(NamedTuple):
    """A block: its role, how many slots were written, who may own it, and which slots are live."""

    role: int
    written: int
    owners: frozenset[int]
    live: frozenset[int]


def decoded(data: dict[str, Any]) -> Iterator[list[State]]:
    """Yield all blocks of each frame of what :func:`sim.study.report.block_map.block_map` returned."""
    size, blocks = data["block_size"], data["num_blocks"]
    width = -(-size // 8)
    streams = {name: iter(zlib.decompress(base64.b64decode(text))) for name, text in data["states"].items()}

    def number(name: str) -> int:
        value = shift = 0
        for byte in streams[name]:
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        return value

    states = [State(0, 0, frozenset({-1}), frozenset())] * blocks
    for _ in data["frames"]["step"]:
        block = -1
        for _ in range(number("counts")):
            block += number("blocks")
            flags = next(streams["flags"])
            state = states[block]._replace(role=flags & 7)
            if flags & 8:
                state = state._replace(written=number("written"))
            if flags & 16:
                state = state._replace(owners=frozenset({number("owner") - 1}))
            if flags & 32:
                bits = int.from_bytes(bytes(next(streams["live"]) for _ in range(width)), "little")
                state = state._replace(live=frozenset(slot for slot in range(size) if bits >> slot & 1))
            states[block] = state
        yield list(states)
    assert all(next(stream, None) is None for stream in streams.values()), "something is left in a stream"


def judged(log: KVEventLog, events: int) -> list[State]:
    """Return all blocks after so many events, as the interpreter of the events has them."""
    replay = Replay(log.block_size, log.num_blocks)
    replay.apply(log.records[:events][FIELDS].tolist())
    size = log.block_size
    copied: dict[int, set[int]] = {}  # block -> whose copies read or fill it
    filled, targets = set(), set()
    for plan in replay.plans.values():
        filled.update(plan.destinations)
        targets.update(plan.targets)
        for block in plan.sources + plan.destinations + plan.targets:
            copied.setdefault(block, set()).add(plan.req)
    readers: dict[int, set[int]] = {}
    written: dict[int, int] = {}
    live: dict[int, set[int]] = {}
    for req, request in replay.requests.items():
        for place, block in enumerate(request.table):
            readers.setdefault(block, set()).add(req)
            fill = min(size, max(0, request.written - place * size))
            assert written.setdefault(block, fill) == fill
        for slot in request.slots.values():
            live.setdefault(slot // size, set()).add(slot % size)
    states = []
    for block in range(log.num_blocks):
        if block in readers:
            role = Role.SHARED if len(readers[block]) > 1 else Role.HELD
            if block in copied:
                role = Role.TARGET if block in targets else Role.SOURCE
            states.append(State(role, written[block], frozenset(readers[block]), frozenset(live.get(block, ()))))
        else:
            role = Role.DESTINATION if block in filled else Role.LEFT if block in copied else Role.FREE
            states.append(State(role, 0, frozenset(copied.get(block, {-1})), frozenset()))
    return states


def same(shown: State, known: State) -> bool:
    """Tell whether a shown block is as the events say; of several readers it names one."""
    return shown._replace(owners=known.owners) == known and shown.owners <= known.owners
