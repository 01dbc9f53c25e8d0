"""Signals of policies from one head's queries, keys and values: the textbook, in float64."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.kv.view import View

Array = NDArray[Any]


class Tensors:
    """Answers for one prompt, whose tokens are all alive.

    Parameters
    ----------
    queries, plain_queries, keys, values
        float[n, d]: queries with and without rotary embedding, keys with, values.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    FUTURE, SINKS, THETA = 512, 4, 10_000.0

    def __init__(self, queries: Array, plain_queries: Array, keys: Array, values: Array) -> None:
        self.q, self.plain, self.k, self.v = (x.astype(float) for x in (queries, plain_queries, keys, values))
        n, d = self.k.shape
        logits = self.q @ self.k.T / np.sqrt(d)
        logits[np.triu_indices(n, 1)] = -np.inf
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        self.attention = p / p.sum(axis=1, keepdims=True)

    def begin(self, view: View) -> None:
        pass

    def accumulated(self, view: View, out: Array) -> None:
        self._tell(view, self.attention.sum(axis=0), out)

    def query(self, view: View, back: int, out: Array) -> None:
        self._tell(view, self.attention[len(self.k) - 1 - back], out)

    def attend(self, view: View, out: Array) -> None:
        self.query(view, 0, out)

    def similarity(self, view: View, out: Array) -> None:
        unit = self.k / np.linalg.norm(self.k, axis=1, keepdims=True)
        cosines = unit @ unit.T
        self._tell(view, (cosines.sum(axis=1) - 1) / (len(unit) - 1), out)

    def key_norms(self, view: View, newest: bool, out: Array) -> None:  # noqa: ARG002
        self._tell(view, np.linalg.norm(self.k, axis=1), out)

    def value_norms(self, view: View, newest: bool, out: Array) -> None:  # noqa: ARG002
        self._tell(view, np.linalg.norm(self.v, axis=1), out)

    def expected(self, view: View, out: Array) -> None:
        """Answer with normal queries of the prompt's mean and covariance, turned to the mean of the next positions."""
        n, d = self.k.shape
        angle = np.arange(n, n + self.FUTURE)[:, None] * self.THETA ** (-2 * np.arange(d // 2) / d)
        cos, sin = np.diag(np.cos(angle).mean(axis=0)), np.diag(np.sin(angle).mean(axis=0))
        turn = np.block([[cos, -sin], [sin, cos]])
        queries, keys = self.plain[self.SINKS :], self.k[self.SINKS :]
        mean = turn @ queries.mean(axis=0)
        spread = turn @ np.cov(queries, rowvar=False, bias=True) @ turn.T
        logits = keys @ mean / np.sqrt(d) + ((keys @ spread) * keys).sum(axis=1) / (2 * d)
        p = np.exp(logits - logits.max())
        self._tell(view, np.concatenate([np.zeros(self.SINKS), p / p.sum()]), out)

    def _tell(self, view: View, known: Array, out: Array) -> None:
        (start,), (n,) = view.start, view.n
        assert n == len(known)
        out[start : start + n] = known


class HeadTensors:
    """Answers for each unit of one prompt, whose tokens are all alive, from its own attention of the last queries.

    Parameters
    ----------
    attention
        float[units, queries, n]: the last queries of the prompt, in order.
    """

    columns: ClassVar[tuple[str, ...]] = ()

    def __init__(self, attention: Array) -> None:
        self.attention = attention

    def begin(self, view: View) -> None:
        pass

    def query(self, view: View, back: int, out: Array) -> None:
        for start, n, unit in zip(view.start, view.n, view.unit, strict=True):
            out[start : start + n] = self.attention[unit, self.attention.shape[1] - 1 - back]
