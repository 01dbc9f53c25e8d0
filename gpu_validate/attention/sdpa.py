"""Attention by gathering the pages and calling torch: the reference, and what a CPU runs."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.bias import causal_lower_right

from gpu_validate.attention.base import check_plan
from gpu_validate.attention.buffers import TableBuffers
from gpu_validate.pool import PagedPool

__all__ = ["SdpaDecode", "causal_attention", "dense_attention", "prefill", "table_slots"]


def table_slots(table: torch.Tensor, width: int, block_size: int) -> torch.Tensor:
    """Return the slots int64 [..., width] of the first ``width`` positions of block table rows [..., M]."""
    index = torch.arange(width, device=table.device)
    blocks = table[..., index // block_size].to(torch.int64)
    return blocks * block_size + index % block_size


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Attend with grouped query heads, in float32.

    Parameters
    ----------
    q
        [B, T, query heads, head size].
    k, v
        [B, L, KV heads, head size].
    visible
        bool, broadcastable to [B, T, L]: which keys each query sees.

    Returns
    -------
    Tensor
        [B, T, query heads, head size] in the type of ``q``; zeros where a query sees nothing.
    """
    wide_q, wide_k, wide_v = (x.to(torch.float32).transpose(1, 2) for x in (q, k, v))
    mask = visible.expand(q.shape[0], q.shape[1], k.shape[1])[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        wide_q, wide_k, wide_v, attn_mask=mask, enable_gqa=q.shape[2] != k.shape[2], scale=1 / math.sqrt(q.shape[3])
    )
    # A row without any key is 0 / 0 in softmax, not zeros.
    return torch.where(mask.any(-1)[..., None], out, 0.0).transpose(1, 2).to(q.dtype)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend causally in the given type, by torch's flash kernel where there is one.

    Parameters
    ----------
    q
        [T, query heads, head size], the last T positions.
    k, v
        [L, KV heads, head size]; query ``i`` sees the first ``L - T + i + 1``.

    Returns
    -------
    Tensor
        As ``q``.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    # Says "causal, aligned at the end" without a tensor: with a mask there is no flash kernel.
    bias = causal_lower_right(len(q), len(k))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=bias,
        scale=1 / math.sqrt(q.shape[2]),
    )
    return out[0].transpose(0, 1)


class SdpaDecode:
    """Decode attention by torch's scaled dot product attention over gathered pages.

    Parameters
    ----------
    pool, max_batch, max_blocks
        See :func:`gpu_validate.attention.base.build_attention`.
    masked
        Plans may come with ``live``.
    capture
        Gather the longest row there can be, whatever the plan, so that a captured graph is right for later plans. Off,
        as much is gathered as the plan's longest row needs.
    """

    name = "sdpa"

    def __init__(
        self, pool: PagedPool, max_batch: int, max_blocks: int, *, masked: bool = False, capture: bool = False
    ) -> None:
        self.pool = pool
        self.masks = masked
        self.capturable = capture
        self._limits = max_batch, max_blocks
        self.buffers = TableBuffers(max_batch, max_blocks, pool.block_size, pool.device, masked=masked)
        self._full_width = max_blocks * pool.block_size
        self._width = self._full_width
        self._positions = torch.arange(self._full_width, device=pool.device)

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
        if not self.capturable:
            self._width = int(lengths.max(initial=1))

    def layout(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """See :meth:`gpu_validate.attention.base.DecodeAttention.layout`."""
        return self.buffers.read_back()

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :meth:`gpu_validate.attention.base.DecodeAttention.run`."""
        rows, width = len(q), self._width
        position = self._positions[:width]
        visible = position < self.buffers.lengths[:rows, None]
        if self.buffers.live is not None:
            bits = self.buffers.live[:rows, position // 32] >> (position % 32).to(torch.int32) & 1
            visible &= bits.to(torch.bool)
        k, v = self.pool.read(layer, table_slots(self.buffers.table[:rows], width, self.pool.block_size))
        out.copy_(dense_attention(q[:, None], k, v, visible[:, None])[:, 0])
        return out


def prefill(
    pool: PagedPool,
    layer: int,
    q: torch.Tensor,
    table: torch.Tensor,
    length: int,
    *,
    live: torch.Tensor | None = None,
    flash: bool | None = None,
) -> torch.Tensor:
    """Attend from a request's newest tokens to all that it has written, causally.

    Parameters
    ----------
    pool, layer
        What is read; the new tokens are in it already.
    q
        [T, query heads, head size]: the request's last T written tokens, in order.
    table
        int [M], its block table on the pool's device.
    length
        Its written slots, the T new ones included; so ``length - T`` is the context before this chunk.
    live
        bool [at least length] on the device: the slots that may be attended to; None: every written one.
    flash
        Without ``live``: use :func:`causal_attention`, in the pool's type, instead of float32 and a mask. None: on a
        GPU, where it is torch's flash kernel and many times as fast.

    Returns
    -------
    Tensor
        [T, query heads, head size] in the type of ``q``.
    """
    tokens = len(q)
    k, v = pool.read(layer, table_slots(table, length, pool.block_size))
    if live is None and (pool.device.type == "cuda" if flash is None else flash):
        return causal_attention(q, k, v)
    index = torch.arange(length, device=pool.device)
    visible = index <= torch.arange(length - tokens, length, device=pool.device)[:, None]
    if live is not None:
        visible = visible & live[:length]
    return dense_attention(q[None], k[None], v[None], visible)[0]
