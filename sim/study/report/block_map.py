"""The pool over time, small enough for a page: chosen steps, each as what changed since the one before."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from typing import Any

import numpy as np

from sim.errors import InputError
from sim.kv.block_states import Frame, Role, frames
from sim.kv.blocks import Why
from sim.kv.events import Kind, KVEventLog
from sim.kv.replay import ReplayError

__all__ = ["MOST_FRAMES", "STREAMS", "block_map", "chosen_moments", "varints"]

MOST_FRAMES = 600
"""Moments that a page shows of a run."""

STREAMS = ("counts", "blocks", "flags", "written", "owner", "live")
"""What :func:`_streams` writes, each a compressed string of bytes."""

ROLE_BITS, WRITTEN_BIT, OWNER_BIT, LIVE_BIT = 7, 8, 16, 32

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
COUNTED = {
    "admitted": Kind.ADMIT,
    "finished": Kind.FINISH,
    "preempted": Kind.PREEMPT,
    "died": Kind.EVICT,
    "moved": Kind.MOVE,
    "committed": Kind.COMMIT,
    "packed": Kind.PACK,
}
"""Events counted between two frames, by the name that the page knows them by."""

OF_REQUESTS = ("admitted", "finished", "preempted")
"""Those that each unit of a request has."""


def block_map(log: KVEventLog, *, limit_bytes: int, most_frames: int = MOST_FRAMES) -> dict[str, Any]:
    """Return the pool over time as what the page reads: plain values and base64 strings, ready for JSON.

    Parameters
    ----------
    log
        The events of a run.
    limit_bytes
        Compressed size of the block states; neighbouring frames are merged until it holds.
    most_frames
        Most moments that are looked at.

    Returns
    -------
    data
        ``block_size``, ``num_blocks``, ``units``, ``events``, ``steps``: of the log. ``frames``: a list a column with
        one entry a frame: ``step``, ``time_s``, ``used``, ``free``, ``live``, ``dead``, ``tail``, ``reserved``,
        ``table_blocks``, ``ideal_blocks``; and since the frame before: ``from`` and ``to`` (blocks that repacks moved
        tokens out of or into) and the counts of :data:`COUNTED`. ``states``: what changed, see :func:`_streams`.
        Times rise: a repack that ends just as the next step begins is a microsecond earlier.

    Raises
    ------
    InputError
        If there is no step in the log, or something that cannot have happened.
    """
    units = log.units
    marks = chosen_moments(log, most_frames)
    try:
        shown = list(frames(log, marks))
    except ReplayError as error:
        raise InputError(f"the KV events cannot have happened: {error}") from None
    while True:
        coded = _streams(shown, log.num_blocks, -(-log.block_size // 8))
        if sum(map(len, coded.values())) <= limit_bytes or len(shown) <= 2:
            break
        shown = [_merged(*pair) if len(pair) == 2 else pair[0] for pair in _pairs(shown)]
    return {
        "block_size": log.block_size,
        "num_blocks": log.num_blocks,
        "units": units,
        "events": len(log),
        "steps": int((log.records["kind"] == Kind.STEP).sum()),
        "frames": _columns(shown, log, units),
        "states": {name: base64.b64encode(data).decode() for name, data in coded.items()},
    }


def chosen_moments(log: KVEventLog, most: int) -> list[int]:
    """Return the moments to show, as events that had happened: steps just begun, repacks just over, and the end.

    If there are too many: up to half of ``most`` are repacks and the steps before them, spread over the run; the others
    are steps that lie evenly in it.

    Raises
    ------
    InputError
        If there is no step.
    """
    kinds = log.records["kind"]
    steps = np.flatnonzero(kinds == Kind.STEP) + 1
    if not len(steps):
        raise InputError("there is no step among the KV events, and no block map to draw")
    over = _repacks_over(log, steps)
    if len(steps) + len(over) > most:
        over = over[np.linspace(0, len(over) - 1, min(most // 4, len(over))).round().astype(int)]
        before = steps[np.maximum(0, np.searchsorted(steps, over) - 1)]
        even = steps[np.linspace(0, len(steps) - 1, most - 2 * len(over)).round().astype(int)]
        steps = np.union1d(before, even)
    return [*map(int, np.unique(np.concatenate((steps, over, [len(log)]))))]


def _repacks_over(log: KVEventLog, steps: Ints) -> Ints:
    """Return the moments behind the last event of the repacks between two steps, before the memory is handed out."""
    kinds = log.records["kind"]
    part = np.isin(kinds, (Kind.MOVE, Kind.COMMIT, Kind.PACK)) | (
        (kinds == Kind.FREE) & (log.records["b"] == Why.REPACK)
    )
    ends: Ints = np.flatnonzero(part) + 1
    between = np.searchsorted(steps, ends)
    last: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.append(between[1:] != between[:-1], True)[: len(ends)]
    return ends[last]


def _pairs(shown: list[Frame]) -> list[list[Frame]]:
    return [shown[at : at + 2] for at in range(0, len(shown), 2)]


def _merged(one: Frame, two: Frame) -> Frame:
    """Return the second of two neighbouring frames, as the difference to what came before both."""
    both = np.concatenate((two.blocks, one.blocks))
    blocks, place = np.unique(both, return_index=True)  # of equal ones the first, which is the later state

    def latest(field: str) -> Any:
        return np.concatenate((getattr(two, field), getattr(one, field)))[place]

    return two._replace(
        blocks=blocks,
        **{field: latest(field) for field in ("role", "written", "owner", "live")},
        moved_from=np.union1d(one.moved_from, two.moved_from),
        moved_to=np.setdiff1d(np.union1d(one.moved_to, two.moved_to), np.union1d(one.moved_from, two.moved_from)),
    )


@dataclasses.dataclass
class _Pool:
    """The state of every block."""

    role: Any
    written: Any
    owner: Any
    live: Any

    @classmethod
    def empty(cls, blocks: int, width: int) -> _Pool:
        return cls(
            np.zeros(blocks, np.uint8),
            np.zeros(blocks, np.int64),
            np.full(blocks, -1, np.int64),
            np.zeros((blocks, width), np.uint8),
        )

    def put(self, frame: Frame) -> None:
        for name in ("role", "written", "owner", "live"):
            getattr(self, name)[frame.blocks] = getattr(frame, name)


def _streams(shown: list[Frame], num_blocks: int, width: int) -> dict[str, bytes]:
    """Return the frames as compressed streams (zlib) of bytes, read side by side from first to last.

    ``counts``: a varint a frame, how many blocks changed. For each of these, rising: ``blocks``: a varint, the distance
    to the one before (to -1 for the first). ``flags``: a byte: the role, + 8 if ``written`` has a varint for it, + 16
    if ``owner`` has a varint (the owner + 1), + 32 if ``live`` has its ceil(S / 8) bytes. What is not there has not
    changed. The pool is empty before the first frame.
    """
    parts: dict[str, list[bytes]] = {name: [] for name in STREAMS}
    pool = _Pool.empty(num_blocks, width)
    for frame in shown:
        at = frame.blocks
        written = pool.written[at] != frame.written
        owner = pool.owner[at] != frame.owner
        live = (pool.live[at] != frame.live).any(axis=1)
        changed = written | owner | live | (pool.role[at] != frame.role)
        flags = frame.role + WRITTEN_BIT * written + OWNER_BIT * owner + LIVE_BIT * live
        parts["counts"].append(varints(np.array([changed.sum()])))
        parts["blocks"].append(varints(np.diff(at[changed], prepend=-1)))
        parts["flags"].append(flags[changed].astype(np.uint8).tobytes())
        parts["written"].append(varints(frame.written[written]))
        parts["owner"].append(varints(frame.owner[owner] + 1))
        parts["live"].append(frame.live[live].tobytes())
        pool.put(frame)
    return {name: zlib.compress(b"".join(chunks), 9) for name, chunks in parts.items()}


def varints(values: Ints) -> bytes:
    """Return whole numbers from 0 on as LEB128: seven bits a byte, low ones first, + 128 if another byte follows."""
    if not len(values):
        return b""
    shifts = 7 * np.arange(10)
    digits = (values[:, None] >> shifts[None, :]) & 127
    length = np.maximum(1, 10 - np.argmax(digits[:, ::-1] != 0, axis=1))
    length[values == 0] = 1
    follows = np.arange(10)[None, :] < length[:, None] - 1
    used = np.arange(10)[None, :] < length[:, None]
    return bytes((digits + 128 * follows)[used].astype(np.uint8).tobytes())


def _columns(shown: list[Frame], log: KVEventLog, units: int) -> dict[str, list[Any]]:
    """Return the figures of each frame."""
    size = log.block_size
    pool = _Pool.empty(log.num_blocks, -(-size // 8))
    kinds = log.records["kind"]
    columns: dict[str, list[Any]] = {}

    def add(**values: Any) -> None:
        for name, value in values.items():
            columns.setdefault(name, []).append(value)

    first = 0
    for frame in shown:
        pool.put(frame)
        reserved = np.isin(pool.role, (Role.DESTINATION, Role.LEFT))
        in_table = (pool.role != Role.FREE) & ~reserved
        live = int(np.bitwise_count(pool.live[in_table]).sum())
        written = int(pool.written[in_table].sum())
        listed = int(in_table.sum())
        happened = np.bincount(kinds[first : frame.event], minlength=max(Kind) + 1)
        add(
            step=frame.step,
            time_s=round(frame.time_ns / 1e9, 7),
            used=listed + int(reserved.sum()),
            free=log.num_blocks - 1 - listed - int(reserved.sum()),
            live=live,
            dead=written - live,
            tail=listed * size - written,
            reserved=int(reserved.sum()),
            ideal_blocks=frame.ideal_blocks,
            table_blocks=frame.table_blocks,
            **{"from": frame.moved_from.tolist(), "to": frame.moved_to.tolist()},
            **{name: int(happened[kind]) // (units if name in OF_REQUESTS else 1) for name, kind in COUNTED.items()},
        )
        first = frame.event
    times = columns["time_s"]
    for place in range(len(times) - 2, -1, -1):
        if times[place] >= times[place + 1]:
            times[place] = round(times[place + 1] - 1e-6, 7)
    return columns
