"""Small KV pools, filled so that every slot is told from every other."""

import dataclasses

import numpy as np
import torch

from gpu_validate.payload import payload
from gpu_validate.pool import PagedPool
from sim.serving.models import Model, get_model

DTYPES = ("bf16", "fp16", "fp32", "fp8")


def toy(**changes: int) -> Model:
    """Return the toy model with other heads, head size or layers."""
    return dataclasses.replace(get_model("toy"), **changes)


def filled(
    model: Model, num_blocks: int, block_size: int, dtype: str = "bf16", device: str = "cpu", writer: int = 7
) -> PagedPool:
    """Return a pool in which slot ``s`` holds the payload of (``writer``, position ``s``), but for the null block."""
    pool = PagedPool(model, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
    slots = torch.arange(block_size, pool.num_slots, device=device)
    for layer in range(model.layers):
        pool.write(layer, *payload(torch.full_like(slots, writer), slots, layer, model, dtype), slots)
    return pool


def contents(pool: PagedPool) -> np.ndarray:
    """Return the bytes of every slot: uint8 [slots, token bytes]."""
    return pool.raw(torch.arange(pool.num_slots, device=pool.device)).cpu().numpy()


def restore(pool: PagedPool, held: np.ndarray) -> None:
    """Put the bytes of every slot back."""
    first = 0
    for plane in pool.planes:
        plane.rows.copy_(torch.from_numpy(held[:, first : first + plane.row_bytes]))
        first += plane.row_bytes
