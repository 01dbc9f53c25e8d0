"""Write docs/configuration.md from the schema of a configuration.

Run ``vtoken config schema | python docs/configuration_md.py > docs/configuration.md``.

The schema gives names, defaults, limits and meanings. Units and vLLM's names are added here; a field that is missing
from ``UNITS`` stops the script, so that a new field is not forgotten.
"""

from __future__ import annotations

import json
import sys
from typing import Any

UNITS = {
    "trace": "file or specification",
    "format": "name",
    "arrivals": "specification",
    "head": "requests",
    "rate_scale": "factor",
    "model": "name",
    "hardware": "name",
    "gpu_memory_utilization": "share of memory",
    "kv_blocks": "blocks",
    "block_size": "tokens",
    "kv_dtype": "choice",
    "policy": "specification",
    "budget": "share of the length",
    "budget_tokens": "tokens",
    "budget_memory": "size",
    "budget_scope": "choice",
    "reclaimer": "specification",
    "granularity": "choice",
    "block_tables": "choice",
    "simulated_layers": "layers",
    "max_num_seqs": "requests",
    "max_num_batched_tokens": "tokens",
    "max_model_len": "tokens",
    "long_prefill_token_threshold": "tokens",
    "watermark": "share of the pool",
    "reserve_full_prompt": "yes or no",
    "prefix_caching": "yes or no",
    "async_scheduling": "yes or no",
    "repack_when": "choice",
    "theta_f": "share of slots",
    "low_watermark": "share of the pool",
    "shared_blocks": "choice",
    "headroom_blocks": "blocks",
    "attention": "specification",
    "step_cost": "specification",
    "copy_cost": "specification",
    "score_reads": "share of the KV read",
    "table_us": "microseconds",
    "evict_every": "steps",
    "seed": "whole number",
}

VLLM = {
    "gpu_memory_utilization": ("gpu_memory_utilization", "0.92; 0.9 in older versions", "cache"),
    "kv_blocks": ("num_gpu_blocks_override", "measured at start", "cache"),
    "block_size": ("block_size", "16", "cache"),
    "kv_dtype": ("cache_dtype", "auto; fp8; int4_per_token_head for int4", "cache"),
    "max_num_seqs": ("max_num_seqs", "1024 from 70 GiB of memory on, A100 excepted; else 256", "args"),
    "max_num_batched_tokens": (
        "max_num_batched_tokens",
        "server: 8192 from 70 GiB on, A100 excepted; else 2048",
        "args",
    ),
    "max_model_len": ("max_model_len", "the model's own", "model"),
    "long_prefill_token_threshold": ("long_prefill_token_threshold", "0", "scheduler"),
    "watermark": ("watermark", "0", "scheduler"),
    "reserve_full_prompt": ("scheduler_reserve_full_isl", "on", "scheduler"),
    "prefix_caching": ("enable_prefix_caching", "on", "cache"),
    "async_scheduling": ("async_scheduling", "on where the executor and the model allow it", "scheduler"),
}
"""Field: vLLM's name, its default, and where that is written (see ``SOURCES``)."""

SOURCES = {
    "args": "`vllm/engine/arg_utils.py` (`get_batch_defaults`)",
    "cache": "`vllm/config/cache.py`",
    "model": "`vllm/config/model.py`",
    "scheduler": "`vllm/config/scheduler.py`",
}

HEAD = """\
# Configuration

<!-- Written by docs/configuration_md.py; do not edit.
     vtoken config schema | python docs/configuration_md.py > docs/configuration.md -->

Every field of `sim.SimConfig`. A field is a flag of `vtoken run` with dashes for underscores (`--kv-blocks 4096`,
`--no-prefix-caching`), a key of a TOML file (`vtoken run --config FILE`), and in a sweep a key of `[base]`, `[grid]`,
`[[exclude]]` and `[[include]]`. Flags win over the file. `vtoken config show` prints what is in force, `vtoken config
schema` the JSON schema.

A *specification* is a name with parameters: `vtoken:theta_f=0.3,low_watermark=0.05`. A parameter in it wins over the
field of the same name. `vtoken policies`, `reclaimers`, `attention`, `step-costs`, `copy-costs`, `models` and
`hardware` list names and parameters.

Together they must make sense: `budget` and `budget_tokens` exclude each other; reclaimer `none` goes with policy `full`
alone.
"""

TAIL = """
## vLLM's names and defaults

Where a field follows vLLM. Read in the sources named, in 2026; its server's defaults depend on device and version, so
state the values of the system you compare with.

| field | vLLM | vLLM's default | source |
|---|---|---|---|
"""


def main() -> None:
    """Read the schema from standard input and print the page."""
    sys.stdout.write(page(json.load(sys.stdin)))


def page(schema: dict[str, Any]) -> str:
    """Return the page for a JSON schema of the configuration."""
    fields: dict[str, dict[str, Any]] = schema["properties"]
    groups: dict[str, list[str]] = {}
    for name, field in fields.items():
        groups.setdefault(field["group"], []).append(name)
    parts = [HEAD]
    for group, names in groups.items():
        parts.append(f"\n## {group}\n\n| field | default | unit | allowed | meaning |\n|---|---|---|---|---|\n")
        parts += [row(name, fields[name]) for name in names]
    parts.append(TAIL)
    for name, (theirs, default, source) in VLLM.items():
        if name not in fields:
            raise SystemExit(f"error: VLLM names a field {name!r} that the schema does not have")
        parts.append(f"| `{name}` | `{theirs}` | {default} | {SOURCES[source]} |\n")
    return "".join(parts)


def row(name: str, field: dict[str, Any]) -> str:
    """Return the table row of one field."""
    if name not in UNITS:
        raise SystemExit(f"error: field {name!r} has no unit: add it to UNITS in docs/configuration_md.py")
    default = field.get("default")
    shown = "-" if default is None else f"`{default}`" if isinstance(default, str) else _plain(default)
    meaning = " ".join(field["description"].split()).replace("|", "\\|")
    return f"| `{name}` | {shown} | {UNITS[name]} | {limits(field)} | {meaning} |\n"


def limits(field: dict[str, Any]) -> str:
    """Return the values that a field may have, in words."""
    rules = next((option for option in field.get("anyOf", ()) if option.get("type") != "null"), field)
    if "enum" in rules:
        return ", ".join(f"`{value}`" for value in rules["enum"])
    if rules["type"] not in ("integer", "number"):
        return {"string": "text", "boolean": "yes or no"}[rules["type"]]
    bounds = []
    for key, word in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<")):
        if key in rules:
            bounds.append(f"{word} {rules[key]:g}")
    return ("whole " if rules["type"] == "integer" else "") + ("number " + ", ".join(bounds)).strip()


def _plain(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()
