"""TOVA: what the last query looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.kv.policies.base import ScorePolicy, policies
from sim.kv.view import View

__all__ = ["TOVA"]


@policies.register("tova")
@dataclass(frozen=True, slots=True)
class TOVA(ScorePolicy):
    """Keep the tokens that the newest query attends to most; nothing is accumulated, and nothing protected.

    Source: Oren et al., 2024 (arXiv 2401.06104); schwartz-lab-NLP/TOVA, tova_cache.py. There attention is the mean over
    the heads of a layer and each layer keeps tokens of its own; here one set serves all layers. As in TOVAPress of
    NVIDIA/kvpress, the newest token never dies, which the reference leaves to its attention.
    """

    attends: ClassVar[bool] = True
    pools: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("tova_attention",)

    def begin(self, view: View) -> None:
        """Take the attention of the prompt's last query."""
        view.set("tova_attention", view.query(0))

    def observe(self, view: View) -> None:
        """Take the attention of the newest query in its place."""
        view.set("tova_attention", view.attention())

    def score(self, view: View) -> NDArray[np.float32]:
        """Return that attention."""
        return view.columns["tova_attention"]
