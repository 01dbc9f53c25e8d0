"""Recorded sessions of coding agents (callanjfox/kv-cache-tester, WEKA; Apache-2.0)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sim.errors import InputError
from sim.workload.json_text import json_object
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.fields import hashes, integer, number_ns, text_of
from sim.workload.readers.rows import Rows
from sim.workload.trace import Trace

_ID_BITS = 32


@trace_readers.register("weka")
@dataclass(frozen=True)
class Weka(TraceReader):
    """JSON, a session a file: requests with times from the session's start and one hash per 64 prompt tokens.

    Sub-agents are entries with requests of their own: those are moved by the time of the entry, and form a session of
    their own (``NAME/1``, ``NAME/2``, ...) over the same hashes. Hashes are local to a file, so each session of a
    folder gets ids of its own; nothing is shared between sessions, and nothing can be said about such sharing. All
    sessions of a folder start at time 0 unless an arrival process says when.
    """

    summary: ClassVar[str] = (
        "Weka agent sessions, one json or a folder: t (s), in, out, hash_ids of 64 tokens local to a session"
    )
    starts_sessions: ClassVar[bool] = True

    def matches(self, head: Head) -> bool:
        """Recognise a session, or a folder with at least one JSON file."""
        if head.path.is_dir():
            return bool(_files(head.path))
        start = head.text.lstrip()[:1] == "{"
        return start and '"requests"' in head.text and ('"hash_id_scope"' in head.text or '"block_size"' in head.text)

    def read(self, path: Path, how: Reading) -> Trace:
        """Read a session, or all sessions of a folder in the order of their file names."""
        files = _files(path) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path}: is a directory without session files (*.json, *.json.gz)")
        starts = np.zeros(len(files), np.int64) if how.arrivals is None else how.arrivals.times(how.seed, len(files))
        rows: Rows | None = None
        for ordinal, (file, start) in enumerate(zip(files, starts.tolist(), strict=True)):
            session = json_object(file)
            size = integer(session, "block_size", str(file))
            if rows is None:
                rows = Rows(path, hash_tokens=size)
            elif size != rows.hash_tokens:
                raise InputError(
                    f"{file}: field 'block_size': {size}, while the sessions before have {rows.hash_tokens}"
                )
            _add(rows, session, file, start, ordinal)
        assert rows is not None
        if len(files) > 1 and how.arrivals is None:
            rows.notes.append(f"all {len(files)} sessions start at time 0: an arrival process would spread them")
        return rows.trace(merged=True)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")) and p.is_file())


def _add(rows: Rows, session: dict[str, Any], file: Path, start_ns: int, ordinal: int) -> None:
    local = session.get("hash_id_scope", "local") == "local"
    name = text_of(session, "id", str(file))
    for label, offset, where, request in _requests(session, str(file), name, 0):
        ids = hashes(request, "hash_ids", where)
        if ids is not None and local:
            if len(ids) and (ids.min() < 0 or ids.max() >> _ID_BITS):
                raise InputError(f"{where}: field 'hash_ids': expected local ids of 0 .. 2**{_ID_BITS} - 1")
            ids = ids + (ordinal << _ID_BITS)
        rows.add(start_ns + offset, integer(request, "in", where), integer(request, "out", where), ids, label)


def _requests(
    holder: dict[str, Any], where: str, label: str, base_ns: int
) -> Iterator[tuple[str, int, str, dict[str, Any]]]:
    """Yield the session label, time in ns, place and record of each request, those of sub-agents included."""
    entries = holder.get("requests")
    if not isinstance(entries, list):
        raise InputError(f"{where}: field 'requests': expected a list")
    agents = 0
    for index, entry in enumerate(entries):
        here = f"{where}: requests[{index}]"
        if not isinstance(entry, dict):
            raise InputError(f"{here}: expected an object")
        at = base_ns + number_ns(entry, "t", 10**9, here)
        if entry.get("type") == "subagent":
            agents += 1
            yield from _requests(entry, here, f"{label}/{agents}", at)
        else:
            yield label, at, here, entry
