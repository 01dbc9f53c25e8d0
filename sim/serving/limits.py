"""What bounds a step and a request."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import InputError

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step and a request; names and defaults are vLLM's."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 1 << 30
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    long_prefill_token_threshold: int = 0
    prefix_caching: bool = False
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise InputError(f"max_model_len: expected at least 2, got {self.max_model_len}")
        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark: expected a share in [0, 1), got {self.watermark}")
        if self.long_prefill_token_threshold < 0:
            raise InputError(
                f"long_prefill_token_threshold: expected 0 (off) or more, got {self.long_prefill_token_threshold}"
            )
