"""The KV cache's control plane: block pool, block tables and token table behind one door.

The paper's three calls are :meth:`KVCache.sync_new_tokens`, :meth:`KVCache.evict_tokens` and
:meth:`KVCache.apply_moves`; all of them touch metadata only and take many tokens at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.jit import njit
from sim.kv.arena import CellArena, make_room
from sim.kv.blocks import BlockPool, emit, list_block, release_row, unlink
from sim.kv.events import EVENT, Kind, KVEventLog
from sim.kv.holes import forget_holes, holes_of
from sim.kv.pack import pack_rows, packs_into_fewer
from sim.kv.repack import RepackPlan
from sim.kv.repacker import Repacker
from sim.kv.state import ROW, H, State, Store
from sim.kv.tokens import append_tokens, evict_tokens, reuse_slot
from sim.kv.units import ONE_UNIT, Units, unit_key
from sim.kv.view import View, fill_view

__all__ = ["KVCache"]

MAX_SLOTS = 2**31 - 1
"""Most slots of a pool: their numbers are 32-bit integers."""

_SHARE = int(Kind.SHARE)
_NO_ROW = np.zeros(1, ROW)
_NO_ROW["plan"] = -1


@njit
def _share_block(s: State, row: int, block: int) -> None:
    """Put a cached block at the end of the row's table; its contents count as the row's computed tokens, all alive."""
    size = s.block_size
    record = s.rows[row]
    shared = s.blocks[block]
    if shared.ref == 0:
        unlink(s, block)
        shared.owner = row
    shared.ref += 1
    if record.tracked:
        if shared.tables > 0:
            s.header[H.LIVE] += size - shared.live
        shared.live = size
        for i in range(size):
            slot, cell = block * size + i, record.start + record.live + i
            s.readers[slot] += 1
            s.position[cell] = record.computed + i
            s.slot[cell] = slot
            s.columns[:, cell] = 0.0
    list_block(s, row, block)
    record.written += size
    record.live += size
    record.computed += size
    emit(s, _SHARE, record.ordinal, block, 0)


@njit
def _share_blocks(s: State, row: int, blocks: np.ndarray) -> None:
    for block in blocks:
        _share_block(s, row, block)


class KVCache:
    """Blocks, tables and tokens of all running requests.

    Parameters
    ----------
    num_blocks
        Blocks of the pool, block 0 (never handed out) included, as vLLM counts them.
    block_size
        Token slots a block (S).
    columns
        Names of the float32 columns to keep for each live token.
    tracked
        Whether single tokens matter. If nothing is ever evicted, slots follow from the block table and the token table
        stays empty. Units with a window are not tracked: of them the oldest token dies, again and again.
    headroom_blocks
        Free blocks that only a repack may take.
    logging
        Keep a :class:`KVEventLog`.
    units
        What decides alone which tokens live: each request has a row for each of them (:mod:`sim.kv.units`). Blocks are
        then a unit's: S tokens of its layers and heads.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        columns: Sequence[str] = (),
        tracked: bool = True,
        headroom_blocks: int = 0,
        logging: bool = False,
        units: Units = ONE_UNIT,
    ) -> None:
        if block_size < 1:
            raise InputError(f"block size: expected at least 1 token, got {block_size}")
        if num_blocks < 2:
            raise InputError(f"KV blocks: expected at least 2 (block 0 is never handed out), got {num_blocks}")
        if num_blocks * block_size > MAX_SLOTS:
            raise InputError(
                f"KV pool: {num_blocks} blocks of {block_size} tokens, expected at most {MAX_SLOTS} slots in all"
            )
        if not 0 <= headroom_blocks < num_blocks - 1:
            raise InputError(
                f"headroom: expected 0 to {num_blocks - 2} blocks of a pool of {num_blocks - 1}, got {headroom_blocks}"
            )
        self.store = Store(
            num_blocks, block_size, columns=len(columns), tracked=tracked, logging=logging, rows=64 * units.count
        )
        self.store.s.header[H.RESERVE] = headroom_blocks
        self.pool = BlockPool(self.store)
        self.repacker = Repacker(self.store, self.pool)
        self.arena = CellArena(self.store)
        self.column_names = tuple(columns)
        self.tracked = tracked
        self.block_size = block_size
        self.units = units
        self._windows = units.window_of
        self._free_rows = self._bundles(0, len(self.store.s.rows))
        self.most_slots = MAX_SLOTS
        self._seen: State | None = None
        self._scratch = np.zeros((2, 0), np.float32)
        self._columns: dict[str, NDArray[np.float32]] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def open(self, ordinal: int, key: int, length: int, target: int, produced: int = 0) -> int:
        """Give a request an empty block table and, if tokens are tracked, cells for ``length`` tokens.

        Parameters
        ----------
        ordinal
            Number of the request in arrival order.
        key
            Where its random draws come from.
        length
            Tokens known so far: the prompt, and after a preemption what was generated.
        target
            Output tokens to produce in all.
        produced
            Output tokens produced before a preemption.

        Returns
        -------
        int
            The row; with several units the first of their bundle. In events the units of request ``ordinal`` are
            ``ordinal * units.count`` and the numbers that follow.
        """
        if not self._free_rows:
            rows = len(self.store.s.rows)
            self.store.grow_rows()
            self._free_rows = self._bundles(rows, 2 * rows)
        first = self._free_rows.pop()
        most = length + target - produced
        self._make_tables(most)
        for unit, row in enumerate(self.bundle(first)):
            tracked = self.tracked and not self._windows[unit]
            record = self.store.s.rows[row]
            record["key"] = unit_key(key, self.units.decides(unit))
            record["ordinal"] = ordinal * self.units.count + unit
            record["target"] = target
            record["length"] = length
            record["produced"] = produced
            record["plan"] = -1
            record["tracked"] = tracked
            if tracked:
                self.arena.open(row, min(most, length + 64))
        return first

    def _make_tables(self, tokens: int) -> None:
        """Make room in every block table for a request of so many tokens."""
        self.store.grow_table(-(-tokens // self.block_size) + 1)

    def bundle(self, row: int) -> range:
        """Return the rows of the request whose first row is ``row``."""
        return range(row, row + self.units.count)

    def _bundles(self, first: int, last: int) -> list[int]:
        """Return the first rows of the bundles among these rows, lowest last."""
        return list(range(first, last, self.units.count))[::-1]

    def close(self, row: int, kind: Kind, value: int) -> None:
        """End a request (:attr:`Kind.FINISH`) or take its memory away (:attr:`Kind.PREEMPT`).

        ``row`` is the one that :meth:`open` gave. Blocks that a copy is still reading stay out of the pool until the
        fence.
        """
        for unit in self.bundle(row):
            s = self.store.s
            if self.store.logging:
                self.store.reserve_events(int(s.rows[unit]["blocks"]) + 1)
                s = self.store.s
                emit(s, int(kind), int(s.rows[unit]["ordinal"]), value, 0)
            release_row(s, unit)
            if len(s.holes):
                forget_holes(s, unit)
            if s.rows[unit]["tracked"]:
                self.arena.close(unit)
            s.rows[unit] = _NO_ROW
        self._free_rows.append(row)

    def share_blocks(self, row: int, blocks: Iterable[int]) -> None:
        """Put blocks that the prefix cache found at the front of an empty table."""
        self.store.reserve_events(len(self.store.s.blocks))
        _share_blocks(self.store.s, row, np.array([*blocks], np.int64))

    def note(self, kind: Kind, ordinal: int, a: int, b: int = 0) -> None:
        """Write an event, if events are kept."""
        if self.store.logging:
            self.store.reserve_events(1)
            emit(self.store.s, int(kind), ordinal, a, b)

    # -- the paper's three calls ---------------------------------------------------------------------------------------

    def sync_new_tokens(self, row: int, count: int) -> None:
        """Register ``count`` tokens written behind the row's last slot, taking blocks from the pool as needed.

        Where slots are used again (:meth:`reuse_slots`), a token that comes alone goes into a dead slot if there
        is one.

        Raises
        ------
        InputError
            If the pool has too few blocks, or several tokens come to a request whose tokens are out of order; nothing
            has changed then.
        """
        if count > 1 and self.store.s.rows[row]["mixed"]:
            raise InputError(
                f"{count} tokens at once for a request whose tokens are out of order in memory: causal attention over "
                "several new tokens wants them in order; append one by one"
            )
        need = self.blocks_needed(row, count)
        if need > max(0, self.pool.available_blocks):
            raise InputError(f"{count} tokens need {need} blocks: the pool has {self.pool.available_blocks} to give")
        self.store.grow_table(int(self.store.s.rows[row]["blocks"]) + need)
        if not make_room(self.store.s, row, count):
            self.grow_cells(row, count)
        self.store.reserve_events(need + 1)
        if count == 1 and holes_of(self.store.s, row):
            reuse_slot(self.store.s, row)
        else:
            append_tokens(self.store.s, row, count)

    def evict_tokens(self, row: int, positions: Sequence[int] | NDArray[np.int64]) -> None:
        """Kill the tokens at these logical positions, for this row; it lets go of blocks in which none of its live.

        Raises
        ------
        InputError
            If a position is not that of a live token, or is given twice; nothing has changed then.
        """
        start, live = (int(self.store.s.rows[row][field]) for field in ("start", "live"))
        mine = self.store.s.position[start : start + live]
        wanted = np.sort(np.asarray(positions, np.int64))
        at = np.searchsorted(mine, wanted)
        found = at < live
        found[found] = mine[at[found]] == wanted[found]
        found[1:] &= wanted[1:] != wanted[:-1]
        if not found.all():
            raise InputError(f"evict: token {int(wanted[~found][0])} is not alive, or is named twice")
        self.evict_cells(np.array([row]), at + start, np.array([len(at)]))

    def apply_moves(self, plan: RepackPlan) -> int:
        """Put a finished relocation into effect, whole or not at all.

        The plans of a group are all put into effect, one after the other, or none: that is settled with the first.

        Returns
        -------
        int
            Blocks that the pool won by it; a plan of a group may have cost some. 0 if it was not worth it any more or
            had been cancelled (``plan.cancelled`` then says so): its destinations have gone back to the pool and the
            layout is as before.

        Raises
        ------
        InputError
            If the plan does not describe a relocation into its own destinations; nothing has changed then.
        """
        return self.repacker.apply_moves(plan)

    def reuse_slots(self) -> None:
        """From now on write a request's new tokens, one by one, into its dead slots as long as it has any."""
        self.store.find_holes()

    # -- repack --------------------------------------------------------------------------------------------------------

    # Plans are made and dropped by :class:`sim.kv.repacker.Repacker`, which says what they are.

    def plan_repack(self, row: int, most_destinations: int) -> RepackPlan | None:
        """Plan the best repack of one request that keeps its tokens in order, or None."""
        return self.repacker.plan_repack(row, most_destinations)

    def plan_scattered(
        self, row: int, most_destinations: int, *, most_gain: int = MAX_SLOTS, most_tokens: int = MAX_SLOTS
    ) -> RepackPlan | None:
        """Plan to copy the tokens of a request's least used blocks, wherever they stand, into fresh ones, or None."""
        return self.repacker.plan_scattered(row, most_destinations, most_gain, most_tokens)

    def plan_fill(self, row: int, *, most_gain: int = MAX_SLOTS, most_tokens: int = MAX_SLOTS) -> RepackPlan | None:
        """Plan to move the tokens of a request's least used blocks into dead slots of its other blocks, or None."""
        return self.repacker.plan_fill(row, most_gain, most_tokens)

    def plan_copy_out(self, rows: NDArray[np.int64], most_destinations: int) -> list[RepackPlan]:
        """Plan to copy the tokens of all readers out of a run of shared blocks; empty if that wins nothing."""
        return self.repacker.plan_copy_out(rows, most_destinations)

    def coming_back(self, plans: Sequence[RepackPlan]) -> int:
        """Return the blocks that the pool gets back when the copies of these plans are complete."""
        return self.repacker.coming_back(plans)

    def cancel(self, plan: RepackPlan) -> None:
        """Drop a plan whose request is about to lose its table; call it before :meth:`close`."""
        self.repacker.cancel(plan)

    def pack(self, rows: NDArray[np.int64], *, counted: bool = False) -> int:
        """Repack rows at once and in place, and return how many tokens moved.

        ``counted`` adds them to the statistics; the ``ideal`` reclaimer's cost nothing and are not.

        Shared blocks stay as they are, and what lies between two of them is packed by itself. What the prefix cache
        knows is packed into free blocks and so not written over, as long as there are any.
        """
        if len(self.store.s.holes) or self.store.s.rows["mixed"][rows].any():
            raise InputError(
                "pack: a request's tokens are out of order in memory, or may be: packing in place keeps the order"
            )
        moved = self.repacker.pack_published(rows, counted) if len(self.store.s.readers) else 0
        if self.store.s.header[H.LOGGING]:
            records = self.store.s.rows[rows]
            self.store.reserve_events(int((records["live"] + records["blocks"]).sum()) + len(rows))
        return moved + int(pack_rows(self.store.s, rows, counted))

    def packable(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return bool[B]: whose tokens fit fewer blocks than they are spread over, shared blocks left out."""
        s = self.store.s
        if not len(s.readers):
            records = s.rows[rows]
            fewer: NDArray[np.bool_] = -(-records["written"] // s.block_size) > -(-records["live"] // s.block_size)
            return fewer
        out = np.empty(len(rows), np.bool_)
        packs_into_fewer(s, rows, out)
        return out

    # -- what policies see ---------------------------------------------------------------------------------------------

    def view(self, rows: NDArray[np.int64], share: float = 1.0, tokens: int = 0, model: Any = None) -> View:
        """Return the view of these rows.

        Parameters
        ----------
        rows
            int64[B].
        share, tokens
            The budget: a share of the length, or ``tokens`` tokens if not 0.
        model
            Attention model for the view to ask.
        """
        s = self.store.s
        numbers = np.empty((6, len(rows)), np.int64)
        key = np.empty(len(rows), np.uint64)
        fill_view(s.rows, rows, share, tokens, numbers, key)
        if self._seen is not s:
            self._seen = s
            self._columns = {name: s.columns[k] for k, name in enumerate(self.column_names)}
            if self._scratch.shape[1] < len(s.position):
                self._scratch = np.zeros((2, len(s.position)), np.float32)
        return View(numbers, key, s.position, self._columns, self._scratch, model, units=self.units, keys=s.rows["key"])

    def evict_cells(self, rows: NDArray[np.int64], victims: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Kill the tokens in these cells (see :func:`sim.kv.tokens.evict_tokens`)."""
        self.store.reserve_events(2 * len(victims))
        evict_tokens(self.store.s, rows, victims, counts)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def blocks_needed(self, row: int, count: int) -> int:
        """Return how many blocks ``count`` more tokens of the row take from the pool."""
        record = self.store.s.rows[row]
        if count == 1 and holes_of(self.store.s, row):
            return 0
        return max(0, -(-(int(record["written"]) + count) // self.block_size) - int(record["blocks"]))

    def grow_cells(self, row: int, count: int) -> None:
        """Make room for ``count`` more tokens of the row, and some."""
        live = int(self.store.s.rows[row]["live"])
        self.arena.resize(row, max(live + count, live + live // 4 + 64))

    def trim_cells(self, rows: NDArray[np.int64]) -> None:
        """Give back cells that rows asked for and will not need soon: their prompts have just been evicted from."""
        for row in rows:
            live, cap = (int(self.store.s.rows[row][field]) for field in ("live", "cap"))
            if live + live // 4 + 64 < cap:
                self.arena.resize(int(row), live + live // 4 + 64)

    def lookup(self, row: int, position: int) -> tuple[int, int] | None:
        """Return (block, offset) of the token at this logical position, or None if it is dead."""
        s = self.store.s
        start, live = int(s.rows[row]["start"]), int(s.rows[row]["live"])
        at = start + int(np.searchsorted(s.position[start : start + live], position))
        if at >= start + live or s.position[at] != position:
            return None
        return divmod(int(s.slot[at]), self.block_size)

    def block_table(self, row: int) -> list[int]:
        """Return the row's blocks in table order."""
        s = self.store.s
        return [int(block) for block in s.table[row, : int(s.rows[row]["blocks"])]]

    def event_log(self) -> KVEventLog:
        """Return the events so far (none unless ``logging``)."""
        s = self.store.s
        count = int(s.header[H.EVENTS])
        events = s.events[:count].copy() if count else np.zeros(0, EVENT)
        return KVEventLog(events, self.block_size, len(s.blocks), units=self.units.count)
