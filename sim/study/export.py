"""Write a directory as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sim.errors import InputError

__all__ = ["RUN_FILES", "complete_directory", "write_atomically"]

RUN_FILES = (
    "summary.json",
    "config.json",
    "requests.parquet",
    "steps.parquet",
    "liveness.parquet",
    "pool.parquet",
    "events.parquet",
)
"""What a run's directory may hold, apart from what was drawn from it."""

DRAWN = ("plots", "report.html")


@contextmanager
def complete_directory(out: str | Path) -> Iterator[Path]:
    """Give a temporary directory that becomes ``out`` when the block ends well, and vanishes when it does not.

    A previous run in ``out`` is replaced. The checks come first, so that nothing is computed for a place that cannot be
    written.

    Raises
    ------
    InputError
        If ``out`` is a file, holds anything but a previous run, or cannot be written.
    """
    out = Path(out)
    check_replaceable(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
    except OSError as error:
        raise InputError(f"{out}: cannot write there: {error.strerror}") from None
    try:
        temporary.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        yield temporary
        _replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Refuse to replace anything but an empty directory or a previous run."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"{out}: expected a directory, it is a file")
    names = {entry.name for entry in out.iterdir()}
    foreign = sorted(names - {*RUN_FILES, *DRAWN})
    if names and ("summary.json" not in names or foreign):
        what = f"it holds {foreign[0]}" if foreign else "it is not a complete run"
        raise InputError(f"{out}: not empty, and not a previous run to replace: {what}; choose another directory")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _replace(temporary: Path, out: Path) -> None:
    """Put ``temporary`` in the place of ``out``."""
    if not out.exists():
        temporary.rename(out)
        return
    old = temporary.with_suffix(".old")
    out.rename(old)
    temporary.rename(out)
    shutil.rmtree(old)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file under a temporary name and rename it, so that a reader sees the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data if isinstance(data, bytes) else data.encode())
    temporary.replace(path)
