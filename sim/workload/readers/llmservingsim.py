"""LLMServingSim 2.0 workloads (casys-kaist/LLMServingSim)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sim.errors import InputError
from sim.workload.json_text import json_lines
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.fields import integer, number_ns
from sim.workload.readers.rows import Rows
from sim.workload.trace import Trace


@trace_readers.register("llmservingsim")
@dataclass(frozen=True)
class LLMServingSim(TraceReader):
    """JSON lines: single requests, or sessions whose requests follow each other after a tool call.

    A request of a session starts when the previous one has ended and its tool has run. The end is not in the file, so
    it is placed the tool's time after the previous arrival, and a note counts such requests.
    """

    summary: ClassVar[str] = "LLMServingSim jsonl: input_toks, output_toks, arrival_time_ns, sessions of sub_requests"

    def matches(self, head: Head) -> bool:
        """Recognise the arrival time and what arrives."""
        return "arrival_time_ns" in head.record and ("input_toks" in head.record or "sub_requests" in head.record)

    def read(self, path: Path, how: Reading) -> Trace:  # noqa: ARG002 (the protocol's signature)
        """Read the file."""
        rows = Rows(path)
        placed = 0
        for where, record in json_lines(path):
            arrival = number_ns(record, "arrival_time_ns", 1, where)
            session = str(record["session_id"]) if record.get("session_id") is not None else None
            parts: Any = record.get("sub_requests", [record])
            if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                raise InputError(f"{where}: field 'sub_requests': expected a list of objects")
            for part in parts:
                rows.add(
                    arrival, integer(part, "input_toks", where), integer(part, "output_toks", where), None, session
                )
                if part.get("tool_duration_ns") is not None:
                    arrival += number_ns(part, "tool_duration_ns", 1, where)
            placed += max(0, len(parts) - 1)
        if placed:
            rows.notes.append(f"{placed} later requests of sessions: placed the tool's time after the previous arrival")
        return rows.trace(merged=placed > 0)
