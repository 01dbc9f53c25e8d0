"""Where the tokens of a made-up moment lie: block tables for attention, and repack plans by the simulator's planner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_validate.program import StepWork
from gpu_validate.sweeps import Decode, Step
from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.rng import stream

__all__ = [
    "DecodeLayout",
    "RepackMoves",
    "decode_layout",
    "lengths_of",
    "new_slots",
    "place",
    "repack_blocks",
    "repack_moves",
    "step_work",
]


def lengths_of(shape: Decode) -> NDArray[np.int32]:
    """Return int32[B]: the written slots of each request of a shape."""
    spread = np.linspace(0.5, 1.5, shape.batch) if shape.ragged and shape.batch > 1 else np.ones(shape.batch)
    lengths: NDArray[np.int32] = np.maximum(1, np.round(spread * (shape.live / (1 - shape.dead)))).astype(np.int32)
    return lengths


@dataclass(frozen=True)
class DecodeLayout:
    """Block tables of a batch.

    Attributes
    ----------
    block_table
        int32[B, M], padded with 0.
    lengths
        int32[B]: written slots of each request, dead ones included.
    """

    block_table: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @property
    def read_tokens(self) -> int:
        """Slots that a kernel reads that takes every listed slot."""
        return int(self.lengths.sum())


def decode_layout(
    shape: Decode, *, block_size: int, num_blocks: int, placement: int = 0, seed: int = 0
) -> DecodeLayout:
    """Lay out a batch; see :func:`place`.

    Parameters
    ----------
    shape
        Requests, lengths, and whether the blocks are in random places of the pool or one behind the other.
    block_size, num_blocks, placement, seed
        See :func:`place`.
    """
    return place(
        lengths_of(shape),
        block_size=block_size,
        num_blocks=num_blocks,
        scattered=shape.scattered,
        placement=placement,
        seed=seed,
    )


def place(
    lengths: NDArray[np.int32],
    *,
    block_size: int,
    num_blocks: int,
    scattered: bool = True,
    placement: int = 0,
    seed: int = 0,
) -> DecodeLayout:
    """Give requests of these lengths blocks.

    Parameters
    ----------
    lengths
        int32[B], written slots.
    block_size, num_blocks
        Of the pool; block 0 is never listed.
    scattered
        Blocks in random places of the pool, or one behind the other.
    placement
        Another one lies elsewhere: as far as the pool has room, no two share a block.
    seed
        Of the places.

    Raises
    ------
    InputError
        If the pool has not that many blocks.
    """
    widths = -(-lengths // block_size)
    need = int(widths.sum())
    if need > num_blocks - 1:
        raise InputError(f"{len(lengths)} requests need {need} blocks, the pool has {num_blocks - 1}")
    first = (placement * need) % (num_blocks - need) if num_blocks - 1 > need else 0
    if scattered:
        blocks = 1 + stream(seed, "layouts", "blocks").permutation(num_blocks - 1)[first : first + need]
    else:
        blocks = np.arange(1 + first, 1 + first + need)
    table = np.zeros((len(lengths), int(widths.max())), np.int32)
    table[np.arange(table.shape[1]) < widths[:, None]] = blocks
    return DecodeLayout(table, lengths)


def new_slots(layout: DecodeLayout, row: int, count: int, block_size: int) -> NDArray[np.int64]:
    """Return int64[count]: the slots of a row's last tokens."""
    index = np.arange(int(layout.lengths[row]) - count, int(layout.lengths[row]))
    slots: NDArray[np.int64] = layout.block_table[row, index // block_size].astype(np.int64) * block_size
    return slots + index % block_size


def step_work(shape: Step, *, block_size: int, num_blocks: int, seed: int = 0) -> StepWork:
    """Return a step as a replay would be given it: a ragged batch that decodes, and a request that prefills.

    Parameters
    ----------
    shape
        The step.
    block_size, num_blocks
        Of the pool.
    seed
        Of the places.
    """
    lengths = lengths_of(Decode(shape.batch, shape.live, ragged=True)) + 1
    query = np.ones(shape.batch, np.int32)
    if shape.prefill:
        lengths = np.append(lengths, np.int32(shape.context + shape.prefill))
        query = np.append(query, np.int32(shape.prefill))
    layout = place(lengths, block_size=block_size, num_blocks=num_blocks, seed=seed)
    slots = [new_slots(layout, row, int(count), block_size) for row, count in enumerate(query)]
    reqs = np.arange(len(query), dtype=np.int64)
    return StepWork(
        step=0,
        reqs=reqs,
        query_tokens=query,
        lengths=layout.lengths,
        block_table=layout.block_table,
        slots=np.concatenate(slots),
        positions=np.concatenate(
            [np.arange(length - count, length) for length, count in zip(lengths, query, strict=True)]
        ),
        writers=np.repeat(reqs, query),
    )


@dataclass(frozen=True)
class RepackMoves:
    """What one copy moves.

    Attributes
    ----------
    source, destination
        int64[T] slots.
    freed_blocks
        Blocks that the pool wins.
    """

    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    freed_blocks: int

    @property
    def tokens(self) -> int:
        """Tokens moved."""
        return len(self.source)


def repack_blocks(tokens: int, *, block_size: int, dead: float = 0.5) -> int:
    """Return the blocks that :func:`repack_moves` needs, block 0 included."""
    return 2 + 2 * max(2, -(-round(tokens / (1 - dead)) // block_size))


def repack_moves(
    tokens: int,
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    dead: float = 0.5,
    scattered: bool = True,
    placement: int = 0,
    seed: int = 0,
) -> RepackMoves:
    """Let the simulator's planner repack a request of which a share has died.

    Parameters
    ----------
    tokens
        Live tokens; the plan may move a few less, for it leaves out what moving would not free a block more.
    block_size, num_blocks
        Of the pool; as small as it can be if None.
    dead
        Share of the request's tokens that has died.
    scattered
        Tokens died at random, and the blocks are all over the pool; else the last part of each block has died, and the
        blocks lie one behind the other.
    placement
        Another one lies elsewhere in the pool.
    seed
        Of what dies and where it lies.

    Raises
    ------
    InputError
        If the pool is too small, or the plan would free nothing.
    """
    draws = stream(seed, "layouts", "repack", str(placement))
    needed = repack_blocks(tokens, block_size=block_size, dead=dead)
    num_blocks = needed if num_blocks is None else num_blocks
    if num_blocks < needed:
        raise InputError(f"repack of {tokens} tokens: it needs {needed} blocks, the pool has {num_blocks}")
    length = (needed - 2) // 2 * block_size
    cache = KVCache(needed, block_size)
    row = cache.open(0, 0, length, 1)
    cache.sync_new_tokens(row, length)
    if scattered:
        victims = np.sort(draws.choice(length, length - min(tokens, length - block_size), replace=False))
    else:
        kept = max(1, round(block_size * (1 - dead)))
        victims = np.flatnonzero(np.arange(length) % block_size >= kept)
    cache.evict_tokens(row, victims)
    plan = cache.plan_repack(row, needed)
    if plan is None:
        raise InputError(f"repack of {tokens} tokens with a share of {dead} dead: no block would be freed")
    # A fresh pool hands out its blocks in order; which number a block has is a matter of what happened before.
    names = np.zeros(num_blocks, np.int64)
    places = draws.permutation(num_blocks - 1) if scattered else np.arange(num_blocks - 1) + placement * needed
    names[1:] = 1 + places % (num_blocks - 1)
    source, destination = (
        names[slots // block_size] * block_size + slots % block_size
        for slots in (plan.from_slot.astype(np.int64), plan.to_slot.astype(np.int64))
    )
    return RepackMoves(source, destination, plan.gain)
