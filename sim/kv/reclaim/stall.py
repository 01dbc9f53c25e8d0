"""Repack one request while the others go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sim.kv.reclaim.base import reclaimers
from sim.kv.reclaim.vtoken import VToken

__all__ = ["Stall"]


@reclaimers.register("stall")
@dataclass(frozen=True, slots=True)
class Stall(VToken):
    """As ``vtoken``, but a request that is being repacked leaves the batch until its copy is done; the others go on.

    As Zipage and Ascend's KV compression do it: nobody has to look at a request whose tokens are under way, and none of
    them dies meanwhile. The request pays with the time of the copy, the batch with a thinner step. Here too the copy
    goes into fresh blocks, so that a preemption in the middle of it can be served like any other.
    """

    stalls: ClassVar[bool] = True
