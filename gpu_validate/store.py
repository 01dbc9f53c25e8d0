"""Writing new tokens into the pool: by torch's operations, or by one Triton launch a layer as serving engines do."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gpu_validate.dtypes import KVDtype, quantise
from gpu_validate.kernels.runtime import require_triton
from sim.serving.models import Model

if TYPE_CHECKING:
    from gpu_validate.pool import PagedPool

__all__ = ["Store", "TorchStore", "TritonStore", "build_store", "launch_constants"]


class Store(Protocol):
    """Writes tokens into their slots; see :meth:`gpu_validate.pool.PagedPool.write`."""

    def __call__(self, pool: PagedPool, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``k`` and ``v`` [T, KV heads, head size] into ``slots`` int64 [T] of ``layer``; -1 writes nothing."""
        ...


class TorchStore:
    """Writes by torch's operations: the twin that the kernel is compared with.

    Padding rows put zeros into slot 0 of the null block, where zeros are already: no value is looked at on the host.
    """

    def __call__(self, pool: PagedPool, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """See :class:`Store`."""
        padding = (slots < 0)[:, None, None]
        target = slots.clamp(min=0)
        for part, values in enumerate((k, v)):
            kept = values.masked_fill(padding, 0)
            into = pool.kv[layer][part].view(pool.num_slots, *values.shape[1:])
            if pool.scales is None:
                into.index_copy_(0, target, kept.to(pool.dtype.storage))
            else:
                stored, scale = quantise(kept)
                # index_copy_ knows no 8-bit floats; bytes are bytes.
                into.view(torch.uint8).index_copy_(0, target, stored.view(torch.uint8))
                pool.scales[layer][part].view(pool.num_slots, -1).index_copy_(0, target, scale)


def launch_constants(model: Model, dtype: KVDtype) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    return {
        "HEADS": model.kv_heads,
        "HEADS_PAD": 1 << (model.kv_heads - 1).bit_length(),
        "HEAD_DIM": model.head_dim,
        "HEAD_DIM_PAD": 1 << (model.head_dim - 1).bit_length(),
        "SCALED": dtype.scaled,
        "num_warps": 4,
    }


class TritonStore:
    """Writes by one launch over keys and values, which are quantised on the way.

    Parameters
    ----------
    device
        Where the pool is.

    Raises
    ------
    InputError
        If Triton cannot run there.
    """

    def __init__(self, device: torch.device) -> None:
        require_triton(device, "the Triton store")
        from gpu_validate.kernels.store import store_tokens

        self._kernel = store_tokens
        self._device = device

    def __call__(self, pool: PagedPool, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """See :class:`Store`."""
        # A slice of the projection's output is taken as it is: only the tokens need not be neighbours.
        k, v = (part if part.stride()[1:] == (pool.model.head_dim, 1) else part.contiguous() for part in (k, v))
        caches = pool.kv[layer]
        scales = caches if pool.scales is None else pool.scales[layer]
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            self._kernel[(len(slots), 2)](
                k,
                v,
                slots,
                caches[0],
                caches[1],
                scales[0],
                scales[1],
                k.stride(0),
                v.stride(0),
                **launch_constants(pool.model, pool.dtype),
            )


def build_store(device: torch.device) -> Store:
    """Return the kernel on a GPU where Triton is installed, else torch's operations."""
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        return TritonStore(device)
    return TorchStore()
