"""Keyformer: heavy hitters by a softmax with noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import NOBODY, ScorePolicy, policies
from sim.kv.policies.kernels import add_noisy_softmax, blur
from sim.kv.view import View

__all__ = ["Keyformer"]

_SCORE = "keyformer_score"


@policies.register("keyformer")
@dataclass(frozen=True, slots=True)
class Keyformer(ScorePolicy):
    """Keep the newest tokens and, of the rest, those that gathered most of a softmax with Gumbel noise.

    Source: Adnan et al., MLSys 2024 (arXiv 2403.09054); d-matrix-ai/keyformer-llm, attention.py. To the logits of each
    query comes Gumbel noise, drawn anew, and their softmax has a temperature that rises with every generated token: a
    score that flattens, so that tokens without much attention so far are not given up. Logits are the logarithms of
    attention, which differ from them by a number a query that no softmax sees.

    Differences: one set of tokens for all layers and heads, on the mean over them, there each head's. Noise is not
    drawn for every query of the prompt: what attention adds up to is multiplied by one lognormal draw a token. The
    reference's temperature rises without end; the paper's, and this, up to ``tau_end``. Logarithms and powers are
    approximations with an error below 1 %. ``experiments/00_attention_fit/assumptions.py`` measures the first two.

    Parameters
    ----------
    recent
        Share of the budget that goes to the newest tokens.
    tau_init, tau_end
        Temperature of the prompt, and the highest.
    tau_delta
        How much it rises with each generated token.
    prompt_noise
        Spread of the logarithm of the prompt's draws; 0 takes plain sums of attention.
    """

    attends: ClassVar[bool] = True
    pools: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = (_SCORE,)

    recent: float = 0.3
    tau_init: float = 1.0
    tau_end: float = 2.0
    tau_delta: float = 0.01
    prompt_noise: float = 0.35

    def __post_init__(self) -> None:
        if not 0 < self.recent <= 1:
            raise InputError(f"keyformer: recent: expected a share in (0, 1], got {self.recent}")
        if not 0 <= self.prompt_noise <= 3:
            raise InputError(f"keyformer: prompt_noise: expected a spread in [0, 3], got {self.prompt_noise}")
        if not 0.25 <= self.tau_init <= self.tau_end <= 100 or self.tau_delta < 0:
            raise InputError(
                "keyformer: expected 0.25 <= tau_init <= tau_end <= 100 and tau_delta >= 0, "
                f"got {self.tau_init}, {self.tau_end} and {self.tau_delta}"
            )

    def begin(self, view: View) -> None:
        """Start from what each token got from all queries of the prompt, with noise."""
        view.set(_SCORE, view.accumulated())
        blur(view.key, view.start, view.n, view.position, self.prompt_noise, view.columns[_SCORE])

    def observe(self, view: View) -> None:
        """Add the noisy softmax of the newest query."""
        tau = np.minimum(self.tau_end, self.tau_init + self.tau_delta * (view.length - view.prompt))
        inverse = (1 / tau).astype(np.float32)
        attention, noisy = view.attention(), view.scratch[1]
        score = view.columns[_SCORE]
        add_noisy_softmax(view.key, view.start, view.n, view.length, view.position, inverse, attention, noisy, score)

    def score(self, view: View) -> NDArray[np.float32]:
        """Return what has been gathered."""
        return view.columns[_SCORE]

    def protect(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Protect the recent share of the budget."""
        return NOBODY, (self.recent * view.keep).astype(np.int64)
