"""What was measured on: the device, its driver, its clocks, and the libraries. Nothing is ever set here."""

from __future__ import annotations

import datetime
import platform
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_validate.memory import free_bytes
from sim.errors import InputError
from sim.serving.profile import Provenance

__all__ = ["Device", "find_device", "read_clocks", "steady"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

LIBRARIES = ("numpy", "scipy", "torch", "triton", "flashinfer-python", "vtoken-sim")


@dataclass(frozen=True)
class Device:
    """A device as it names itself.

    Attributes
    ----------
    name
        "NVIDIA H200", or the processor.
    spec
        As torch names it: "cuda:0", "cpu".
    memory_bytes
        Free memory; what a pool may take is a part of it.
    l2_bytes
        Last-level cache: what a timing must not read twice from. 0 where that is not known.
    hardware
        Preset of :mod:`sim.serving.hardware` that it is; None if it is none.
    versions
        Driver and libraries.
    """

    name: str
    spec: str
    memory_bytes: int
    l2_bytes: int
    hardware: str | None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.spec.startswith("cuda")

    def provenance(self, source: str) -> Provenance:
        """Return the provenance of figures measured here today.

        Parameters
        ----------
        source
            The command.
        """
        return Provenance(
            device=self.name, date=datetime.date.today(), source=source, versions=dict(sorted(self.versions.items()))
        )


def find_device(spec: str) -> Device:
    """Look at a device.

    Parameters
    ----------
    spec
        ``cpu``, ``cuda`` or ``cuda:N``.

    Raises
    ------
    InputError
        If there is no such device.
    """
    import torch

    kind = spec.partition(":")[0]
    versions = {"python": platform.python_version()} | _library_versions()
    if kind == "cpu":
        return Device(
            name=f"{_processor()}, one thread",
            spec="cpu",
            memory_bytes=free_bytes("cpu"),
            l2_bytes=0,
            hardware=None,
            versions=versions | {"linux": platform.release()},
        )
    if kind != "cuda":
        raise InputError(f"device {spec!r}: expected 'cpu', 'cuda' or 'cuda:N'")
    if not torch.cuda.is_available():
        raise InputError(f"device {spec!r}: torch {torch.__version__} sees no CUDA device here; use --device cpu")
    try:
        device = torch.device(spec)
    except RuntimeError:
        raise InputError(f"device {spec!r}: expected 'cpu', 'cuda' or 'cuda:N'") from None
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise InputError(f"device {spec!r}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    properties: Any = torch.cuda.get_device_properties(index)
    versions["cuda"] = str(torch.version.cuda)
    driver = _query(index, "driver_version")
    if driver is not None:
        versions["driver"] = driver[0]
    return Device(
        name=properties.name,
        spec=f"cuda:{index}",
        memory_bytes=free_bytes(device),
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)),
        hardware=_preset(properties.name),
        versions=versions,
    )


def steady(device: Device) -> None:
    """Make a CPU's times repeatable for the rest of this process; on another device this does nothing.

    One thread does all the work, so that its time is the work's. And freed memory is kept: glibc gives large buffers
    back at once, and to have the kernel clear their pages anew each time takes longer than attention over them (a step
    of 16 requests of 384 tokens took 12 ms in place of 5 ms).
    """
    if device.is_cuda:
        return
    import ctypes

    import torch

    torch.set_num_threads(1)
    keep = getattr(ctypes.CDLL(None), "mallopt", None)
    if keep is not None:  # glibc
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            keep(option, 1 << 30)


def read_clocks(device: Device) -> dict[str, float] | None:
    """Return SM and memory clock in MHz, temperature in degrees and power in watts; None where nobody tells."""
    if not device.is_cuda:
        return None
    names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    values = _query(int(device.spec.partition(":")[2]), *names)
    if values is None:
        return None
    clocks = {}
    for name, value in zip(("sm_mhz", "memory_mhz", "temperature_c", "power_w"), values, strict=True):
        try:
            clocks[name] = float(value)
        except ValueError:
            continue  # "[N/A]"
    return clocks


def _query(index: int, *names: str) -> list[str] | None:
    """Ask nvidia-smi about a device; None if it cannot be asked."""
    import torch

    # nvidia-smi counts all devices of the machine; torch only those that it is shown.
    identity = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    which = f"GPU-{identity}" if identity is not None else str(index)
    command = ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return values if len(values) == len(names) else None


def _preset(name: str) -> str | None:
    """Return the hardware preset that a device's own name means, if one does."""
    from sim.serving.hardware import HARDWARE

    words = name.lower().replace("-", " ").split()
    forms = {"pcie", "nvl"} & set(words)
    for preset in HARDWARE:
        kind, *form = preset.split("-")
        # An SXM part names its form at best with a number ("SXM4"), the other forms are named always.
        named = all(part == "sxm" or any(word.startswith(part) for word in words) for part in form)
        if kind in words and named and forms <= set(form):
            return preset
    return None


def _library_versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
