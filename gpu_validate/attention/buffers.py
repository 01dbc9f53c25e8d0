"""The device's copy of a step's block table and lengths: fixed tensors, rewritten in place."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["TableBuffers", "upload"]


def upload(values: NDArray[np.generic], into: torch.Tensor) -> None:
    """Copy ``values`` over ``into`` in place, without waiting for the device.

    On a GPU they go through page-locked memory of torch's caching allocator, which hands it out again only when the
    copy is done: the caller may overwrite ``values`` at once.
    """
    source = torch.from_numpy(np.ascontiguousarray(values))
    if into.device.type == "cuda":
        source = source.pin_memory()
    into.copy_(source, non_blocking=True)


class TableBuffers:
    """Block table, lengths and live bits with room for the largest batch.

    Parameters
    ----------
    max_batch, max_blocks, block_size
        Rows, blocks a row, slots a block.
    device
        Where they live.
    masked
        Whether there are live bits.

    Attributes
    ----------
    table
        int32 [max_batch, max_blocks].
    lengths
        int32 [max_batch]; 0 behind the planned rows.
    live
        int32 [max_batch, words] or None. Bit ``i`` of word ``w`` is slot ``32 w + i`` of the row, in table order: a
        bit for each reader's view of a slot, since readers of a shared block need not agree on what is dead in it, and
        an eighth of what bytes would cost to upload.
    """

    def __init__(
        self, max_batch: int, max_blocks: int, block_size: int, device: torch.device, *, masked: bool = False
    ) -> None:
        self.table = torch.zeros((max_batch, max_blocks), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_batch, dtype=torch.int32, device=device)
        words = -(-max_blocks * block_size // 32)
        self.live = torch.full((max_batch, words), -1, dtype=torch.int32, device=device) if masked else None
        self._host_table = np.zeros((max_batch, max_blocks), np.int32)
        self._host_lengths = np.zeros(max_batch, np.int32)
        self._block_size = block_size
        self._planned = 0

    def write(
        self, block_table: NDArray[np.int32], lengths: NDArray[np.int32], live: NDArray[np.bool_] | None = None
    ) -> None:
        """Bring a plan to the device; see :meth:`gpu_validate.attention.base.DecodeAttention.plan`."""
        rows, width = block_table.shape
        self._planned = rows
        self._host_lengths[:rows] = lengths
        self._host_lengths[rows:] = 0
        upload(self._host_lengths, self.lengths)
        if rows == 0:
            return
        self._host_table[:rows, :width] = block_table
        upload(self._host_table[:rows], self.table[:rows])
        if self.live is not None:
            words = np.full((rows, self.live.shape[1]), -1, np.int32)
            if live is not None:
                packed = np.packbits(live, axis=1, bitorder="little")
                words.view(np.uint8)[:, : packed.shape[1]] = packed[:, : 4 * self.live.shape[1]]
            upload(words, self.live[:rows])

    def read_back(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the planned rows; see :meth:`gpu_validate.attention.base.DecodeAttention.layout`."""
        lengths = self.lengths[: self._planned].cpu().numpy()
        blocks = -(-lengths // self._block_size)
        table = self.table[: self._planned, : blocks.max(initial=0)].cpu().numpy()
        table[np.arange(table.shape[1]) >= blocks[:, None]] = 0
        return table, lengths
