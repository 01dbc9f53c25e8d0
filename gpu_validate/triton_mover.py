"""The mover whose copy is one Triton launch over all layers."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch

from gpu_validate.kernels.runtime import require_triton
from gpu_validate.memory import check_fits
from gpu_validate.mover import BaseMover
from gpu_validate.pool import PagedPool, Plane

__all__ = ["TritonMover", "launch_constants"]

_TILE_BYTES = 16 * 1024
"""Bytes that a program moves: with 128 threads eight 16-byte loads each, all in flight before the first store."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Planes with rows of one size: one launch."""

    planes: list[Plane]
    table: torch.Tensor
    """int64 [planes], addresses."""
    constants: dict[str, Any]


def launch_constants(row_bytes: int, alignment: int) -> dict[str, Any]:
    """Return what the kernel is compiled for.

    Parameters
    ----------
    row_bytes
        Bytes of a token in a plane.
    alignment
        Largest power of two, up to 16, that divides the address of every row.
    """
    import triton
    import triton.language as tl

    word = min(alignment, 8)
    row = row_bytes // word
    columns = triton.next_power_of_2(row)
    return {
        "ROW": row,
        "COLUMNS": columns,
        "TOKENS": max(1, _TILE_BYTES // (columns * word)),
        "WORD": {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[word],
        "ALIGNMENT": alignment,
        "num_warps": 4,
    }


def _alignment(planes: list[Plane]) -> int:
    return math.gcd(16, planes[0].row_bytes, *(plane.rows.data_ptr() for plane in planes))


class TritonMover(BaseMover):
    """Moves by one launch over the keys and values of all layers.

    The addresses of the planes are in a table on the device, so the launch does not grow with the number of layers.
    With ``fp8`` there is a second launch, for the scales: their rows are 4 bytes a head, a sixteenth or less of a row
    of values, and in a launch of the others' shape most threads would have nothing to do.

    Parameters
    ----------
    pool
        What it moves tokens in.
    staging_tokens
        Room for :meth:`move_in_place`, allocated when first needed.

    Raises
    ------
    InputError
        If Triton cannot run on the pool's device.
    """

    name = "triton"

    def __init__(self, pool: PagedPool, staging_tokens: int = 1024) -> None:
        super().__init__(pool, staging_tokens)
        require_triton(pool.device, "mover 'triton'")
        from gpu_validate.kernels.copy import copy_rows

        self._kernel = copy_rows
        by_size: dict[int, list[Plane]] = {}
        for plane in pool.planes:
            by_size.setdefault(plane.row_bytes, []).append(plane)
        self._bundles = [self._bundle(planes) for planes in by_size.values()]
        self._staging: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def _bundle(self, planes: list[Plane]) -> _Bundle:
        constants = launch_constants(planes[0].row_bytes, _alignment(planes))
        return _Bundle(planes, self._addresses([plane.rows for plane in planes]), constants)

    def _addresses(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([part.data_ptr() for part in rows], dtype=torch.int64, device=self.pool.device)

    def _launch(
        self, bundle: _Bundle, from_table: torch.Tensor, to_table: torch.Tensor, src: torch.Tensor, dst: torch.Tensor
    ) -> None:
        on_gpu = self.pool.device.type == "cuda"
        grid = (-(-len(src) // bundle.constants["TOKENS"]), len(bundle.planes))
        # Triton launches on the current device, whatever its arguments say.
        with torch.cuda.device(self.pool.device) if on_gpu else contextlib.nullcontext():
            self._kernel[grid](from_table, to_table, src, dst, len(src), **bundle.constants)

    def _copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for bundle in self._bundles:
            self._launch(bundle, bundle.table, bundle.table, src, dst)

    def _copy_staged(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        seat = torch.arange(len(src), dtype=torch.int64, device=self.pool.device)
        for bundle, (_, staging) in zip(self._bundles, self._get_staging(), strict=True):
            self._launch(bundle, bundle.table, staging, src, seat)
            self._launch(bundle, staging, bundle.table, seat, dst)

    def _get_staging(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each bundle the buffer uint8 [planes, tokens, row bytes], and the addresses in it."""
        if self._staging is None:
            size = self.staging_tokens * self.pool.token_bytes
            check_fits({f"staging for {self.staging_tokens} tokens": size}, self.pool.device, lower="staging_tokens")
            self._staging = []
            for bundle in self._bundles:
                shape = (len(bundle.planes), self.staging_tokens, bundle.planes[0].row_bytes)
                buffer = torch.empty(shape, dtype=torch.uint8, device=self.pool.device)
                self._staging.append((buffer, self._addresses(list(buffer))))
        return self._staging
