"""32-bit arithmetic for kernels: what numba needs to be told so that a loop of it runs eight or sixteen tokens at a time.

numba widens every integer to 64 bits, and a hash computed that way costs twice the registers and a multiplication that
most vector units lack. The functions here stay at 32 bits. Each is plain Python (which is what runs under
``NUMBA_DISABLE_JIT=1``) and, inside a kernel, one machine instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from sim.jit import njit

__all__ = ["add", "band", "bits_of", "mix", "mul", "row_sum", "shr", "signed", "sub", "truncated_float", "xor"]

_MASK = 0xFFFFFFFF
_LANES = 16


def _two(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have ``function(uint32, uint32)`` compiled to the LLVM instruction ``name``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @intrinsic
        def instruction(_typing: Any, a: Any, b: Any) -> Any:
            def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                return getattr(builder, name)(*arguments)

            return types.uint32(types.uint32, types.uint32), build

        @overload(function, inline="always", strict=False)
        def compiled(a: Any, b: Any) -> Any:
            return lambda a, b: instruction(a, b)

        return function

    return decorate


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


def signed(a: np.uint32) -> np.float32:
    """Return ``a``, read as a signed integer, as float32."""
    return np.float32(np.uint32(a).view(np.int32))


def bits_of(a: np.float32) -> np.uint32:
    """Return the bit pattern of a float32."""
    return np.float32(a).view(np.uint32)


def truncated_float(a: np.float32) -> np.float32:
    """Return the float32 whose bit pattern is the integer part of ``a``."""
    return np.int32(a).view(np.float32)


@intrinsic
def _signed(_typing: Any, a: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.sitofp(arguments[0], ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def _bits_of(_typing: Any, a: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), build


@intrinsic
def _truncated_float(_typing: Any, a: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptosi(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.float32), build


@overload(signed, inline="always", strict=False)
def _signed_compiled(a: Any) -> Any:
    return lambda a: _signed(a)


@overload(bits_of, inline="always", strict=False)
def _bits_of_compiled(a: Any) -> Any:
    return lambda a: _bits_of(a)


@overload(truncated_float, inline="always", strict=False)
def _truncated_float_compiled(a: Any) -> Any:
    return lambda a: _truncated_float(a)


@njit(inline="always")
def mix(x: np.uint32) -> np.uint32:
    """Scramble 32 bits: every bit of the answer depends on every bit of ``x`` (xor, shift, multiply, twice)."""
    x = mul(xor(x, shr(x, np.uint32(16))), np.uint32(0x21F0AAAD))
    x = mul(xor(x, shr(x, np.uint32(15))), np.uint32(0x735A2D97))
    return xor(x, shr(x, np.uint32(15)))


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


@intrinsic
def _sum_of_chunks(_typing: Any, row: Any, chunks: Any) -> Any:
    """Sum of the first ``16 * chunks`` elements, as :func:`row_sum` defines it."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), _LANES)
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
            which = ir.VectorType(ir.IntType(32), width)
            low = ir.Constant(which, list(range(width)))
            high = ir.Constant(which, list(range(width, 2 * width)))
            folded = builder.fadd(
                builder.shuffle_vector(folded, folded, low), builder.shuffle_vector(folded, folded, high)
            )
        return builder.extract_element(folded, ir.Constant(ir.IntType(32), 0))

    return types.float32(row, types.intp), build


@overload(row_sum, strict=False)
def _row_sum_compiled(row: Any) -> Any:
    def compiled(row: NDArray[np.float32]) -> np.float32:
        chunks = len(row) // _LANES
        total = _sum_of_chunks(row, chunks)
        for i in range(chunks * _LANES, len(row)):
            total += row[i]
        return total

    return compiled
