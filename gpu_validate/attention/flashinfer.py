"""FlashInfer's paged decode attention, unchanged: ``BatchDecodeWithPagedKVCacheWrapper`` over the pool's tensors.

Written against flashinfer-python 0.6.8. A wrapper in graph mode serves one batch size, so there is one for each number
of rows that is planned; they share their buffers. Rows that pad a batch attend to one slot of the null block, whose
value is zero, and so give zeros without a further kernel.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_validate.attention.base import check_plan
from gpu_validate.attention.buffers import upload
from gpu_validate.memory import check_fits
from gpu_validate.pool import PagedPool
from sim.errors import InputError
from sim.serving.models import Model

__all__ = ["FlashInferDecode", "workspace_bytes"]

_LEAST_WORKSPACE = 128 * 1024 * 1024
"""What FlashInfer's documentation recommends."""

_TILE_ROWS = 16
_MOST_WRAPPERS = 16


def workspace_bytes(model: Model, max_batch: int, processors: int) -> int:
    """Return the bytes of workspace for the largest batch.

    On tensor cores in graph mode each tile of 16 query rows keeps a float32 partial result, and there are as many as
    two programs a multiprocessor, or tiles of the batch (scheduler.cuh: PrefillPlan, PrefillSplitQOKVIndptr).

    Parameters
    ----------
    model
        Heads and head size.
    max_batch
        Largest batch.
    processors
        Multiprocessors of the device.
    """
    tiles = max_batch - (-max_batch * (model.heads // model.kv_heads) // _TILE_ROWS)
    partial = model.heads * max(tiles, 2 * processors) * _TILE_ROWS * (model.head_dim + 1) * 4
    return max(_LEAST_WORKSPACE, partial + 2**20)


def _import_flashinfer() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:
        # It loads compiled code, and fails in many ways where that does not fit the machine.
        raise InputError(
            f"attention 'flashinfer': cannot import flashinfer ({error}): install flashinfer-python, or choose another"
        ) from error


class FlashInferDecode:
    """Decode attention by FlashInfer.

    Parameters
    ----------
    pool, max_batch, max_blocks
        See :func:`gpu_validate.attention.base.build_attention`.
    masked
        Refused: the kernel attends to every slot of the pages it is given.
    capture
        ``run`` will be captured: the wrapper of every batch size is kept. Off, of the last 16 only: each has 8 MiB on
        the device and on the host.
    tensor_cores
        FlashInfer's choice of kernel; on, as vLLM has it: the other one knows only groups of 1, 2, 3, 4 and 8.
    workspace
        Bytes of FlashInfer's workspace on the device; None: :func:`workspace_bytes`.

    Raises
    ------
    InputError
        If flashinfer cannot be imported or cannot compile for this machine, or for a pool that it has no kernel for:
        float32, or fp8 with a scale for each token.
    """

    name = "flashinfer"
    masks = False

    def __init__(
        self,
        pool: PagedPool,
        max_batch: int,
        max_blocks: int,
        *,
        masked: bool = False,
        capture: bool = False,
        tensor_cores: bool = True,
        workspace: int | None = None,
    ) -> None:
        if masked:
            raise InputError("attention 'flashinfer' cannot mask dead slots: choose paged or sdpa for that")
        if pool.dtype.name not in ("bf16", "fp16"):
            why = "one scale a tensor, not one a token" if pool.dtype.scaled else "16-bit keys and values"
            raise InputError(f"attention 'flashinfer' knows {why}: {pool.dtype.name} needs paged or sdpa")
        self.pool = pool
        self.capturable = capture
        self._flashinfer = _import_flashinfer()
        self._limits = max_batch, max_blocks
        self._tensor_cores = tensor_cores
        device = pool.device
        if workspace is None:
            on_gpu = device.type == "cuda"
            processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
            workspace = workspace_bytes(pool.model, max_batch, processors)
        check_fits({"FlashInfer's workspace": workspace}, device, lower="the largest batch")
        self._workspace = torch.zeros(workspace, dtype=torch.uint8, device=device)
        self._indptr = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self._indices = torch.zeros(max_batch * max(max_blocks, 1), dtype=torch.int32, device=device)
        self._last_page_len = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._wrappers: dict[int, Any] = {}
        self._uploaded: dict[int, Any] = {}
        self._planned = 0
        self._rows = 0
        self._try()

    def _try(self) -> None:
        """Attend once, so that a machine without a compiler is refused here and nothing is compiled while timing."""
        shape = (1, self.pool.model.heads, self.pool.model.head_dim)
        q = torch.zeros(shape, dtype=self.pool.dtype.compute, device=self.pool.device)
        try:
            self.plan(np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
            self.run(0, q, torch.empty_like(q))
        except Exception as error:
            raise InputError(f"attention 'flashinfer' does not work here ({error}): choose another") from error

    def _wrapper(self, rows: int) -> Any:
        if rows not in self._wrappers:
            if not self.capturable and len(self._wrappers) >= _MOST_WRAPPERS:
                oldest = next(iter(self._wrappers))
                # FlashInfer's own copy may still be reading the page-locked memory that goes with it.
                if oldest in self._uploaded:
                    self._uploaded.pop(oldest).synchronize()
                del self._wrappers[oldest]
            self._wrappers[rows] = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores,
                paged_kv_indptr_buffer=self._indptr[: rows + 1],
                paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=self._last_page_len[:rows],
            )
        return self._wrappers[rows]

    def plan(
        self,
        block_table: NDArray[np.int32],
        lengths: NDArray[np.int32],
        *,
        live: NDArray[np.bool_] | None = None,
        rows: int | None = None,
    ) -> None:
        """See :meth:`gpu_validate.attention.base.DecodeAttention.plan`.

        FlashInfer's planning runs on the host lengths. What it uploads lies in page-locked memory of its own, one area
        a wrapper, so a second plan first waits until the copy of the one before is done.
        """
        check_plan(self.pool, self._limits, block_table, lengths, live=live, masks=False, rows=rows)
        self._planned = len(lengths)
        self._rows = self._planned if rows is None else rows
        if self._rows == 0:
            return
        size = self.pool.block_size
        # A row without slots has the null block's first.
        written = np.ones(self._rows, np.int32)
        written[: self._planned] = np.maximum(lengths, 1)
        blocks = -(-written // size)
        table = np.zeros((self._rows, max(block_table.shape[1], 1)), np.int32)
        table[: self._planned, : block_table.shape[1]] = block_table
        table[: self._planned][lengths == 0] = 0
        indices = table[np.arange(table.shape[1]) < blocks[:, None]]
        indptr = np.zeros(self._rows + 1, np.int32)
        np.cumsum(blocks, out=indptr[1:])
        on_gpu = self.pool.device.type == "cuda"
        if self._rows in self._uploaded:
            self._uploaded[self._rows].synchronize()
        # Indices are brought where they belong already: from the host, the wrapper's own copy waits for the stream.
        upload(indices, self._indices[: len(indices)])
        model = self.pool.model
        self._wrapper(self._rows).plan(
            self._to_lock(indptr),
            self._indices[: len(indices)],
            self._to_lock((written - 1) % size + 1),
            model.heads,
            model.kv_heads,
            model.head_dim,
            size,
            q_data_type=self.pool.dtype.compute,
            kv_data_type=self.pool.dtype.storage,
        )
        if on_gpu:
            self._uploaded[self._rows] = torch.cuda.current_stream(self.pool.device).record_event()

    def _to_lock(self, values: NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(values.astype(np.int32))
        return tensor.pin_memory() if self.pool.device.type == "cuda" else tensor

    def layout(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """See :meth:`gpu_validate.attention.base.DecodeAttention.layout`."""
        indptr = self._indptr[: self._planned + 1].cpu().numpy()
        last = self._last_page_len[: self._planned].cpu().numpy()
        blocks = np.diff(indptr)
        indices = self._indices[: indptr[-1]].cpu().numpy()
        table = np.zeros((self._planned, blocks.max(initial=0)), np.int32)
        table[np.arange(table.shape[1]) < blocks[:, None]] = indices
        lengths = (blocks - 1) * self.pool.block_size + last
        lengths[(table == 0).all(1)] = 0  # what stands in for an empty row
        return table, lengths.astype(np.int32)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See :meth:`gpu_validate.attention.base.DecodeAttention.run`."""
        if len(q) != self._rows:
            raise InputError(f"attention 'flashinfer': {len(q)} rows of queries, planned were {self._rows}")
        k, v = self.pool.kv[layer][0], self.pool.kv[layer][1]
        self._wrappers[len(q)].run(q, (k, v), out=out)
        return out
