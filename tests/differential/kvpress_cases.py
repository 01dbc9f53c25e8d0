"""What NVIDIA/kvpress keeps of drawn attention layers: run by an interpreter that has it, writes an npz.

    python tests/differential/kvpress_cases.py OUT.npz FIRST_SEED CASES [units]

A case is one layer with one head: random weights and hidden states, keys and queries with rotary embedding, attention
with a causal mask. Each press compresses its cache; what is left is recognised by its keys. With ``units`` a case is
several layers with several KV heads, each of two query heads, for presses with budgets that differ. Nothing here
imports the simulator.
"""

from __future__ import annotations

import math
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb

PRESSES = {
    "streaming_llm": StreamingLLMPress,
    "tova": TOVAPress,
    "snapkv": lambda ratio: SnapKVPress(ratio, window_size=16),
    "keydiff": KeyDiffPress,
    "knorm": KnormPress,
    "expected_attention": ExpectedAttentionPress,
}
WIDTH = 8
LAYERS, KV_HEADS, GROUP, WINDOW = 5, 3, 2, 6


def case(seed: int) -> dict[str, Any]:
    """Draw a layer and compress it with every press."""
    torch.manual_seed(seed)
    tokens = int(torch.randint(40, 90, ()))
    ratio = float(torch.rand(())) * 0.5 + 0.1  # a window of 16 always fits: of its tokens torch drops any
    config = LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=1, num_key_value_heads=1, head_dim=WIDTH, max_position_embeddings=4096
    )
    layer = LlamaAttention(config, layer_idx=0)
    layer.rotary_emb = LlamaRotaryEmbedding(config)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.copy_(torch.randn(WIDTH, WIDTH) * 0.7)
        hidden = torch.randn(1, tokens, WIDTH)
        turned = layer.rotary_emb(hidden, torch.arange(tokens)[None])
        plain, keys, values = (
            projection(hidden).view(1, tokens, 1, WIDTH).transpose(1, 2)
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(plain, keys, *turned)
        logits = queries @ keys.transpose(2, 3) / WIDTH**0.5
        attention = (logits + torch.full((tokens, tokens), -torch.inf).triu(1)).softmax(dim=-1)
        out: dict[str, Any] = {
            "queries": queries[0, 0],
            "plain_queries": plain[0, 0],
            "keys": keys[0, 0],
            "values": values[0, 0],
        }
        for name, press in PRESSES.items():
            made = press(ratio)
            arguments = (layer, hidden, keys, values, attention, {"position_embeddings": turned})
            left, _ = made.compress(*arguments)
            out[f"{name}_kept"] = recognised(left[0, 0], keys[0, 0])
            out[f"{name}_score"] = made.score(*arguments)[0, 0]
    return {key: value.numpy() for key, value in out.items()}


def unit_case(seed: int) -> dict[str, Any]:
    """Draw a few layers, and compress them with presses that give layers or heads budgets of their own."""
    torch.manual_seed(seed)
    tokens = int(torch.randint(40, 90, ()))
    kept = int(torch.randint(2 * WINDOW, tokens - WINDOW, ()))
    ratio = 1 - kept / tokens
    while int(tokens * (1 - ratio)) < kept:  # presses round down
        ratio = math.nextafter(ratio, 0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH,
        num_hidden_layers=LAYERS,
        attn_implementation="sdpa",
    )
    out: dict[str, Any] = {"budget": torch.tensor(kept)}
    alive = {name: torch.zeros(LAYERS, KV_HEADS, tokens, dtype=torch.bool) for name in ("pyramidkv", "ada_kv")}
    seen = torch.zeros(LAYERS, KV_HEADS, WINDOW, tokens)
    for index in range(LAYERS):
        layer = LlamaAttention(config, layer_idx=index)
        # Some heads look at few tokens and some at many; keys tell tokens apart.
        sharpness = torch.rand(KV_HEADS * GROUP, 1, 1) * 4
        logits = torch.randn(KV_HEADS * GROUP, tokens, tokens) * sharpness
        attention = (logits + torch.full((tokens, tokens), -torch.inf).triu(1)).softmax(dim=-1)[None]
        hidden, keys = torch.zeros(1, tokens, WIDTH), torch.randn(1, KV_HEADS, tokens, WIDTH)
        arguments = (layer, hidden, keys, keys, attention, {})
        seen[index] = attention[0].view(KV_HEADS, GROUP, tokens, tokens).mean(1)[:, -WINDOW:]
        left, _ = PyramidKVPress(ratio, window_size=WINDOW).compress(*arguments)
        for head in range(KV_HEADS):
            alive["pyramidkv"][index, head, recognised(left[0, head], keys[0, head])] = True
        AdaKVPress(SnapKVPress(ratio, window_size=WINDOW)).compress(*arguments)
        alive["ada_kv"][index] = True
        _, heads, dead = layer.masked_key_indices
        alive["ada_kv"][index, heads, dead] = False
    out["attention"] = seen
    out |= {f"{name}_kept": which for name, which in alive.items()}
    return {key: value.numpy() for key, value in out.items()}


def recognised(some: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return which rows of ``of`` these are, in order."""
    equal = (some[:, None] == of[None]).all(dim=-1)
    assert (equal.sum(dim=1) == 1).all()
    return equal.int().argmax(dim=1).sort().values


def main() -> None:
    """Write the cases."""
    path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    draw = unit_case if sys.argv[4:] == ["units"] else case
    arrays: dict[str, Any] = {"kvpress": np.array(version("kvpress")), "cases": np.array(count)}
    for number in range(count):
        for key, value in draw(first + number).items():
            arrays[f"{number}_{key}"] = value.astype({"i": np.int16, "f": np.float32, "b": np.bool_}[value.dtype.kind])
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main()
