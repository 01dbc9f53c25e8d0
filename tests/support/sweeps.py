"""What tests of sweeps share."""

from __future__ import annotations

from pathlib import Path

__all__ = ["contents"]

TOLD_BY_TIME = ("timing.csv", "index.jsonl")


def contents(root: Path) -> dict[str, bytes]:
    """Return every file of a sweep but those that tell when it was made."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name not in TOLD_BY_TIME)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
