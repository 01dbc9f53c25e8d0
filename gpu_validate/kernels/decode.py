"""Paged decode attention, split over the sequence (flash decoding): partial results, then their sum."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["combine_splits", "decode_split"]


@triton.jit
def decode_split(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    table,
    lengths,
    live,
    out,
    partial,
    partial_lse,
    scale,
    table_stride,
    live_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend from one group of query heads to one split of a row's slots.

    Grid: (KV heads, rows, splits): neighbouring programs read neighbouring heads of the same tokens. All query heads of
    a group are in one program, so that keys and values are read once.

    Parameters
    ----------
    q
        [rows, HEADS * GROUP, HEAD_DIM].
    k_cache, v_cache
        [slots, HEADS, HEAD_DIM].
    k_scale, v_scale
        float32 [slots, HEADS], read if ``SCALED``.
    table
        int32 [rows, table_stride]; entries behind ``lengths`` are not read.
    lengths
        int32 [rows]; a row of length 0 gives zeros.
    live
        int32 [rows, live_stride], a bit a slot in table order; read if ``MASKED``.
    out
        As ``q``; written if ``SPLITS`` is 1.
    partial, partial_lse
        float32 [rows, HEADS * GROUP, SPLITS, HEAD_DIM] and [rows, HEADS * GROUP, SPLITS]: otherwise each split's
        attention, and the base-2 logarithm of its softmax's sum (-inf of a split that sees nothing).
    scale
        1 / sqrt(HEAD_DIM) * log2(e): softmax is taken with exp2.
    GROUP_PAD
        Rows of the tile of queries: tensor cores want 16.
    TILE
        Slots that are read at a time.
    UPCAST
        Multiply in float32. Triton's interpreter keeps bfloat16 as its bits in integers and multiplies those.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    begin = split * share
    end = tl.minimum(begin + share, length)

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, TILE)
    first_head = (row * HEADS + head).to(tl.int64) * GROUP
    queries = tl.load(q + (first_head + g)[:, None] * HEAD_DIM + d[None, :], mask=(g < GROUP)[:, None], other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_DIM], tl.float32)
    for start in range(begin, end, TILE):
        index = start + n
        inside = index < end
        block = tl.load(table + row * table_stride + index // BLOCK_SIZE, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + index % BLOCK_SIZE
        cell = slot * HEADS + head
        at = cell[:, None] * HEAD_DIM + d[None, :]
        keys = tl.load(k_cache + at, mask=inside[:, None], other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if SCALED:
            scores *= tl.load(k_scale + cell, mask=inside, other=0.0)[None, :]
        visible = inside
        if MASKED:
            word = tl.load(live + row * live_stride + index // 32, mask=inside, other=0)
            visible = visible & ((word >> (index % 32) & 1) != 0)
        scores = tl.where(visible[None, :], scores, float("-inf"))

        now = tl.maximum(highest, tl.max(scores, 1))
        # Nothing visible so far: any finite number keeps exp2 from -inf less -inf.
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weights, 1)
        values = tl.load(v_cache + at, mask=inside[:, None], other=0.0).to(queries.dtype)
        if SCALED:
            weights *= tl.load(v_scale + cell, mask=inside, other=0.0)[None, :]
        acc = acc * fade[:, None] + tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
        highest = now

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    mine = g < GROUP
    if SPLITS == 1:
        tl.store(out + (first_head + g)[:, None] * HEAD_DIM + d[None, :], acc, mask=mine[:, None])
    else:
        cell = (first_head + g) * SPLITS + split
        tl.store(partial + cell[:, None] * HEAD_DIM + d[None, :], acc, mask=mine[:, None])
        lse = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(partial_lse + cell, lse, mask=mine)


@triton.jit
def combine_splits(
    partial,
    partial_lse,
    out,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """Combine a query head's splits, each weighted by its share of the softmax's sum.

    Grid: (rows * query heads,). Arrays as in :func:`decode_split`.
    """
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, HEAD_DIM)
    there = split < SPLITS
    lse = tl.load(partial_lse + head * SPLITS + split, mask=there, other=float("-inf"))
    highest = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
    at = (head * SPLITS + split)[:, None] * HEAD_DIM + d[None, :]
    parts = tl.load(partial + at, mask=there[:, None], other=0.0)
    total = tl.sum(weight, 0)
    acc = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * HEAD_DIM + d, acc)
