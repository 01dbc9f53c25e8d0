"""Keys and values that say whose they are.

With ``--verify`` each token's keys and values are a hash of (writer, position, layer, keys or values): whoever reads a
slot can tell which token is in it, on any device, without a copy kept anywhere. Only integer operations that cannot
overflow are used, and each value is a small integer times a power of two, so that

- the bytes are the same on every device and however the tokens are split into calls;
- every dtype of the pool holds the values exactly: what is written comes back unchanged, even through ``fp8``.

Values look like a normal distribution (a sum of four uniform integers), so softmax is neither flat nor a single spike.
Each head of each token has a magnitude of its own among four: in ``fp8`` their scales differ, and a scale that stays
behind when its token moves is seen.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from gpu_validate.dtypes import KVDtype, get_dtype
from gpu_validate.pool import PagedPool
from sim.serving.models import Model

__all__ = ["fill_random", "payload", "queries"]

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_KEYS, _VALUES, _QUERIES = 1, 2, 3

_Number = TypeVar("_Number", torch.Tensor, int)


def _mix(x: _Number) -> _Number:
    """Mix 32-bit numbers (tensors of them in int64): a bijection that spreads each bit over all others.

    The constants are those of the xor-shift-multiply hash of least bias known, from github.com/skeeto/hash-prospector
    (issue 19). Both are below 2**31, so no product leaves the signed 64 bits.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def _absorb(state: torch.Tensor | int, word: torch.Tensor) -> torch.Tensor:
    return (_mix((word & _MASK) ^ state) + _GOLDEN) & _MASK


def _token_key(owner: torch.Tensor, index: torch.Tensor, layer: int, what: int, stream: int) -> torch.Tensor:
    """Return 32 bits [T] that depend on every bit of the token's identity."""
    state: torch.Tensor | int = _mix(_mix(4 * what + stream) ^ layer)
    for word in (owner, owner >> 32, index):
        state = _absorb(state, word)
    return _absorb(state, index >> 32)


def _values(
    owner: torch.Tensor, index: torch.Tensor, layer: int, what: int, heads: int, head_dim: int, dtype: KVDtype
) -> torch.Tensor:
    # Two keys: tokens are mistaken for each other only where 64 bits collide.
    first, second = (_token_key(owner, index, layer, what, stream) for stream in (1, 2))
    counter = torch.arange(heads * head_dim, dtype=torch.int64, device=owner.device)
    spread = _mix(counter * _GOLDEN & _MASK)
    drawn = _mix(_mix(first[:, None] ^ spread) ^ second[:, None])
    # Four uniform integers of `bits` bits: their sum less its mean is exact with 8 significant bits, or with e4m3's 4.
    bits = 3 if dtype.scaled else 7
    top = (1 << bits) - 1
    total = (drawn & top) + (drawn >> 8 & top) + (drawn >> 16 & top) + (drawn >> 24 & top) - 2 * top
    # Standard deviation 1.15; each (token, head) is then halved up to twice or doubled.
    head = torch.arange(heads, dtype=torch.int64, device=owner.device)
    magnitude = 3 - (_mix(second[:, None] ^ _mix(head + _GOLDEN)) & 3)
    shifted = total.view(-1, heads, head_dim) << magnitude[..., None]
    # An integer of up to 12 bits times a power of two: exact in float32, and in the narrow types because its low
    # bits are zeros.
    return (shifted.to(torch.float32) * 2.0 ** -(bits + 1)).to(dtype.compute)


def payload(
    writer: torch.Tensor, position: torch.Tensor, layer: int, model: Model, dtype: str | KVDtype = "bf16"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of tokens, from their identity alone.

    Parameters
    ----------
    writer
        int64 [T], the request that wrote each token: with shared prefixes not the one that reads it.
    position
        int64 [T], logical positions.
    layer
        Decoder layer.
    model
        KV heads and head size.
    dtype
        The pool's element type.

    Returns
    -------
    tuple of Tensor
        [T, KV heads, head size] in the dtype's compute type, on the device of ``writer``; the pool's dtype holds them
        exactly. About 16 bytes of working memory for each element.
    """
    kind = get_dtype(dtype)
    shape = (model.kv_heads, model.head_dim, kind)
    return (
        _values(writer, position, layer, _KEYS, *shape),
        _values(writer, position, layer, _VALUES, *shape),
    )


def queries(step: int, req: torch.Tensor, layer: int, model: Model, dtype: str | KVDtype = "bf16") -> torch.Tensor:
    """Return the queries of one step, one a request.

    Parameters
    ----------
    step
        Engine step.
    req
        int64 [B], requests.
    layer, model, dtype
        As for :func:`payload`.

    Returns
    -------
    Tensor
        [B, query heads, head size] in the dtype's compute type.
    """
    index = torch.full_like(req, step)
    return _values(req, index, layer, _QUERIES, model.heads, model.head_dim, get_dtype(dtype))


def fill_random(pool: PagedPool, seed: int = 0) -> None:
    """Fill a pool with random numbers for timing: no zeros that a memory could compress, no denormals.

    Standard normal, or for ``fp8`` random e4m3 between 1/8 and 2 in magnitude with scales between 1/2 and 1. The null
    block stays as it is. The bytes depend on the device: they are for timing, not for comparing.
    """
    generator = torch.Generator(device=pool.device).manual_seed(seed)
    for layer, kv in enumerate(pool.kv):
        blocks = kv[:, 1:]
        if pool.scales is None:
            blocks.normal_(generator=generator)
        else:
            stored = blocks.view(torch.uint8)
            stored.random_(0, 256, generator=generator)
            # Sign, two low exponent bits and mantissa stay random; exponent field 01xx is 2**-3 to 2**0.
            stored.bitwise_and_(0b1001_1111).bitwise_or_(0b0010_0000)
            pool.scales[layer][:, 1:].uniform_(0.5, 1.0, generator=generator)
