"""What NVIDIA/kvpress keeps of drawn attention layers: run by an interpreter that has it, writes an npz.

    python tests/differential/kvpress_cases.py OUT.npz FIRST_SEED CASES

A case is one layer with one head: random weights and hidden states, keys and queries with rotary embedding, attention
with a causal mask. Each press compresses its cache; what is left is recognised by its keys. Nothing here imports the
simulator.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from kvpress import ExpectedAttentionPress, KeyDiffPress, KnormPress, SnapKVPress, StreamingLLMPress, TOVAPress
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


def recognised(some: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return which rows of ``of`` these are, in order."""
    equal = (some[:, None] == of[None]).all(dim=-1)
    assert (equal.sum(dim=1) == 1).all()
    return equal.int().argmax(dim=1).sort().values


def main() -> None:
    """Write the cases."""
    path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    arrays: dict[str, Any] = {"kvpress": np.array(version("kvpress")), "cases": np.array(count)}
    for number in range(count):
        for key, value in case(first + number).items():
            small = value.astype(np.int16) if value.dtype.kind == "i" else value.astype(np.float32)
            arrays[f"{number}_{key}"] = small
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main()
