"""Recorded attention: what a real model's queries looked at, replayed over whatever tokens a policy left alive."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.jit import njit
from sim.kv.view import View
from sim.serving.attention.base import attention_models
from sim.serving.attention.bits import mix, row_sum, xor

__all__ = ["Capture", "Recorded"]

_FLOOR = 1e-7
"""The smallest probability a capture can hold; code 0 stands for it and for less."""
_AGE_EXPONENT = 0.8
"""How attention to one and the same token falls with its distance, where a prompt query has to be estimated."""
_SINKS = 4
"""Tokens whose attention does not fall with distance."""


@dataclass(frozen=True)
class Capture:
    """One recorded sequence, pooled over layers and heads.

    File format: an ``npz`` without pickled objects, with

    - ``P``, ``G``: prompt tokens and generated tokens;
    - ``attn_u8`` uint8[G, P+G]: attention of decode step g (the query at position P+g), log-quantised:
      ``p = exp(ln 1e-7 * (1 - code / 255))``, code 0 for nothing;
    - ``prefill_score_global`` float[P]: column sums of the prompt's attention;
    - ``prompt_attn_u8`` uint8[R, P], optional: attention of the last R prompt queries in the same code, row ``back``
      for the query at position P-1-back. ``experiments/00_attention_fit/extend.py`` adds it to a capture.
    """

    name: str
    attention: NDArray[np.uint8]
    """[G, P+G]."""
    prompt_attention: NDArray[np.uint8]
    """[R, P]; R is 0 where the file has none."""
    score: NDArray[np.float32]
    """[P]."""

    @classmethod
    def load(cls, path: Path) -> Capture:
        """Read a file.

        Raises
        ------
        InputError
            If it is missing, is not an npz, is damaged, or an array is missing or has the wrong shape, type or values.
        """
        try:
            with path.open("rb") as file:
                archive = np.load(file, allow_pickle=False)
                if not isinstance(archive, np.lib.npyio.NpzFile):
                    raise InputError(f"{path}: expected an npz archive of attention, got a single array")
                wanted = {"P", "G", "attn_u8", "prefill_score_global"}
                missing = sorted(wanted - set(archive.files))
                if missing:
                    raise InputError(f"{path}: not a capture: array {missing[0]!r} is missing")
                arrays: dict[str, NDArray[Any]] = {
                    name: archive[name] for name in archive.files if name in wanted | {"prompt_attn_u8"}
                }
        except InputError:
            raise
        except FileNotFoundError:
            raise InputError(f"{path}: no such file; expected an npz of recorded attention") from None
        except ValueError as error:
            what = "it holds pickled objects" if "allow_pickle" in str(error) else str(error)
            raise InputError(f"{path}: not a readable npz of attention ({what})") from None
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{path}: not a readable npz of attention ({error})") from None
        return cls._checked(path, arrays)

    @classmethod
    def _checked(cls, path: Path, arrays: dict[str, NDArray[Any]]) -> Capture:
        sizes = {}
        for name in ("P", "G"):
            value = arrays[name]
            if value.shape != () or value.dtype.kind not in "iu" or int(value) < 1:
                raise InputError(f"{path}: {name} must be one whole number of at least 1")
            sizes[name] = int(value)
        prompt, generated = sizes["P"], sizes["G"]
        attention = arrays["attn_u8"]
        _expect(path, "attn_u8", attention, (generated, prompt + generated), "u", 1)
        score = arrays["prefill_score_global"]
        _expect(path, "prefill_score_global", score, (prompt,), "f")
        if not np.isfinite(score).all() or (score < 0).any() or score.sum() <= 0:
            raise InputError(f"{path}: prefill_score_global must be finite, not negative, and not all 0")
        rows = arrays.get("prompt_attn_u8", np.zeros((0, prompt), np.uint8))
        _expect(path, "prompt_attn_u8", rows, (len(rows) if rows.ndim else 0, prompt), "u", 1)
        return cls(path.stem, attention, rows, score.astype(np.float32))


def _expect(
    path: Path, name: str, array: NDArray[Any], shape: tuple[int, ...], kind: str, size: int | None = None
) -> None:
    if array.shape != shape:
        raise InputError(f"{path}: {name} must have shape {list(shape)} for its P and G, got {list(array.shape)}")
    if array.dtype.kind != kind or (size is not None and array.dtype.itemsize != size):
        raise InputError(f"{path}: {name} must be {'uint8' if kind == 'u' else 'floating point'}, got {array.dtype}")


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

    A capture knows the prompt's column sums but not its rows, unless it has ``prompt_attn_u8``. Without it,
    :meth:`query` estimates the row of the query ``back`` tokens before the end of the prompt from decode row ``back``
    (mirrored at the last row), which holds the same tokens' own weights; each token but the first four is made as much
    heavier as attention falls with distance (as distance**-0.8, which fits seven captures best). So no draw is made,
    and the same question always has the same answer. Against the true rows of the seven captures of
    ``../shared/attention``, the estimate costs 2 points of dead / partial / reclaimable blocks on average with TOVA
    and 4 with Scissorhands right after the prompt; H2O needs no estimate.

    Parameters
    ----------
    path
        An npz file (see :class:`Capture`), or a folder in which every ``*.npz`` is one.

    Raises
    ------
    InputError
        If a file cannot be used, or a folder holds none.
    """

    bare_parameter: ClassVar[str] = "path"
    columns: ClassVar[tuple[str, ...]] = ()

    path: str
    captures: tuple[Capture, ...] = field(init=False, repr=False, compare=False)
    _store: _Store = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read the captures."""
        path = Path(self.path)
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path}: no *.npz of recorded attention in this folder")
        captures = tuple(Capture.load(file) for file in files)
        object.__setattr__(self, "captures", captures)
        object.__setattr__(self, "_store", _Store.of(captures))

    def capture_of(self, key: int) -> Capture:
        """Return the capture that a request with this key replays."""
        return self.captures[_choice(np.uint64(key), len(self.captures))]

    def begin(self, view: View) -> None:
        """Do nothing: there is no state."""

    def accumulated(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the recorded column sums of the prompt, scaled to sum to the request's length."""
        store = self._store
        _accumulate(view.key, view.start, view.n, view.length, view.position, store.sizes, store.scores, out)

    def query(self, view: View, back: int, out: NDArray[np.float32]) -> None:
        """Write a prompt query's attention: recorded where the file has it, else estimated (see the class)."""
        longest = int(view.length.max(initial=1)) + int(self._store.sizes[:, :2].sum(axis=1).max())
        decay = (np.arange(1, longest + 2) ** -_AGE_EXPONENT).astype(np.float32)
        store = self._store
        _query(
            view.key, view.start, view.n, view.length, view.position, back, store.sizes, store.codes, decay, _CODES, out
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
            store.codes,
            _CODES,
            out,
        )


_CODES = np.exp(np.log(_FLOOR) * (1 - np.arange(256) / 255)).astype(np.float32)
_CODES[0] = 0


@dataclass(frozen=True)
class _Store:
    """All captures in three arrays, so that one kernel call serves a batch that replays many."""

    sizes: NDArray[np.int64]
    """[captures, 6]: P, G, R, then where in ``codes`` the decode and prompt rows begin, and where in ``scores``."""
    codes: NDArray[np.uint8]
    scores: NDArray[np.float32]

    @classmethod
    def of(cls, captures: tuple[Capture, ...]) -> _Store:
        sizes = np.zeros((len(captures), 6), np.int64)
        code = score = 0
        for i, capture in enumerate(captures):
            prompt, generated, rows = len(capture.score), len(capture.attention), len(capture.prompt_attention)
            sizes[i] = prompt, generated, rows, code, code + capture.attention.size, score
            code += capture.attention.size + capture.prompt_attention.size
            score += prompt
        codes = [array.ravel() for c in captures for array in (c.attention, c.prompt_attention)]
        return cls(sizes, np.concatenate(codes), np.concatenate([c.score for c in captures]))


@njit
def _choice(key: np.uint64, captures: int) -> int:
    """Return which capture a request replays."""
    mixed = mix(xor(np.uint32(key), mix(np.uint32(key >> np.uint64(32)))))
    return int(np.int64(mixed) % captures)


@njit
def _mirrored(step: int, low: int, high: int) -> int:
    """Return ``step`` up to ``high``; beyond, the values between ``low`` and ``high``, back and forth."""
    if step <= high or high == low:
        return min(step, high)
    phase = (step - high) % (2 * (high - low))
    return high - phase if phase <= high - low else low + phase - (high - low)


@njit
def _in_prompt(position: int, prompt: int, recorded: int) -> int:
    """Return which of the capture's prompt tokens stands for this one."""
    if position == 0 or recorded == 1:
        return 0
    return 1 + (position - 1) * (recorded - 1) // max(prompt - 1, 1)


@njit
def _normalise(row: NDArray[np.float32], total: np.float32) -> None:
    """Scale ``row`` to sum to ``total``; spread it evenly where all that the query looked at is gone."""
    found = row_sum(row)
    if found > 0:
        scale = total / found
        row *= scale
    else:
        row[:] = total / np.float32(len(row))


@njit
def _replay(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    length: NDArray[np.int64],
    prompt: NDArray[np.int64],
    position: NDArray[np.int32],
    sizes: NDArray[np.int64],
    codes: NDArray[np.uint8],
    values: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    for i in range(len(start)):
        size = sizes[_choice(key[i], len(sizes))]
        recorded, steps = size[0], size[1]
        step = max(length[i] - 1 - prompt[i], 0)
        row = _mirrored(step, steps // 2, steps - 1)
        seen = codes[size[3] + row * (recorded + steps) : size[3] + (row + 1) * (recorded + steps)]
        where = position[start[i] : start[i] + n[i]]
        answer = out[start[i] : start[i] + n[i]]
        for j in range(len(where)):
            at = where[j]
            if at < prompt[i]:
                source = _in_prompt(at, prompt[i], recorded)
            elif row == step:
                source = recorded + at - prompt[i]
            else:
                source = recorded + (at - prompt[i]) * row // step
            answer[j] = values[seen[source]]
        _normalise(answer, np.float32(1))


@njit
def _query(
    key: NDArray[np.uint64],
    start: NDArray[np.int64],
    n: NDArray[np.int64],
    length: NDArray[np.int64],
    position: NDArray[np.int32],
    back: int,
    sizes: NDArray[np.int64],
    codes: NDArray[np.uint8],
    decay: NDArray[np.float32],
    values: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    for i in range(len(start)):
        size = sizes[_choice(key[i], len(sizes))]
        recorded, steps = size[0], size[1]
        where = position[start[i] : start[i] + n[i]]
        answer = out[start[i] : start[i] + n[i]]
        query = length[i] - 1 - back
        visible = np.searchsorted(where, query, side="right")
        answer[visible:] = np.float32(0)
        if visible == 0:
            continue
        if back < size[2]:
            seen = codes[size[4] + back * recorded : size[4] + (back + 1) * recorded]
            for j in range(visible):
                answer[j] = values[seen[_in_prompt(where[j], length[i], recorded)]]
        else:
            row = _mirrored(back, 0, steps - 1)
            seen = codes[size[3] + row * (recorded + steps) : size[3] + (row + 1) * (recorded + steps)]
            for j in range(visible):
                source = _in_prompt(where[j], length[i], recorded)
                nearer = np.float32(1)
                if source >= _SINKS:
                    nearer = decay[query - where[j]] / decay[recorded + row - source]
                answer[j] = values[seen[source]] * nearer
        _normalise(answer[:visible], np.float32(1))


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
        size = sizes[_choice(key[i], len(sizes))]
        where = position[start[i] : start[i] + n[i]]
        answer = out[start[i] : start[i] + n[i]]
        for j in range(len(where)):
            answer[j] = scores[size[5] + _in_prompt(where[j], length[i], size[0])]
        _normalise(answer, np.float32(length[i]))
