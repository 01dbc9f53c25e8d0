"""Element types of the KV pool.

Three are stored as they are. ``fp8`` (e4m3) comes with float32 scales, one for the keys and one for the values of each
token and head, as in vLLM's ``fp8_per_token_head``: a scale belongs to the token, not to the block, and goes where the
token goes. The simulator's ``fp8`` (:mod:`sim.serving.kv_dtype`) is vLLM's ``fp8``, whose scales are for a whole layer:
a head of 128 takes 128 bytes there and 132 here.

The scale is a power of two, taken from the exponent of the head's largest magnitude, so quantising needs no division:
the bytes are the same on every device, and what e4m3 can hold comes back unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch

from sim.errors import InputError, did_you_mean

__all__ = ["DTYPES", "FP8_MAX", "KVDtype", "dequantise", "get_dtype", "power_of_two_scale", "quantise"]

FP8_MAX = 448.0
"""Largest finite e4m3 value (OCP 8-bit floating point specification, table 1)."""

_MANTISSA = 0x7FFFFF
_MANTISSA_OF_448 = 0x600000  # 448 = 1.75 * 2**8
_EXPONENT_OF_448 = 8


@dataclass(frozen=True, slots=True)
class KVDtype:
    """How an element of the pool is stored.

    Parameters
    ----------
    name
        "bf16", "fp16", "fp32" or "fp8".
    storage
        Element type of the pool's tensors.
    compute
        Element type of the keys, values and queries handed in, and of attention's output.
    scaled
        Whether each (keys or values, token, head) has a float32 scale.
    """

    name: str
    storage: torch.dtype
    compute: torch.dtype
    scaled: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a stored element."""
        return int(self.storage.itemsize)

    def token_bytes(self, layers: int, heads: int, head_dim: int) -> int:
        """Return the bytes that one token takes over all layers, scales included."""
        return 2 * layers * heads * (head_dim * self.itemsize + (4 if self.scaled else 0))


DTYPES = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            KVDtype("bf16", torch.bfloat16, torch.bfloat16),
            KVDtype("fp16", torch.float16, torch.float16),
            KVDtype("fp32", torch.float32, torch.float32),
            KVDtype("fp8", torch.float8_e4m3fn, torch.bfloat16, scaled=True),
        )
    }
)
"""All element types by name."""


def get_dtype(name: str | KVDtype) -> KVDtype:
    """Return the element type called ``name``.

    Raises
    ------
    InputError
        If there is none.
    """
    if isinstance(name, KVDtype):
        return name
    if name == "int4":
        raise InputError(f"KV dtype int4: the pool on a device does not store it, give --dtype: {', '.join(DTYPES)}")
    if name not in DTYPES:
        hint = did_you_mean(name, DTYPES)
        raise InputError(f"unknown KV dtype {name!r}: expected one of {', '.join(DTYPES)}{hint}")
    return DTYPES[name]


def power_of_two_scale(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least power of two that brings ``largest`` down to e4m3's range, and its inverse.

    Parameters
    ----------
    largest
        float32, not negative, finite; 0 gives scale 0 and inverse 0.

    Returns
    -------
    tuple of Tensor
        float32, shaped as ``largest``; both exact, made from the bits of the exponent.
    """
    bits = largest.view(torch.int32)
    exponent = (bits >> 23) - _EXPONENT_OF_448 + ((bits & _MANTISSA) > _MANTISSA_OF_448).to(torch.int32)
    exponent = exponent.clamp(min=1)  # no denormal scale
    something = bits > 0
    scale = torch.where(something, exponent << 23, 0).view(torch.float32)
    inverse = torch.where(something, (254 - exponent) << 23, 0).view(torch.float32)
    return scale, inverse


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``values`` [..., D] as e4m3, and the float32 scale [...] to multiply them by."""
    wide = values.to(torch.float32)
    scale, inverse = power_of_two_scale(wide.abs().amax(-1))
    return (wide * inverse[..., None]).to(torch.float8_e4m3fn), scale


def dequantise(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return e4m3 ``stored`` [..., D] times ``scale`` [...] as float32."""
    return stored.to(torch.float32) * scale[..., None]
