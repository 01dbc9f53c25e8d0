"""The custom dataset of vLLM's benchmark command (vllm-project/vllm; Apache-2.0)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sim.workload.json_text import json_lines
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.fields import characters_to_tokens, integer, text_of
from sim.workload.readers.rows import Rows
from sim.workload.source import Lengths

DEFAULT_OUTPUT = 256
"""Output tokens of a record that names none: the default of vLLM's ``--custom-output-len``."""


@trace_readers.register("vllm_custom")
@dataclass(frozen=True)
class VllmCustom(TraceReader):
    """JSON lines: a prompt's text, and how many tokens to emit. Lengths only; four characters count as one token."""

    summary: ClassVar[str] = (
        "vLLM custom jsonl: prompt (text, 4 characters a token), output_tokens (256 if absent); lengths only"
    )

    def matches(self, head: Head) -> bool:
        """Recognise a prompt in words."""
        return isinstance(head.record.get("prompt"), str)

    def read(self, path: Path, how: Reading) -> Lengths:  # noqa: ARG002 (the protocol's signature)
        """Read the file."""
        rows = Rows(path)
        defaulted = count = 0
        for where, record in json_lines(path):
            output = DEFAULT_OUTPUT
            if record.get("output_tokens") is None:
                defaulted += 1
            else:
                output = integer(record, "output_tokens", where)
            rows.add(0, characters_to_tokens(text_of(record, "prompt", where)), output)
            count += 1
        rows.notes.append(f"{count} prompts are text: counted as a token for every four characters")
        if defaulted:
            rows.notes.append(f"{defaulted} prompts name no output length: {DEFAULT_OUTPUT} tokens, as vLLM takes")
        return rows.lengths()
