"""Where the kernels can run."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from sim.errors import InputError

__all__ = ["is_interpreted", "require_triton"]


def is_interpreted(kernel: Any) -> bool:
    """Say whether Triton runs ``kernel`` in its interpreter: settled when the kernel's module was imported."""
    import triton

    return not isinstance(kernel, triton.JITFunction)


def require_triton(device: torch.device, what: str) -> None:
    """Refuse a device on which Triton cannot run.

    Parameters
    ----------
    device
        Where the kernels are to run.
    what
        Who asks, for the message.

    Raises
    ------
    InputError
        If Triton is not installed, or the device is a CPU and the interpreter is off, or a GPU and it is on.
    """
    if importlib.util.find_spec("triton") is None:
        raise InputError(f"{what} needs triton, which is not installed: install vtoken-sim[gpu], or choose another")
    from gpu_validate.kernels.copy import copy_rows

    interpreted = is_interpreted(copy_rows)
    if device.type == "cuda" and interpreted:
        raise InputError(f"{what} on a GPU: unset TRITON_INTERPRET, which is for CPUs")
    if device.type != "cuda" and not interpreted:
        raise InputError(f"{what} on {device} needs Triton's interpreter: set TRITON_INTERPRET=1, or choose another")
