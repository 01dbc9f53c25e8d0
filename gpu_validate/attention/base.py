"""The seam between the replay and the kernels of decode attention.

``plan`` is a step's host work: it brings the block table and the lengths to the device, in place, into tensors that
never move. ``run`` launches kernels over those tensors and nothing else, once a layer. So a captured CUDA graph of
``run`` stays right for every later ``plan``.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_validate.pool import PagedPool
from sim.errors import InputError, did_you_mean

__all__ = ["BACKENDS", "DecodeAttention", "build_attention", "check_plan", "choose_attention"]

BACKENDS = MappingProxyType(
    {
        "flashinfer": "gpu_validate.attention.flashinfer:FlashInferDecode",
        "paged": "gpu_validate.attention.paged:PagedDecode",
        "sdpa": "gpu_validate.attention.sdpa:SdpaDecode",
    }
)
"""Backends by name, each where its class is: a module is imported only when its backend is asked for."""


@runtime_checkable
class DecodeAttention(Protocol):
    """Attention of one query token a request over the tokens in its blocks.

    Attributes
    ----------
    name
        Name of the backend, for results.
    masks
        Whether plans may come with ``live``. Without, every written slot of the listed blocks is attended to, dead ones
        too, as stock kernels do.
    capturable
        Whether ``run`` may be captured in a CUDA graph and replayed after later plans.
    """

    name: str
    masks: bool
    capturable: bool

    def plan(
        self,
        block_table: NDArray[np.int32],
        lengths: NDArray[np.int32],
        *,
        live: NDArray[np.bool_] | None = None,
        rows: int | None = None,
    ) -> None:
        """Take the step's block table.

        Parameters
        ----------
        block_table
            int32 [B, M]; entries behind a row's last block are not read, but must be blocks of the pool (0 is one).
        lengths
            int32 [B], written slots of each row, dead ones included: the row's first ``lengths`` slots in table order.
            Rows from B up to the largest batch get length 0.
        live
            bool [B, at least max(lengths)] in table order: what may be attended to. None: every written slot.
        rows
            Rows that ``run`` will be given: the graph's batch bucket. None: B.

        Raises
        ------
        InputError
            If shapes do not fit the backend's buffers, a length does not fit its row, a block is out of range, or
            ``live`` is given where ``masks`` is False.
        """
        ...

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Attend; rows of length 0 (the padding of a graph's batch bucket), or with nothing live, give zeros.

        Parameters
        ----------
        layer
            Decoder layer.
        q
            [R, query heads, head size] in the pool's compute type; R is the planned B, or a larger bucket.
        out
            As ``q``; written in place.

        Returns
        -------
        Tensor
            ``out``.
        """
        ...

    def layout(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the planned block table [B, M] and lengths [B], read back from what the kernels read.

        M is the most blocks of a row; entries behind a row's last block are 0. Waits for the device.
        """
        ...


def check_plan(
    pool: PagedPool,
    limits: tuple[int, int],
    block_table: NDArray[np.int32],
    lengths: NDArray[np.int32],
    *,
    live: NDArray[np.bool_] | None = None,
    masks: bool = False,
    rows: int | None = None,
) -> None:
    """Refuse a plan that does not fit the buffers or points outside the pool.

    Raises
    ------
    InputError
        With the figure that is wrong and the one that was expected.
    """
    planned, width = block_table.shape
    rows = planned if rows is None else rows
    if rows > limits[0] or width > limits[1] or planned > rows:
        raise InputError(
            f"block table of {planned} x {width} for {rows} rows: the attention buffers are {limits[0]} x {limits[1]}"
        )
    if lengths.shape != (planned,):
        raise InputError(f"lengths of shape {lengths.shape}: expected one for each of the table's {planned} rows")
    if block_table.size == 0:
        return
    longest = int(lengths.max())
    if int(lengths.min()) < 0 or longest > width * pool.block_size:
        raise InputError(f"lengths from {lengths.min()} to {longest}: {width} blocks hold {width * pool.block_size}")
    if live is not None and not masks:
        raise InputError("a live mask for attention that was built without: build it with masked=True")
    if live is not None and (live.shape[0] != planned or live.shape[1] < longest):
        raise InputError(f"live mask of shape {live.shape}: expected {planned} rows of at least {longest}")
    lowest, highest = int(block_table.min()), int(block_table.max())
    if lowest < 0 or highest >= pool.num_blocks:
        raise InputError(f"block table lists blocks {lowest} to {highest}: the pool has 0 to {pool.num_blocks - 1}")


def choose_attention(name: str, device: torch.device | str) -> str:
    """Return the backend that ``name`` means on ``device``.

    "auto" is FlashInfer on a GPU where it can be imported, else our paged kernel there, and SDPA on a CPU.

    Raises
    ------
    InputError
        If there is no such backend.
    """
    if name == "auto":
        if torch.device(device).type != "cuda":
            return "sdpa"
        return "flashinfer" if importlib.util.find_spec("flashinfer") else "paged"
    if name not in BACKENDS:
        known = ["auto", *BACKENDS]
        raise InputError(
            f"unknown attention backend {name!r}: expected one of {', '.join(known)}{did_you_mean(name, known)}"
        )
    return name


def build_attention(name: str, pool: PagedPool, max_batch: int, max_blocks: int, **options: Any) -> DecodeAttention:
    """Make the backend called ``name`` with buffers for ``max_batch`` rows of ``max_blocks`` blocks.

    With "auto", a pool or a machine that FlashInfer cannot serve gets our own kernel: the result's ``name`` says which
    it is.

    Parameters
    ----------
    name
        A backend, or "auto".
    pool
        What it reads.
    max_batch, max_blocks
        Largest batch and longest table row that will be planned.
    options
        The backend's own: see its class. Every backend knows ``masked`` (whether plans come with ``live``) and
        ``capture`` (whether ``run`` will be captured in a graph).

    Raises
    ------
    InputError
        If there is no such backend, or it cannot serve this pool or these options.
    """
    chosen = choose_attention(name, pool.device)
    module, _, attribute = BACKENDS[chosen].partition(":")
    try:
        backend: DecodeAttention = getattr(importlib.import_module(module), attribute)(
            pool, max_batch, max_blocks, **options
        )
    except InputError:
        if name != "auto" or chosen != "flashinfer":
            raise
        return build_attention("paged", pool, max_batch, max_blocks, **options)
    return backend
