"""Hardware presets: memory, memory bandwidth and arithmetic rate of one device, each with its source.

Memory is what the driver offers to programs, which is less than the number in the product's name; it is what vLLM's
``gpu_memory_utilization`` is a share of. It differs by a few hundred MB between drivers and with the ECC setting.
Arithmetic rates are dense: where a datasheet prints the figure for 2:4 sparsity, half of it is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sim.serving.presets import find_preset

__all__ = ["HARDWARE", "Hardware", "get_hardware", "table"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator.

    Parameters
    ----------
    name
        Name of the preset.
    memory_bytes
        Device memory that the driver offers to programs.
    memory_source
        Where that was read.
    bandwidth_bytes_per_s
        Peak memory bandwidth.
    flops_per_s
        Peak dense bf16 rate, multiplications and additions counted apart.
    source
        Where bandwidth and rate are from.
    """

    name: str
    memory_bytes: int
    memory_source: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    source: str


def _device(
    name: str, memory_gib: float, memory_source: str, bandwidth_gb_per_s: float, tflops_per_s: float, source: str
) -> Hardware:
    return Hardware(
        name=name,
        memory_bytes=round(memory_gib * _GIB),
        memory_source=memory_source,
        bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
        flops_per_s=tflops_per_s * 1e12,
        source=source,
    )


_TORCH = "total device memory as torch reports it"

_ALL = (
    _device("a100-40g", 39.49, _TORCH, 1555, 312, "NVIDIA A100 datasheet (SXM4 40 GB): 1,555 GB/s, 312 TFLOPS"),
    _device("a100-80g", 79.15, _TORCH, 2039, 312, "NVIDIA A100 datasheet (SXM4 80 GB): 2,039 GB/s, 312 TFLOPS"),
    _device(
        "h100-sxm",
        79.22,
        "vLLM's log on an H100 80 GB (vllm pull request 12126)",
        3350,
        989.5,
        "NVIDIA H100 datasheet (SXM): 3.35 TB/s, 1,979 TFLOPS with sparsity",
    ),
    _device(
        "h100-pcie",
        79.22,
        "taken to be that of the SXM part, which has as much memory",
        2000,
        756.5,
        "NVIDIA H100 datasheet (PCIe): 2 TB/s, 1,513 TFLOPS with sparsity",
    ),
    _device(
        "h100-nvl",
        93.10,
        _TORCH,
        3900,
        835.5,
        "NVIDIA H100 product page (NVL): 3.9 TB/s, 1,671 TFLOPS with sparsity",
    ),
    _device(
        "h200-sxm",
        139.80,
        _TORCH,
        4800,
        989.5,
        "NVIDIA H200 datasheet (SXM): 4.8 TB/s, 1,979 TFLOPS with sparsity",
    ),
    _device("b200", 178.35, _TORCH, 8000, 2250, "NVIDIA HGX B200 datasheet: 8 TB/s, 4.5 PFLOPS with sparsity a device"),
    _device("l40s", 44.40, _TORCH, 864, 362.05, "NVIDIA L40S datasheet: 864 GB/s, 362.05 TFLOPS"),
    _device(
        "l4",
        23034 / 1024,
        "memory that nvidia-smi shows (23,034 MiB); torch reports a little less",
        300,
        121,
        "NVIDIA L4 datasheet: 300 GB/s, 242 TFLOPS with sparsity",
    ),
    _device("a10", 22.18, _TORCH, 600, 125, "NVIDIA A10 datasheet: 600 GB/s, 125 TFLOPS"),
    _device("mi300x", 191.98, _TORCH, 5300, 1307.4, "AMD Instinct MI300X datasheet: 5.3 TB/s, 1,307.4 TFLOPS"),
)

HARDWARE = MappingProxyType({device.name: device for device in _ALL})
"""All presets by name."""

_ALIASES = {
    "a100": "a100-80g",
    "a100-sxm": "a100-80g",
    "a100-80gb": "a100-80g",
    "a100-40gb": "a100-40g",
    "h100": "h100-sxm",
    "h100-80g": "h100-sxm",
    "h100_sxm": "h100-sxm",
    "h200": "h200-sxm",
    "h200_sxm": "h200-sxm",
    "b200-sxm": "b200",
    "b200_sxm": "b200",
}


def get_hardware(name: str) -> Hardware:
    """Return the preset called ``name`` (any case; ``h100``, ``a100`` and ``h200`` mean the usual SXM parts).

    Raises
    ------
    InputError
        If there is none.
    """
    return find_preset("hardware", name, HARDWARE, _ALIASES)


def table() -> list[dict[str, Any]]:
    """Return one row a preset, for printing: name, memory, bandwidth, dense bf16 rate, sources."""
    names: dict[str, list[str]] = {}
    for alias, name in _ALIASES.items():
        names.setdefault(name, []).append(alias)
    return [
        {
            "hardware": device.name,
            "also": ", ".join(names.get(device.name, ())),
            "memory_gib": round(device.memory_bytes / _GIB, 2),
            "bandwidth_gb_per_s": round(device.bandwidth_bytes_per_s / 1e9),
            "bf16_tflops_per_s": device.flops_per_s / 1e12,
            "source": device.source,
            "memory_source": device.memory_source,
        }
        for device in HARDWARE.values()
    ]
