"""What calibration times, on a real pool: each method lays something out and returns the operation that repeats it.

Nothing is measured here. Operations rotate over layers, and over several placements where one would fit the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_validate.attention.base import DecodeAttention, build_attention
from gpu_validate.attention.sdpa import prefill
from gpu_validate.device import Device
from gpu_validate.layouts import DecodeLayout, decode_layout, new_slots, repack_moves, step_work
from gpu_validate.matrices import Matrices
from gpu_validate.mover import build_mover
from gpu_validate.payload import fill_random
from gpu_validate.pool import PagedPool
from gpu_validate.program import StepWork
from gpu_validate.step import StepRunner
from gpu_validate.step_times import StepTimes
from gpu_validate.sweeps import Beside, Decode, Prefill, Repack, Step, Sweep
from gpu_validate.timing import Op, Rotation, clock_for
from sim.serving.models import Model

__all__ = ["TorchBench"]

MOST_PLACEMENTS = 16


class TorchBench:
    """A pool, its attention, its mover and the model's matrices on one device.

    Parameters
    ----------
    model
        Geometry.
    device
        Where.
    sweep
        The shapes that will be asked for: all buffers are made for the largest.
    dtype, block_size
        Of the pool.
    attention, mover
        Backends, see :func:`gpu_validate.attention.base.build_attention` and :func:`gpu_validate.mover.build_mover`.
    quick
        Time for a third as long.
    seed
        Of contents and places.

    Raises
    ------
    InputError
        If pool and weights do not fit the device's memory; nothing is allocated then.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        sweep: Sweep,
        *,
        dtype: str = "bf16",
        block_size: int = 16,
        attention: str = "auto",
        mover: str = "auto",
        quick: bool = False,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.device = device
        self.block_size = block_size
        self.graph_clock = clock_for(device.spec, quick=quick)
        self.eager_clock = clock_for(device.spec, graph=False, quick=quick)
        self.host_clock = clock_for("cpu", quick=quick)
        self._seed = seed
        self._sweep = sweep
        # A request's last block is partly empty, and so is the pool's null block.
        blocks = 2 + sweep.slots // block_size + 2 * sweep.most_batch
        self.pool = PagedPool(model, num_blocks=blocks, block_size=block_size, dtype=dtype, device=device.spec)
        fill_random(self.pool, seed)
        self.kv_dtype = self.pool.dtype.name
        self._at = torch.device(device.spec)
        self._max_blocks = -(-sweep.longest // block_size)
        self._attention_name = attention
        self._attention: list[DecodeAttention] = []
        self._works: dict[Step, StepWork] = {}
        self._plans: dict[Repack, list[list[torch.Tensor]]] = {}
        self.mover = build_mover(mover, self.pool)
        self.weights = Matrices(model, sweep.most_tokens, device=device.spec, dtype=dtype, seed=seed)
        self.runner = StepRunner(
            model,
            self.pool,
            self._planned(0),
            matrices=self.weights,
            max_batch=sweep.most_batch,
            max_tokens=sweep.most_tokens,
            graphs=device.is_cuda and self._planned(0).capturable,
            seed=seed,
        )
        self.backends = {"attention": self._planned(0).name, "mover": self.mover.name}
        self.free_sequences = _multiprocessors(device) / model.kv_heads

    # -- parts of a step -----------------------------------------------------------------------------------------------

    def launch(self) -> Op:
        """Launch a kernel that has nothing to do."""
        nothing = torch.zeros(1, device=self._at)
        return lambda _: nothing.add_(0.0)

    def plain_copy(self, size: int) -> Op:
        """Copy ``size`` bytes from one place to another."""
        places = self._placements(2 * size)
        source = torch.randint(0, 255, (places, size), dtype=torch.uint8, device=self._at)
        target = torch.empty_like(source)
        return Rotation(lambda i: target[i % places].copy_(source[i % places]), places)

    def matrices(self, tokens: int) -> Op:
        """Multiply ``tokens`` tokens with the weights of all layers."""
        return lambda _: self.weights.all_layers(tokens)

    def head(self, sequences: int) -> Op:
        """Multiply with the output projection."""
        return lambda _: self.weights.head(sequences)

    def decode(self, shape: Decode) -> Op:
        """Decode attention of one layer."""
        layers = self.model.layers
        size = self._layout(shape).read_tokens * self.pool.token_bytes // layers
        placements = max(1, min(4, self._placements(size) // layers))
        backends = []
        for k in range(placements):
            layout = self._layout(shape, k)
            backend = self._planned(k)
            backend.plan(layout.block_table, layout.lengths)
            backends.append(backend)
        q = self._random(shape.batch, self.model.heads, self.model.head_dim)
        out = torch.empty_like(q)
        return Rotation(lambda i: backends[i // layers % placements].run(i % layers, q, out), layers * placements)

    def decode_eagerly(self) -> bool:
        """Say whether decode attention cannot be captured."""
        return not self._planned(0).capturable

    def prefill(self, shape: Prefill) -> Op:
        """Prefill attention of one layer, the new tokens' writes included."""
        layout = self._layout(Decode(shape.batch, shape.tokens + shape.context))
        tables = torch.from_numpy(layout.block_table).to(self._at)
        slots = torch.from_numpy(
            np.concatenate([new_slots(layout, k, shape.tokens, self.block_size) for k in range(shape.batch)])
        )
        slots = slots.to(self._at)
        tokens, layers, length = shape.tokens, self.model.layers, shape.tokens + shape.context
        q = self._random(shape.batch * tokens, self.model.heads, self.model.head_dim)
        k, v = (self._random(shape.batch * tokens, self.model.kv_heads, self.model.head_dim) for _ in range(2))

        def op(i: int) -> None:
            self.pool.write(i % layers, k, v, slots)
            for row in range(shape.batch):
                prefill(self.pool, i % layers, q[row * tokens : (row + 1) * tokens], tables[row], length)

        return op

    def repack(self, shape: Repack) -> Op:
        """Copy tokens of all layers."""
        moves = self._moves(shape)
        return Rotation(lambda i: self.mover.move(*moves[i % len(moves)], check=False), len(moves))

    # -- whole steps ---------------------------------------------------------------------------------------------------

    def play(self, shapes: Sequence[Step]) -> NDArray[np.float64]:
        """Run whole steps, one after the other as a replay does, and return float64[n]: nanoseconds of each."""
        times = StepTimes(cuda=self.device.is_cuda)
        for shape in shapes:
            work = self._work(shape)
            times.begin(work)
            times.moved(work)
            self.runner.run(work, times)
            times.end(work)
        return times.times_ns()

    def upload(self, shape: Decode) -> Op:
        """Bring a block table and lengths to the device: the host's part."""
        layout, backend = self._layout(shape), self._planned(0)
        return lambda _: backend.plan(layout.block_table, layout.lengths)

    def steps_of_decode(self, shape: Beside, count: int) -> Op:
        """Run attention and matrices of ``count`` decode steps."""
        layers = self.model.layers
        attention = self.decode(Decode(shape.batch, shape.live))

        def op(_: int) -> None:
            for step in range(count):
                for layer in range(layers):
                    self.weights.layer(layer, shape.batch)
                    attention(step * layers + layer)
                self.weights.head(shape.batch)

        return op

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _layout(self, shape: Decode, placement: int = 0) -> DecodeLayout:
        return decode_layout(
            shape, block_size=self.block_size, num_blocks=self.pool.num_blocks, placement=placement, seed=self._seed
        )

    def _moves(self, shape: Repack) -> list[list[torch.Tensor]]:
        """Return slots from and to on the device, for as many places as the copies must rotate over."""
        if shape not in self._plans:
            plans = [
                repack_moves(
                    shape.tokens,
                    block_size=self.block_size,
                    num_blocks=self.pool.num_blocks,
                    scattered=shape.scattered,
                    placement=k,
                    seed=self._seed,
                )
                for k in range(self._placements(2 * shape.tokens * self.pool.token_bytes))
            ]
            self._plans[shape] = [
                [torch.from_numpy(slots).to(self._at) for slots in (plan.source, plan.destination)] for plan in plans
            ]
        return self._plans[shape]

    def _work(self, shape: Step) -> StepWork:
        if shape not in self._works:
            self._works[shape] = step_work(
                shape, block_size=self.block_size, num_blocks=self.pool.num_blocks, seed=self._seed
            )
        return self._works[shape]

    def _planned(self, k: int) -> DecodeAttention:
        """Return backend number ``k``: each has a plan of its own."""
        while len(self._attention) <= k:
            capture = self.device.is_cuda and self._attention_name != "sdpa"
            self._attention.append(
                build_attention(
                    self._attention_name, self.pool, self._sweep.most_batch, self._max_blocks, capture=capture
                )
            )
        return self._attention[k]

    def _placements(self, size: int) -> int:
        """Return over how many places ``size`` bytes must rotate so that none is in the cache when its turn comes."""
        return min(MOST_PLACEMENTS * self.model.layers, max(1, math.ceil(3 * self.device.l2_bytes / size)))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._at).to(self.pool.dtype.compute)


def _multiprocessors(device: Device) -> int:
    """Return how many there are; 0 on a CPU, where every sequence counts."""
    if not device.is_cuda:
        return 0
    return int(torch.cuda.get_device_properties(device.spec).multi_processor_count)
