"""Draws small cases at random that look for corners: pools that are too small, equal times, prefixes in common."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw", "draw_hybrid", "write_case"]


def draw(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the arguments and the trace of the case number ``seed``.

    Every request fits the pool alone, which vLLM makes sure of before it starts, except for a few whose prompt is as
    long as ``max_model_len`` or longer; those are turned away.
    """
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 8, 16, 16, 32, 64))
    most = rng.choice((24, 60, 150, 400, 900))
    needed = -(-(most - 1) // block_size)
    max_num_seqs = rng.choice((1, 2, 3, 8, 16, 64))
    case = {
        "blocks": 1 + needed + rng.choice((0, 0, 1, needed // 3, needed, 4 * needed)),
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(max_num_seqs, rng.choice((1, 7, 16, 33, 64, 100, 256, 2048))),
        "max_model_len": most,
        "prefix_caching": rng.random() < 0.6,
        "reserve_full_prompt": rng.random() < 0.6,
        "watermark": rng.choice((0.0, 0.0, 0.01, 0.05, 0.2)),
        "long_prefill_token_threshold": min(most, rng.choice((0, 0, 0, 1, 5, 16, 50))),
        "base_s": rng.choice((0.008, 0.01, 0.0137)),
        "per_token_s": rng.choice((0.0, 2e-5, 1e-4, 3.3e-5)),
        "async_scheduling": rng.random() < 0.5,
    }
    return case, _trace(rng, case)


def draw_hybrid(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return case number ``seed`` of a model of which some groups of layers have a sliding window; no prefix caching.

    ``windows`` has the window of each group, those with one first; 0 is full attention.
    """
    rng = random.Random(-1 - seed)
    case, _ = draw(seed)
    size, most = case["block_size"], case["max_model_len"]
    window = rng.choice((1, 2, size, size + 1, 3 * size - 1, max(1, most // 4), most))
    full = rng.choice((0, 1, 1, 1, 2))
    # vLLM makes one group of layers that are all alike, and has one kind in several groups at most.
    windows = [window] * (rng.randint(1, 5) if full == 1 else 1) + [0] * full
    steps = 2 if case["async_scheduling"] else 1
    whole = -(-(most - 1) // size)
    bounded = -(-min(window - 1 + steps * case["max_num_batched_tokens"], most) // size) + 1
    needed = sum(min(whole, bounded) if window else whole for window in windows)
    case |= {
        "windows": windows,
        "prefix_caching": False,
        "blocks": 1 + needed + rng.choice((0, 0, 1, needed // 3, needed, 4 * needed)),
    }
    return case, _trace(rng, case)


def _trace(rng: random.Random, case: dict[str, Any]) -> list[dict[str, Any]]:
    count = rng.choice((3, 8, 20, 40))
    longest = rng.choice((1, 2, 4)) * case["max_model_len"] // 4
    answer = rng.choice((1, 3, 20, longest, longest))
    span = rng.choice((1, 3, 8, 16, 20, 48))
    shares = case["prefix_caching"] and rng.random() < 0.85
    # Few of them, and such that Python's hash() of one is that of another: equal only by chance is not equal.
    ids = (-1, -2, 5, 5 + (1 << 61) - 1) if rng.random() < 0.1 else range(1 << 40)
    name = rng.choice(("{}", "{}", "r{}"))
    prompts: list[tuple[int, list[int]]] = []
    rows: list[dict[str, Any]] = []
    for req_id, arrival in enumerate(_arrivals(rng, case, count)):
        tokens = rng.choice((1, rng.randint(1, longest), rng.randint(1, longest)))
        if rng.random() < 0.02:
            tokens = case["max_model_len"] + rng.choice((-1, 0, 5))
        row: dict[str, Any] = {
            "req_id": name.format(req_id),
            "arrival_s": f"{arrival:.6f}",
            "prompt_tokens": tokens,
            "output_tokens": rng.choice((1, rng.randint(1, answer), rng.randint(1, answer))),
        }
        if shares:
            row["prompt_tokens"], spans = _prompt(rng, tokens, span, ids, prompts)
            row |= {"prefix_hashes": " ".join(map(str, spans)), "hash_tokens": span}
        rows.append(row)
    return rows


def _prompt(
    rng: random.Random, tokens: int, span: int, ids: Sequence[int], prompts: list[tuple[int, list[int]]]
) -> tuple[int, list[int]]:
    """Return the length of a prompt and its spans: new, the start of another one, or all of it."""
    kind = rng.random()
    if kind < 0.1:
        return tokens, []
    spans = [rng.choice(ids) for _ in range(-(-tokens // span))]
    if prompts and kind < 0.9:
        length, known = rng.choice(prompts)
        if kind < 0.4:
            return length, known
        shared = rng.randint(0, min(len(known), len(spans)))
        spans[:shared] = known[:shared]
    if rng.random() < 0.05:
        spans = spans[: len(spans) // 2]  # the rest of the prompt is nobody else's
    prompts.append((tokens, spans))
    return tokens, spans


def _arrivals(rng: random.Random, case: dict[str, Any], count: int) -> list[float]:
    """Draw times of arrival: all at once, in bursts, on the boundaries of steps, far apart, or at random."""
    kind = rng.choice(("once", "bursts", "boundaries", "apart", "random", "random"))
    if kind == "once":
        return [0.0] * count
    if kind == "bursts":
        return sorted(rng.choice((0.0, 0.05, 0.3, 0.3001)) for _ in range(count))
    if kind == "boundaries":
        return sorted(case["base_s"] * rng.randint(0, 4 * count) for _ in range(count))
    gap = 1.0 if kind == "apart" else case["base_s"] * rng.choice((1, 4, 20))
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(1 / gap)
        times.append(now)
    return times


def write_case(folder: Path, case: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a case as its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    (folder / "trace.csv").write_text("\n".join(lines) + "\n")
