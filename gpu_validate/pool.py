"""The paged KV pool: keys and values of all layers in blocks of slots, as vLLM's flash layout has them.

Layer ``l`` is one contiguous tensor ``kv[l]`` of shape (2, blocks, block size, KV heads, head size): keys, then values,
each NHD within a block. FlashInfer takes ``(kv[l][0], kv[l][1])`` as it is. A slot is ``block * block_size + offset``;
block 0 is the null block that padding points to and no request ever owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_validate.dtypes import KVDtype, dequantise, get_dtype
from gpu_validate.memory import check_fits
from gpu_validate.store import build_store
from sim.errors import InputError
from sim.serving.models import Model

__all__ = ["LAYOUTS", "PagedPool", "Plane"]

LAYOUTS = ("NHD",)
"""Orders of (token, head, element) within a block that the pool and its kernels know."""


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One of the arrays in which every token has a row: the keys, values or scales of a layer."""

    rows: torch.Tensor
    """uint8 [slots, row_bytes], a view into the pool."""
    row_bytes: int
    layer: int
    what: str
    """ "k", "v", "k_scale" or "v_scale"."""


class PagedPool:
    """KV memory of one device.

    Parameters
    ----------
    model
        Geometry: layers, KV heads, head size.
    num_blocks
        Blocks, the null block included.
    block_size
        Token slots a block.
    dtype
        Name of an element type, see :mod:`gpu_validate.dtypes`.
    device
        Where the pool lives.
    layout
        Order within a block; "NHD" (token, head, element) is the only one.

    Raises
    ------
    InputError
        If a size is not positive, the dtype or layout is unknown, or the pool does not fit; nothing is allocated then.

    Notes
    -----
    The pool starts as zeros. ``kv``, ``scales`` and ``planes`` keep their addresses for as long as the pool lives, so
    captured graphs and pointer tables may hold them.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        dtype: str | KVDtype = "bf16",
        device: torch.device | str = "cpu",
        layout: str = "NHD",
    ) -> None:
        if layout not in LAYOUTS:
            raise InputError(f"unknown KV layout {layout!r}: expected {', '.join(LAYOUTS)}")
        self.model = model
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = get_dtype(dtype)
        self.device = torch.device(device)
        self.layout = layout
        self.check_fits(model, num_blocks=num_blocks, block_size=block_size, dtype=self.dtype, device=self.device)
        shape = (2, num_blocks, block_size, model.kv_heads, model.head_dim)
        self.kv = [torch.zeros(shape, dtype=self.dtype.storage, device=self.device) for _ in range(model.layers)]
        """By layer: (2, blocks, block size, KV heads, head size)."""
        self.scales: list[torch.Tensor] | None = None
        """By layer: float32 (2, blocks, block size, KV heads); None if the dtype has none."""
        if self.dtype.scaled:
            self.scales = [
                torch.zeros(shape[:-1], dtype=torch.float32, device=self.device) for _ in range(model.layers)
            ]
        self._store = build_store(self.device)
        self.planes = self._planes()
        """Everything that a token carries, keys and values first, then scales."""

    @staticmethod
    def bytes_needed(model: Model, *, num_blocks: int, block_size: int, dtype: str | KVDtype = "bf16") -> int:
        """Return the bytes of a pool: blocks times slots times the bytes of a token.

        Raises
        ------
        InputError
            If a size is not positive, the dtype is unknown, or the model keeps a latent in place of keys and values.
        """
        if model.latent is not None:
            raise InputError(f"{model.name} keeps a latent ({model.kind}): the pool on a device has keys and values")
        for what, size in (("num_blocks", num_blocks), ("block_size", block_size)):
            if size < 1:
                raise InputError(f"{what}: expected a positive number, got {size}")
        return num_blocks * block_size * get_dtype(dtype).token_bytes(model.layers, model.kv_heads, model.head_dim)

    @classmethod
    def check_fits(
        cls,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        dtype: str | KVDtype = "bf16",
        device: torch.device | str = "cpu",
    ) -> None:
        """Refuse a pool that the device has no room for, before anything is allocated.

        Raises
        ------
        InputError
            With the bytes needed, those free, and what to lower.
        """
        needed = cls.bytes_needed(model, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        what = f"KV pool of {num_blocks} blocks of {block_size} {get_dtype(dtype).name} tokens of {model.name}"
        check_fits({what: needed}, device, lower="the number of blocks, or take a smaller model or KV dtype")

    def _planes(self) -> list[Plane]:
        planes = [
            Plane(part.view(torch.uint8).view(self.num_slots, -1), part[0, 0].nbytes, layer, what)
            for layer, kv in enumerate(self.kv)
            for what, part in zip(("k", "v"), kv, strict=True)
        ]
        for layer, scales in enumerate(self.scales or []):
            for what, part in zip(("k_scale", "v_scale"), scales, strict=True):
                planes.append(Plane(part.view(torch.uint8).view(self.num_slots, -1), part[0, 0].nbytes, layer, what))
        return planes

    @property
    def num_slots(self) -> int:
        """Token slots, those of the null block included."""
        return self.num_blocks * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers, scales included."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_slots * self.token_bytes

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write tokens into their slots, quantised if the dtype asks for it.

        Parameters
        ----------
        layer
            Decoder layer.
        k, v
            [T, KV heads, head size], any floating type.
        slots
            int64 [T]; -1 is padding and writes nothing. No slot may be given twice.

        Notes
        -----
        No value is looked at on the host, so this can be captured in a CUDA graph, once it has run before.
        """
        if len(slots):
            self._store(self, layer, k, v, slots)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the slots, dequantised.

        Parameters
        ----------
        layer
            Decoder layer.
        slots
            int64, any shape [...].

        Returns
        -------
        tuple of Tensor
            [..., KV heads, head size] in the dtype's compute type.
        """
        flat = slots.reshape(-1)
        parts = []
        for part in range(2):
            rows = self.kv[layer][part].view(self.num_slots, self.model.kv_heads, self.model.head_dim)
            if self.scales is None:
                values = rows.index_select(0, flat)
            else:
                stored = rows.view(torch.uint8).index_select(0, flat).view(self.dtype.storage)
                scale = self.scales[layer][part].view(self.num_slots, -1).index_select(0, flat)
                values = dequantise(stored, scale).to(self.dtype.compute)
            parts.append(values.view(*slots.shape, self.model.kv_heads, self.model.head_dim))
        return parts[0], parts[1]

    def raw(self, slots: torch.Tensor) -> torch.Tensor:
        """Return all bytes that the tokens in ``slots`` int64 [T] carry, as uint8 [T, token_bytes]."""
        return torch.cat([plane.rows.index_select(0, slots) for plane in self.planes], 1)
