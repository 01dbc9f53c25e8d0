"""What a replay tells whoever measures it."""

from __future__ import annotations

from gpu_validate.program import Fence, Launch, StepWork

__all__ = ["StepObserver"]


class StepObserver:
    """Told what happens around each step, in this order; a subclass overrides what it wants to know.

    All but the last two are called by the thread that plays the steps, while the stream that steps run on is current:
    an event recorded here stands at that place on the device, and the host's clock tells what the host took. Without an
    observer nothing is called.
    """

    def begin(self, work: StepWork) -> None:
        """Take note of a step of which nothing has been issued yet."""

    def launched(self, launch: Launch) -> None:
        """Take note of copies that were handed to the copy queue."""

    def fenced(self, fence: Fence) -> None:
        """Take note of copies that all that follows waits for."""

    def moved(self, work: StepWork) -> None:
        """Note that all that happens to the pool before the step has been issued."""

    def uploaded(self, work: StepWork) -> None:
        """Note that the slots to write are on their way to the device."""

    def planned(self, work: StepWork) -> None:
        """Note that attention has its plan: block table and lengths are on their way to the device."""

    def end(self, work: StepWork) -> None:
        """Note that all kernels of the step have been issued."""

    def copy_begin(self, launch: Launch) -> None:
        """Note, where a copy runs and with its stream current, that it begins."""

    def copy_end(self, launch: Launch) -> None:
        """Note, where a copy runs and with its stream current, that it has been issued."""
