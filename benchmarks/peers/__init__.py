"""Other simulators of LLM serving: installed from PyPI into environments of their own, and what they do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import ROOT, Taken, run

__all__ = ["AISIMULATE", "PEERS", "SCHED_SIM", "NotAvailableError", "Peer"]

ENVIRONMENTS = ROOT / ".bench" / "peers"
"""Where the environments are kept from one run to the next; not in git."""

HERE = Path(__file__).parent


class NotAvailableError(RuntimeError):
    """A peer could not be installed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A program to compare with.

    Parameters
    ----------
    name
        Its name on PyPI.
    version
        The version to install.
    setting
        What it simulates: device and requests a second.
    command
        Makes the command from the environment's ``bin``, the number of requests and a directory for results.
    """

    name: str
    version: str
    setting: str
    command: Callable[[Path, int, Path], Sequence[str | Path]]

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.name}=={self.version}"

    @property
    def environment(self) -> Path:
        """Its virtual environment."""
        return ENVIRONMENTS / self.name

    def install(self) -> None:
        """Make its environment, unless it is there already.

        Raises
        ------
        NotAvailableError
            If that fails; says why in one line.
        """
        done = self.environment / "installed"
        if done.exists() and done.read_text() == self.requirement:
            return
        print(f"installing {self.requirement} into {self.environment}", file=sys.stderr)
        pip: list[str | Path] = [
            self.environment / "bin" / "python",
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
        ]
        try:
            _call([sys.executable, "-m", "venv", "--clear", self.environment])
            _call([*pip, self.requirement])
        except (OSError, subprocess.SubprocessError) as error:
            raise NotAvailableError(f"{self.requirement} could not be installed: {_reason(error)}") from None
        done.write_text(self.requirement)

    def simulate(self, requests: int, out: Path) -> Taken:
        """Run it once."""
        return run(self.command(self.environment / "bin", requests, out), cwd=out)


def _call(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)


def _reason(error: Exception) -> str:
    """Return the last line that pip said, or else the error itself."""
    lines = (getattr(error, "stderr", None) or "").strip().splitlines()
    return str(lines[-1]) if lines else str(error)


def _aisimulate(binaries: Path, requests: int, out: Path) -> Sequence[str | Path]:
    stop = f"traffic.stop.requests={requests}"
    given: list[str | Path] = [
        "-c",
        HERE / "aisimulate.yaml",
        "--set",
        stop,
        "--output-dir",
        out / "aisimulate",
        "--overwrite",
    ]
    return [binaries / "aisimulate", "predict", *given, "--format", "json"]


def _sched_sim(binaries: Path, requests: int, out: Path) -> Sequence[str | Path]:  # noqa: ARG001 - as Peer wants it
    return [binaries / "python", HERE / "run_sched_sim.py", str(requests)]


AISIMULATE = Peer("aisimulate", "0.13.0.dev202610270000000085", "H100, 16/s", _aisimulate)
SCHED_SIM = Peer("sched-sim", "0.2.1", "A100, 8/s", _sched_sim)
PEERS = (AISIMULATE, SCHED_SIM)
