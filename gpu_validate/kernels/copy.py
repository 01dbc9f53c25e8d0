"""Copy tokens' rows between planes, all planes in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_rows"]


# Neither the number of tokens nor where their lists begin may compile the kernel anew in the middle of a measurement.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["src", "dst"])
def copy_rows(
    from_planes,
    to_planes,
    src,
    dst,
    count,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Copy row ``src[i]`` of each plane to row ``dst[i]`` of its counterpart.

    Grid: (tiles of ``TOKENS`` tokens, planes).

    Parameters
    ----------
    from_planes, to_planes
        int64 [planes], addresses of the planes' first rows: a pointer table, so that the number of layers is part of
        the grid and not of the launches.
    src, dst
        int64 [count], rows.
    count
        Tokens; need not fill the last tile.
    ROW
        Words of a row.
    COLUMNS
        The next power of two.
    TOKENS
        Tokens a program.
    WORD
        Type of a word: tl.int64 (each thread then moves two at a time, 16 bytes) or a narrower integer.
    ALIGNMENT
        Bytes that every row begins at a multiple of, 16 for 16-byte accesses.
    """
    plane = tl.program_id(1)
    pointer: tl.constexpr = tl.pointer_type(WORD)
    source = tl.multiple_of(tl.load(from_planes + plane).to(pointer), ALIGNMENT)
    target = tl.multiple_of(tl.load(to_planes + plane).to(pointer), ALIGNMENT)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    there = token < count
    from_row = tl.load(src + token, mask=there, other=0)
    to_row = tl.load(dst + token, mask=there, other=0)
    inside = there[:, None] & (column < ROW)[None, :]
    words = tl.load(source + from_row[:, None] * ROW + column[None, :], mask=inside)
    tl.store(target + to_row[:, None] * ROW + column[None, :], words, mask=inside)
