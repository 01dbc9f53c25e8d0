"""Reclaimers: what happens to the slots of the dead. One small file each; others register by entry point."""

from __future__ import annotations

from sim.kv.reclaim.base import Pressure, Reclaimer, reclaimers

__all__ = ["Pressure", "Reclaimer", "reclaimers"]
