"""Which software made a result."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

__all__ = ["package_version", "versions"]

DISTRIBUTION = "vtoken-sim"


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def package_version() -> str:
    """Return the version of vtoken-sim."""
    return _version(DISTRIBUTION)


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python, and of the libraries whose numbers end up in a result."""
    return {"python": platform.python_version()} | {
        name: _version(name) for name in (DISTRIBUTION, "numpy", "numba", "simpy", "pyarrow")
    }
