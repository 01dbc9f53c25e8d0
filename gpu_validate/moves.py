"""What a copy of tokens may do, decided on the host before any byte is written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError

__all__ = ["check_moves", "overlaps", "safe_in_order"]


def check_moves(src: NDArray[np.int64], dst: NDArray[np.int64], num_blocks: int, block_size: int) -> None:
    """Refuse moves that leave the pool, touch the null block, or bring two tokens to one place.

    A source may be given more than once: several requests may copy their own out of a shared block.

    Parameters
    ----------
    src, dst
        int64 [T], slots.
    num_blocks, block_size
        The pool's.

    Raises
    ------
    InputError
        If the arrays differ in length, a slot is out of range or in block 0, or a destination is given twice.
    """
    if src.ndim != 1 or src.shape != dst.shape:
        raise InputError(f"moves: {src.shape} sources and {dst.shape} destinations, expected one each a token")
    for what, slots in (("source", src), ("destination", dst)):
        outside = (slots < block_size) | (slots >= num_blocks * block_size)
        if outside.any():
            first = int(outside.argmax())
            raise InputError(
                f"move {first}: {what} slot {slots[first]}, expected {block_size} to {num_blocks * block_size - 1}"
            )
    ordered = np.sort(dst)
    double = ordered[1:] == ordered[:-1]
    if double.any():
        raise InputError(f"moves: destination slot {ordered[int(double.argmax())]} is given twice")


def overlaps(src: NDArray[np.int64], dst: NDArray[np.int64]) -> bool:
    """Say whether a slot is both read and written: then the order of the copies matters."""
    return bool(np.isin(dst, src).any())


def safe_in_order(src: NDArray[np.int64], dst: NDArray[np.int64], chunk: int) -> bool:
    """Say whether the moves may be done chunk after chunk, each read as a whole before it is written.

    They may if no chunk reads what an earlier one wrote. Ordered compaction (both ascending, no token moving up) always
    may: a slot that move ``i`` writes is at or below its source, so whoever reads it comes no later.

    Parameters
    ----------
    src, dst
        int64 [T], the destinations without doubles.
    chunk
        Moves a chunk.
    """
    if len(dst) == 0:
        return True
    order = np.argsort(dst)
    near = order[np.minimum(np.searchsorted(dst, src, sorter=order), len(dst) - 1)]
    read = np.arange(len(src))
    # near[j] is the move that writes what j reads, if any does.
    return bool(((dst[near] != src) | (read // chunk <= near // chunk)).all())
