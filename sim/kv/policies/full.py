"""Nothing dies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sim.kv.policies.base import EvictionPolicy, policies

__all__ = ["Full"]


@policies.register("full")
@dataclass(frozen=True, slots=True)
class Full(EvictionPolicy):
    """Full retention, as vLLM serves by default."""

    evicts: ClassVar[bool] = False
