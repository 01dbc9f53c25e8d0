"""How a log is replayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_validate.attention.base import choose_attention
from gpu_validate.dtypes import get_dtype
from gpu_validate.mover import choose_mover
from gpu_validate.streams import choose_queue
from sim.errors import InputError, did_you_mean

__all__ = ["VISIBLE", "Options"]

VISIBLE = ("listed", "live")
"""What a query sees: every written slot of the listed blocks, as stock kernels do, or only what is alive."""


@dataclass(frozen=True)
class Options:
    """How a log is replayed.

    Parameters
    ----------
    device
        "cpu", "cuda" or "cuda:1".
    dtype
        Element type of the pool.
    attention, mover, queue
        Backends, "auto" for what suits the device.
    steps
        Play steps from the first number on up to the second, which is left out; None plays all.
    verify
        Give tokens payloads, and judge bytes and outputs after every step.
    sample
        Share of the tokens and rows that are judged.
    visible
        "listed": queries see every written slot of the listed blocks, as stock kernels do; "live": only what is alive.
    graph
        Play steps of decodes as captured graphs; on a CPU, the same buffers and buckets without the capture.
    matrices
        Compute the model's matrix products too.
    check
        Read the layout back after every step and the copies at every fence. That waits for the device: to measure, turn
        it off.
    lookahead
        Steps that are read off the log before they are played: no Python between them.
    seed
        Of random contents and draws.

    Raises
    ------
    InputError
        If a name is unknown or a number out of range.
    """

    device: str = "cpu"
    dtype: str = "bf16"
    attention: str = "auto"
    mover: str = "auto"
    queue: str = "auto"
    steps: tuple[int, int] | None = None
    verify: bool = False
    sample: float = 1.0
    visible: str = "listed"
    graph: bool = False
    matrices: bool = False
    check: bool = True
    lookahead: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            raise InputError(f"unknown device {self.device!r}: expected cpu, cuda or cuda:1") from None
        if kind not in ("cpu", "cuda"):
            raise InputError(f"device {self.device!r}: expected cpu, cuda or cuda:1")
        if kind == "cuda" and not torch.cuda.is_available():
            raise InputError(f"device {self.device!r}: torch {torch.__version__} finds no CUDA device here; use cpu")
        get_dtype(self.dtype)
        choose_attention(self.attention, self.device)
        choose_queue(self.queue, self.device, choose_mover(self.mover, self.device))
        if self.visible not in VISIBLE:
            hint = did_you_mean(self.visible, VISIBLE)
            raise InputError(f"visible: expected {' or '.join(VISIBLE)}, got {self.visible!r}{hint}")
        if not 0 < self.sample <= 1:
            raise InputError(f"sample: expected a share greater than 0 and at most 1, got {self.sample}")
        if self.steps is not None and not 0 <= self.steps[0] < self.steps[1]:
            raise InputError(f"steps: expected A:B with 0 <= A < B, got {self.steps[0]}:{self.steps[1]}")
        if self.lookahead < 0:
            raise InputError(f"lookahead: expected at least 0, got {self.lookahead}")
