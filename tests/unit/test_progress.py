"""The progress line: what it says, and when, on a terminal and in a pipe."""

from __future__ import annotations

import io

from sim.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_says_rate_and_time_left() -> None:
    clock = Clock()
    progress = Progress(io.StringIO(), "runs", clock=clock)
    progress.start(36)
    assert progress.line() == "0/36 runs"
    clock.now_s = 6.0
    progress.done = 12
    assert progress.line() == "12/36 runs, 2 runs/s, 12 s left"
    clock.now_s = 1200.0
    assert progress.line("busy") == "12/36 runs, 0.01 runs/s, 40 min 0 s left, busy"
    progress.total = None
    assert progress.line() == "12 runs, 0.01 runs/s"


def test_long_waits_are_in_hours() -> None:
    clock = Clock()
    progress = Progress(io.StringIO(), "runs", clock=clock)
    progress.start(1001)
    progress.done, clock.now_s = 1, 7.5
    assert progress.line().endswith("2 h 5 min left")


def test_a_pipe_gets_a_line_every_few_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, "runs", clock=clock)
    progress.start(100)
    for done in range(1, 101):
        clock.now_s += 0.12
        progress.update(done)
    progress.clear()
    assert stream.getvalue().splitlines() == [
        "42/100 runs, 8.33 runs/s, 7 s left",
        "84/100 runs, 8.33 runs/s, 2 s left",
    ]


def test_a_terminal_gets_one_line_that_is_taken_off_at_the_end() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, "runs", clock=clock)
    progress.start(10)
    progress.update(0)
    clock.now_s = 1.0
    progress.update(1)
    progress.message("a message")
    assert "\n" not in stream.getvalue().partition("a message")[0]
    assert stream.getvalue().endswith("\ra message\n")


def test_nowhere_is_silent() -> None:
    progress = Progress(None, "runs")
    progress.message("x")
    progress.update(1)
    progress.clear()
    assert progress.done == 1
