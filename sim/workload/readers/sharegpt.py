"""ShareGPT conversations, as vLLM's benchmark uses them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sim.errors import InputError
from sim.workload.json_text import json_items
from sim.workload.readers import trace_readers
from sim.workload.readers.base import Head, Reading, TraceReader
from sim.workload.readers.fields import characters_to_tokens, integer, text_of
from sim.workload.readers.rows import Rows
from sim.workload.source import Lengths

MIN_PROMPT = 4
MAX_PROMPT = 1024
MAX_TOTAL = 2048


@trace_readers.register("sharegpt")
@dataclass(frozen=True)
class ShareGPT(TraceReader):
    """JSON array of conversations: the first turn is the prompt, the second the output. Lengths only.

    Conversations of one turn, and prompts below 4 or above 1,024 tokens or 2,048 with the output, are left out as vLLM
    does. Tokens are those of a turn's ``tokens`` field if it has one, else one for every four characters.
    """

    summary: ClassVar[str] = (
        "ShareGPT json: first two turns, vLLM's filter, 4 characters a token unless 'tokens' says; lengths only"
    )

    def matches(self, head: Head) -> bool:
        """Recognise an array with conversations."""
        return head.text.lstrip().startswith("[") and '"conversations"' in head.text

    def read(self, path: Path, how: Reading) -> Lengths:  # noqa: ARG002 (the protocol's signature)
        """Read the file, one conversation at a time."""
        rows = Rows(path)
        short = outside = estimated = 0
        for where, item in json_items(path):
            turns = item.get("conversations") if isinstance(item, dict) else None
            if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
                raise InputError(f"{where}: field 'conversations': expected a list of turns")
            if len(turns) < 2:
                short += 1
                continue
            (prompt, guess), (output, other) = (_tokens(turn, where) for turn in turns[:2])
            estimated += guess or other
            if prompt < MIN_PROMPT or prompt > MAX_PROMPT or prompt + output > MAX_TOTAL:
                outside += 1
                continue
            rows.add(0, prompt, output)
        if short or outside:
            rows.notes.append(
                f"left out {short} conversations of fewer than two turns and {outside} with a prompt outside "
                f"{MIN_PROMPT} .. {MAX_PROMPT} tokens or more than {MAX_TOTAL} in all"
            )
        if estimated:
            rows.notes.append(f"{estimated} conversations are text: counted as a token for every four characters")
        return rows.lengths()


def _tokens(turn: dict[str, Any], where: str) -> tuple[int, bool]:
    if turn.get("tokens") is not None:
        return integer(turn, "tokens", where), False
    return characters_to_tokens(text_of(turn, "value", where)), True
