"""Decode steps captured once for each batch bucket, and replayed with whatever the fixed buffers hold.

A step of B rows is played by the graph of the smallest bucket that has room for B; the rows behind are padding, whose
slot is -1 and whose length is 0. On a device that has no graphs the step's body is called instead, on the same buffers
and with the same buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["DecodeGraphs", "buckets"]

WARM_UP = 3

cuda: Any = torch.cuda
"""Untyped in some versions of torch."""


def buckets(most: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, steps of 8, from 64 on of 16, from 256 on of 64, and ``most``."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 64)]
    return [size for size in sizes if size < most] + [most] if most > 0 else []


class DecodeGraphs:
    """One captured step a bucket.

    Parameters
    ----------
    prepare
        ``prepare(rows)`` makes a plan for so many rows that ``body`` can be tried with.
    body
        ``body(rows)`` issues a step of so many rows. It must read nothing that changes but the contents of ``fixed``.
    most
        Largest batch.
    device
        Where it runs.
    fixed
        Names the tensors that a captured step reads and writes.
    """

    def __init__(
        self,
        prepare: Callable[[int], None],
        body: Callable[[int], None],
        most: int,
        device: torch.device,
        fixed: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        self.sizes = buckets(most)
        self.captured = device.type == "cuda"
        """Whether these are CUDA graphs."""
        self._fixed = fixed
        self._addresses = [tensor.data_ptr() for tensor in fixed()]
        self._steps: dict[int, Callable[[], Any]] = {}
        memory = cuda.graph_pool_handle() if self.captured else None
        for rows in reversed(self.sizes):  # the largest first: the others fit into its memory
            prepare(rows)
            self._steps[rows] = self._capture(body, rows, device, memory) if self.captured else _call(body, rows)

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket with room for ``rows``."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def replay(self, rows: int) -> None:
        """Play a step of ``rows`` rows."""
        self._steps[self.bucket(rows)]()

    def check_addresses(self) -> None:
        """Raise if a tensor is not where it was when it was captured."""
        if [tensor.data_ptr() for tensor in self._fixed()] != self._addresses:
            raise RuntimeError("a tensor that a CUDA graph was captured with has been allocated again")

    @staticmethod
    def _capture(body: Callable[[int], None], rows: int, device: torch.device, memory: Any) -> Callable[[], Any]:
        # Kernels are compiled and libraries take their workspaces before, on a stream that is not the default one.
        stream = cuda.Stream(device)
        stream.wait_stream(cuda.current_stream(device))
        with cuda.stream(stream):
            for _ in range(WARM_UP):
                body(rows)
        cuda.current_stream(device).wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=memory):
            body(rows)
        replay: Callable[[], Any] = graph.replay
        return replay


def _call(body: Callable[[int], None], rows: int) -> Callable[[], Any]:
    return lambda: body(rows)
