"""Mooncake traces and AIPerf's extension of them (kvcache-ai/Mooncake, ai-dynamo/aiperf; Apache-2.0)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sim.errors import InputError
from sim.workload.json_text import json_lines
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.fields import characters_to_tokens, hashes, integer, number_ns
from sim.workload.readers.rows import Rows
from sim.workload.source import Lengths
from sim.workload.trace import Trace

_MS = 1_000_000
_PROMPTS = ("input_length", "text_input", "messages", "payload")


@trace_readers.register("mooncake")
@dataclass(frozen=True)
class Mooncake(TraceReader):
    """JSON lines: times in ms, lengths, one hash per 512 prompt tokens.

    AIPerf adds sessions. Its later turns may have a ``delay`` instead of a time: ms after the previous *response*,
    which a trace cannot know. They are placed that long after the previous *arrival*, and a note counts them. Prompts
    given as text are counted as a token for every four characters.
    """

    summary: ClassVar[str] = (
        "Mooncake / AIPerf jsonl: timestamp (ms), input_length, output_length, hash_ids of 512 tokens, sessions"
    )

    def matches(self, head: Head) -> bool:
        """Recognise a prompt field of the format, and no Bailian conversation."""
        return any(key in head.record for key in _PROMPTS) and "chat_id" not in head.record

    def read(self, path: Path, how: Reading) -> Trace | Lengths:  # noqa: ARG002 (the protocol's signature)
        """Read the file; lengths only if its first row has neither a time nor a delay."""
        rows = Rows(path)
        previous: dict[str, int] = {}
        timed: bool | None = None
        delayed = estimated = 0
        for where, record in json_lines(path):
            prompt, guess = _prompt(record, where)
            estimated += guess
            raw = record.get("session_id")
            session = None if raw is None else str(raw)
            has_time = record.get("timestamp") is not None
            follows = record.get("delay") is not None and session in previous
            timed = (has_time or follows) if timed is None else timed
            if timed and not has_time and not follows:
                raise InputError(f"{where}: field 'timestamp' is missing, expected a time in ms")
            if not timed and has_time:
                raise InputError(f"{where}: has a timestamp while the rows before have none")
            arrival = 0
            if timed and has_time:
                arrival = number_ns(record, "timestamp", _MS, where)
            elif timed and session is not None:
                arrival = previous[session] + number_ns(record, "delay", _MS, where)
                delayed += 1
            if session is not None:
                previous[session] = arrival
            rows.add(arrival, prompt, _output(record, where), hashes(record, "hash_ids", where), session)
        if estimated:
            rows.notes.append(f"{estimated} prompts are text: counted as a token for every four characters")
        if delayed:
            rows.notes.append(f"{delayed} turns have a delay only: placed that long after the previous turn's arrival")
        return rows.trace() if timed else rows.lengths()


def _prompt(record: dict[str, Any], where: str) -> tuple[int, bool]:
    """Return the prompt's tokens, and whether they are an estimate."""
    given = [key for key in _PROMPTS if record.get(key) is not None]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise InputError(f"{where}: expected exactly one of {', '.join(_PROMPTS)}, found {found}")
    if given[0] == "input_length":
        return integer(record, "input_length", where), False
    return characters_to_tokens(_text(record[given[0]])), True


def _text(value: Any) -> str:
    """Return the words in a text, a list of messages, or the body of a request."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_text, value))
    if isinstance(value, dict):
        return "".join(_text(value[key]) for key in ("messages", "prompt", "content", "text") if key in value)
    return ""


def _output(record: dict[str, Any], where: str) -> int:
    payload = record.get("payload")
    if record.get("output_length") is None and isinstance(payload, dict) and "max_tokens" in payload:
        return integer(payload, "max_tokens", f"{where}: payload")
    return integer(record, "output_length", where)
