"""Reads NVIDIA AIConfigurator's tables of measured kernels, from a folder or from the package installed.

The tables are Parquet files, one a kernel: decode attention (``generation_attention``), prefill attention
(``context_attention``) and matrix products (``gemm``); ``latency`` is in ms for one call, in one layer. They were made
by replaying a CUDA graph of the kernel over the same buffers, without clearing the cache. A folder holds them as the
package does (``h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet``) or flat (``h100_sxm_vllm_0.24.0_gemm_perf.parquet``).
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError, did_you_mean

__all__ = ["DEVICES", "Table", "Tables", "read_tables"]

DEVICES = {"h100_sxm": ("h100-sxm", "NVIDIA H100 80GB HBM3"), "h200_sxm": ("h200-sxm", "NVIDIA H200")}
"""Devices that can be read: hardware preset, and the name in the tables."""

BACKEND = "vllm"
PUBLISHED = {"0.24.0": datetime.date(2026, 9, 1)}
"""When tables were published, by the version of vLLM: 0.24.0 with the package aiconfigurator-core 0.12.0."""

_ATTENTION = (
    "batch_size",
    "isl",
    "step",
    "num_heads",
    "num_key_value_heads",
    "head_dim",
    "window_size",
    "kv_cache_dtype",
    "latency",
)
COLUMNS = {
    "generation_attention": _ATTENTION,
    "context_attention": _ATTENTION,
    "gemm": ("m", "n", "k", "gemm_dtype", "latency"),
}
_FOLDERS = {"generation_attention": "attention", "context_attention": "attention", "gemm": "gemm"}
_TEXTS = ("kv_cache_dtype", "gemm_dtype")

Table = dict[str, NDArray[Any]]
"""Columns by name; ``latency`` is in ns here."""


@dataclass(frozen=True)
class Tables:
    """The measured kernels of one device.

    Attributes
    ----------
    device
        Its name in the database ("h100_sxm").
    hardware
        Its preset.
    version
        Version of vLLM.
    digests
        The first 12 digits of each file's sha256, by table.
    decode, prefill, gemm
        The tables.
    """

    device: str
    hardware: str
    version: str
    digests: dict[str, str]
    decode: Table
    prefill: Table
    gemm: Table

    @property
    def date(self) -> datetime.date:
        """When they were published; the day the library appeared is not known for versions not listed here."""
        if self.version not in PUBLISHED:
            known = ", ".join(PUBLISHED)
            raise InputError(f"AIConfigurator's tables of vLLM {self.version}: expected a version known here: {known}")
        return PUBLISHED[self.version]


def read_tables(device: str, path: str | Path | None = None) -> Tables:
    """Read all tables of a device.

    Parameters
    ----------
    device
        ``h100_sxm`` or ``h200_sxm``.
    path
        Folder of the tables; that of the installed package aiconfigurator if None.

    Raises
    ------
    InputError
        If the device is not known, a file is missing or is no Parquet file, a column is missing, or a time is not
        positive: one line with the file.
    """
    key = device.strip().lower().replace("-", "_")
    if key not in DEVICES:
        raise InputError(f"device {device!r}: expected one of {', '.join(DEVICES)}{did_you_mean(key, DEVICES)}")
    folder = Path(path) if path is not None else _installed()
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder of AIConfigurator's tables")
    files = {kernel: _find(folder, key, kernel) for kernel in COLUMNS}
    versions = {version for _, version in files.values()}
    if len(versions) > 1:
        raise InputError(f"{folder}: expected tables of one version of vLLM, got {', '.join(sorted(versions))}")
    tables = {kernel: _read(file, COLUMNS[kernel]) for kernel, (file, _) in files.items()}
    return Tables(
        device=key,
        hardware=DEVICES[key][0],
        version=versions.pop(),
        digests={kernel: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for kernel, (file, _) in files.items()},
        decode=tables["generation_attention"],
        prefill=tables["context_attention"],
        gemm=tables["gemm"],
    )


def _installed() -> Path:
    """Return the folder of the tables in the installed package, without importing it."""
    # Since version 0.10 the tables are in a package of their own.
    for distribution, package in (("aiconfigurator-core", "aiconfigurator_core"), ("aiconfigurator", "aiconfigurator")):
        try:
            found = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        folder = Path(str(found.locate_file(package))) / "systems" / "data"
        if folder.is_dir():
            return folder
    raise InputError(
        "the package aiconfigurator is not installed: pip install aiconfigurator-core, or name a folder with --path"
    )


def _find(folder: Path, device: str, kernel: str) -> tuple[Path, str]:
    """Return the file of a table and the version of vLLM that it is for: the newest, if there are several."""
    found = [
        (file, file.parent.name)
        for file in folder.glob(f"{device}/{_FOLDERS[kernel]}/{BACKEND}/*/{kernel}_perf.parquet")
    ]
    front, back = f"{device}_{BACKEND}_", f"_{kernel}_perf.parquet"
    found += [(file, file.name[len(front) : -len(back)]) for file in folder.glob(f"{front}*{back}")]
    if not found:
        raise InputError(
            f"{folder}: expected {device}/{_FOLDERS[kernel]}/{BACKEND}/VERSION/{kernel}_perf.parquet "
            f"or {front}VERSION{back}, found neither"
        )
    return max(found, key=lambda item: [int(part) if part.isdigit() else -1 for part in item[1].split(".")])


def _read(file: Path, columns: tuple[str, ...]) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        there = pq.read_schema(file).names
        missing = [name for name in columns if name not in there]
        if missing:
            raise InputError(f"{file}: column {missing[0]!r} is missing{did_you_mean(missing[0], there)}")
        content = pq.read_table(file, columns=list(columns))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file}: expected a Parquet file: {error}") from None
    table: Table = {}
    for name in columns:
        values = content.column(name).to_numpy()
        if name in _TEXTS:
            table[name] = values.astype(str)
            continue
        if not np.issubdtype(values.dtype, np.number) or not np.isfinite(values).all():
            raise InputError(f"{file}: column {name!r}: expected numbers in every row")
        table[name] = values.astype(np.float64)
    if not len(table["latency"]) or (table["latency"] <= 0).any():
        raise InputError(f"{file}: column 'latency': expected positive times in at least one row")
    table["latency"] = table["latency"] * 1e6
    return table
