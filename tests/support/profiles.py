"""A cost profile with numbers that are easy to add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VALUES = {
    "step_overhead_ns": 1000,
    "sequence_overhead_ns": 7,
    "attention_launch_ns": 50,
    "attention_ns_per_byte": 1 / 131_072,  # 1 ns a slot of llama-3.1-8b
    "attention_sequence_ns": 30,
    "attention_free_sequences": 16,
    "dead_slot_factor": 1,
    "prefill_ns_per_token": 3,
    "prefill_ns_per_pair": 0.5,
    "copy_launch_ns": 100,
    "copy_ns_per_byte_scattered": 2 / 131_072,
    "copy_ns_per_byte_contiguous": 1 / 131_072,
    "copy_share": 0.25,
    "copy_interference": 1.5,
    "table_step_ns": 5,
    "table_entry_ns": 32,
    "score_step_ns": 11,
    "score_request_ns": 13,
    "score_pair_bytes": 4,
}


def content() -> dict[str, Any]:
    """Return the JSON of a profile for llama-3.1-8b on an h100-sxm, as json.loads gives it."""
    figures = {name: {"value": value, "provenance": "toy", "n": 3} for name, value in VALUES.items()}
    figures["sequence_overhead_ns"] |= {
        "interval": [6, 8],
        "note": "made up",
        "error": {"mean": 0.05, "median": 0.04, "p90": 0.1, "max": 0.2},
    }
    return {
        "schema": "vtoken-cost-profile",
        "version": 2,
        "model": "llama-3.1-8b",
        "kv_dtype": "bf16",
        "hardware": "h100-sxm",
        "block_size": 16,
        "fitted_on": ["a.parquet"],
        "provenances": {
            "toy": {
                "device": "none",
                "date": "2026-11-30",
                "source": "made up for this test",
                "kind": "measured",
                "versions": {"torch": "2"},
            }
        },
        "gemm_ns": {"points": [[8, 100], [16, 100], [32, 260]], "provenance": "toy"},
        "head_ns": {"points": [[1, 20], [11, 30]], "provenance": "toy"},
        **figures,
    }


def write(folder: Path, what: object) -> Path:
    """Write a profile's file."""
    path = folder / "profile.json"
    path.write_text(json.dumps(what))
    return path
