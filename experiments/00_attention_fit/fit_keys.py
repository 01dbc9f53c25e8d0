"""Compare what policies that look at keys, values and queries leave of blocks: synthetic against recorded; and fit.

    python experiments/00_attention_fit/fit_keys.py                 # the tables of README.md
    python experiments/00_attention_fit/fit_keys.py --search 300    # draw parameters for 300 s, print the best
    python experiments/00_attention_fit/fit_keys.py --levels        # norms, cosines and their correlations

The policies are the simulator's own, on a cache of their own; the measured side replays the captures with the
statistics that ``extend.py`` computed (``rows``), for requests of exactly the captures' lengths.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measured import SHARED
from numpy.typing import NDArray

from sim.kv.cache import KVCache
from sim.kv.policies import policies
from sim.kv.view import View
from sim.rng import request_key
from sim.serving.attention import synthetic
from sim.serving.attention.recorded import Recorded

ROWS = Path(__file__).parent / "rows"
BUDGETS = (0.2, 0.4, 0.6, 0.8)
SIZES = (8, 16, 32, 64)
FITTED = ("knorm", "keydiff", "expected_attention")
OTHERS = ("snapkv", "keyformer", "r_kv")
RANGES = {
    "along_skew": (0.0, 1.0),
    "along_cluster": (0.0, 0.8),
    "along_sigma": (0.015, 0.04),
    "key_weight": (0.3, 0.9),
    "key_cluster": (0.0, 0.6),
    "expected_cluster": (0.0, 1.0),
    "expected_score": (0.5, 0.85),
    "expected_offset": (50.0, 400.0),
    "expected_exponent": (0.8, 2.5),
}
Blocks = NDArray[np.float64]


def blocks(live: NDArray[np.bool_]) -> Blocks:
    """Return float64[sizes, 3]: % of the blocks that are dead, partly dead, and reclaimable."""
    found = np.zeros((len(SIZES), 3))
    for row, size in enumerate(SIZES):
        count = -(-len(live) // size)
        padded = np.zeros(count * size, bool)
        padded[: len(live)] = live
        held = padded.reshape(-1, size).sum(1)
        dead = (held == 0).mean()
        spare = 1 - dead - -(-live.sum() // size) / count
        found[row] = dead, ((held > 0) & (held < size)).mean(), spare
    return 100 * found


def serve(name: str, model: Any, key: int, prompt: int, generated: int, share: float) -> Blocks:
    """Return float64[2, sizes, 3]: blocks at the end of the prompt, and the mean over every 32nd decode step."""
    policy = policies.build(name)
    cache = KVCache(600, 16, columns=(*policy.columns, *model.columns))
    row = cache.open(0, key, prompt, generated + 1)
    cache.sync_new_tokens(row, prompt)
    rows = np.array([row])
    record = cache.store.s.rows[row : row + 1]
    seen = []
    for step in range(generated + 1):
        if step:
            cache.sync_new_tokens(row, 1)
        else:
            record["decode_from"] = prompt
        view = cache.view(rows, share, 0, model)
        if step == 0:
            model.begin(view)
            policy.begin(view)
        elif not policy.prompt_only:
            policy.observe(view)
        excess = view.n - view.keep
        if excess[0] > 0 and (step == 0 or not policy.prompt_only):
            cache.evict_cells(rows, *policy.select(view, excess))
        if step % 32 == 0:
            seen.append(blocks(alive(cache, row, prompt + step)))
    return np.stack([seen[0], np.mean(seen[1:], axis=0) if generated >= 32 else seen[0]])


def alive(cache: KVCache, row: int, length: int) -> NDArray[np.bool_]:
    """Return bool[length]: which positions live."""
    record = cache.store.s.rows[row]
    live = np.zeros(length, bool)
    live[cache.store.s.position[record["start"] : record["start"] + record["live"]]] = True
    return live


def recorded() -> list[tuple[Recorded, int, int]]:
    """Return each capture with its numbers of prompt and generated tokens."""
    found = []
    for path in sorted(SHARED.glob("*.npz")):
        model = Recorded(str(path), str(ROWS))
        (capture,) = model.captures
        found.append((model, len(capture.score), len(capture.attention)))
    return found


def table(names: Iterable[str], models: list[tuple[Any, int, int, int]], *, decode: bool = True) -> dict[str, Blocks]:
    """Return float64[2, budgets, sizes, 3] for each policy: the mean over (model, key, prompt, generated)."""
    return {
        name: np.mean(
            [
                np.stack([serve(name, model, key, p, g if decode else 0, share) for share in BUDGETS], axis=1)
                for model, key, p, g in models
            ],
            axis=0,
        )
        for name in names
    }


def drawn(seeds: range, sizes: list[tuple[int, int]]) -> list[tuple[Any, int, int, int]]:
    """Return synthetic requests of these lengths, ``seeds`` of each."""
    model = synthetic.Synthetic()
    return [(model, request_key(seed, i), p, g) for seed in seeds for i, (p, g) in enumerate(sizes)]


def compare(seeds: int) -> None:
    """Print how far off synthetic is, and both sides at block size 16."""
    captures = recorded()
    names = FITTED + OTHERS
    real = table(names, [(model, 0, p, g) for model, p, g in captures])
    ours = table(names, drawn(range(1000, 1000 + seeds), [(p, g) for _, p, g in captures]))
    print("| policy | when | mean | largest | within 6 |\n|---|---|---|---|---|")
    for name in names:
        for when, label in enumerate(("prompt end", "decode")):
            off = np.abs(real[name][when] - ours[name][when])
            print(f"| {name} | {label} | {off.mean():.1f} | {off.max():.1f} | {100 * (off <= 6).mean():.0f} % |")
    print("\n| policy, budget | when | dead | partial | reclaim |\n|---|---|---|---|---|")
    for name in names:
        for when, label in enumerate(("prompt end", "decode")):
            for b, share in enumerate(BUDGETS):
                pairs = zip(real[name][when, b, 1], ours[name][when, b, 1], strict=True)
                cells = " | ".join(f"{x:.0f} / {y:.0f}" for x, y in pairs)
                print(f"| {name} {100 * share:.0f} | {label} | {cells} |")


def search(seconds: float, seed: int) -> None:
    """Draw parameters around the best ones so far; the cost is the mean difference, of each policy by itself."""
    captures = recorded()
    real = table(FITTED, [(model, 0, p, g) for model, p, g in captures], decode=False)
    requests = drawn(range(3), [(p, 0) for _, p, _ in captures])
    rng = np.random.default_rng(seed)
    prefixes = {"knorm": "key_", "keydiff": "along_", "expected_attention": "expected_"}
    best = synthetic.KEYS
    cost = dict.fromkeys(FITTED, np.inf)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name in FITTED:
            mine = [field for field in RANGES if field.startswith(prefixes[name])]
            wide = 1.0 if rng.random() < 0.3 else 0.15
            values = {}
            for field in mine:
                low, high = RANGES[field]
                at = getattr(best, field) + wide * (high - low) * rng.uniform(-1, 1)
                values[field] = float(f"{np.clip(at, low, high):.3g}")
            trial = replace(best, **values) if np.isfinite(cost[name]) else best
            synthetic.KEYS = trial
            got = table([name], requests, decode=False)[name]
            off = np.abs(got - real[name])[0]
            now = off.mean() + 0.2 * off.max()
            if now < cost[name]:
                best, cost[name] = trial, now
                print(
                    f"{name}: mean {off.mean():.2f}, largest {off.max():.1f}",
                    {f: getattr(best, f) for f in mine},
                    flush=True,
                )
            synthetic.KEYS = best


def levels() -> None:
    """Print levels, spreads and correlations of both sides, as means over the captures and as many requests."""
    captures = recorded()
    real = [_levels(model, 0, p) for model, p, _ in captures]
    requests = drawn(range(8), [(p, 0) for _, p, _ in captures])
    ours = [_levels(model, key, p) for model, key, p, _ in requests]
    print("| | measured | synthetic |\n|---|---|---|")
    for name in real[0]:
        print(f"| {name} | {np.mean([r[name] for r in real]):.3g} | {np.mean([r[name] for r in ours]):.3g} |")


def _levels(model: Any, key: int, prompt: int) -> dict[str, float]:
    cells = np.arange(prompt, dtype=np.int32)
    numbers = np.array([0, 0, prompt, prompt, prompt, prompt], np.int64).reshape(6, 1)
    columns = {name: np.zeros(prompt, np.float32) for name in model.columns}
    view = View(numbers, np.array([key], np.uint64), cells, columns, np.zeros((2, prompt), np.float32), model)
    model.begin(view)
    norm, value = view.key_norms().copy(), view.value_norms().copy()
    like, score, expected = view.similarity().copy(), view.accumulated().copy(), view.expected().copy()
    # The trend of both with age is taken away, so that what is left is the token's own.
    own_score = _detrended(np.log(score[4:]))
    own_expected = _detrended(np.log(expected[4:]))
    k, v, s = np.log(norm[4:]), np.log(value[4:]), _detrended(like[4:])
    return {
        "key norm: spread, relative": float(k.std()),
        "of token 0, to the mean": float(norm[0] / norm[1:].mean()),
        "like its neighbour's (correlation)": _lagged(k, 1),
        "like that of 8 tokens on": _lagged(k, 8),
        "with the score at the end of the prompt (ranks)": _ranked(k, own_score),
        "value norm: spread, relative": float(v.std()),
        "with the key's norm": float(np.corrcoef(k, v)[0, 1]),
        "with the score (ranks)": _ranked(v, own_score),
        "mean cosine of keys": float(like[1:].mean()),
        "its spread": float(like[1:].std()),
        "its spread without the trend": float(s.std()),
        "token 0's": float(like[0]),
        "like its neighbour's, without the trend": _lagged(s, 1),
        "expected attention: spread of the logarithm": float(np.log(expected[4:]).std()),
        "without the trend": float(own_expected.std()),
        "like its neighbour's, no trend": _lagged(own_expected, 1),
        "with the score, no trend": float(np.corrcoef(own_expected, own_score)[0, 1]),
    }


def _detrended(x: NDArray[Any]) -> NDArray[np.float64]:
    t = np.polynomial.polynomial.polyvander(np.linspace(-1, 1, len(x)), 5)
    rest: NDArray[np.float64] = x - t @ np.linalg.lstsq(t, x, rcond=None)[0]
    return rest


def _lagged(x: NDArray[Any], lag: int) -> float:
    return float(np.corrcoef(x[:-lag], x[lag:])[0, 1])


def _ranked(x: NDArray[Any], y: NDArray[Any]) -> float:
    return float(np.corrcoef(np.argsort(np.argsort(x)), np.argsort(np.argsort(y)))[0, 1])


def main() -> None:
    """Compare, or search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--levels", action="store_true")
    parser.add_argument("--seeds", type=int, default=8, help="synthetic requests of each length")
    options = parser.parse_args()
    if not SHARED.is_dir():
        raise SystemExit(f"error: {SHARED} is absent: the captures that this compares with are not part of vtoken-sim")
    if options.search:
        search(options.search, 1)
    elif options.levels:
        levels()
    else:
        compare(options.seeds)


if __name__ == "__main__":
    main()
