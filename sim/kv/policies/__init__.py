"""Eviction policies: who dies. One small file a policy; others register through the entry-point group."""

from __future__ import annotations

from sim.kv.policies.base import EvictionPolicy, ScorePolicy, policies

__all__ = ["EvictionPolicy", "ScorePolicy", "policies"]
