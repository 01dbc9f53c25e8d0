"""One line that says how far a long job is: redrawn on a terminal, every few seconds when piped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["Progress", "duration"]


class Progress:
    """Write how many items are done, how fast, and how long the rest will take.

    Parameters
    ----------
    stream
        Where to write, standard error as a rule; None is nowhere.
    unit
        What is counted ("runs").
    clock
        Seconds of a clock that only goes forward.
    """

    TERMINAL_S = 0.2
    PIPE_S = 5.0

    def __init__(self, stream: TextIO | None, unit: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self.unit = unit
        self._clock = clock
        self._terminal = stream is not None and stream.isatty()
        self._every_s = self.TERMINAL_S if self._terminal else self.PIPE_S
        self._width = 0
        self.done = 0
        self.total: int | None = None
        self.start()

    def start(self, total: int | None = None) -> None:
        """Begin to count, from zero to ``total`` if that is known."""
        self.done, self.total = 0, total
        self._start_s = self._clock()
        # A short job in a pipe says nothing.
        self._next_s = self._start_s + (0.0 if self._terminal else self._every_s)

    def update(self, done: int | None = None, note: str = "") -> None:
        """Say how many are done, if it is time to; without an argument, only the clock has moved."""
        self.done = self.done if done is None else done
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + self._every_s
            self._write(self.line(note))

    def line(self, note: str = "") -> str:
        """Return the line: ``12/36 runs, 1.4 runs/s, 17 s left``."""
        elapsed_s = self._clock() - self._start_s
        rate = self.done / elapsed_s if elapsed_s > 0 else 0.0
        parts = [f"{self.done:,}{'' if self.total is None else f'/{self.total:,}'} {self.unit}"]
        if rate:
            parts.append(f"{rate:,.3g} {self.unit}/s" if rate < 100 else f"{rate:,.0f} {self.unit}/s")
            if self.total is not None:
                parts.append(f"{duration((self.total - self.done) / rate)} left")
        return ", ".join([*parts, note] if note else parts)

    def message(self, text: str) -> None:
        """Write a line that stays."""
        if self._stream is not None:
            self.clear()
            self._stream.write(text + "\n")
            self._stream.flush()

    def clear(self) -> None:
        """Take the line off the terminal."""
        if self._stream is not None and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def _write(self, line: str) -> None:
        if self._stream is None:
            return
        if self._terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """Return ``"42 s"``, ``"3 min 10 s"`` or ``"2 h 5 min"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
