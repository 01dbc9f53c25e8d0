"""Whether something fits into a device's memory, asked before any of it is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from sim.errors import InputError

__all__ = ["check_fits", "free_bytes"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def _cgroup_bytes() -> float:
    """Return what the container may still take, or infinity."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        return float("inf") if limit == "max" else int(limit) - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")


def free_bytes(device: torch.device | str) -> int:
    """Return the bytes that can be allocated on ``device`` now.

    On a CPU it is the kernel's estimate of available memory, or the container's limit if that is less; what torch holds
    in its cache on a GPU counts as free.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + int(cached)
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(min(int(line.split()[1]) * 1024, max(_cgroup_bytes(), 0)))
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def check_fits(parts: Mapping[str, int], device: torch.device | str, *, lower: str) -> None:
    """Refuse what does not fit, with the figures.

    Parameters
    ----------
    parts
        Bytes by what they are for.
    device
        Where they are to be.
    lower
        What the user can make smaller ("the number of blocks").

    Raises
    ------
    InputError
        If the sum is more than the device has free.
    """
    needed, free = sum(parts.values()), free_bytes(device)
    if needed > free:
        listed = ", ".join(f"{what} {_gib(size)}" for what, size in parts.items())
        raise InputError(
            f"{torch.device(device)} has {_gib(free)} free, needed are {_gib(needed)} ({listed}): lower {lower}"
        )
