"""Copies of tokens within the pool: all layers at once, from slot to slot.

A move carries everything that a token has in the pool: keys, values and, where the dtype has them, scales (a scale that
stayed behind would rescale whoever is written there next). What may be moved is decided on the host before the first
byte is written; a refused plan changes nothing.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_validate.moves import check_moves, overlaps, safe_in_order
from gpu_validate.pool import PagedPool
from sim.errors import InputError, did_you_mean

__all__ = ["MOVERS", "BaseMover", "Mover", "Slots", "TorchMover", "build_mover", "choose_mover"]

MOVERS = ("triton", "torch")
"""Movers by name."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

Slots: TypeAlias = "NDArray[np.int64] | torch.Tensor"
"""int64 [T]: on the host, where they are checked and brought to the device, or on the device already."""


@runtime_checkable
class Mover(Protocol):
    """Copies tokens from slot to slot over all layers, on the current stream."""

    name: str

    def move(self, src: Slots, dst: Slots, *, check: bool = True) -> None:
        """Copy tokens; no destination is a source of another move.

        Parameters
        ----------
        src, dst
            int64 [T], slots.
        check
            Refuse unlawful moves. Slots on a GPU are brought to the host for it; without the check a plan known to be
            lawful is launched with no wait.

        Raises
        ------
        InputError
            If a slot is out of range or in the null block, or a destination is given twice or is a source as well;
            nothing has changed then.
        """
        ...

    def move_in_place(self, src: Slots, dst: Slots) -> None:
        """Copy tokens whose destinations may be sources too, as if all were read before any is written.

        Raises
        ------
        InputError
            As :meth:`move`, and if neither their order nor the staging buffer makes the copy safe; nothing has changed
            then.
        """
        ...


def _on_host(slots: Slots) -> NDArray[np.int64]:
    if isinstance(slots, np.ndarray):
        return slots
    host: NDArray[np.int64] = slots.cpu().numpy()
    return host


class BaseMover:
    """What all movers share: the checks, and the order of a copy in place."""

    def __init__(self, pool: PagedPool, staging_tokens: int = 1024) -> None:
        if staging_tokens < 1:
            raise InputError(f"staging_tokens: expected a positive number, got {staging_tokens}")
        self.pool = pool
        self.staging_tokens = staging_tokens

    def move(self, src: Slots, dst: Slots, *, check: bool = True) -> None:
        """See :meth:`Mover.move`."""
        if check:
            from_slot, to_slot = _on_host(src), _on_host(dst)
            check_moves(from_slot, to_slot, self.pool.num_blocks, self.pool.block_size)
            if overlaps(from_slot, to_slot):
                raise InputError("moves: a destination is the source of another move; move_in_place allows that")
        if len(src):
            self._copy(self._on_device(src), self._on_device(dst))

    def move_in_place(self, src: Slots, dst: Slots) -> None:
        """See :meth:`Mover.move_in_place`.

        Without overlap it is one plain copy. Otherwise chunks of at most ``staging_tokens`` go through a staging
        buffer, each read as a whole before it is written, if no chunk reads what an earlier one wrote.
        """
        from_slot, to_slot = _on_host(src), _on_host(dst)
        check_moves(from_slot, to_slot, self.pool.num_blocks, self.pool.block_size)
        going = from_slot != to_slot
        from_slot, to_slot = from_slot[going], to_slot[going]
        if not overlaps(from_slot, to_slot):
            self.move(from_slot, to_slot, check=False)
            return
        chunk = self.staging_tokens
        if not safe_in_order(from_slot, to_slot, chunk):
            raise InputError(
                f"{len(from_slot)} moves in place: one reads what another wrote in an earlier chunk of {chunk}; "
                f"order them so that no token moves up, or give the mover staging for {len(from_slot)} tokens"
            )
        for start in range(0, len(from_slot), chunk):
            part = slice(start, start + chunk)
            self._copy_staged(self._on_device(from_slot[part]), self._on_device(to_slot[part]))

    def _on_device(self, slots: Slots) -> torch.Tensor:
        if not isinstance(slots, np.ndarray):
            return slots.to(self.pool.device)
        source = torch.from_numpy(np.ascontiguousarray(slots))
        if self.pool.device.type != "cuda":
            return source
        # Page-locked memory of torch's allocator, which is handed out again only when the copy is done.
        return source.pin_memory().to(self.pool.device, non_blocking=True)

    def _copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        raise NotImplementedError

    def _copy_staged(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        raise NotImplementedError


class TorchMover(BaseMover):
    """Moves by torch's index operations, two a plane: the twin that the kernel is compared with.

    Parameters
    ----------
    pool
        What it moves tokens in.
    staging_tokens
        Most tokens that are held aside at once by :meth:`move_in_place`.
    """

    name = "torch"

    def _copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for plane in self.pool.planes:
            # The widest integers that a row is made of: index operations go by elements.
            rows = plane.rows.view(_WORDS[math.gcd(8, plane.row_bytes)])
            rows.index_copy_(0, dst, rows.index_select(0, src))

    def _copy_staged(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._copy(src, dst)  # index_select holds all sources before the first destination is written


def choose_mover(name: str, device: torch.device | str) -> str:
    """Return the mover that ``name`` means on ``device``: "auto" is Triton on a GPU and torch on a CPU.

    Raises
    ------
    InputError
        If there is no such mover, or Triton is asked for and not installed.
    """
    if name == "auto":
        on_gpu = torch.device(device).type == "cuda"
        return "triton" if on_gpu and importlib.util.find_spec("triton") else "torch"
    if name not in MOVERS:
        known = ["auto", *MOVERS]
        raise InputError(f"unknown mover {name!r}: expected one of {', '.join(known)}{did_you_mean(name, known)}")
    return name


def build_mover(name: str, pool: PagedPool, *, staging_tokens: int = 1024) -> Mover:
    """Make the mover called ``name``, or the one that "auto" means on the pool's device.

    Raises
    ------
    InputError
        If there is none, or it cannot work there.
    """
    if choose_mover(name, pool.device) == "torch":
        return TorchMover(pool, staging_tokens)
    from gpu_validate.triton_mover import TritonMover

    return TritonMover(pool, staging_tokens)
