"""Alibaba Bailian traces (alibaba-edu/qwen-bailian-usagetraces-anon)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sim.workload.json_text import json_lines
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.fields import hashes, integer, number_ns
from sim.workload.readers.rows import Rows
from sim.workload.trace import Trace


@trace_readers.register("bailian")
@dataclass(frozen=True)
class Bailian(TraceReader):
    """JSON lines: times in seconds, one hash per 16 prompt tokens; a session is the chat its turns descend from."""

    summary: ClassVar[str] = (
        "Bailian jsonl: timestamp (s), hash_ids of 16 tokens, chat_id / parent_chat_id give the session"
    )

    def matches(self, head: Head) -> bool:
        """Recognise the ids of the chat and of its parent."""
        return {"chat_id", "parent_chat_id"} <= head.record.keys()

    def read(self, path: Path, how: Reading) -> Trace:  # noqa: ARG002 (the protocol's signature)
        """Read the file."""
        rows = Rows(path, hash_tokens=16)
        root: dict[str, str] = {}
        for where, record in json_lines(path):
            chat, parent = str(record.get("chat_id")), str(record.get("parent_chat_id"))
            # A parent from before the trace began stands for its own root.
            root[chat] = chat if parent in ("-1", "None") else root.get(parent, parent)
            rows.add(
                number_ns(record, "timestamp", 10**9, where),
                integer(record, "input_length", where),
                integer(record, "output_length", where),
                hashes(record, "hash_ids", where),
                root[chat],
            )
        return rows.trace()
