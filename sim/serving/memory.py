"""How many KV blocks fit on a device beside the weights.

The rule is vLLM's: of the device's memory a share may be used; the weights and what a step needs for its activations
come off; the rest is cut into blocks.
"""

from __future__ import annotations

from sim.errors import InputError
from sim.serving.hardware import Hardware
from sim.serving.models import Model

__all__ = ["ACTIVATION_RESERVE_BYTES", "kv_blocks"]

ACTIVATION_RESERVE_BYTES = 1_500_000_000
"""Default for activations, CUDA graphs and what else is not weights or KV cache.

vLLM measures this when it starts, and it depends on the largest batch it allows: 1.4 GiB to 3 GiB in its logs for 8B
models on an H100. The default is the reserve behind the paper's capacity frontier: with it Llama-3.1-8B on an H100 of
80 GB has room for 93,100 tokens at a utilisation of 0.35 and 190,500 at 0.50, and Qwen2.5-14B for 58,400 at 0.50.
R-KV's stress test (Qwen2.5-Math-7B, 256 sequences at once) reports 430,000, 282,000, 134,000 and 60,000 tokens at
0.50, 0.40, 0.30 and 0.25, where this default gives 449,900, 301,600, 153,200 and 79,100: 5 to 32 % more. The difference
is the same 19,000 to 20,000 tokens in every row, so it is the reserve and nothing else: 2.6 GB gives all four within
0.2 %. Where the pool of a real run is known, state it instead of working it out; under memory pressure nothing else
decides as much.
"""


def kv_blocks(
    model: Model,
    hardware: Hardware,
    block_size: int,
    utilisation: float = 0.9,
    activation_reserve_bytes: int = ACTIVATION_RESERVE_BYTES,
    tensor_parallel: int = 1,
) -> int:
    """Return the number of KV blocks that fit on the device (on each, with tensor parallelism).

    A block holds so many tokens of all layers or, where layers with a sliding window have groups of their own, of one
    group (:attr:`sim.serving.models.Model.kv_groups`).

    Parameters
    ----------
    model, hardware
        The presets.
    block_size
        Token slots a block.
    utilisation
        Share of the device's memory that weights, activations and KV cache may take together, in (0, 1].
    activation_reserve_bytes
        What is neither weights nor KV cache.
    tensor_parallel
        Devices the model is split over; each holds its share of the weights, and of the KV heads (at least one).

    Raises
    ------
    InputError
        If a parameter is out of range, or the weights leave no room for a block.
    """
    if block_size < 1:
        raise InputError(f"block size: expected at least 1, got {block_size}")
    if not 0 < utilisation <= 1:
        raise InputError(f"utilisation: expected a share in (0, 1], got {utilisation}")
    if activation_reserve_bytes < 0:
        raise InputError(f"activation reserve: expected at least 0 bytes, got {activation_reserve_bytes}")
    if tensor_parallel < 1 or model.heads % tensor_parallel:
        raise InputError(f"tensor parallel: expected a divisor of {model.heads} heads, got {tensor_parallel}")
    usable_bytes = utilisation * hardware.memory_bytes
    weight_bytes = model.weight_bytes / tensor_parallel
    kv_heads_here = -(-model.kv_heads // tensor_parallel)
    token_bytes = (model.kv_bytes_per_token // model.kv_heads) * kv_heads_here
    block_bytes = block_size * token_bytes * model.kv_group_layers // model.layers
    blocks = int((usable_bytes - weight_bytes - activation_reserve_bytes) // block_bytes)
    if blocks < 1:
        raise InputError(
            f"{model.name} does not fit on {hardware.name}: weights of {weight_bytes / 1e9:.1f} GB and "
            f"{activation_reserve_bytes / 1e9:.1f} GB for activations leave no room for a KV block of "
            f"{block_bytes / 1e6:.1f} MB in {usable_bytes / 1e9:.1f} GB ({utilisation:g} of the memory)"
        )
    return blocks
