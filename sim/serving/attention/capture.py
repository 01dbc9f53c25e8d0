"""One recorded sequence of a real model, and the file that holds it."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError

__all__ = ["Capture", "decoded"]

_FLOOR = 1e-7
"""The smallest probability a capture can hold; code 0 stands for it and for less."""
_CAPTURE = ("P", "G", "attn_u8", "prefill_score_global")
_ROWS = ("prompt_attn_u8", "prompt_attn_fine", "attn_fine")
_LAYERS = ("prefill_score_layer", "last32_score_layer")
_STATISTICS = ("key_norm", "value_norm", "expected_attention", "keys_i8", "keys_step")
_OF = "attn_crc32"
_NONE = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Capture:
    """One recorded sequence, pooled over layers and heads.

    File format: an ``npz`` without pickled objects, with

    - ``P``, ``G``: prompt tokens and generated tokens;
    - ``attn_u8`` uint8[G, P+G]: attention of decode step g (the query at position P+g), log-quantised:
      ``p = exp(ln 1e-7 * (1 - code / 255))``, code 0 for nothing;
    - ``prefill_score_global`` float[P]: column sums of the prompt's attention.

    Optional, here or in a second file (``experiments/00_attention_fit/extend.py`` makes it):

    - ``prompt_attn_u8`` uint8[R, P]: attention of the last R prompt queries in the same code, row ``back`` for the
      query at position P-1-back;
    - ``attn_fine`` uint8[B, G, ceil((P+G)/8)]: B more bits of ``attn_u8``, most significant first, each packed as
      ``numpy.packbits`` does: the code is ``code - 1/2 + (bits + 1/2) / 2**B``;
    - ``prompt_attn_fine`` uint8[B, Q, ceil(P/8)], Q <= R: the same for the first Q rows of ``prompt_attn_u8``;
    - ``key_norm``, ``value_norm`` float[P+G]: norms of each token's key and value, mean over layers and KV heads;
    - ``expected_attention`` float[P]: attention that each prompt token can expect of the queries to come, by the
      statistics of the prompt's (arXiv 2510.00636), mean over layers and heads;
    - ``keys_i8`` int8[P+G, D], ``keys_step`` float[D]: vectors ``keys_i8 * keys_step`` whose products are the cosines
      of the tokens' keys, mean over layers and KV heads;
    - ``prefill_score_layer``, ``last32_score_layer`` float[L, P]: column sums of the attention of each of L layers, of
      all prompt queries and of the last 32, mean over heads;
    - ``attn_crc32``: ``zlib.crc32`` of ``attn_u8``; a second file must have it, so as not to be of another capture.
    """

    name: str
    attention: NDArray[np.float32]
    """[G, P+G]: attention of the decode steps."""
    prompt_attention: NDArray[np.float32]
    """[R, P]: attention of the last prompt queries, newest first; R is 0 where nothing is known of them."""
    score: NDArray[np.float32]
    """[P]: column sums of the prompt."""
    key_norm: NDArray[np.float32] = field(default_factory=lambda: _NONE)
    """[P+G], or [0] where the file has none; so are the next two."""
    value_norm: NDArray[np.float32] = field(default_factory=lambda: _NONE)
    """[P+G]"""
    expected: NDArray[np.float32] = field(default_factory=lambda: _NONE)
    """[P]"""
    keys: NDArray[np.float32] = field(default_factory=lambda: _NONE.reshape(0, 0))
    """[P+G, D]; D is 0 where the file has none."""

    layer_scores: NDArray[np.float32] = field(default_factory=lambda: _NONE.reshape(0, 0))
    """[L, P]: column sums of each layer; L is 0 where the file has none. So is the next."""
    layer_rows: NDArray[np.float32] = field(default_factory=lambda: _NONE.reshape(0, 0))
    """[L, P]: column sums of the last 32 queries."""

    @classmethod
    def load(cls, path: Path, rows: Path | None = None) -> Capture:
        """Read a capture, and the optional arrays from the file ``rows``.

        Raises
        ------
        InputError
            If a file is missing, is not an npz, is damaged, or an array is missing or has the wrong shape, type or
            values, or ``rows`` is of another capture.
        """
        arrays = _read(path, _CAPTURE, _ROWS + _STATISTICS + _LAYERS)
        _check(path, arrays)
        if rows is not None:
            more = _read(rows, (_OF,), _ROWS + _STATISTICS)
            if more[_OF].shape != () or int(more[_OF]) != zlib.crc32(arrays["attn_u8"].tobytes()):
                raise InputError(f"{rows}: holds the rows of another capture than {path} (attn_crc32 differs)")
            arrays |= more
        prompt, generated = int(arrays["P"]), int(arrays["G"])
        codes = arrays.get("prompt_attn_u8", np.zeros((0, prompt), np.uint8))
        _expect(rows or path, "prompt_attn_u8", codes, (len(codes) if codes.ndim else 0, prompt), "u", 1)
        fine = _planes(rows or path, arrays, "attn_fine", generated, prompt + generated)
        prompt_fine = _planes(rows or path, arrays, "prompt_attn_fine", len(codes), prompt)
        exact = prompt_fine.shape[1]
        prompt_attention = np.concatenate([decoded(codes[:exact], prompt_fine), decoded(codes[exact:])])
        return cls(
            path.stem,
            decoded(arrays["attn_u8"], fine),
            prompt_attention,
            arrays["prefill_score_global"].astype(np.float32),
            **_statistics(rows or path, arrays, prompt, prompt + generated),
            **_layers(path, arrays, prompt),
        )


def _read(path: Path, wanted: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InputError(f"{path}: expected an npz archive of attention, got a single array")
            missing = sorted(set(wanted) - set(archive.files))
            if missing:
                what = "rows of a capture" if _OF in wanted else "a capture"
                raise InputError(f"{path}: not {what}: array {missing[0]!r} is missing")
            return {name: archive[name] for name in archive.files if name in wanted + optional}
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected an npz of recorded attention") from None
    except ValueError as error:
        what = "it holds pickled objects" if "allow_pickle" in str(error) else str(error)
        raise InputError(f"{path}: not a readable npz of attention ({what})") from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: not a readable npz of attention ({error})") from None


def _check(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    for name in ("P", "G"):
        value = arrays[name]
        if value.shape != () or value.dtype.kind not in "iu" or int(value) < 1:
            raise InputError(f"{path}: {name} must be one whole number of at least 1")
    prompt, generated = int(arrays["P"]), int(arrays["G"])
    _expect(path, "attn_u8", arrays["attn_u8"], (generated, prompt + generated), "u", 1)
    score = arrays["prefill_score_global"]
    _expect(path, "prefill_score_global", score, (prompt,), "f")
    if not np.isfinite(score).all() or (score < 0).any() or score.sum() <= 0:
        raise InputError(f"{path}: prefill_score_global must be finite, not negative, and not all 0")


def _statistics(path: Path, arrays: dict[str, NDArray[Any]], prompt: int, total: int) -> dict[str, NDArray[np.float32]]:
    """Return what the file knows of keys, values and queries."""
    found = {}
    for name, where, size in (
        ("key_norm", "key_norm", total),
        ("value_norm", "value_norm", total),
        ("expected_attention", "expected", prompt),
    ):
        if name in arrays:
            _expect(path, name, arrays[name], (size,), "f")
            if not (np.isfinite(arrays[name]).all() and (arrays[name] >= 0).all()):
                raise InputError(f"{path}: {name} must be finite and not negative")
            found[where] = arrays[name].astype(np.float32)
    if "keys_i8" in arrays:
        codes, step = arrays["keys_i8"], arrays.get("keys_step", _NONE)
        _expect(path, "keys_i8", codes, (total, codes.shape[-1] if codes.ndim else 0), "i", 1)
        _expect(path, "keys_step", step, (codes.shape[1],), "f")
        found["keys"] = codes.astype(np.float32) * step.astype(np.float32)
    return found


def _layers(path: Path, arrays: dict[str, NDArray[Any]], prompt: int) -> dict[str, NDArray[np.float32]]:
    """Return what the file knows of single layers: both arrays or none."""
    if not all(name in arrays for name in _LAYERS):
        return {}
    layers = len(arrays[_LAYERS[0]]) if arrays[_LAYERS[0]].ndim else 0
    for name in _LAYERS:
        _expect(path, name, arrays[name], (layers, prompt), "f")
        if not (np.isfinite(arrays[name]).all() and (arrays[name] >= 0).all()):
            raise InputError(f"{path}: {name} must be finite and not negative")
    scores, rows = (arrays[name].astype(np.float32) for name in _LAYERS)
    return {"layer_scores": scores, "layer_rows": rows}


def _expect(
    path: Path, name: str, array: NDArray[Any], shape: tuple[int, ...], kind: str, size: int | None = None
) -> None:
    if array.shape != shape:
        raise InputError(f"{path}: {name} must have shape {list(shape)} for its P and G, got {list(array.shape)}")
    if array.dtype.kind != kind or (size is not None and array.dtype.itemsize != size):
        wanted = {"u": "uint8", "i": "int8", "f": "floating point"}[kind]
        raise InputError(f"{path}: {name} must be {wanted}, got {array.dtype}")


def _planes(path: Path, arrays: dict[str, NDArray[Any]], name: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Return uint8[B, rows or fewer, columns] of single bits; B is 0 where the file has none."""
    packed = arrays.get(name)
    if packed is None:
        return np.zeros((0, rows, columns), np.uint8)
    bits, some = packed.shape[:2] if packed.ndim == 3 else (0, 0)
    _expect(path, name, packed, (bits, min(some, rows), -(-columns // 8)), "u", 1)
    if name == "attn_fine" and some != rows:
        raise InputError(f"{path}: {name} must have one row for each of the G = {rows} decode steps, got {some}")
    return np.unpackbits(packed, axis=-1)[:, :, :columns]


def decoded(codes: NDArray[np.uint8], planes: NDArray[np.uint8] | None = None) -> NDArray[np.float32]:
    """Return the probabilities that codes stand for; ``planes`` uint8[B, ..] are B more bits, one each."""
    bits = 0 if planes is None else len(planes)
    parts = 1 << bits
    index = codes.astype(np.int64) * parts
    for plane in range(bits):
        index += planes[plane].astype(np.int64) << (bits - 1 - plane)  # type: ignore[index]
    code = (np.arange(256 * parts) + 0.5) / parts - 0.5
    values = np.exp(np.log(_FLOOR) * (1 - code / 255)).astype(np.float32)
    values[:parts] = 0
    found: NDArray[np.float32] = values[index]
    return found
