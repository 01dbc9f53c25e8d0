"""Attention models: where tokens' scores come from when there is no neural network to ask.

Built-in: ``synthetic`` (fitted to a measured model), ``recorded:FILE`` (captures of a real model) and ``uniform``.
"""

from __future__ import annotations

from sim.serving.attention.base import AttentionModel, attention_models, build_attention

__all__ = ["AttentionModel", "attention_models", "build_attention"]
