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
from sim.kv.blocks import BlockPool, Why, emit, free_block, list_block, release_row, unlink
from sim.kv.events import EVENT, Kind, KVEventLog
from sim.kv.group import find_group, index_of
from sim.kv.holes import forget_holes, holes_of
from sim.kv.pack import find_published, pack_rows, packs_into_fewer
from sim.kv.repack import (
    Group,
    RepackPlan,
    blocks_kept,
    commit,
    fills_lawfully,
    is_lawful,
    set_aside,
    set_idle,
)
from sim.kv.scatter import choose_least_used, choose_targets
from sim.kv.state import ROW, H, State, Store
from sim.kv.tokens import append_tokens, drop_block, evict_tokens, lives_in, reuse_slot, table_index
from sim.kv.units import ONE_UNIT, Units, unit_key
from sim.kv.view import View, fill_view
from sim.kv.window import find_window

__all__ = ["KVCache"]

MAX_SLOTS = 2**31 - 1
"""Most slots of a pool: their numbers are 32-bit integers."""

_SHARE = int(Kind.SHARE)
_NO_ROW = np.zeros(1, ROW)
_NO_ROW["plan"] = -1
_UNSETTLED = np.zeros(0, np.bool_)
_NO_BLOCKS = np.zeros(0, np.int32)


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


@njit
def _let_go(s: State, row: int, held: np.ndarray) -> None:
    """Forget the row's repack; of the blocks that it held those in which none of the row's tokens lives leave now."""
    record = s.rows[row]
    record.busy_from = 0
    record.busy_to = 0
    record.plan = -1
    for block in held[::-1]:
        if lives_in(s, row, block):
            set_idle(s, row, block)
        else:
            s.header[H.FREED_BY_DEATH] += drop_block(s, row, table_index(s, row, block), Why.DEATH)
            s.blocks[block].busy = 0


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
        self.arena = CellArena(self.store)
        self.column_names = tuple(columns)
        self.tracked = tracked
        self.block_size = block_size
        self.units = units
        self._windows = units.window_of
        self._free_rows = self._bundles(0, len(self.store.s.rows))
        self.most_slots = MAX_SLOTS
        self._plans = 0
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
        self._check(plan)
        self.store.reserve_events(2 * len(plan.held) + 2 * len(plan.destinations) + plan.tokens + 4)
        s = self.store.s
        emit(s, int(Kind.COPIED), plan.ordinal, plan.number, 0)
        freed = 0
        if not plan.cancelled:
            done = False
            if plan.group is None or self._worth(plan.group):
                died = plan.group.died if plan.group is not None else _UNSETTLED
                done, freed = commit(
                    s,
                    plan.row,
                    plan.number,
                    plan.sources,
                    plan.targets,
                    plan.destinations,
                    plan.position,
                    plan.to_slot,
                    died,
                )
            if not done:
                emit(s, int(Kind.CANCEL), plan.ordinal, plan.number, 0)
                plan.cancelled = True
            _let_go(s, plan.row, plan.targets if done else plan.held)
        if plan.cancelled:
            for block in plan.destinations[::-1]:
                emit(s, int(Kind.FREE), plan.ordinal, int(block), Why.CANCEL)
                free_block(s, int(block))
            for block in plan.held[len(plan.held) - plan.deferred :][::-1]:
                emit(s, int(Kind.FREE), plan.ordinal, int(block), Why.CANCEL)
                s.blocks["busy"][block] = 0
                free_block(s, int(block))
        return freed

    def reuse_slots(self) -> None:
        """From now on write a request's new tokens, one by one, into its dead slots as long as it has any."""
        self.store.find_holes()

    # -- repack --------------------------------------------------------------------------------------------------------

    def plan_repack(self, row: int, most_destinations: int) -> RepackPlan | None:
        """Plan the best repack of one request on the present state, and set its destinations aside.

        Parameters
        ----------
        most_destinations
            Free blocks that it may use, headroom included.

        Returns
        -------
        RepackPlan or None
            None if no block would be freed, or a plan for the request is in flight already.
        """
        s = self.store.s
        if s.rows[row]["plan"] >= 0:
            return None
        first, last = find_window(s, row, min(most_destinations, self.pool.free_blocks))
        return self._plan(row, first, last) if last > first else None

    def plan_scattered(
        self, row: int, most_destinations: int, *, most_gain: int = MAX_SLOTS, most_tokens: int = MAX_SLOTS
    ) -> RepackPlan | None:
        """Plan to copy the tokens of a request's least used blocks, wherever they stand, into fresh ones.

        The moved tokens are in logical order among themselves, but no longer in the whole table: from then on several
        tokens at once are refused. Blocks whose contents the prefix cache knows are left alone.

        Parameters
        ----------
        most_destinations
            Free blocks that it may use, headroom included.
        most_gain, most_tokens
            Blocks to win at most, and tokens to copy at most.

        Returns
        -------
        RepackPlan or None
            The one that wins most blocks, by the fewest tokens; None if none does or one is in flight already.
        """
        s = self.store.s
        if s.rows[row]["plan"] >= 0:
            return None
        most = min(most_destinations, self.pool.free_blocks)
        sources = choose_least_used(s, row, False, most, most_gain, most_tokens)
        return self._plan_of(row, sources, sources[:0]) if len(sources) else None

    def plan_fill(self, row: int, *, most_gain: int = MAX_SLOTS, most_tokens: int = MAX_SLOTS) -> RepackPlan | None:
        """Plan to move the tokens of a request's least used blocks into dead slots of its other blocks.

        No fresh block is needed and no plan frees as many blocks by fewer copies; order is lost as by
        :meth:`plan_scattered`. The fullest blocks are filled, so that sparse ones stay cheap to empty.

        Parameters
        ----------
        most_gain, most_tokens
            Blocks to win at most, and tokens to copy at most.

        Returns
        -------
        RepackPlan or None
            None if no block can be won, or a plan for the request is in flight already.
        """
        s = self.store.s
        if s.rows[row]["plan"] >= 0:
            return None
        sources = choose_least_used(s, row, True, 0, most_gain, most_tokens)
        return self._plan_of(row, sources, choose_targets(s, row, sources)) if len(sources) else None

    def plan_copy_out(self, rows: NDArray[np.int64], most_destinations: int) -> list[RepackPlan]:
        """Plan to copy the tokens of all readers out of a run of shared blocks, so that these are free.

        Parameters
        ----------
        rows
            int64[B], running requests.
        most_destinations
            Free blocks that the plans may use together, headroom included.

        Returns
        -------
        list of RepackPlan
            A plan for each reader, of the run that wins most; none if all copies together take as many blocks as they
            free, or a reader's repack is in flight already.
        """
        s = self.store.s
        row, first, last = find_group(s, rows, min(most_destinations, self.pool.free_blocks))
        if last <= first:
            return []
        block = int(s.table[row, first])
        places = [(reader, int(index_of(s, reader, block))) for reader in rows.tolist()]
        number = self._plans
        plans = [self._plan(reader, at, at + last - first, number) for reader, at in places if at >= 0]
        group = Group(plans)
        for plan in plans:
            plan.group = group
        return plans

    def coming_back(self, plans: Sequence[RepackPlan]) -> int:
        """Return the blocks that the pool gets back when the copies of these plans are complete."""
        if not plans:
            return 0
        sources = [p.held[len(p.held) - p.deferred :] if p.cancelled else p.sources for p in plans]
        # Of a source that others hold too, only the plans' own references go.
        blocks, held = np.unique(np.concatenate(sources), return_counts=True)
        freed = int((held >= self.store.s.blocks["ref"][blocks]).sum())
        return freed + sum(len(plan.destinations) for plan in plans if plan.cancelled)

    def _plan(self, row: int, first: int, last: int, group: int = -1) -> RepackPlan:
        """Plan the repack of the blocks ``[first, last)`` of a row's table."""
        return self._plan_of(row, self.store.s.table[row, first:last].copy(), _NO_BLOCKS, window=first, group=group)

    def _plan_of(
        self, row: int, sources: NDArray[np.int32], targets: NDArray[np.int32], *, window: int = -1, group: int = -1
    ) -> RepackPlan:
        """Plan to empty ``sources``, in table order, into ``targets`` or, if there are none, fresh blocks."""
        self.store.reserve_events(2 * len(sources) + len(targets) + 2)
        number = self._plans
        self._plans += 1
        destinations = np.empty(len(sources), np.int32)
        position, from_slot, to_slot = np.empty((3, len(sources) * self.block_size), np.int32)
        s = self.store.s
        count = set_aside(s, row, number, group, sources, targets, window, destinations, position, from_slot, to_slot)
        need = 0 if len(targets) else -(-count // self.block_size)
        return RepackPlan(
            number,
            row,
            int(s.rows[row]["ordinal"]),
            sources,
            destinations[:need],
            position[:count],
            from_slot[:count],
            to_slot[:count],
            targets,
        )

    def cancel(self, plan: RepackPlan) -> None:
        """Drop a plan whose request is about to lose its table; its blocks come back behind the fence (apply_moves).

        Call it before :meth:`close`.
        """
        plan.deferred = len(plan.held)
        plan.cancelled = True
        self.note(Kind.CANCEL, plan.ordinal, plan.number)

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
        moved = self._pack_published(rows, counted) if len(self.store.s.readers) else 0
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

    def _pack_published(self, rows: NDArray[np.int64], counted: bool) -> int:
        moved = 0
        for row in rows.tolist():
            first, last = find_published(self.store.s, row)
            while last > first:
                live = int(self.store.s.blocks["live"][self.store.s.table[row, first:last]].sum())
                if -(-live // self.block_size) > self.pool.available_blocks:
                    break
                self.apply_moves(self._plan(row, first, last))
                moved += live
                if not counted:
                    self.store.s.header[H.MOVED] -= live
                    self.store.s.rows["moved"][row] -= live
                first, last = find_published(self.store.s, row)
        return moved

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

    def _worth(self, group: Group) -> bool:
        """Say whether the group still frees more blocks than it takes; behind the fence, before anything changes."""
        if group.worth is None:
            s = self.store.s
            left = [plan for plan in group.plans if not plan.cancelled]
            blocks = s.blocks[left[0].sources]
            # One that somebody else reads by now stays; one in which nobody lives any more would go without the copy.
            group.died = blocks["live"] == 0
            freed = int(((blocks["tables"] == len(left)) & ~group.died).sum())
            group.worth = freed > sum(int(blocks_kept(s, plan.row, plan.position)) for plan in left)
        return group.worth

    def _check(self, plan: RepackPlan) -> None:
        """Refuse a plan that is not one."""
        s = self.store.s
        known = plan.cancelled or int(s.rows[plan.row]["plan"]) == plan.number
        lawful = known and (
            fills_lawfully(s, plan.row, plan.targets, plan.position, plan.to_slot)
            if len(plan.targets) and not plan.cancelled
            else len(plan.targets) > 0 or is_lawful(s, plan.row, plan.destinations, plan.position, plan.to_slot)
        )
        if not lawful:
            raise InputError(f"repack plan {plan.number}: it does not move tokens into blocks set aside for it")
