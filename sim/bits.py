"""32-bit arithmetic for kernels: what numba must be told for a loop to run eight or sixteen tokens at a time.

numba widens every integer to 64 bits, and a hash computed that way costs twice the registers and a multiplication that
most vector units lack. The functions here stay at 32 bits. Each is plain Python (which is what runs under
``NUMBA_DISABLE_JIT=1``) and, inside a kernel, one machine instruction.
"""

# ruff: noqa: ARG005 numba looks at the parameters of what it is given, not at what becomes of them

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from sim.jit import njit

__all__ = [
    "BYTES_STD",
    "add",
    "band",
    "bits_of",
    "mix",
    "mul",
    "normal",
    "row_sum",
    "shr",
    "signed",
    "sub",
    "truncated_float",
    "xor",
]

_MASK = 0xFFFFFFFF
_LANES = 16
_INT, _FLOAT = ir.IntType(32), ir.FloatType()


def _compiled_to(
    emit: Callable[..., Any], result: Any, *operands: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a function of one or two numbers compiled to what ``emit(builder, *values)`` builds."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return emit(builder, *arguments)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if len(operands) == 1:
            one: Any = intrinsic(lambda _typing, a: (result(*operands), build))
            overload(function, strict=False)(lambda a: lambda a: one(a))
        else:
            two: Any = intrinsic(lambda _typing, a, b: (result(*operands), build))
            overload(function, strict=False)(lambda a, b: lambda a, b: two(a, b))
        return function

    return decorate


def _two(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have ``function(uint32, uint32)`` compiled to the LLVM instruction ``name``."""
    return _compiled_to(lambda builder, a, b: getattr(builder, name)(a, b), types.uint32, types.uint32, types.uint32)


@_two("add")
def add(a: np.uint32, b: np.uint32) -> np.uint32:
    """Return ``a + b`` modulo 2**32."""
    return np.uint32((int(a) + int(b)) & _MASK)


@_two("sub")
def sub(a: np.uint32, b: np.uint32) -> np.uint32:
    """Return ``a - b`` modulo 2**32."""
    return np.uint32((int(a) - int(b)) & _MASK)


@_two("mul")
def mul(a: np.uint32, b: np.uint32) -> np.uint32:
    """Return ``a * b`` modulo 2**32."""
    return np.uint32((int(a) * int(b)) & _MASK)


@_two("xor")
def xor(a: np.uint32, b: np.uint32) -> np.uint32:
    """Return the exclusive or."""
    return np.uint32(int(a) ^ int(b))


@_two("and_")
def band(a: np.uint32, b: np.uint32) -> np.uint32:
    """Return the bitwise and."""
    return np.uint32(int(a) & int(b))


@_two("lshr")
def shr(a: np.uint32, b: np.uint32) -> np.uint32:
    """Return ``a`` shifted right by ``b`` < 32."""
    return np.uint32(int(a) >> int(b))


@_compiled_to(lambda builder, a: builder.sitofp(a, _FLOAT), types.float32, types.uint32)
def signed(a: np.uint32) -> np.float32:
    """Return ``a``, read as a signed integer, as float32."""
    return np.float32(np.uint32(a).view(np.int32))


@_compiled_to(lambda builder, a: builder.bitcast(a, _INT), types.uint32, types.float32)
def bits_of(a: np.float32) -> np.uint32:
    """Return the bit pattern of a float32."""
    return np.float32(a).view(np.uint32)


@_compiled_to(lambda builder, a: builder.bitcast(builder.fptosi(a, _INT), _FLOAT), types.float32, types.float32)
def truncated_float(a: np.float32) -> np.float32:
    """Return the float32 whose bit pattern is the integer part of ``a``."""
    return np.int32(a).view(np.float32)


@njit
def mix(x: np.uint32) -> np.uint32:
    """Scramble 32 bits: every bit of the answer depends on every bit of ``x`` (xor, shift, multiply, twice)."""
    x = mul(xor(x, shr(x, np.uint32(16))), np.uint32(0x21F0AAAD))
    x = mul(xor(x, shr(x, np.uint32(15))), np.uint32(0x735A2D97))
    mixed: np.uint32 = xor(x, shr(x, np.uint32(15)))
    return mixed


BYTES_STD = math.sqrt(4 * (256**2 - 1) / 12)
"""Of the sum of the four bytes of a hash."""
_BYTES_MEAN = 4 * 255 / 2


@njit
def normal(h: np.uint32) -> np.float32:
    """Return the standardised sum of the four bytes of a hash: close to normal, never beyond 3.5."""
    pairs = add(band(h, np.uint32(0x00FF00FF)), band(shr(h, np.uint32(8)), np.uint32(0x00FF00FF)))
    total = shr(mul(pairs, np.uint32(0x00010001)), np.uint32(16))
    drawn: np.float32 = (signed(total) - np.float32(_BYTES_MEAN)) * np.float32(1 / BYTES_STD)
    return drawn


def row_sum(row: NDArray[np.float32]) -> np.float32:
    """Return the sum of float32[n], added in one fixed order: sixteen lanes, halved four times, then the rest.

    A compiler may not reorder floating-point additions, so a plain loop adds one number at a time; letting it reorder
    (``fastmath``) would make the sum depend on the machine. Here the order is part of the definition.
    """
    chunks = len(row) // _LANES
    lanes = np.zeros(_LANES, np.float32)
    for i in range(chunks):
        lanes += row[i * _LANES : (i + 1) * _LANES]
    width = _LANES
    while width > 1:
        width //= 2
        lanes = lanes[:width] + lanes[width:]
    total = lanes[0]
    for value in row[chunks * _LANES :]:
        total += value
    return np.float32(total)


def _emit_sum_of_chunks(_typing: Any, row: Any, chunks: Any) -> Any:
    """Sum of the first ``16 * chunks`` elements, as :func:`row_sum` defines it."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_FLOAT, _LANES)
        zero = ir.Constant(vector, [0.0] * _LANES)
        data, count = context.make_array(signature.args[0])(context, builder, arguments[0]).data, arguments[1]
        data = builder.bitcast(data, vector.as_pointer())
        before, loop, after = builder.block, builder.append_basic_block("lanes"), builder.append_basic_block("fold")
        first, step = ir.Constant(count.type, 0), ir.Constant(count.type, 1)
        builder.cbranch(builder.icmp_signed(">", count, first), loop, after)
        builder.position_at_end(loop)
        index, lanes = builder.phi(count.type), builder.phi(vector)
        total = builder.fadd(lanes, builder.load(builder.gep(data, [index]), align=4))
        following = builder.add(index, step)
        index.add_incoming(first, before)
        index.add_incoming(following, loop)
        lanes.add_incoming(zero, before)
        lanes.add_incoming(total, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        builder.position_at_end(after)
        folded = builder.phi(vector)
        folded.add_incoming(zero, before)
        folded.add_incoming(total, loop)
        width = _LANES
        while width > 1:
            width //= 2
            which = ir.VectorType(_INT, width)
            low = ir.Constant(which, list(range(width)))
            high = ir.Constant(which, list(range(width, 2 * width)))
            folded = builder.fadd(
                builder.shuffle_vector(folded, folded, low), builder.shuffle_vector(folded, folded, high)
            )
        return builder.extract_element(folded, ir.Constant(_INT, 0))

    return types.float32(row, chunks), build


_sum_of_chunks: Any = intrinsic(_emit_sum_of_chunks)


def _row_sum(row: NDArray[np.float32]) -> np.float32:
    chunks = len(row) // _LANES
    total: np.float32 = _sum_of_chunks(row, chunks)
    for i in range(chunks * _LANES, len(row)):
        total += row[i]
    return total


overload(row_sum, strict=False)(lambda row: _row_sum)
