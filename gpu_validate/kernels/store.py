"""Write new tokens' keys and values into their slots, quantised if need be: one launch a layer."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["store_tokens"]

_MANTISSA = tl.constexpr(0x7FFFFF)
_MANTISSA_OF_448 = tl.constexpr(0x600000)


@triton.jit
def store_tokens(
    k,
    v,
    slots,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Write one token's keys or values.

    Grid: (tokens, 2).

    Parameters
    ----------
    k, v
        [tokens, HEADS, HEAD_DIM], any floating type; ``k_stride`` and ``v_stride`` elements from token to token.
    slots
        int64 [tokens]; -1 writes nothing.
    k_cache, v_cache
        [slots, HEADS, HEAD_DIM].
    k_scale, v_scale
        float32 [slots, HEADS], written if ``SCALED``: as :func:`gpu_validate.dtypes.power_of_two_scale` has it.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    row = token.to(tl.int64)
    if tl.program_id(1) == 0:
        _store(k + row * k_stride, slot, k_cache, k_scale, HEADS, HEADS_PAD, HEAD_DIM, HEAD_DIM_PAD, SCALED)
    else:
        _store(v + row * v_stride, slot, v_cache, v_scale, HEADS, HEADS_PAD, HEAD_DIM, HEAD_DIM_PAD, SCALED)


@triton.jit
def _store(
    row,
    slot,
    cache,
    scales,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SCALED: tl.constexpr,
):
    head = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, HEAD_DIM_PAD)
    mine = (head < HEADS) & (slot >= 0)
    inside = mine[:, None] & (d < HEAD_DIM)[None, :]
    cell = head[:, None] * HEAD_DIM + d[None, :]
    values = tl.load(row + cell, mask=inside, other=0.0)
    if SCALED:
        wide = values.to(tl.float32)
        bits = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 8 + ((bits & _MANTISSA) > _MANTISSA_OF_448).to(tl.int32)
        exponent = tl.maximum(exponent, 1)
        scale = tl.where(bits > 0, exponent << 23, 0).to(tl.float32, bitcast=True)
        inverse = tl.where(bits > 0, (254 - exponent) << 23, 0).to(tl.float32, bitcast=True)
        tl.store(scales + slot * HEADS + head, scale, mask=mine)
        values = wide * inverse[:, None]
    tl.store(cache + slot * (HEADS * HEAD_DIM) + cell, values.to(cache.dtype.element_ty), mask=inside)
