"""Step and copy costs made of a profile's measured figures (:mod:`sim.serving.profile`)."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sim.errors import InputError, did_you_mean
from sim.serving.copy import contended_stretch, copy_costs
from sim.serving.cost import require, step_costs
from sim.serving.hardware import Hardware, get_hardware
from sim.serving.kv_dtype import AUTO
from sim.serving.models import Model
from sim.serving.profile import OVERLAP, CostProfile, dump_profile, load_profile, shipped, shipped_names

__all__ = ["AutoStepCost", "ProfileCopyCost", "ProfileStepCost", "find_profile"]

C = TypeVar("C", "ProfileStepCost", "ProfileCopyCost")


def find_profile(name: str, model: str, kv_dtype: str = AUTO) -> Path:
    """Return the file that ``name`` means: the path of one, or a device for which a profile of ``model`` comes along.

    Parameters
    ----------
    name
        Path or device.
    model, kv_dtype
        Preset and format of the KV cache.

    Raises
    ------
    InputError
        If there is neither.
    """
    if Path(name).suffix or Path(name).exists():
        return Path(name)
    try:
        hardware = get_hardware(name).name
    except InputError:
        known = sorted({device for device, _ in shipped_names()})
        raise InputError(
            f"cost profile {name}: No such file, and no device of that name: profiles come along for "
            f"{', '.join(known)}{did_you_mean(name, [*known, *(device.partition('-')[0] for device in known)])}"
        ) from None
    path = shipped(hardware, model, kv_dtype)
    if path is None:
        models = [of for device, of in shipped_names() if device == hardware]
        there = ", ".join(models) or "no model"
        raise InputError(f"cost profile {name}: none comes along for model {model} on {hardware}: there is {there}")
    return path


def _load_for(path: str, model: Model, hardware: Hardware | None) -> CostProfile:
    profile = load_profile(find_profile(path, model.name, model.kv_dtype))
    require(profile.model == model.name, f"cost profile {path}, field model", model.name, profile.model)
    if profile.hardware is not None and hardware is not None:
        require(
            profile.hardware == hardware.name, f"cost profile {path}, field hardware", hardware.name, profile.hardware
        )
    return profile


def _made_of(cls: type[C], profile: CostProfile, model: Model) -> C:
    require(profile.model == model.name, "cost profile, field model", model.name, profile.model)
    cost = cls.__new__(cls)
    for name, value in {"path": "", "model": model}.items():
        object.__setattr__(cost, name, value)
    cost._take(profile)
    return cost


@dataclass(frozen=True)
class _Host:
    """Figures of host and policy that a specification may set; None leaves the profile's, or the roofline's."""

    step_overhead_s: float | None = None
    sequence_overhead_s: float | None = None
    score_step_s: float | None = None
    score_request_s: float | None = None
    score_pair_bytes: float | None = None


@step_costs.register("auto")
@dataclass(frozen=True)
class AutoStepCost(_Host):
    """The profile that comes along for the run's model and device, or ``roofline`` where there is none.

    Parameters
    ----------
    step_overhead_s, sequence_overhead_s, score_step_s, score_request_s, score_pair_bytes
        As in ``profile`` and ``roofline``, which both have them.
    """

    name: ClassVar[str]

    def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:
        """Refuse: :func:`sim.serving.cost.build_step_cost` makes the step cost that this name stands for."""
        raise NotImplementedError("'auto' stands for another step cost: see resolve_step_cost")


@step_costs.register("profile")
@dataclass(frozen=True)
class ProfileStepCost(_Host):
    """Step time from measured figures.

    A step takes ``overheads + gemm(tokens) + head(sequences) + attention + prefill + tables``. Attention is a launch
    and the norm of what its bytes and its sequences take (:func:`sim.serving.fit.attention_ns`); prefill adds each
    token beyond one a sequence and each query-key pair beyond one a slot. The weights keep the bandwidth busy for as
    long as the matrices take with the fewest tokens, attention for as long as its bytes take.

    Parameters
    ----------
    path
        File of a :class:`CostProfile`, or the device of one that comes along (``h100``).
    model, hardware
        Those of the run; the profile must have been made for them.
    step_overhead_s, sequence_overhead_s, score_step_s, score_request_s, score_pair_bytes
        In place of the profile's figures.
    """

    name: ClassVar[str]
    path: str = field(kw_only=True)
    model: Model = field(kw_only=True)
    hardware: Hardware | None = field(default=None, kw_only=True)
    profile: CostProfile = field(init=False, repr=False)
    _terms: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    _score_ns: tuple[float, float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._take(_load_for(self.path, self.model, self.hardware))

    @classmethod
    def of(cls, profile: CostProfile, model: Model) -> ProfileStepCost:
        """Return the cost that a profile at hand gives for its model, with no file."""
        return _made_of(cls, profile, model)

    def _take(self, profile: CostProfile) -> None:
        def ns(name: str, figure: float) -> float:
            value = getattr(self, name)
            if value is None:
                return figure
            require(0 <= value < math.inf, f"step cost 'profile', {name}", "a number of at least 0", value)
            return float(value) * (1.0 if name == "score_pair_bytes" else 1e9)

        # A pair's bytes are read and written as a copy of neighbours is.
        pair_bytes = ns("score_pair_bytes", profile.score_pair_bytes.value)
        pair_ns = pair_bytes * self.model.layers * self.model.kv_heads * profile.copy_ns_per_byte_contiguous.value
        computed = {
            "profile": profile,
            "_terms": (
                *profile.gemm_ns.lines(),
                *profile.head_ns.lines(),
                profile.gemm_ns.points[0][1] + profile.head_ns.points[0][1],
                ns("step_overhead_s", profile.step_overhead_ns.value)
                + profile.attention_launch_ns.value
                + profile.table_step_ns.value,
                ns("sequence_overhead_s", profile.sequence_overhead_ns.value),
                profile.attention_ns_per_byte.value * profile.kv_bytes_per_token(self.model),
                profile.table_entry_ns.value / profile.block_size,
                profile.attention_free_sequences.value,
                profile.attention_sequence_ns.value,
                profile.prefill_ns_per_token.value,
                profile.prefill_ns_per_pair.value,
            ),
            "_score_ns": (
                ns("score_step_s", profile.score_step_ns.value),
                ns("score_request_s", profile.score_request_ns.value),
                pair_ns,
            ),
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    @property
    def about(self) -> str:
        """Which profile it is, in one line, and where the time of attention is from."""
        profile = self.profile
        made = profile.provenances[profile.attention_ns_per_byte.provenance]
        digest = hashlib.sha256(dump_profile(profile).encode()).hexdigest()[:12]
        run = self.model.kv_format.name
        scaled = f"; measured with KV in {profile.kv_dtype}, run with {run}" if run != profile.kv_dtype else ""
        return (
            f"profile {profile.model} on {profile.hardware or made.device} ({made.kind}, {made.date}: {made.source}; "
            f"sha256 {digest}{scaled})"
        )

    def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:
        """Return the time of a step and the part of it during which memory bandwidth is busy, in ns."""
        # Unpacked at once: this runs in every step, and a local name is found faster than a field.
        (
            gemm_counts,
            gemm_lines,
            head_counts,
            head_lines,
            weights_ns,
            fixed_ns,
            overhead_ns,
            kv_token_ns,
            entry_token_ns,
            free,
            sequence_ns,
            token_ns,
            pair_ns,
        ) = self._terms
        start_ns, slope = gemm_lines[bisect_right(gemm_counts, tokens)]
        head_ns, head_slope = head_lines[bisect_right(head_counts, seqs)]
        gemm_ns = start_ns + slope * tokens + head_ns + head_slope * seqs
        kv_ns = (kv_read_tokens + tokens) * kv_token_ns
        step_ns = fixed_ns + gemm_ns + seqs * overhead_ns + kv_read_tokens * entry_token_ns
        if seqs > free:
            step_ns += (kv_ns**OVERLAP + ((seqs - free) * sequence_ns) ** OVERLAP) ** (1 / OVERLAP)
        else:
            step_ns += kv_ns
        if tokens > seqs:
            step_ns += (tokens - seqs) * token_ns
        if attention_pairs > kv_read_tokens:
            step_ns += (attention_pairs - kv_read_tokens) * pair_ns
        return round(step_ns), round((weights_ns if weights_ns < gemm_ns else gemm_ns) + kv_ns)

    def score_ns(self, requests: int, pairs: int) -> int:
        """Return by how much scoring at intervals makes a step longer, in ns: see :class:`RooflineStepCost`."""
        step_ns, request_ns, pair_ns = self._score_ns
        return round(step_ns + requests * request_ns + pairs * pair_ns)


@copy_costs.register("profile")
@dataclass(frozen=True)
class ProfileCopyCost:
    """Copy time from measured figures: a launch, and the bytes of K and V read and written.

    Parameters
    ----------
    path
        File of a :class:`CostProfile`, or the device of one that comes along (``h100``).
    model, hardware
        Those of the run; the profile must have been made for them.
    """

    name: ClassVar[str]
    path: str
    model: Model
    hardware: Hardware | None = None
    profile: CostProfile = field(init=False, repr=False)
    share: float = field(init=False)
    _launch_ns: float = field(init=False, repr=False, compare=False)
    _token_ns: float = field(init=False, repr=False, compare=False)
    _busy_token_ns: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._take(_load_for(self.path, self.model, self.hardware))

    @classmethod
    def of(cls, profile: CostProfile, model: Model) -> ProfileCopyCost:
        """Return the cost that a profile at hand gives for its model, with no file."""
        return _made_of(cls, profile, model)

    def _take(self, profile: CostProfile) -> None:
        token_bytes = 2 * profile.kv_bytes_per_token(self.model)
        computed = {
            "profile": profile,
            "share": profile.copy_share.value,
            "_launch_ns": profile.copy_launch_ns.value,
            "_token_ns": profile.copy_ns_per_byte_scattered.value * token_bytes,
            "_busy_token_ns": profile.copy_ns_per_byte_contiguous.value * token_bytes,
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
        return math.ceil(tokens * self._busy_token_ns)

    def stretch_ns(self, step_ns: int, memory_ns: int, copy_bandwidth_ns: int) -> int:
        """Return how much longer a step gets because of the copy work beside it, in ns."""
        explained = contended_stretch(step_ns, memory_ns, copy_bandwidth_ns, self.share)
        return round(explained * self.profile.copy_interference.value)
