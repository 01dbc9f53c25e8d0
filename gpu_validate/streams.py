"""Copy queues: where repack copies run while steps go on.

A copy may read its sources once all that was issued before its launch is done, and what is issued behind its fence may
read its destinations and write its sources. Between the two it runs when it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from gpu_validate.mover import Mover, Slots
from gpu_validate.observer import StepObserver
from gpu_validate.program import Launch
from sim.errors import InputError, did_you_mean

__all__ = [
    "QUEUES",
    "CopyQueue",
    "CudaQueue",
    "DeferredQueue",
    "SyncQueue",
    "ThreadQueue",
    "build_queue",
    "choose_queue",
]

cuda: Any = torch.cuda
"""Untyped in some versions of torch."""


class CopyQueue(Protocol):
    """Runs copies.

    Attributes
    ----------
    name
        Name of the queue, for results.
    tokens
        Tokens copied so far.
    """

    name: str
    tokens: int

    def launch(self, launch: Launch) -> None:
        """Take a copy on, behind everything issued so far."""
        ...

    def fence(self, plans: Sequence[int]) -> None:
        """Have everything issued from now on wait for the copies of these plans."""
        ...

    def close(self) -> None:
        """Wait for all copies, and give back what the queue holds."""
        ...


class SyncQueue:
    """Copies at once, on the stream that steps run on: everybody waits."""

    name = "sync"

    def __init__(self, mover: Mover, observer: StepObserver | None = None) -> None:
        self.tokens = 0
        self._mover = mover
        self._observer = observer

    def launch(self, launch: Launch) -> None:
        """See :meth:`CopyQueue.launch`."""
        self._copy(launch, launch.source, launch.target)

    def fence(self, plans: Sequence[int]) -> None:
        """See :meth:`CopyQueue.fence`."""

    def close(self) -> None:
        """See :meth:`CopyQueue.close`."""

    def _copy(self, launch: Launch, source: Slots, target: Slots) -> None:
        if self._observer is not None:
            self._observer.copy_begin(launch)
        # The replay has checked them against everything in flight.
        self._mover.move(source, target, check=False)
        if self._observer is not None:
            self._observer.copy_end(launch)
        self.tokens += len(source)


class CudaQueue(SyncQueue):
    """Copies on a CUDA stream of their own, between events; the host waits for nothing."""

    name = "stream"

    def __init__(self, mover: Mover, device: torch.device, observer: StepObserver | None = None) -> None:
        super().__init__(mover, observer)
        self._device = device
        self._stream = cuda.Stream(device)
        self._ends: dict[int, Any] = {}

    def launch(self, launch: Launch) -> None:
        """See :meth:`CopyQueue.launch`."""
        begin, end = cuda.Event(), cuda.Event()
        begin.record(cuda.current_stream(self._device))
        # Slots are allocated on this stream, so that their memory is given to nobody else before the copy has read it.
        with cuda.stream(self._stream):
            source, target = (
                torch.from_numpy(slots).pin_memory().to(self._device, non_blocking=True)
                for slots in (launch.source, launch.target)
            )
            self._stream.wait_event(begin)
            self._copy(launch, source, target)
            end.record(self._stream)
        self._ends.update(dict.fromkeys(launch.plans, end))

    def fence(self, plans: Sequence[int]) -> None:
        """See :meth:`CopyQueue.fence`."""
        stream = cuda.current_stream(self._device)
        for end in {self._ends.pop(plan) for plan in plans}:
            stream.wait_event(end)

    def close(self) -> None:
        """See :meth:`CopyQueue.close`."""
        self._stream.synchronize()


class ThreadQueue(SyncQueue):
    """Copies on a thread of their own: on a CPU they really run beside the steps."""

    name = "thread"

    def __init__(self, mover: Mover, observer: StepObserver | None = None) -> None:
        super().__init__(mover, observer)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._copies: dict[int, Future[None]] = {}

    def launch(self, launch: Launch) -> None:
        """See :meth:`CopyQueue.launch`."""
        copy = self._worker.submit(super().launch, launch)
        self._copies.update(dict.fromkeys(launch.plans, copy))

    def fence(self, plans: Sequence[int]) -> None:
        """See :meth:`CopyQueue.fence`; an error of the copy is raised here."""
        for plan in plans:
            self._copies.pop(plan).result()

    def close(self) -> None:
        """See :meth:`CopyQueue.close`."""
        self._worker.shutdown()
        for copy in self._copies.values():
            copy.result()


class DeferredQueue(SyncQueue):
    """Copies at moments drawn at random between launch and fence, token by token in a random order.

    What comes out must not depend on it: if it does, something reads or writes a slot at the wrong time.

    Parameters
    ----------
    mover
        Copies.
    seed
        Of the moments and orders.
    last
        Copy everything at the last moment.
    """

    name = "deferred"

    def __init__(
        self, mover: Mover, observer: StepObserver | None = None, *, seed: int = 0, last: bool = False
    ) -> None:
        super().__init__(mover, observer)
        self._random = np.random.default_rng(seed)
        self._last = last
        self._left: dict[int, tuple[Launch, np.ndarray]] = {}  # by first plan; tokens not copied yet
        self._launches: dict[int, int] = {}  # plan -> first plan of its launch

    def launch(self, launch: Launch) -> None:
        """See :meth:`CopyQueue.launch`."""
        self._some_time()
        first = launch.plans[0]
        self._left[first] = launch, self._random.permutation(len(launch.source))
        self._launches.update(dict.fromkeys(launch.plans, first))

    def fence(self, plans: Sequence[int]) -> None:
        """See :meth:`CopyQueue.fence`."""
        self._some_time()
        for plan in plans:
            first = self._launches.pop(plan)
            if first in self._left:
                self._advance(first, 1.0)

    def close(self) -> None:
        """See :meth:`CopyQueue.close`."""
        for first in list(self._left):
            self._advance(first, 1.0)

    def _some_time(self) -> None:
        """Let time pass in which copies may go on."""
        for first in self._random.permutation(list(self._left)).tolist():
            self._advance(int(first), 0.0 if self._last else float(self._random.choice([0.0, 0.5, 1.0])))

    def _advance(self, first: int, share: float) -> None:
        launch, left = self._left[first]
        count = int(np.ceil(share * len(left)))
        if count:
            self._copy(launch, launch.source[left[:count]], launch.target[left[:count]])
        self._left[first] = launch, left[count:]
        if count == len(left):
            del self._left[first]


QUEUES = ("stream", "thread", "deferred", "sync")
"""Queues by name."""


def choose_queue(name: str, device: torch.device | str, mover: str = "torch") -> str:
    """Return the queue that ``name`` means on ``device``: "auto" is a stream on a GPU and a thread on a CPU.

    Triton's interpreter, which runs ``mover`` "triton" on a CPU, knows one thread only: "auto" is "sync" then.

    Raises
    ------
    InputError
        If there is no such queue, or it cannot work there.
    """
    on_gpu = torch.device(device).type == "cuda"
    if name == "auto":
        return "stream" if on_gpu else "sync" if mover == "triton" else "thread"
    if name not in QUEUES:
        known = ["auto", *QUEUES]
        raise InputError(f"unknown copy queue {name!r}: expected one of {', '.join(known)}{did_you_mean(name, known)}")
    if (name == "stream") > on_gpu or (name == "thread" and on_gpu):
        raise InputError(f"copy queue {name!r} does not work on {torch.device(device).type}: use 'auto'")
    if name == "thread" and mover == "triton":
        raise InputError("copy queue 'thread': Triton's interpreter runs in one thread: use 'deferred' or 'sync'")
    return name


def build_queue(
    name: str, mover: Mover, device: torch.device | str, observer: StepObserver | None = None, *, seed: int = 0
) -> CopyQueue:
    """Make the queue called ``name``, or the one that "auto" means on ``device``.

    Raises
    ------
    InputError
        See :func:`choose_queue`.
    """
    makers: dict[str, Callable[[], Any]] = {
        "stream": lambda: CudaQueue(mover, torch.device(device), observer),
        "thread": lambda: ThreadQueue(mover, observer),
        "deferred": lambda: DeferredQueue(mover, observer, seed=seed),
        "sync": lambda: SyncQueue(mover, observer),
    }
    queue: CopyQueue = makers[choose_queue(name, device, mover.name)]()
    return queue
