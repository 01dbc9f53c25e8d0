"""Running a program and learning what it took."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ROOT", "FailedError", "Taken", "run", "vtoken"]

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""

_RSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""What ``ru_maxrss`` counts: bytes on macOS, KiB on Linux."""


class FailedError(RuntimeError):
    """A program that was to be measured ended with an error."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What a process took, from its start to its end, with the processes that it started and waited for."""

    cpu_s: float
    """User and system."""
    wall_s: float
    rss_bytes: int
    """Most memory it held at once. Linux counts what its parent held when it started it, too: keep parents small."""
    output: str
    """Its standard output."""


def run(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Taken:
    """Run ``command`` to its end.

    Parameters
    ----------
    command
        Program and arguments.
    env
        Set in addition to the present environment.
    cwd
        Where it runs.

    Raises
    ------
    FailedError
        If it does not end with 0; says the last line of its standard error.
    """
    # Files, not pipes: nobody has to read them while we wait.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=cwd,
            env={**os.environ, **(env or {})},
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        wall_s = time.perf_counter() - start_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing on standard error")
            raise FailedError(f"{Path(command[0]).name} ended with {process.returncode}: {said}")
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Taken(usage.ru_utime + usage.ru_stime, wall_s, usage.ru_maxrss * _RSS_BYTES, text)


def vtoken(*arguments: str | Path) -> Taken:
    """Run ``vtoken`` of this checkout with the interpreter that runs the benchmarks."""
    return run([sys.executable, "-m", "sim.cli", *arguments], env={"PYTHONPATH": str(ROOT)})
