"""A step from its schedule to its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from sim.serving.request import RequestState

__all__ = ["Batch"]


@dataclass(slots=True, eq=False)
class Batch:
    """What was scheduled for one step, while the device has not come to its end.

    Synchronous scheduling has one at a time, which is used again and again; asynchronous scheduling decides on the next
    while one is on the device.
    """

    work: NDArray[Any]
    """Indexed by :data:`sim.serving.scheduler.W`."""
    step: int = 0
    tokens: int = 0
    step_ns: int = 0
    """How long the step takes by itself."""
    memory_ns: int = 0
    """Part of it during which memory bandwidth is busy."""
    tables_ns: int = 0
    """Part of it for block tables beyond one a request."""
    owed: list[RequestState] = field(default_factory=list)
    """Requests that were preempted since: they hold no memory, but the token that this step computes is theirs."""
