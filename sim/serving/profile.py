"""Measured costs: a JSON file of figures that each say where they come from, and the step and copy costs made of them.

The form of the cost is affine (:class:`ProfileStepCost`), so every figure can be fitted and checked by itself. A file
looks like this, with one entry in ``provenances`` for each series of measurements::

    {"schema": "vtoken-cost-profile", "version": 1, "model": "llama-3.1-8b", "hardware": "h100-sxm",
     "provenances": {"a": {"device": "...", "date": "2026-11-30", "source": "...", "versions": {"torch": "..."}}},
     "step_overhead_ns": {"value": 1e6, "provenance": "a", "n": 20, "error": 0.02}, ...,
     "gemm_ns": {"points": [[1, 5.8e6], [256, 7.9e6]], "provenance": "a", "n": 20, "error": 0.03}}
"""

from __future__ import annotations

import bisect
import datetime
import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.errors import InputError
from sim.serving.copy import contended_stretch, copy_costs
from sim.serving.cost import require, step_costs
from sim.serving.hardware import Hardware
from sim.serving.models import Model

__all__ = [
    "CostProfile",
    "Figure",
    "GemmTable",
    "ProfileCopyCost",
    "ProfileStepCost",
    "Provenance",
    "load_profile",
    "save_profile",
]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Provenance(_Record):
    """Where a series of figures comes from.

    Parameters
    ----------
    device
        What was measured, as it names itself ("NVIDIA H200").
    date
        Day of the measurement, or of the publication for published figures.
    source
        The command, the data set with its version, or the datasheet.
    versions
        Driver and libraries: name to version.
    """

    device: str = Field(min_length=1)
    date: datetime.date
    source: str = Field(min_length=1)
    versions: dict[str, str] = {}


class _Measured(_Record):
    provenance: str
    n: int | None = Field(default=None, ge=1)
    error: float | None = Field(default=None, ge=0)


class Figure(_Measured):
    """One number: its value, which provenance it has, from how many measurements, and its relative error.

    ``error`` is the mean absolute error on shapes that the fit did not see, as a share of the measured value; None
    where that is not known.
    """

    value: float = Field(ge=0)


class GemmTable(_Measured):
    """Time of all weight matrices of a step, at some numbers of scheduled tokens; linear between and beyond them."""

    points: Annotated[tuple[tuple[int, float], ...], Field(min_length=2)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        tokens = [count for count, _ in self.points]
        if any(a >= b for a, b in pairwise(tokens)) or tokens[0] < 1:
            raise ValueError("the numbers of tokens must be positive and increase")
        if any(ns <= 0 for _, ns in self.points):
            raise ValueError("the times must be positive")
        if self.points[-1][1] < self.points[-2][1]:
            raise ValueError("the last time must not be below the one before: it is extrapolated")
        return self


class CostProfile(_Record):
    """What steps and copies cost for one model on one device.

    Parameters
    ----------
    model
        Model preset that was measured.
    hardware
        Hardware preset that was measured; None for a device that has none.
    provenances
        Provenances by the names that the figures refer to.
    step_overhead_ns
        Host, sampling and small kernels of a step.
    gemm_ns
        All weight matrices of a step, output projection included.
    attention_launch_ns
        Attention of all layers, if it had nothing to read.
    attention_ns_per_byte
        For each byte of KV read or written by attention.
    sequence_ns
        For each sequence of the batch, over all layers.
    prefill_ns_per_pair
        For each query-key pair beyond one a KV slot read, over all layers.
    copy_launch_ns, copy_ns_per_byte
        One launch of a token copy, and each byte it reads or writes with the memory to itself.
    copy_share
        Share of the bandwidth that a copy takes beside a step.
    """

    schema_: Literal["vtoken-cost-profile"] = Field(default="vtoken-cost-profile", alias="schema")
    version: Literal[1] = 1
    model: str
    hardware: str | None
    provenances: dict[str, Provenance]
    step_overhead_ns: Figure
    gemm_ns: GemmTable
    attention_launch_ns: Figure
    attention_ns_per_byte: Figure
    sequence_ns: Figure
    prefill_ns_per_pair: Figure
    copy_launch_ns: Figure
    copy_ns_per_byte: Figure
    copy_share: Figure

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in type(self).model_fields:
            measured = getattr(self, name)
            if isinstance(measured, _Measured) and measured.provenance not in self.provenances:
                raise ValueError(f"{name}: no provenance is called {measured.provenance!r}")
        if not 0 < self.copy_share.value < 1:
            raise ValueError(f"copy_share: expected a share in (0, 1), got {self.copy_share.value}")
        return self


def load_profile(path: str | Path) -> CostProfile:
    """Read a cost profile.

    Raises
    ------
    InputError
        If the file cannot be read, is not JSON, or is not a profile of a version known here: one line, with the field.
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
    try:
        return CostProfile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"cost profile {path}{', field ' + where if where else ''}: {message}") from None


def save_profile(profile: CostProfile, path: str | Path) -> None:
    """Write a cost profile so that :func:`load_profile` reads the same one."""
    content = profile.model_dump(mode="json", by_alias=True)
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _load_for(path: str, model: Model, hardware: Hardware) -> CostProfile:
    profile = load_profile(path)
    require(profile.model == model.name, f"cost profile {path}, field model", model.name, profile.model)
    if profile.hardware is not None:
        require(
            profile.hardware == hardware.name, f"cost profile {path}, field hardware", hardware.name, profile.hardware
        )
    return profile


@step_costs.register("profile")
@dataclass(frozen=True)
class ProfileStepCost:
    """Step time from measured figures.

    A step takes ``overhead + gemm(tokens) + attention launch + bytes + sequences``, and the pairs of prefill. The
    weights keep the bandwidth busy for as long as the matrices take with the fewest tokens, attention for as long as
    it reads.

    Parameters
    ----------
    path
        File of a :class:`CostProfile`.
    model, hardware
        Those of the run; the profile must have been made for them.
    """

    name: ClassVar[str]
    path: str
    model: Model
    hardware: Hardware
    profile: CostProfile = field(init=False, repr=False)
    _tokens: list[int] = field(init=False, repr=False, compare=False)
    _lines: list[tuple[float, float]] = field(init=False, repr=False, compare=False)
    _weights_ns: float = field(init=False, repr=False, compare=False)
    _fixed_ns: float = field(init=False, repr=False, compare=False)
    _kv_token_ns: float = field(init=False, repr=False, compare=False)
    _sequence_ns: float = field(init=False, repr=False, compare=False)
    _pair_ns: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        profile = _load_for(self.path, self.model, self.hardware)
        points = profile.gemm_ns.points
        slopes = [(ns2 - ns1) / (n2 - n1) for (n1, ns1), (n2, ns2) in pairwise(points)]
        # Below the first point the matrices wait for the weights, however few tokens there are.
        lines = [(points[0][1], 0.0)]
        lines += [(ns - slope * n, slope) for (n, ns), slope in zip(points, slopes, strict=False)]
        computed = {
            "profile": profile,
            "_tokens": [n for n, _ in points[:-1]],
            "_lines": lines,
            "_weights_ns": points[0][1],
            "_fixed_ns": profile.step_overhead_ns.value + profile.attention_launch_ns.value,
            "_kv_token_ns": profile.attention_ns_per_byte.value * self.model.kv_bytes_per_token,
            "_sequence_ns": profile.sequence_ns.value,
            "_pair_ns": profile.prefill_ns_per_pair.value,
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:
        """Return the time of a step and the part of it during which memory bandwidth is busy, in ns."""
        start_ns, slope = self._lines[bisect.bisect_right(self._tokens, tokens)]
        gemm_ns = start_ns + slope * tokens
        kv_ns = (kv_read_tokens + tokens) * self._kv_token_ns
        prefill_pairs = attention_pairs - kv_read_tokens
        step_ns = self._fixed_ns + gemm_ns + kv_ns + seqs * self._sequence_ns
        if prefill_pairs > 0:
            step_ns += prefill_pairs * self._pair_ns
        return round(step_ns), round(min(self._weights_ns, gemm_ns) + kv_ns)


@copy_costs.register("profile")
@dataclass(frozen=True)
class ProfileCopyCost:
    """Copy time from measured figures: a launch, and the bytes of K and V read and written.

    Parameters
    ----------
    path
        File of a :class:`CostProfile`.
    model, hardware
        Those of the run; the profile must have been made for them.
    """

    name: ClassVar[str]
    path: str
    model: Model
    hardware: Hardware
    profile: CostProfile = field(init=False, repr=False)
    share: float = field(init=False)
    _launch_ns: float = field(init=False, repr=False, compare=False)
    _token_ns: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        profile = _load_for(self.path, self.model, self.hardware)
        computed = {
            "profile": profile,
            "share": profile.copy_share.value,
            "_launch_ns": profile.copy_launch_ns.value,
            "_token_ns": profile.copy_ns_per_byte.value * 2 * self.model.kv_bytes_per_token,
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    def copy_ns(self, tokens: int) -> int:
        """Return the wall time of one launch that moves ``tokens`` tokens while a step runs beside it, in ns."""
        return math.ceil(self._launch_ns + tokens * self._token_ns / self.share) if tokens else 0

    def alone_ns(self, tokens: int) -> int:
        """Return the wall time of one launch that moves ``tokens`` tokens while nothing else runs, in ns."""
        return math.ceil(self._launch_ns + tokens * self._token_ns) if tokens else 0

    def bandwidth_ns(self, tokens: int) -> int:
        """Return how long the copy would keep the memory busy if it had it to itself, in ns."""
        return math.ceil(tokens * self._token_ns)

    def stretch_ns(self, step_ns: int, memory_ns: int, copy_bandwidth_ns: int) -> int:
        """Return how much longer a step gets because of the copy work beside it, in ns."""
        return contended_stretch(step_ns, memory_ns, copy_bandwidth_ns, self.share)
