"""Recorded attention: what a real model's queries looked at, replayed over whatever tokens a policy left alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.jit import njit
from sim.kv.policies.base import EvictionPolicy
from sim.kv.units import Units
from sim.kv.view import View
from sim.serving.attention.base import attention_models
from sim.serving.attention.capture import Capture
from sim.serving.attention.layers import LayerScores
from sim.serving.attention.mapping import capture_of, in_capture, in_prompt, mirrored, scale_to

__all__ = ["Recorded"]

_AGE_EXPONENT = 0.8
"""How attention to one and the same token falls with its distance, where a prompt query has to be estimated."""
_SINKS = 4
"""Tokens whose attention does not fall with distance."""
_WINDOW = 400
"""Prompt queries whose estimate is put right by the prompt's column sums."""
_RIGHT = (0.3, 3.0)
"""The least and the largest ratio of column sums that is believed."""


@attention_models.register("recorded")
@dataclass(frozen=True)
class Recorded:
    """Replays a capture, or a folder of captures dealt out to the requests by their key.

    A request with the prompt length of its capture and at most as many generated tokens sees exactly what was recorded,
    renormalised over its live tokens. Any other length is mapped linearly:

    - prompt position 0 is the capture's position 0; position i of a prompt of n tokens is the capture's
      1 + (i-1)(P-1) // (n-1);
    - decode step g replays row g; after the last row, rows G-1, G-2, .. G//2 and back again, for ever;
    - generated token j of g (the newest) is, with r for the row, the capture's generated token j where g = r, and
      j r // g otherwise.

    A capture knows the prompt's column sums but not its rows, unless it, or its file in ``rows``, has
    ``prompt_attn_u8``. Without, :meth:`query` estimates the row of the query ``back`` tokens before the end of the
    prompt from decode row ``back`` (mirrored at the last row), which holds the same tokens' own weights. Each token but
    the first four is made as much heavier as attention falls with distance (as distance**-0.8, which fits seven
    captures best), and in all rows but the last by the square root of what its column sum has over the estimate's. So
    no draw is made, and the same question always has the same answer. docs/attention.md says what the estimate costs
    with TOVA and Scissorhands; H2O needs none.

    Of single layers a capture knows the column sums (``prefill_score_layer``) and what the prompt's last queries
    attend to together (``last32_score_layer``): enough for policies that evict at the end of the prompt alone, if the
    model has as many layers. Each of a layer's queries is then their mean: exact where 32 of them are added up.

    Parameters
    ----------
    path
        An npz file (see :class:`Capture`), or a folder in which every ``*.npz`` is one.
    rows
        The file with the rows that the capture lacks, or a folder with a file of the same name for each capture.

    Raises
    ------
    InputError
        If a file cannot be used, a folder holds none, or a capture has no file in ``rows``.
    """

    bare_parameter: ClassVar[str] = "path"
    without_signals: ClassVar[str] = (
        "add them to the captures with experiments/00_attention_fit/extend.py, or use 'synthetic'"
    )
    columns: ClassVar[tuple[str, ...]] = ()

    path: str
    rows: str = ""
    captures: tuple[Capture, ...] = field(init=False, repr=False, compare=False)
    _store: _Store = field(init=False, repr=False, compare=False)
    _layers: LayerScores | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read the captures."""
        path = Path(self.path)
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path}: no *.npz of recorded attention in this folder")
        rows = Path(self.rows)
        captures = tuple(
            Capture.load(file, (rows / file.name if rows.is_dir() else rows) if self.rows else None) for file in files
        )
        object.__setattr__(self, "captures", captures)
        object.__setattr__(self, "_store", _Store.of(captures))
        object.__setattr__(self, "_layers", LayerScores.of(captures))

    @property
    def signals(self) -> tuple[str, ...]:
        """What all captures know beside attention: the names of methods that can answer."""
        store = self._store
        return tuple(name for name in ("similarity", "key_norms", "value_norms", "expected") if name in store.signals)

    def capture_of(self, key: int) -> Capture:
        """Return the capture that a request with this key replays."""
        return self.captures[capture_of(np.uint64(key), len(self.captures))]

    def check_units(self, policy: EvictionPolicy, units: Units) -> None:
        """Refuse what a capture does not know of single layers and heads.

        Raises
        ------
        InputError
            That says what is missing.
        """
        known = len(self._layers) if self._layers is not None else 0
        if units.heads > 1:
            what = "single heads"
        elif known != units.layers:
            what = f"{units.layers} layers: it has {known or 'no scores of single layers'}"
        elif policy.needs or not policy.prompt_only:
            what = f"what policy {policy.name!r} asks of single layers: it has their scores at the end of the prompt"
        else:
            return
        raise InputError(f"attention 'recorded' ({self.path}) does not know {what}; use 'synthetic'")

    def begin(self, view: View) -> None:
        """Do nothing: there is no state."""

    def accumulated(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the recorded column sums of the prompt, scaled to sum to the request's length."""
        store = self._store
        if self._layers is not None and view.units.layers > 1:
            self._layers.accumulated(view, store.sizes, out)
            return
        _accumulate(view.key, view.start, view.n, view.length, view.position, store.sizes, store.scores, out)

    def expected(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the recorded expectation of the prompt's tokens."""
        store, scores = self._store, self._store.signals["expected"]
        _accumulate(view.key, view.start, view.n, view.length, view.position, store.sizes, scores, out)
        _to_one(view.start, view.n, out)

    def key_norms(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:
        """Write the recorded norms of the keys."""
        self._norms(view, "key_norms", newest, out)

    def value_norms(self, view: View, newest: bool, out: NDArray[np.float32]) -> None:
        """Write the recorded norms of the values."""
        self._norms(view, "value_norms", newest, out)

    def _norms(self, view: View, signal: str, newest: bool, out: NDArray[np.float32]) -> None:
        store = self._store
        start, n = (view.newest, np.ones_like(view.n)) if newest else (view.start, view.n)
        _of_tokens(view.key, start, n, view.prompt, view.position, store.sizes, store.signals[signal], out)

    def similarity(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the mean cosine of each live token's recorded key with the request's other live keys."""
        store, keys = self._store, self._store.signals["similarity"]
        _similarity(view.key, view.start, view.n, view.prompt, view.position, store.sizes, keys, out)

    def query(self, view: View, back: int, out: NDArray[np.float32]) -> None:
        """Write a prompt query's attention: recorded where the file has it, else estimated (see the class)."""
        if self._layers is not None and view.units.layers > 1:
            self._layers.query(view, back, self._store.sizes, out)
            return
        longest = int(view.length.max(initial=1)) + int(self._store.sizes[:, :2].sum(axis=1).max())
        decay = _decay(longest)
        store = self._store
        _query(
            view.key,
            view.start,
            view.n,
            view.length,
            view.position,
            back,
            store.sizes,
            store.attention,
            decay,
            store.right,
            out,
        )

    def attend(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the recorded row of this decode step, renormalised over the live tokens."""
        store = self._store
        _replay(
            view.key,
            view.start,
            view.n,
            view.length,
            view.prompt,
            view.position,
            store.sizes,
            store.attention,
            out,
        )


@dataclass(frozen=True)
class _Store:
    """All captures in three arrays, so that one kernel call serves a batch that replays many."""

    sizes: NDArray[np.int64]
    """[captures, 7]: P, G, R, then where in ``attention`` the decode and prompt rows begin, where in arrays of prompts,
    and where in arrays of all tokens."""
    attention: NDArray[np.float32]
    scores: NDArray[np.float32]
    right: NDArray[np.float32]
    """What puts an estimated prompt row right, for each token of each prompt."""
    signals: dict[str, NDArray[np.float32]]
    """Of prompts (expected), of all tokens (norms), of all tokens by 16 or so (keys of ``similarity``)."""

    @classmethod
    def of(cls, captures: tuple[Capture, ...]) -> _Store:
        sizes = np.zeros((len(captures), 7), np.int64)
        cell = score = token = 0
        for i, capture in enumerate(captures):
            prompt, generated, rows = len(capture.score), len(capture.attention), len(capture.prompt_attention)
            sizes[i] = prompt, generated, rows, cell, cell + capture.attention.size, score, token
            cell += capture.attention.size + capture.prompt_attention.size
            score += prompt
            token += prompt + generated
        attention = [array.ravel() for c in captures for array in (c.attention, c.prompt_attention)]
        return cls(
            sizes,
            np.concatenate(attention),
            np.concatenate([c.score for c in captures]),
            np.concatenate([_put_right(c) for c in captures]),
            _signals(captures),
        )


def _signals(captures: tuple[Capture, ...]) -> dict[str, NDArray[np.float32]]:
    """Return what every capture knows beside attention, by the name of the method that tells it."""
    fields = {"key_norms": "key_norm", "value_norms": "value_norm", "expected": "expected", "similarity": "keys"}
    found = {}
    for signal, field_name in fields.items():
        parts = [getattr(capture, field_name) for capture in captures]
        if all(len(part) for part in parts):
            width = max(part.shape[1] for part in parts) if parts[0].ndim == 2 else 0
            wide = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) if width else part for part in parts]
            found[signal] = np.concatenate(wide)
    return found


def _put_right(capture: Capture) -> NDArray[np.float32]:
    """Return float32[P]: the square root of a token's column sum over what the estimated prompt rows add up to."""
    prompt, generated = len(capture.score), len(capture.attention)
    window = min(_WINDOW, prompt)
    estimated = np.zeros(prompt)
    sizes = np.array([[prompt, generated, 0, 0, 0, 0, 0]], np.int64)
    row, one = np.zeros(prompt, np.float32), np.ones(1, np.int64)
    for back in range(window):
        _query(
            np.zeros(1, np.uint64),
            0 * one,
            prompt * one,
            prompt * one,
            np.arange(prompt, dtype=np.int32),
            back,
            sizes,
            capture.attention.ravel(),
            _decay(2 * prompt + generated),
            np.ones(prompt, np.float32),
            row,
        )
        estimated += row
    # A column sum is of all queries that came after the token: take the share of the last ones by the law of decay.
    seen = prompt - np.arange(prompt)
    law = np.concatenate([[0.0], np.cumsum(np.arange(1, prompt + 1) ** -_AGE_EXPONENT)])
    share = (law[seen] - law[np.maximum(seen - window, 0)]) / law[seen]
    share[:_SINKS] = window / np.maximum(seen[:_SINKS], window)
    ratio = capture.score * share / np.maximum(estimated, 1e-12)
    right: NDArray[np.float32] = np.sqrt(np.clip(ratio, *_RIGHT)).astype(np.float32)
    return right


def _decay(longest: int) -> NDArray[np.float32]:
    """Return the attention to a token by its distance, up to ``longest``."""
    decay: NDArray[np.float32] = (np.arange(1, longest + 2) ** -_AGE_EXPONENT).astype(np.float32)
    return decay


@njit
def _of_tokens(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    prompt: NDArray[np.int64],
    position: NDArray[np.int32],
    sizes: NDArray[np.int64],
    known: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    for i in range(len(start)):
        size = sizes[capture_of(key[i], len(sizes))]
        for cell in range(start[i], start[i] + n[i]):
            out[cell] = known[size[6] + in_capture(position[cell], prompt[i], size[0], size[1])]


@njit
def _similarity(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    prompt: NDArray[np.int64],
    position: NDArray[np.int32],
    sizes: NDArray[np.int64],
    keys: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    width = keys.shape[1]
    for i in range(len(start)):
        size = sizes[capture_of(key[i], len(sizes))]
        total = np.zeros(width, np.float32)
        for cell in range(start[i], start[i] + n[i]):
            mine = keys[size[6] + in_capture(position[cell], prompt[i], size[0], size[1])]
            for d in range(width):
                total[d] += mine[d]
        others = np.float32(max(n[i] - 1, 1))
        for cell in range(start[i], start[i] + n[i]):
            mine = keys[size[6] + in_capture(position[cell], prompt[i], size[0], size[1])]
            cosine = np.float32(0)
            for d in range(width):
                cosine += mine[d] * (total[d] - mine[d])
            out[cell] = cosine / others


@njit
def _to_one(start: NDArray[np.int64], n: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    for i in range(len(start)):
        scale_to(out[start[i] : start[i] + n[i]], np.float32(1))


@njit
def _replay(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    length: NDArray[np.int64],
    prompt: NDArray[np.int64],
    position: NDArray[np.int32],
    sizes: NDArray[np.int64],
    attention: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    for i in range(len(start)):
        size = sizes[capture_of(key[i], len(sizes))]
        recorded, steps = size[0], size[1]
        step = max(length[i] - 1 - prompt[i], 0)
        row = mirrored(step, steps // 2, steps - 1)
        seen = attention[size[3] + row * (recorded + steps) : size[3] + (row + 1) * (recorded + steps)]
        where = position[start[i] : start[i] + n[i]]
        answer = out[start[i] : start[i] + n[i]]
        for j in range(len(where)):
            at = where[j]
            if at < prompt[i]:
                source = in_prompt(at, prompt[i], recorded)
            elif row == step:
                source = recorded + at - prompt[i]
            else:
                source = recorded + (at - prompt[i]) * row // step
            answer[j] = seen[source]
        scale_to(answer, np.float32(1))


@njit
def _query(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    length: NDArray[np.int64],
    position: NDArray[np.int32],
    back: int,
    sizes: NDArray[np.int64],
    attention: NDArray[np.float32],
    decay: NDArray[np.float32],
    right: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    for i in range(len(start)):
        size = sizes[capture_of(key[i], len(sizes))]
        recorded, steps = size[0], size[1]
        where = position[start[i] : start[i] + n[i]]
        answer = out[start[i] : start[i] + n[i]]
        query = length[i] - 1 - back
        visible = np.searchsorted(where, query, side="right")
        answer[visible:] = np.float32(0)
        if visible == 0:
            continue
        if back < size[2]:
            seen = attention[size[4] + back * recorded : size[4] + (back + 1) * recorded]
            for j in range(visible):
                answer[j] = seen[in_prompt(where[j], length[i], recorded)]
        else:
            row = mirrored(back, 0, steps - 1)
            seen = attention[size[3] + row * (recorded + steps) : size[3] + (row + 1) * (recorded + steps)]
            for j in range(visible):
                source = in_prompt(where[j], length[i], recorded)
                nearer = np.float32(1)
                if source >= _SINKS:
                    nearer = decay[query - where[j]] / decay[recorded + row - source]
                if back > 0:
                    nearer *= right[size[5] + source]
                answer[j] = seen[source] * nearer
        scale_to(answer[:visible], np.float32(1))


@njit
def _accumulate(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    length: NDArray[np.int64],
    position: NDArray[np.int32],
    sizes: NDArray[np.int64],
    scores: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    for i in range(len(start)):
        size = sizes[capture_of(key[i], len(sizes))]
        where = position[start[i] : start[i] + n[i]]
        answer = out[start[i] : start[i] + n[i]]
        for j in range(len(where)):
            answer[j] = scores[size[5] + in_prompt(where[j], length[i], size[0])]
        scale_to(answer, np.float32(length[i]))
