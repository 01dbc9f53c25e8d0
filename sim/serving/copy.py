"""How long a token copy takes, and how much it slows the step it runs beside.

A copy moves the K and V of all layers of some tokens in one launch, on a stream of its own. It reads and writes memory
that the step wants too, and makes the step longer (:func:`contended_stretch`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from sim.registry import Registry
from sim.serving.cost import require, with_path
from sim.serving.hardware import Hardware
from sim.serving.models import Model

__all__ = [
    "BandwidthCopyCost",
    "Beside",
    "CopyCost",
    "LinearCopyCost",
    "build_copy_cost",
    "contended_stretch",
    "copy_costs",
]


class CopyCost(Protocol):
    """What a copy costs."""

    name: ClassVar[str]

    def copy_ns(self, tokens: int) -> int:
        """Return the wall time of one launch that moves ``tokens`` tokens while a step runs beside it, in ns."""
        ...

    def alone_ns(self, tokens: int) -> int:
        """Return the wall time of one launch that moves ``tokens`` tokens while nothing else runs, in ns."""
        ...

    def bandwidth_ns(self, tokens: int) -> int:
        """Return how long the copy would keep the memory busy if it had it to itself, in ns."""
        ...

    def stretch_ns(self, step_ns: int, memory_ns: int, copy_bandwidth_ns: int) -> int:
        """Return how much longer a step gets because of the copy work beside it, in ns.

        Parameters
        ----------
        step_ns, memory_ns
            The step by itself, and the part of it during which memory bandwidth is busy.
        copy_bandwidth_ns
            Copy work that overlaps the step, as the time it needs with the memory to itself.
        """
        ...


copy_costs: Registry[CopyCost] = Registry(
    "copy cost", "vtoken.copy_costs", ("sim.serving.copy", "sim.serving.profile_cost")
)


class Beside:
    """One launch of a copy beside steps: what it takes, and how much of that the steps have paid for.

    Parameters
    ----------
    cost
        What a copy costs.
    tokens
        How many tokens it moves.

    Attributes
    ----------
    wall_ns
        From its start to its end.
    bandwidth_ns
        What it would keep the memory busy for, alone.
    left_ns
        Part of that which overlapped no step yet.
    """

    __slots__ = ("_cost", "bandwidth_ns", "left_ns", "wall_ns")

    def __init__(self, cost: CopyCost, tokens: int) -> None:
        self._cost = cost
        self.wall_ns = cost.copy_ns(tokens)
        self.bandwidth_ns = cost.bandwidth_ns(tokens)
        self.left_ns = float(self.bandwidth_ns)

    def stretch_ns(self, step_ns: int, memory_ns: int) -> int:
        """Return how much longer a step beside the copy gets, and count the work that overlaps it as paid for.

        Parameters
        ----------
        step_ns, memory_ns
            The step by itself, and the part of it during which memory bandwidth is busy.
        """
        if self.left_ns <= 0:
            return 0
        longer = self._cost.stretch_ns(step_ns, memory_ns, int(self.left_ns))
        self.left_ns -= (step_ns + longer) * self.bandwidth_ns / max(self.wall_ns, 1)
        return longer


def build_copy_cost(spec: str, *, model: Model, hardware: Hardware) -> CopyCost:
    """Make the copy cost that ``spec`` describes.

    Parameters
    ----------
    spec
        ``bandwidth``, ``linear:base_s=..,per_token_s=..``, or ``profile:FILE``, a profile of your own or one that
        comes along (``profile:h100``); with parameters if wanted.
    model, hardware
        For the costs that need them.

    Raises
    ------
    InputError
        If the name, a parameter or the file is no good.
    """
    return copy_costs.build(with_path(spec), model=model, hardware=hardware)


def contended_stretch(step_ns: int, memory_ns: int, copy_bandwidth_ns: int, share: float) -> int:
    """Return how much longer a step gets because copy work runs beside it.

    The step's wish for memory is taken to be spread evenly over it, so that for ``memory_ns / step_ns`` of the copy's
    work the step waits; a copy is never free. While both want the memory the copy gets no more than ``share`` of it, so
    a step is never delayed by more than that. No more bandwidth is handed out than there is.

    Parameters
    ----------
    step_ns, memory_ns
        The step by itself, and the part of it during which memory bandwidth is busy.
    copy_bandwidth_ns
        Copy work that overlaps the step, as the time it needs with the memory to itself.
    share
        Share of the bandwidth that a copy takes beside a step, in (0, 1).
    """
    if step_ns <= 0:
        return 0
    return min(math.ceil(copy_bandwidth_ns * memory_ns / step_ns), round(memory_ns * share / (1 - share)))


@copy_costs.register("bandwidth")
@dataclass(frozen=True)
class BandwidthCopyCost:
    """A launch, and the bytes of K and V read and written at the device's memory bandwidth.

    Parameters
    ----------
    model, hardware
        Bytes of a token, and peak bandwidth.
    launch_s
        From the decision to the first byte; our assumption.
    share
        Share of the bandwidth that a copy takes beside a step; our assumption, to be swept.
    efficiency
        Share of the peak that a copy reaches alone: 4.3 of 4.8 TB/s (read and written) in a device-to-device copy
        measured on an H200.
    """

    name: ClassVar[str]
    model: Model
    hardware: Hardware
    launch_s: float = 10e-6
    share: float = 0.5
    efficiency: float = 0.9
    _launch_ns: float = field(init=False, repr=False, compare=False)
    _token_ns: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(0 <= self.launch_s < math.inf, "copy cost 'bandwidth', launch_s", "at least 0 seconds", self.launch_s)
        require(0 < self.share < 1, "copy cost 'bandwidth', share", "a share in (0, 1)", self.share)
        require(0 < self.efficiency <= 1, "copy cost 'bandwidth', efficiency", "a share in (0, 1]", self.efficiency)
        bytes_per_ns = self.hardware.bandwidth_bytes_per_s * self.efficiency / 1e9
        object.__setattr__(self, "_launch_ns", self.launch_s * 1e9)
        object.__setattr__(self, "_token_ns", 2 * self.model.kv_bytes_per_token / bytes_per_ns)

    def copy_ns(self, tokens: int) -> int:
        """Return the wall time of one launch that moves ``tokens`` tokens while a step runs beside it, in ns."""
        return math.ceil(self._launch_ns + tokens * self._token_ns / self.share) if tokens else 0

    def alone_ns(self, tokens: int) -> int:
        """Return the wall time of one launch that moves ``tokens`` tokens while nothing else runs, in ns."""
        return math.ceil(self._launch_ns + tokens * self._token_ns) if tokens else 0

    def bandwidth_ns(self, tokens: int) -> int:
        """Return how long the copy would keep the memory busy if it had it to itself, in ns."""
        return math.ceil(tokens * self._token_ns)

    def stretch_ns(self, step_ns: int, memory_ns: int, copy_bandwidth_ns: int) -> int:
        """Return how much longer a step gets because of the copy work beside it, in ns."""
        return contended_stretch(step_ns, memory_ns, copy_bandwidth_ns, self.share)


@copy_costs.register("linear")
@dataclass(frozen=True)
class LinearCopyCost:
    """A fixed time and a time for each moved token, beside a step; for tests and for slow copies.

    Parameters
    ----------
    per_token_s
        For each token.
    base_s
        For each launch.
    share
        Share of the bandwidth that a copy takes beside a step.
    """

    name: ClassVar[str]
    per_token_s: float
    base_s: float = 0.0
    share: float = 0.5
    _base_ns: int = field(init=False, repr=False, compare=False)
    _token_ns: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for time_s in ("base_s", "per_token_s"):
            value = getattr(self, time_s)
            require(0 <= value < math.inf, f"copy cost 'linear', {time_s}", "at least 0 seconds", value)
        require(0 < self.share < 1, "copy cost 'linear', share", "a share in (0, 1)", self.share)
        object.__setattr__(self, "_base_ns", round(self.base_s * 1e9))
        object.__setattr__(self, "_token_ns", self.per_token_s * 1e9)

    def copy_ns(self, tokens: int) -> int:
        """Return the wall time of one launch that moves ``tokens`` tokens, in ns."""
        return self._base_ns + round(self._token_ns * tokens) if tokens else 0

    def alone_ns(self, tokens: int) -> int:
        """Return the wall time of one launch that moves ``tokens`` tokens while nothing else runs, in ns."""
        return self._base_ns + round(self.share * self._token_ns * tokens) if tokens else 0

    def bandwidth_ns(self, tokens: int) -> int:
        """Return how long the copy would keep the memory busy alone, in ns: its share of its time."""
        return round(self.share * self.copy_ns(tokens))

    def stretch_ns(self, step_ns: int, memory_ns: int, copy_bandwidth_ns: int) -> int:
        """Return how much longer a step gets because of the copy work beside it, in ns."""
        return contended_stretch(step_ns, memory_ns, copy_bandwidth_ns, self.share)
