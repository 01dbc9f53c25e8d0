"""A trace reader: a format of one's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from sim import InputError, Trace
from sim.workload.readers import Head, Reading, TraceReader

FIRST = "# arrival_s prompt output"
LINE = re.compile(r"(\d+(?:\.\d+)?) ([1-9]\d*) ([1-9]\d*)")


@dataclass(frozen=True)
class SpaceSeparated(TraceReader):
    """Lines of arrival (s), prompt and output tokens behind a comment that says so."""

    summary: ClassVar[str] = "arrival (s), prompt and output tokens, separated by spaces"

    def matches(self, head: Head) -> bool:
        """Recognise the comment in the first line."""
        return head.text.startswith(FIRST)

    def read(self, path: Path, how: Reading) -> Trace:  # noqa: ARG002
        """Read the file."""
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], start=2):
            found = LINE.fullmatch(line.strip())
            if found is None:
                raise InputError(f"{path}:{number}: expected seconds, prompt and output tokens, got {line!r}")
            rows.append((round(float(found[1]) * 1e9), int(found[2]), int(found[3])))
        arrival_ns, prompt, output = np.array(sorted(rows), np.int64).reshape(-1, 3).T
        return Trace(arrival_ns, prompt, output, name=path.name)
