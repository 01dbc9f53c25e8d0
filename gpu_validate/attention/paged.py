"""Our own paged decode attention in Triton: grouped heads, any block size, fp8 with scales, dead slots masked if asked.

It reads the same bytes as a stock kernel would, dead slots too; with ``live`` it only leaves them out of the softmax.
Unlike a stock kernel it also runs on a CPU, in Triton's interpreter: what the GPU will do is tested without one.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_validate.attention.base import check_plan
from gpu_validate.attention.buffers import TableBuffers
from gpu_validate.dtypes import KVDtype
from gpu_validate.kernels.runtime import is_interpreted, require_triton
from gpu_validate.pool import PagedPool
from sim.errors import InputError
from sim.serving.models import Model

__all__ = ["PagedDecode", "choose_splits", "launch_constants"]

_DOT_ROWS = 16
"""Fewest rows that a tensor core multiplies: a group with fewer query heads is padded, but for float32, which is
multiplied without them."""

_TILE_BYTES = 16 * 1024

_SHORTEST_SPLIT = 256
"""Slots below which another split costs more than it spreads: its partial result is written and read once more."""

_MOST_SPLITS = 64


def choose_splits(rows: int, kv_heads: int, longest: int, processors: int) -> int:
    """Return into how many parts each row's slots are split.

    Enough that every multiprocessor has two programs, none shorter than 256 slots, a power of two. It follows from the
    launch's shape alone, never from a step's lengths: a captured graph has one answer.

    Parameters
    ----------
    rows, kv_heads
        Programs without splits.
    longest
        Slots that a row of the block table can hold.
    processors
        Multiprocessors of the device.
    """
    wanted = -(-2 * processors // (rows * kv_heads))
    most = min(_MOST_SPLITS, max(1, longest // _SHORTEST_SPLIT))
    return min(1 << (wanted - 1).bit_length(), 1 << (most.bit_length() - 1))


def launch_constants(model: Model, block_size: int, dtype: KVDtype, *, masked: bool, upcast: bool) -> dict[str, Any]:
    """Return what the kernel is compiled for, but for the number of splits.

    Parameters
    ----------
    model, block_size, dtype
        The pool's.
    masked
        Whether plans come with ``live``.
    upcast
        Whether to multiply in float32: in Triton's interpreter.
    """
    group = model.heads // model.kv_heads
    return {
        "HEADS": model.kv_heads,
        "GROUP": group,
        "GROUP_PAD": 1 << (max(group, 1 if dtype.compute.itemsize == 4 else _DOT_ROWS) - 1).bit_length(),
        "HEAD_DIM": model.head_dim,
        "BLOCK_SIZE": block_size,
        # 16 KiB of keys at a time.
        "TILE": max(16, _TILE_BYTES // (model.head_dim * dtype.compute.itemsize)),
        "SCALED": dtype.scaled,
        "MASKED": masked,
        "UPCAST": upcast,
        "num_warps": 4,
        "num_stages": 3,
    }


class PagedDecode:
    """Decode attention by the kernels in :mod:`gpu_validate.kernels.decode`.

    Parameters
    ----------
    pool, max_batch, max_blocks
        See :func:`gpu_validate.attention.base.build_attention`.
    masked
        Plans may come with ``live``.
    capture
        Accepted for the seam: ``run`` can always be captured.
    splits
        Parts that each row is split into; None: :func:`choose_splits`.

    Raises
    ------
    InputError
        If Triton cannot run on the pool's device, or the head size is not a power of two from 16 to 256.
    """

    name = "paged"
    capturable = True

    def __init__(
        self,
        pool: PagedPool,
        max_batch: int,
        max_blocks: int,
        *,
        masked: bool = False,
        capture: bool = True,  # noqa: ARG002 - the seam's; nothing depends on it here
        splits: int | None = None,
    ) -> None:
        require_triton(pool.device, "attention 'paged'")
        from gpu_validate.kernels import decode

        model = pool.model
        if model.head_dim not in (16, 32, 64, 128, 256):
            raise InputError(f"attention 'paged': head size {model.head_dim} of {model.name}: expected 16, 32, .. 256")
        self.pool = pool
        self.masks = masked
        self._limits = max_batch, max_blocks
        self.buffers = TableBuffers(max_batch, max_blocks, pool.block_size, pool.device, masked=masked)
        self._decode_split, self._combine_splits = decode.decode_split, decode.combine_splits
        on_gpu = pool.device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(pool.device).multi_processor_count if on_gpu else 1
        self._longest = max_blocks * pool.block_size
        self._splits = splits
        parts = max(rows * self.splits(rows) for rows in range(1, max_batch + 1))
        self._partial = torch.empty((parts * model.heads, model.head_dim), dtype=torch.float32, device=pool.device)
        self._partial_lse = torch.empty(parts * model.heads, dtype=torch.float32, device=pool.device)
        self._scale = math.log2(math.e) / math.sqrt(model.head_dim)
        self._constants = launch_constants(
            model, pool.block_size, pool.dtype, masked=masked, upcast=is_interpreted(decode.decode_split)
        )

    def splits(self, rows: int) -> int:
        """Return the splits of a launch of ``rows`` rows."""
        return self._splits or choose_splits(rows, self.pool.model.kv_heads, self._longest, self._processors)

    def plan(
        self,
        block_table: NDArray[np.int32],
        lengths: NDArray[np.int32],
        *,
        live: NDArray[np.bool_] | None = None,
        rows: int | None = None,
    ) -> None:
        """See :meth:`gpu_validate.attention.base.DecodeAttention.plan`."""
        check_plan(self.pool, self._limits, block_table, lengths, live=live, masks=self.masks, rows=rows)
        self.buffers.write(block_table, lengths, live)

    def layout(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """See :meth:`gpu_validate.attention.base.DecodeAttention.layout`."""
        return self.buffers.read_back()

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :meth:`gpu_validate.attention.base.DecodeAttention.run`."""
        pool, buffers, rows = self.pool, self.buffers, len(q)
        splits = self.splits(rows)
        k, v = pool.kv[layer]
        # Not read unless the pool has scales or bits; the kernel wants a tensor all the same.
        k_scale, v_scale = (k, v) if pool.scales is None else pool.scales[layer]
        live = buffers.table if buffers.live is None else buffers.live
        on_gpu = pool.device.type == "cuda"
        with torch.cuda.device(pool.device) if on_gpu else contextlib.nullcontext():
            self._decode_split[(pool.model.kv_heads, rows, splits)](
                q,
                k,
                v,
                k_scale,
                v_scale,
                buffers.table,
                buffers.lengths,
                live,
                out,
                self._partial,
                self._partial_lse,
                self._scale,
                buffers.table.shape[1],
                live.shape[1],
                **self._constants,
                SPLITS=splits,
            )
            if splits > 1:
                self._combine_splits[(rows * pool.model.heads,)](
                    self._partial,
                    self._partial_lse,
                    out,
                    HEAD_DIM=pool.model.head_dim,
                    SPLITS=splits,
                    SPLITS_PAD=1 << (splits - 1).bit_length(),
                    num_warps=4,
                )
        return out
