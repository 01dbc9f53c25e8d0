"""Measured costs: a JSON file of figures that each say where they come from.

A file looks like this, with one entry in ``provenances`` for each series of measurements, and all figures of
:class:`CostProfile`::

    {"schema": "vtoken-cost-profile", "version": 2, "model": "llama-3.1-8b", "kv_dtype": "bf16", "hardware": "h100-sxm",
     "block_size": 16, "fitted_on": [],
     "provenances": {"a": {"device": "...", "date": "2026-11-30", "source": "...", "kind": "measured", "versions": {}}},
     "step_overhead_ns": {"value": 1e6, "provenance": "a", "n": 20, "interval": [9e5, 1.1e6],
                          "error": {"mean": 0.04, "median": 0.03, "p90": 0.09, "max": 0.2}},
     "gemm_ns": {"points": [[1, 5.8e6], [256, 7.9e6]], "provenance": "a", "n": 20}, ...}

What is made of it: :mod:`sim.serving.profile_cost`. How its figures are fitted: :mod:`sim.serving.fit`. This module
needs the standard library alone, so that a profile can be written where little else is installed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sim.errors import InputError, did_you_mean
from sim.serving.kv_dtype import AUTO
from sim.serving.records import FieldError, at_least, plain, read_record

if TYPE_CHECKING:
    from sim.serving.models import Model

__all__ = [
    "FIGURES",
    "KV_BYTES",
    "NEAREST",
    "OVERLAP",
    "SHIPPED",
    "VERSION",
    "CostProfile",
    "Curve",
    "Errors",
    "Figure",
    "Provenance",
    "dump_profile",
    "load_profile",
    "save_profile",
    "shipped",
    "shipped_names",
]

SCHEMA: Literal["vtoken-cost-profile"] = "vtoken-cost-profile"
VERSION: Literal[2] = 2

OVERLAP = 1.5
"""How the bytes and the sequences of attention add up, as the exponent of a norm: 1 is one after the other, infinity
the longer of the two. Left free, NVIDIA's tables for H100 and H200 give 1.1 to 2.2 by head shape; with 1.5 the mean
error is nowhere more than 1 point larger."""

KV_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Bytes of an element of the KV cache."""

SHIPPED = Path(__file__).parent / "data" / "profiles"
"""The profiles that come along: ``HARDWARE/MODEL.json``, and ``HARDWARE/fp8/MODEL.json`` for a cache in fp8."""

NEAREST = {"fp8": "fp8", "int4": "fp8"}
"""Which of them stands for which format of the cache. Nobody measured int4: it is expanded in the kernel, as fp8 is."""


@dataclass(frozen=True)
class Provenance:
    """Where a series of figures comes from.

    Parameters
    ----------
    device
        What was measured, as it names itself ("NVIDIA H200").
    date
        Day of the measurement, or of the publication for published figures.
    source
        The command, the data set with its version, the datasheet, or why it is assumed.
    kind
        ``measured``, ``datasheet``, or ``assumed`` for what nobody measured on this device.
    versions
        Driver and libraries: name to version.
    """

    device: str
    date: datetime.date
    source: str
    kind: Literal["measured", "datasheet", "assumed"] = "measured"
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("device", "source"):
            if not getattr(self, name).strip():
                raise FieldError(name, "expected a text that is not empty")


@dataclass(frozen=True)
class Errors:
    """Absolute errors as shares of the measured values, on measurements that the fit did not see."""

    mean: float
    median: float
    p90: float
    max: float

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 0:
            raise FieldError("", "expected errors of at least 0")


@dataclass(frozen=True)
class Figure:
    """One number.

    Parameters
    ----------
    value
        At least 0.
    provenance
        Name of its provenance.
    n
        Number of measurements that it was fitted to.
    error
        Of the law that it is part of.
    interval
        95 % confidence interval of the fit.
    note
        Where it does not hold, or how far it is extrapolated.
    """

    value: float
    provenance: str
    n: int | None = None
    error: Errors | None = None
    interval: tuple[float, float] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        at_least("value", self.value, 0)
        at_least("n", self.n, 1)
        if self.interval is not None and not self.interval[0] <= self.value <= self.interval[1]:
            raise FieldError("interval", f"expected two numbers around the value, got {list(self.interval)}")


@dataclass(frozen=True)
class Curve:
    """A time that depends on a number: straight between and beyond the points, flat below the first.

    Parameters
    ----------
    points
        Pairs of the number, at least 1 and increasing, and the time in ns. Two or more.
    provenance, n, error, note
        As in :class:`Figure`.
    """

    points: tuple[tuple[int, float], ...]
    provenance: str
    n: int | None = None
    error: Errors | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise FieldError("points", f"expected at least two points, got {len(self.points)}")
        counts = [count for count, _ in self.points]
        if any(a >= b for a, b in pairwise(counts)) or counts[0] < 1:
            raise FieldError("points", "the numbers must be positive and increase")
        if any(ns <= 0 for _, ns in self.points):
            raise FieldError("points", "the times must be positive")
        if self.points[-1][1] < self.points[-2][1]:
            raise FieldError("points", "the last time must not be below the one before: it is extrapolated")
        at_least("n", self.n, 1)

    def lines(self) -> tuple[list[int], list[tuple[float, float]]]:
        """Return where the lines meet, and the value at 0 and the slope of each: ``bisect_right`` finds the line."""
        slopes = [(ns2 - ns1) / (n2 - n1) for (n1, ns1), (n2, ns2) in pairwise(self.points)]
        lines = [(ns - slope * n, slope) for (n, ns), slope in zip(self.points, slopes, strict=False)]
        return [n for n, _ in self.points[:-1]], [(self.points[0][1], 0.0), *lines]


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """What steps and copies cost for one model on one device. Times are in ns and over all layers.

    Parameters
    ----------
    model
        Model preset that was measured.
    kv_dtype
        Type of an element of the KV cache: "bf16", "fp16", "fp32" or "fp8". Figures for a byte mean bytes of this type;
        a run that asks for another one is charged for its own bytes at the same figures.
    hardware
        Hardware preset that was measured; None for a device that has none: such a profile goes with any.
    block_size
        Token slots of a block where it was measured: what ``table_entry_ns`` counts.
    provenances
        Provenances by the names that the figures refer to.
    step_overhead_ns, sequence_overhead_ns
        Host, sampling and small kernels: of a step, and of each sequence of its batch.
    gemm_ns
        The layers' weight matrices against scheduled tokens.
    head_ns
        The output projection against sequences sampled.
    attention_launch_ns
        Attention, if it had nothing to read.
    attention_ns_per_byte
        For each byte of KV that attention reads or that is written.
    attention_sequence_ns
        For each sequence beyond those that run beside each other at no cost.
    attention_free_sequences
        How many these are: multiprocessors over KV heads.
    dead_slot_factor
        Cost of a dead slot over that of a live one. A record of what was measured: steps are told how many slots are
        read, dead or not, and take it to be 1.
    prefill_ns_per_token
        For each scheduled token beyond one a sequence.
    prefill_ns_per_pair
        For each query-key pair beyond one a slot read.
    copy_launch_ns
        One launch of a token copy.
    copy_ns_per_byte_scattered
        Each byte that a copy of scattered tokens reads or writes, with the memory to itself.
    copy_ns_per_byte_contiguous
        The same where neighbours are copied: how long the memory is busy.
    copy_share
        Share of its speed that a copy keeps beside a step.
    copy_interference
        By which factor a step is delayed more than the bytes of a copy beside it explain.
    table_step_ns, table_entry_ns
        Rewriting of block tables: of a step, and of each entry.
    score_step_ns, score_request_ns, score_pair_bytes
        Of a policy that scores at intervals: see :class:`sim.serving.cost.RooflineStepCost`.
    fitted_on
        Event logs that the figures were fitted to, by name or sha256; empty for designed sweeps.
    """

    schema: Literal["vtoken-cost-profile"] = SCHEMA
    version: Literal[2] = VERSION
    model: str
    hardware: str | None = None
    kv_dtype: str
    block_size: int
    fitted_on: tuple[str, ...] = ()
    provenances: dict[str, Provenance]
    step_overhead_ns: Figure
    sequence_overhead_ns: Figure
    gemm_ns: Curve
    head_ns: Curve
    attention_launch_ns: Figure
    attention_ns_per_byte: Figure
    attention_sequence_ns: Figure
    attention_free_sequences: Figure
    dead_slot_factor: Figure
    prefill_ns_per_token: Figure
    prefill_ns_per_pair: Figure
    copy_launch_ns: Figure
    copy_ns_per_byte_scattered: Figure
    copy_ns_per_byte_contiguous: Figure
    copy_share: Figure
    copy_interference: Figure
    table_step_ns: Figure
    table_entry_ns: Figure
    score_step_ns: Figure
    score_request_ns: Figure
    score_pair_bytes: Figure

    def __post_init__(self) -> None:
        at_least("block_size", self.block_size, 1)
        if self.kv_dtype not in KV_BYTES:
            hint = did_you_mean(self.kv_dtype, KV_BYTES)
            raise FieldError("kv_dtype", f"expected one of {', '.join(KV_BYTES)}, got {self.kv_dtype!r}{hint}")
        for name in FIGURES:
            provenance = getattr(self, name).provenance
            if provenance not in self.provenances:
                hint = did_you_mean(provenance, self.provenances)
                raise FieldError(name, f"no provenance is called {provenance!r}{hint}")
        if not 0 < self.copy_share.value < 1:
            raise FieldError("copy_share", f"expected a share in (0, 1), got {self.copy_share.value}")

    def kv_bytes_per_token(self, model: Model) -> int:
        """Return bytes of K and V of one token over all layers: in the run's format, or if that is auto as measured."""
        if model.kv_dtype != AUTO:
            return model.kv_bytes_per_token
        return 2 * model.layers * model.kv_heads * model.head_dim * KV_BYTES[self.kv_dtype]

    def kind(self, name: str) -> str:
        """Return whether the figure called ``name`` is measured, from a datasheet, or assumed."""
        return self.provenances[getattr(self, name).provenance].kind


FIGURES = tuple(spec.name for spec in dataclasses.fields(CostProfile) if spec.type in ("Figure", "Curve"))
"""Names of the figures and curves, in the order of the file."""


def load_profile(path: str | Path) -> CostProfile:
    """Read a cost profile.

    Raises
    ------
    InputError
        If the file cannot be read, is not JSON, or is not a profile of this version: one line, with the field.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cost profile {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"cost profile {path}: expected JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"cost profile {path}, line {error.lineno}: expected JSON, {error.msg}") from None
    if not isinstance(content, dict):
        raise InputError(f"cost profile {path}: expected a JSON object, got {type(content).__name__}")
    # Every file names what it is: a default would take any JSON object that has the right fields.
    missing = [key for key in ("schema", "version") if key not in content]
    if missing:
        raise InputError(f"cost profile {path}: expected 'schema' and 'version', {missing[0]!r} is missing")
    if content["schema"] == SCHEMA and content["version"] != VERSION:
        raise InputError(
            f"cost profile {path}, field version: expected {VERSION}, got {content['version']!r}: "
            "make it again with `vtoken profile from-aiconfigurator` or `vtoken calibrate`"
        )
    try:
        profile: CostProfile = read_record(CostProfile, content)
    except FieldError as error:
        where = f", field {error.where}" if error.where else ""
        raise InputError(f"cost profile {path}{where}: {error}") from None
    return profile


def dump_profile(profile: CostProfile) -> str:
    """Return the text of a profile's file: one line a figure."""
    content = plain(profile)
    lines = []
    for key, value in content.items():
        if isinstance(value, dict) and key == "provenances":
            inner = ",\n".join(f"    {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            lines.append(f'  "{key}": {{\n{inner}\n  }}')
        else:
            lines.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save_profile(profile: CostProfile, path: str | Path) -> None:
    """Write a cost profile so that :func:`load_profile` reads the same one.

    Raises
    ------
    InputError
        If it cannot be written.
    """
    try:
        Path(path).write_text(dump_profile(profile), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cost profile {path}: cannot write it: {error.strerror or error}") from None


def shipped(hardware: str, model: str, kv_dtype: str = AUTO) -> Path | None:
    """Return the file of the profile that comes along for two presets and a KV format, or None if there is none."""
    path = SHIPPED / hardware / NEAREST.get(kv_dtype, "") / f"{model}.json"
    return path if path.is_file() else None


def shipped_names() -> list[tuple[str, str]]:
    """Return (hardware, model) of every profile that comes along, sorted; each comes for a cache in fp8, too."""
    return sorted((path.parent.name, path.stem) for path in SHIPPED.glob("*/*.json"))
