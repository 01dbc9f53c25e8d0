"""One engine step on the device: tables up, then layer after layer write, attend, multiply.

Rows that compute one token decode, with the attention backend; the others are chunks of prompts, whose attention is
torch's. A step of decodes alone may be captured: all that changes from step to step is the contents of fixed tensors. A
step with chunks is issued kernel by kernel, as vLLM does in its mode FULL_DECODE_ONLY.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_validate.attention.base import DecodeAttention
from gpu_validate.attention.buffers import upload
from gpu_validate.attention.sdpa import prefill
from gpu_validate.dtypes import KVDtype, get_dtype
from gpu_validate.graph import DecodeGraphs
from gpu_validate.matrices import Matrices
from gpu_validate.observer import StepObserver
from gpu_validate.payload import payload, queries
from gpu_validate.pool import PagedPool
from gpu_validate.program import StepWork
from sim.serving.models import Model

__all__ = ["Chunk", "StepRunner", "query_of"]


@dataclass(slots=True)
class Chunk:
    """A row of more than one query token."""

    row: int
    tokens: slice
    """Its tokens, among those of all chunks."""
    table: torch.Tensor
    """int32[M] on the device."""
    length: int
    live: torch.Tensor | None = None
    out: list[torch.Tensor] = field(default_factory=list)
    """By layer: what attention gave, if outputs are kept."""


class StepRunner:
    """Plays steps on one pool.

    Parameters
    ----------
    model
        Geometry.
    pool, attention
        What is written and read, and by what.
    matrices
        The model's products; None leaves them out.
    max_batch, max_tokens
        Most decoding rows, and tokens of a step.
    graphs
        Play steps of decodes alone as captured graphs.
    payload
        Write what says whose it is (see :mod:`gpu_validate.payload`), and keep the outputs of chunks; otherwise
        random numbers, the same in every step.
    seed
        Of the random numbers.

    Attributes
    ----------
    rows
        Decoding rows of the last step, in the order of its batch.
    out
        By layer: [max_batch, query heads, head size], attention of the decoding rows.
    chunks
        The other rows of the last step.
    """

    def __init__(
        self,
        model: Model,
        pool: PagedPool,
        attention: DecodeAttention,
        *,
        matrices: Matrices | None = None,
        max_batch: int,
        max_tokens: int,
        graphs: bool = False,
        payload: bool = False,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention
        self.matrices = matrices
        self.max_batch = max(max_batch, 1)
        self.rows = np.zeros(0, np.int64)
        self.chunks: list[Chunk] = []
        self._payload = payload
        self._generator = torch.Generator(device=pool.device).manual_seed(seed)
        layers, width = range(model.layers), (model.kv_heads, model.head_dim)
        self.q = [self._buffer(self.max_batch, model.heads, model.head_dim) for _ in layers]
        self.out = [torch.zeros_like(q) for q in self.q]
        self._k = [self._buffer(self.max_batch, *width) for _ in layers]
        self._v = [self._buffer(self.max_batch, *width) for _ in layers]
        # Random numbers of chunks are the same for all layers; payloads are made layer by layer.
        self._chunk_k, self._chunk_v = (self._buffer(max_tokens, *width) for _ in range(2))
        self._chunk_q = self._buffer(max_tokens, model.heads, model.head_dim)
        self.slots = torch.full((self.max_batch,), -1, dtype=torch.int64, device=pool.device)
        """int64[max_batch], where decoding rows write; -1 behind the last."""
        self._host_slots = np.full(self.max_batch, -1, np.int64)
        self.chunk_slots = torch.zeros(0, dtype=torch.int64, device=pool.device)
        self._owner = self.chunk_slots, self.chunk_slots  # of the step's tokens, decoding rows first
        self._step = 0
        self.graphs: DecodeGraphs | None = None
        if graphs:
            self.graphs = DecodeGraphs(self._plan_one, self.forward, self.max_batch, pool.device, self._fixed)

    @staticmethod
    def bytes_needed(model: Model, dtype: str | KVDtype, max_batch: int, max_tokens: int) -> int:
        """Return the bytes of the buffers."""
        heads = 2 * model.heads + 2 * model.kv_heads
        chunk = model.heads + 2 * model.kv_heads
        elements = model.head_dim * (heads * model.layers * max_batch + chunk * max_tokens)
        return elements * int(get_dtype(dtype).compute.itemsize)

    def run(self, work: StepWork, observer: StepObserver | None = None) -> None:
        """Issue a step: tables, plan, kernels. Nothing waits for the device."""
        self._upload(work)
        if observer is not None:
            observer.uploaded(work)
        self._plan(work)
        if observer is not None:
            observer.planned(work)
        if self._payload:
            self._write_payload()
        if self.graphs is not None and len(self.rows) and not self.chunks:
            self.graphs.replay(len(self.rows))
        else:
            self.forward(len(self.rows))

    def forward(self, rows: int) -> None:
        """Issue the step's kernels one by one, for ``rows`` decoding rows and the chunks."""
        tokens = rows + len(self.chunk_slots)
        wide = max(rows, self.bucket)  # as planned: an eager step beside graphs has their rows, too
        for layer in range(self.model.layers):
            if self.matrices is not None:
                self.matrices.qkv(layer, tokens)
            if rows:
                self.pool.write(layer, self._k[layer][:rows], self._v[layer][:rows], self.slots[:rows])
            if self.chunks:
                self._write_chunks(layer)
            # Only now: a chunk may share what a row of this very step has written.
            if rows:
                self.attention.run(layer, self.q[layer][:wide], self.out[layer][:wide])
            outs = [self._attend(layer, chunk) for chunk in self.chunks]
            if self.matrices is not None:
                attended = torch.cat([out.flatten(1) for out in (self.out[layer][:rows], *outs)])
                self.matrices.rest(layer, attended)
        if self.matrices is not None:
            self.matrices.head(rows + len(self.chunks))

    @property
    def bucket(self) -> int:
        """Rows that attention was planned for in the last step: those that decode, or their graph's."""
        if self.graphs is None or not len(self.rows):
            return len(self.rows)
        return self.graphs.bucket(len(self.rows))

    def _fixed(self) -> list[torch.Tensor]:
        """Return what a captured step reads and writes, wherever it is now."""
        tables = getattr(self.attention, "buffers", None)
        parts = [] if tables is None else [tables.table, tables.lengths, tables.live]
        pool = [*self.pool.kv, *(self.pool.scales or ())]
        own = [*self.q, *self.out, *self._k, *self._v, self.slots]
        return [*pool, *own, *(part for part in parts if part is not None)]

    def _plan_one(self, rows: int) -> None:
        """Plan one row that reads one slot; all slots to write are padding."""
        self.attention.plan(np.ones((1, 1), np.int32), np.ones(1, np.int32), rows=rows)

    def _buffer(self, *shape: int) -> torch.Tensor:
        empty = torch.empty(shape, dtype=self.pool.dtype.compute, device=self.pool.device)
        return empty.normal_(generator=self._generator)

    def _upload(self, work: StepWork) -> None:
        """Bring to the device where tokens are written, and the tables of chunks."""
        decode = work.decode
        self.rows = np.flatnonzero(decode)
        ends = np.cumsum(work.query_tokens)
        of_decodes = np.repeat(decode, work.query_tokens)
        self._host_slots[: len(self.rows)] = work.slots[of_decodes]
        self._host_slots[len(self.rows) :] = -1
        upload(self._host_slots, self.slots)
        self.chunk_slots = self._to_device(work.slots[~of_decodes])
        self.chunks = []
        first = 0
        for row in np.flatnonzero(~decode).tolist():
            tokens = int(work.query_tokens[row])
            table = self._to_device(work.block_table[row])
            self.chunks.append(Chunk(row, slice(first, first + tokens), table, int(work.lengths[row])))
            first += tokens
        if self._payload:
            self._step = work.step
            order = np.concatenate([ends[self.rows] - 1, np.flatnonzero(~of_decodes)])
            self._owner = self._to_device(work.writers[order]), self._to_device(work.positions[order])

    def _plan(self, work: StepWork) -> None:
        live = work.live_mask(self.pool.block_size) if self.attention.masks else None
        if len(self.rows):
            width = -(-int(work.lengths[self.rows].max()) // self.pool.block_size)
            self.attention.plan(
                work.block_table[self.rows, :width],
                work.lengths[self.rows],
                live=None if live is None else live[self.rows],
                rows=self.bucket,
            )
        if live is not None:
            for chunk in self.chunks:
                chunk.live = self._to_device(live[chunk.row, : chunk.length])

    def _write_payload(self) -> None:
        """Fill the fixed buffers of decoding rows with what says whose it is."""
        rows = len(self.rows)
        writer, position = (part[:rows] for part in self._owner)
        kind = self.pool.dtype
        for layer in range(self.model.layers if rows else 0):
            k, v = payload(writer, position, layer, self.model, kind)
            self._k[layer][:rows] = k
            self._v[layer][:rows] = v
            self.q[layer][:rows] = queries(self._step, query_of(writer, position), layer, self.model, kind)

    def _write_chunks(self, layer: int) -> None:
        tokens = len(self.chunk_slots)
        if not self._payload:
            self.pool.write(layer, self._chunk_k[:tokens], self._chunk_v[:tokens], self.chunk_slots)
            return
        writer, position = (part[len(self.rows) :] for part in self._owner)
        k, v = payload(writer, position, layer, self.model, self.pool.dtype)
        self.pool.write(layer, k, v, self.chunk_slots)
        self._chunk_q[:tokens] = queries(self._step, query_of(writer, position), layer, self.model, self.pool.dtype)

    def _attend(self, layer: int, chunk: Chunk) -> torch.Tensor:
        out = prefill(self.pool, layer, self._chunk_q[chunk.tokens], chunk.table, chunk.length, live=chunk.live)
        if self._payload:
            chunk.out.append(out)
        return out

    def _to_device(self, values: NDArray[np.generic]) -> torch.Tensor:
        source = torch.from_numpy(np.ascontiguousarray(values))
        if self.pool.device.type != "cuda" or not len(values):
            return source.to(self.pool.device)
        return source.pin_memory().to(self.pool.device, non_blocking=True)


def query_of(writer: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return the number int64[T] by which the query of a token is drawn: both of its own, in one."""
    return (writer << 32) + position
