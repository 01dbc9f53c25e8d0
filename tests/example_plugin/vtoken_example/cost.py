"""Cost models: of a step, and of a copy beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sim import InputError
from sim.serving.copy import contended_stretch


@dataclass(frozen=True)
class PerRequest:
    """A step costs by its requests alone; half of it the memory is busy."""

    name: ClassVar[str]
    base_s: float = 0.005
    per_request_s: float = 0.0005

    def __post_init__(self) -> None:
        if self.base_s <= 0 or self.per_request_s < 0:
            raise InputError("per_request: expected base_s above 0 and per_request_s of at least 0")

    def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the time of a step, and how long the memory is busy in it."""
        step_ns = round(1e9 * (self.base_s + self.per_request_s * seqs))
        return step_ns, step_ns // 2


@dataclass(frozen=True)
class PerLaunch:
    """A copy costs a launch and a time for each token; it has at most half of the bandwidth."""

    name: ClassVar[str]
    launch_s: float = 1e-5
    per_token_s: float = 1e-6

    def __post_init__(self) -> None:
        if self.launch_s < 0 or self.per_token_s <= 0:
            raise InputError("per_launch: expected launch_s of at least 0 and per_token_s above 0")

    def copy_ns(self, tokens: int) -> int:
        """Return the time beside a step: it gets half of the memory."""
        return round(1e9 * (self.launch_s + 2 * self.per_token_s * tokens))

    def alone_ns(self, tokens: int) -> int:
        """Return the time while nothing else runs."""
        return round(1e9 * (self.launch_s + self.per_token_s * tokens))

    def bandwidth_ns(self, tokens: int) -> int:
        """Return how long the memory is busy with it."""
        return round(1e9 * self.per_token_s * tokens)

    def stretch_ns(self, step_ns: int, memory_ns: int, copy_bandwidth_ns: int) -> int:
        """Return how much longer the step gets, as the built-in costs say."""
        return contended_stretch(step_ns, memory_ns, copy_bandwidth_ns, 0.5)
