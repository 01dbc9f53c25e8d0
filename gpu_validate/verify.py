"""Judges: whether the device holds and computes what the log says.

Three judgements, none of which asks the device's own bookkeeping: the layout that its kernels read against the oracle's
tables; the bytes of live tokens against a payload made again from who wrote them; and attention's output against a
dense softmax over the payloads of the tokens that should have been visible.

A copy in flight may write into dead slots of blocks that stay listed. What such a slot holds before the fence is
undefined, so where kernels see every listed slot ("listed") the output of a row that lists one is undefined too: it is
counted, not judged. Its live tokens' bytes are judged all the same, and so is its output where kernels mask the dead.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_validate.payload import payload, queries
from gpu_validate.pool import PagedPool
from gpu_validate.program import Action, Fence, Launch, StepWork, Tokens
from gpu_validate.step import StepRunner, query_of

__all__ = ["TOLERANCE", "MismatchError", "Shadow", "Verifier", "check_layout", "reference"]

TOLERANCE = {"fp32": 1e-4, "fp16": 3e-3, "bf16": 2e-2, "fp8": 2e-2}
"""Largest difference of an output from the reference, as a share of the largest magnitude of the values it could see:
a few roundings of the compute type (2**-11 in fp16, 2**-8 in bf16, in which fp8 is computed too)."""

AT_ONCE = 1024
"""Tokens whose bytes are compared at a time."""


class MismatchError(RuntimeError):
    """The device does not hold, or compute, what it should."""


class Shadow:
    """Which token's keys and values stand in each slot, dead or alive, told by what the device was asked to do.

    Attributes
    ----------
    writer, position
        int64[slots]; of a slot that was never written -1 and its own number.
    pending
        By plan: copies launched that no fence has passed.
    """

    def __init__(self, num_slots: int) -> None:
        self.writer = np.full(num_slots, -1, np.int64)
        self.position = np.arange(num_slots, dtype=np.int64)
        self.pending: dict[int, Launch] = {}

    def act(self, action: Action) -> None:
        """Do what happens between two steps."""
        if isinstance(action, Launch):
            ends = np.cumsum(action.counts)
            for plan, count, end in zip(action.plans, action.counts, ends.tolist(), strict=True):
                part = slice(end - count, end)
                self.pending[plan] = Launch((plan,), (count,), action.source[part], action.target[part], action.listed)
        elif isinstance(action, Fence):
            for plan in action.plans:
                launch = self.pending.pop(plan)
                self._copy(launch.source, launch.target)
        else:
            self._copy(action.source, action.target)

    def filling(self, slots: NDArray[np.int64]) -> bool:
        """Say whether a copy in flight writes into one of these slots."""
        return any(np.isin(launch.target, slots).any() for launch in self.pending.values())

    def write(self, work: StepWork) -> None:
        """Write what a step writes."""
        self.writer[work.slots] = work.writers
        self.position[work.slots] = work.positions

    def _copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        self.writer[target], self.position[target] = self.writer[source], self.position[source]


class Verifier:
    """Judges a pool whose tokens carry payloads.

    Parameters
    ----------
    pool, runner
        What is judged.
    shadow
        What stands in dead slots.
    visible
        One of :data:`gpu_validate.options.VISIBLE`.
    sample
        Share of a step's rows and tokens to judge, drawn anew in each step.
    seed
        Of the draws.

    Attributes
    ----------
    tokens, outputs
        Tokens and rows judged so far.
    undefined
        Rows whose output could not be judged.
    max_error
        Largest difference of an output so far, as a share of the largest value that it could see.
    """

    def __init__(
        self,
        pool: PagedPool,
        runner: StepRunner,
        shadow: Shadow,
        *,
        visible: str = "listed",
        sample: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.tokens = 0
        self.outputs = 0
        self.undefined = 0
        self.max_error = 0.0
        self._pool = pool
        self._runner = runner
        self._shadow = shadow
        self._visible = visible
        self._sample = sample
        self._seed = seed
        # To see bytes as this dtype stores them; one layer and one token a block.
        one = dataclasses.replace(pool.model, layers=1)
        self._scratch = PagedPool(one, num_blocks=1 + AT_ONCE, block_size=1, dtype=pool.dtype, device=pool.device)

    def fill(self) -> None:
        """Write the whole pool but the null block: what the shadow says, and its own number where that is nothing."""
        slots = np.arange(self._pool.block_size, self._pool.num_slots)
        for first in range(0, len(slots), AT_ONCE):
            part = slots[first : first + AT_ONCE]
            at = self._tensor(part)
            for layer in range(self._pool.model.layers):
                self._pool.write(layer, *self._payload(part, layer), at)

    def check(self, work: StepWork) -> None:
        """Judge everything after a step.

        Raises
        ------
        MismatchError
            At the first difference.
        """
        assert work.live is not None
        random = np.random.default_rng([self._seed, work.step])
        tokens = work.audit if work.audit is not None else work.live
        if self._shadow.filling(tokens.slots):
            raise MismatchError(f"step {work.step}: a copy in flight writes over a live token")
        self._check_shadow(work, tokens)
        audited = np.unique(tokens.slots)
        audited = audited[random.random(len(audited)) < self._sample]
        runner = self._runner
        rows = [
            *(_Row(work, row, [out[at : at + 1] for out in runner.out]) for at, row in enumerate(runner.rows.tolist())),
            *(_Row(work, chunk.row, chunk.out) for chunk in runner.chunks),
        ]
        rows = [row for row in rows if random.random() < self._sample]
        if self._visible == "listed":
            drawn = len(rows)
            rows = [row for row in rows if not self._shadow.filling(row.slots(work, self._pool.block_size))]
            self.undefined += drawn - len(rows)
        live = work.live_mask(self._pool.block_size)
        needed = np.unique(np.concatenate([audited, *(row.slots(work, self._pool.block_size) for row in rows)]))
        for layer in range(self._pool.model.layers):
            k, v = self._payload(needed, layer)
            self._check_bytes(work, audited, layer, needed, k, v)
            for row in rows:
                at = self._tensor(np.searchsorted(needed, row.slots(work, self._pool.block_size)))
                self._check_output(work, row, live[row.number], layer, k[at], v[at])
        self.tokens += len(audited)
        self.outputs += len(rows)

    def _check_shadow(self, work: StepWork, tokens: Tokens) -> None:
        """Compare what the device was asked to do with what the oracle says: of live tokens both tell the writer."""
        shadow = self._shadow
        wrong = (shadow.writer[tokens.slots] != tokens.writers) | (shadow.position[tokens.slots] != tokens.positions)
        if wrong.any():
            raise MismatchError(f"step {work.step}: {self._name(tokens.slots[wrong][0])} is there by mistake")

    def _check_bytes(
        self, work: StepWork, slots: NDArray[np.int64], layer: int, needed: NDArray[np.int64], k: Any, v: Any
    ) -> None:
        """Compare the bytes in these slots, scales included, with what their writers' identity gives."""
        planes = [plane.rows for plane in self._pool.planes if plane.layer == layer]
        for first in range(0, len(slots), AT_ONCE):
            part = slots[first : first + AT_ONCE]
            at, there = self._tensor(np.searchsorted(needed, part)), self._tensor(part)
            room = torch.arange(1, len(part) + 1, device=at.device)
            self._scratch.write(0, k[at], v[at], room)
            for rows, expected in zip(planes, self._scratch.planes, strict=True):
                different = (rows[there] != expected.rows[room]).any(1)
                if different.any():
                    slot = int(part[int(different.to(torch.uint8).argmax())])
                    count = int(different.sum())
                    raise MismatchError(
                        f"step {work.step}, layer {layer}: expected {self._name(slot)}, its {expected.what} has other "
                        f"bytes ({count} such tokens)"
                    )

    def _check_output(
        self, work: StepWork, row: _Row, live: NDArray[np.bool_], layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        pool, length, count = self._pool, row.length, row.count
        # Token i of a chunk sees what stands before it, and itself.
        visible = np.arange(length) <= np.arange(length - count, length)[:, None]
        if self._visible == "live":
            visible = visible & live[:length]
        new = row.new
        who, where = self._tensor(self._shadow.writer[new]), self._tensor(self._shadow.position[new])
        q = queries(work.step, query_of(who, where), layer, pool.model, pool.dtype)
        expected = reference(q, k, v, torch.from_numpy(visible).to(pool.device))
        error = float((row.out[layer].double() - expected).abs().max() / v.abs().max())
        self.max_error = max(self.max_error, error)
        most = TOLERANCE[pool.dtype.name]
        if not error <= most:  # not a number is an error too
            raise MismatchError(
                f"step {work.step}, request {work.reqs[row.number]}, layer {layer}: attention is {error:.2e} of the "
                f"largest value off, expected at most {most:.0e}"
            )

    def _payload(self, slots: NDArray[np.int64], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that should stand in these slots."""
        shadow, model = self._shadow, self._pool.model
        parts = [
            payload(
                self._tensor(shadow.writer[part]), self._tensor(shadow.position[part]), layer, model, self._pool.dtype
            )
            for part in np.array_split(slots, -(-len(slots) // AT_ONCE) or 1)
        ]
        k, v = zip(*parts, strict=True)
        return torch.cat(k), torch.cat(v)

    def _name(self, slot: int) -> str:
        return f"token {self._shadow.position[slot]} of request {self._shadow.writer[slot]} in slot {slot}"

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._pool.device)


class _Row:
    """A row of a step, and what attention gave for it, by layer."""

    def __init__(self, work: StepWork, number: int, out: list[torch.Tensor]) -> None:
        self.number = number
        self.length = int(work.lengths[number])
        self.count = int(work.query_tokens[number])
        end = int(work.query_tokens[: number + 1].sum())
        self.new = work.slots[end - self.count : end]
        """int64[count]: the slots that it writes."""
        self.out = out

    def slots(self, work: StepWork, size: int) -> NDArray[np.int64]:
        """Return int64[length]: the slots that the row lists, in table order."""
        index = np.arange(self.length)
        return np.asarray(work.block_table[self.number, index // size].astype(np.int64) * size + index % size)


def check_layout(work: StepWork, runner: StepRunner) -> None:
    """Compare, block for block, what the kernels of a step read with the oracle's tables.

    Raises
    ------
    MismatchError
        At the first difference.
    """
    size, rows = runner.pool.block_size, runner.rows
    tables: list[tuple[int, NDArray[np.int32], int]] = []
    if len(rows):
        table, lengths = runner.attention.layout()
        tables += zip(rows.tolist(), table, lengths.tolist(), strict=True)
    tables += [(chunk.row, chunk.table.cpu().numpy(), chunk.length) for chunk in runner.chunks]
    if len(tables) != work.seqs:
        raise MismatchError(f"step {work.step}: {len(tables)} rows on the device, expected {work.seqs}")
    for row, table, length in tables:
        used = -(-int(work.lengths[row]) // size)
        if length != work.lengths[row] or table[:used].tolist() != work.block_table[row, :used].tolist():
            raise MismatchError(
                f"step {work.step}, request {work.reqs[row]}: the device reads {length} slots of blocks "
                f"{table[:used].tolist()}, expected {work.lengths[row]} of {work.block_table[row, :used].tolist()}"
            )
    slots = torch.cat([runner.slots[: len(rows)], runner.chunk_slots]).cpu().numpy()
    order = np.repeat(work.decode, work.query_tokens)
    if slots.tolist() != [*work.slots[order].tolist(), *work.slots[~order].tolist()]:
        raise MismatchError(f"step {work.step}: the device writes other slots than the log's tokens have")
    if not (runner.slots[len(rows) : runner.bucket] == -1).all():
        raise MismatchError(f"step {work.step}: a padding row writes a slot")


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Attend in float64, one softmax after the other: nothing shared with any backend.

    Parameters
    ----------
    q
        [T, query heads, head size].
    k, v
        [L, KV heads, head size].
    visible
        bool [T, L].
    """
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,lhd->thl", q.double(), wide_k) / math.sqrt(q.shape[2])
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    return torch.einsum("thl,lhd->thd", torch.softmax(scores, -1), wide_v)
