"""The small trace that is shipped with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from sim.errors import InputError

__all__ = ["default_path"]

_NAME = "default.csv"


def default_path() -> Path:
    """Return where the default trace is: inside an installed package, or in ``traces/`` of a source tree.

    Raises
    ------
    InputError
        If the installation lacks it.
    """
    candidates = (
        Path(str(resources.files("sim.workload"))) / "data" / _NAME,
        Path(__file__).resolve().parents[2] / "traces" / _NAME,
    )
    for path in candidates:
        if path.is_file():
            return path
    raise InputError(f"the default trace is missing from this installation ({candidates[0]})")
