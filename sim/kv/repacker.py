"""Plans of repacks on the present state of a cache: made, put into effect, dropped.

:mod:`sim.kv.repack` says what a plan is and has the kernels. The caller of this module is the cache
(:class:`sim.kv.cache.KVCache`), whose methods of the same names reclaimers call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.jit import njit
from sim.kv.blocks import BlockPool, Why, emit, free_block
from sim.kv.events import Kind
from sim.kv.group import find_group, index_of
from sim.kv.pack import find_published
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
from sim.kv.state import H, State, Store
from sim.kv.tokens import drop_block, lives_in, table_index
from sim.kv.window import find_window

__all__ = ["Repacker"]

_NO_BLOCKS = np.zeros(0, np.int32)
_UNSETTLED = np.zeros(0, np.bool_)


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


class Repacker:
    """Plans repacks of a store's rows, one a row at a time, and numbers them.

    Parameters
    ----------
    store
        Of the cache.
    pool
        Where destinations come from.
    """

    def __init__(self, store: Store, pool: BlockPool) -> None:
        self.store = store
        self.pool = pool
        self._count = 0

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan_repack(self, row: int, most_destinations: int) -> RepackPlan | None:
        """Plan the best repack of one request that keeps its tokens in order, and set its destinations aside.

        Parameters
        ----------
        row
            Of the request.
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
        return self.plan_window(row, first, last) if last > first else None

    def plan_scattered(self, row: int, most_destinations: int, most_gain: int, most_tokens: int) -> RepackPlan | None:
        """Plan to copy the tokens of a request's least used blocks, wherever they stand, into fresh ones.

        The moved tokens are in logical order among themselves, but no longer in the whole table: from then on several
        tokens at once are refused. Blocks whose contents the prefix cache knows are left alone.

        Parameters
        ----------
        row
            Of the request.
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
        return self.make(row, sources, _NO_BLOCKS) if len(sources) else None

    def plan_fill(self, row: int, most_gain: int, most_tokens: int) -> RepackPlan | None:
        """Plan to move the tokens of a request's least used blocks into dead slots of its other blocks.

        No fresh block is needed and no plan frees as many blocks by fewer copies; order is lost as by
        :meth:`plan_scattered`. The fullest blocks are filled, so that sparse ones stay cheap to empty.

        Parameters
        ----------
        row
            Of the request.
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
        return self.make(row, sources, choose_targets(s, row, sources)) if len(sources) else None

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
        number = self._count
        plans = [self.plan_window(reader, at, at + last - first, number) for reader, at in places if at >= 0]
        group = Group(plans)
        for plan in plans:
            plan.group = group
        return plans

    def plan_window(self, row: int, first: int, last: int, group: int = -1) -> RepackPlan:
        """Plan the repack of the blocks ``[first, last)`` of a row's table, whatever it wins."""
        return self.make(row, self.store.s.table[row, first:last].copy(), _NO_BLOCKS, window=first, group=group)

    def make(
        self, row: int, sources: NDArray[np.int32], targets: NDArray[np.int32], *, window: int = -1, group: int = -1
    ) -> RepackPlan:
        """Plan to empty ``sources``, in table order, into ``targets`` or, if there are none, fresh blocks.

        ``window`` and ``group`` are those of :func:`sim.kv.repack.set_aside`.
        """
        self.store.reserve_events(2 * len(sources) + len(targets) + 2)
        number = self._count
        self._count += 1
        s = self.store.s
        destinations = np.empty(len(sources), np.int32)
        position, from_slot, to_slot = np.empty((3, len(sources) * s.block_size), np.int32)
        count = set_aside(s, row, number, group, sources, targets, window, destinations, position, from_slot, to_slot)
        need = 0 if len(targets) else -(-count // s.block_size)
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

    # -- what becomes of plans -----------------------------------------------------------------------------------------

    def coming_back(self, plans: Sequence[RepackPlan]) -> int:
        """Return the blocks that the pool gets back when the copies of these plans are complete."""
        if not plans:
            return 0
        sources = [p.held[len(p.held) - p.deferred :] if p.cancelled else p.sources for p in plans]
        # Of a source that others hold too, only the plans' own references go.
        blocks, held = np.unique(np.concatenate(sources), return_counts=True)
        freed = int((held >= self.store.s.blocks["ref"][blocks]).sum())
        return freed + sum(len(plan.destinations) for plan in plans if plan.cancelled)

    def cancel(self, plan: RepackPlan) -> None:
        """Drop a plan whose request is about to lose its table; its blocks come back behind the fence (apply_moves)."""
        plan.deferred = len(plan.held)
        plan.cancelled = True
        self.store.reserve_events(1)
        emit(self.store.s, int(Kind.CANCEL), plan.ordinal, plan.number, 0)

    def apply_moves(self, plan: RepackPlan) -> int:
        """Put a finished relocation into effect, whole or not at all (:meth:`sim.kv.cache.KVCache.apply_moves`)."""
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

    def pack_published(self, rows: NDArray[np.int64], counted: bool) -> int:
        """Pack what the prefix cache knows of these rows into free blocks, at once; return how many tokens moved.

        ``counted`` adds them to the statistics. It stops where the pool has no blocks left to give.
        """
        moved, size = 0, self.store.s.block_size
        for row in rows.tolist():
            first, last = find_published(self.store.s, row)
            while last > first:
                live = int(self.store.s.blocks["live"][self.store.s.table[row, first:last]].sum())
                if -(-live // size) > self.pool.available_blocks:
                    break
                self.apply_moves(self.plan_window(row, first, last))
                moved += live
                if not counted:
                    self.store.s.header[H.MOVED] -= live
                    self.store.s.rows["moved"][row] -= live
                first, last = find_published(self.store.s, row)
        return moved

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
