"""The rows of a store's files in one file of text, so that ten thousand of them need not be opened.

A line is believed as long as the file that it is about has the size and the time of change that were noted when it was
written or examined. Without the index, or with a part of it, all is as it was, only slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from sim.study.run_file import Row

__all__ = ["Entry", "Index"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is known of a run's file."""

    config_hash: str
    size: int
    mtime_ns: int
    row: Row

    @classmethod
    def of(cls, path: Path, row: Row) -> Entry:
        """Describe a file as it is now."""
        status = path.stat()
        return cls(path.stem, status.st_size, status.st_mtime_ns, row)

    def holds(self, status: os.stat_result) -> bool:
        """Tell whether the file is still the one described."""
        return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{self.config_hash}.parquet"

    @property
    def line(self) -> str:
        """The entry as text."""
        return json.dumps([self.config_hash, self.size, self.mtime_ns, self.row]) + "\n"


class Index:
    """A file of entries; of several for one run the last counts.

    Parameters
    ----------
    path
        Where it is, or will be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        with open(self.path, "ab") as file:
            file.write(entry.line.encode())

    def mend(self) -> None:
        """End the last line, if a killed process left it half written."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "r+b") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
                file.write(b"\n")

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries; a line that cannot be read, as the last one of a killed process, is left out."""
        try:
            file = open(self.path, encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        except OSError:
            return
        with file:
            for line in file:
                try:
                    config_hash, size, mtime_ns, row = json.loads(line)
                    row = {key: row[key] for key in ("config", "summary", "version")}
                except (ValueError, TypeError, KeyError):
                    continue
                yield Entry(config_hash, size, mtime_ns, row)
