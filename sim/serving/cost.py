"""How long a step takes.

A step cost is asked once a step for the whole time and for the part of it during which memory bandwidth is busy; what
is left of the bandwidth is what a copy beside the step can take without slowing it (:mod:`sim.serving.copy`).

``roofline`` works from datasheets and needs nothing measured on the device in question, ``linear`` is two numbers,
``profile:FILE`` (:mod:`sim.serving.profile_cost`) reads measured ones, and ``auto`` is the profile that comes along for
model and device, or ``roofline`` where there is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from sim.errors import InputError
from sim.registry import Registry
from sim.serving.hardware import Hardware
from sim.serving.models import Model
from sim.serving.profile import shipped

__all__ = [
    "LinearStepCost",
    "RooflineStepCost",
    "StepCost",
    "build_step_cost",
    "require",
    "resolve_step_cost",
    "step_costs",
    "with_path",
]


class StepCost(Protocol):
    """What a step costs.

    It may also have ``score_ns(requests, pairs)``, as :class:`RooflineStepCost` has: what a policy that scores at
    intervals adds to a step. Without it that is free.
    """

    name: ClassVar[str]

    def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:
        """Return the time of a step and the part of it during which memory bandwidth is busy, in ns.

        Parameters
        ----------
        tokens
            Scheduled tokens over all requests.
        seqs
            Scheduled requests.
        kv_read_tokens
            KV slots that attention reads over all requests, those of dead tokens in retained blocks included.
        attention_pairs
            Query-key pairs over all requests: one a slot in decode, more in prefill.
        """
        ...


step_costs: Registry[StepCost] = Registry(
    "step cost", "vtoken.step_costs", ("sim.serving.cost", "sim.serving.profile_cost")
)


def build_step_cost(spec: str, *, model: Model, hardware: Hardware) -> StepCost:
    """Make the step cost that ``spec`` describes.

    Parameters
    ----------
    spec
        ``auto``, ``roofline``, ``linear:base_s=..,per_token_s=..``, or ``profile:FILE``, a profile of your own or one
        that comes along (``profile:h100``); with parameters if wanted.
    model, hardware
        For the costs that need them.

    Raises
    ------
    InputError
        If the name, a parameter or the file is no good.
    """
    return step_costs.build(resolve_step_cost(spec, model=model, hardware=hardware), model=model, hardware=hardware)


def resolve_step_cost(spec: str, *, model: Model, hardware: Hardware) -> str:
    """Return the specification that ``auto`` stands for, and any other one with the file of its profile as ``path``."""
    name, _, parameters = spec.partition(":")
    if name.strip() != "auto":
        return with_path(spec)
    if shipped(hardware.name, model.name, model.kv_dtype) is None:
        return f"roofline:{parameters}"
    return f"profile:path={hardware.name},{parameters}"


def with_path(spec: str) -> str:
    """Write ``profile:FILE,key=value`` with the name of its first parameter."""
    name, _, parameters = spec.partition(":")
    if name.strip() == "profile" and parameters and "=" not in parameters.partition(",")[0]:
        return f"profile:path={parameters}"
    return spec


def require(condition: bool, what: str, expected: str, value: object) -> None:
    """Raise :class:`~sim.errors.InputError` unless ``condition`` holds."""
    if not condition:
        raise InputError(f"{what}: expected {expected}, got {value}")


@step_costs.register("roofline")
@dataclass(frozen=True)
class RooflineStepCost:
    """Step time from the work in the step and the device's peak rates, one kernel after the other.

    The matrices take the longer of reading all weights once and multiplying all tokens with them (only one token a
    sequence goes through the output projection). Attention reads the KV slots it is given and writes those of the new
    tokens; query-key pairs beyond one a slot, which only prefill has, are paid at the arithmetic rate. Launches, each
    sequence of the batch and the host come on top. One device; communication is not modelled. A decode that computes
    longer on a slot than it takes to read it, which latent attention with few bytes can, waits for the arithmetic. Of
    experts a step reads those that its tokens are expected to reach. What it takes to expand a quantised cache is not
    modelled.

    The efficiencies are medians over NVIDIA's measured kernels for H100 SXM and H200 SXM (AIConfigurator's database,
    vLLM 0.24, bf16, commit 095f58a5), as shares of the datasheet's peaks; other devices are taken to be alike.

    Parameters
    ----------
    model, hardware
        Geometry and peak rates.
    gemm_bandwidth_efficiency
        Matrices of at least 16 M weights, up to 128 tokens: 0.77 to 0.81 on H100, 0.72 to 0.74 on H200.
    gemm_flops_efficiency
        The same matrices from 1,024 tokens on: 0.79 to 0.82 on H100, 0.76 to 0.81 on H200. Around 256 tokens, where
        both limits meet, the measured time is up to a quarter above the longer of the two.
    attention_bandwidth_efficiency
        Fit of decode attention (32 query and 8 KV heads of 128): 0.97 on H100, 0.92 on H200.
    attention_flops_efficiency
        Prefill attention of the same shape: 0.44 at 2,048 tokens, 0.55 at 4,096, 0.60 at 8,192, 0.20 at 512.
    attention_launch_s
        Of each layer's decode attention, by the same fit: 10.8 us on H100, 11.0 us on H200.
    sequence_kv_head_s
        For each sequence, layer and KV head, by the same fit: 0.18 us at 8 heads, in proportion to the heads.
    step_overhead_s, sequence_overhead_s
        Host, sampling and small kernels, fixed and for each sequence. Together 2.5 ms at 256 sequences: the kernels of
        Qwen2.5-7B on an H100 leave 2 to 3 ms of the step time that R-KV's stress test implies. How it divides is ours.
    score_step_s, score_request_s
        For a policy that scores at intervals (``every`` above 1): hooks in the layers, in every step; launches and host
        for each request scored, in the step behind it. 0 unless told: they are an implementation's. R-KV's port for
        vLLM on an H100: 5 ms and 1 ms, fitted by ``experiments/04_rkv_stress``.
    score_pair_bytes
        For each pair of a scored request's live keys, layer and KV head: bytes that scoring reads and writes, at the
        peak bandwidth. Counted over the passes of R-KV's PyTorch code: cosines of 2 bytes, indices of 8.
    """

    name: ClassVar[str]
    model: Model
    hardware: Hardware
    gemm_bandwidth_efficiency: float = 0.77
    gemm_flops_efficiency: float = 0.80
    attention_bandwidth_efficiency: float = 0.94
    attention_flops_efficiency: float = 0.50
    attention_launch_s: float = 11e-6
    sequence_kv_head_s: float = 0.0225e-6
    step_overhead_s: float = 1e-3
    sequence_overhead_s: float = 6e-6
    score_step_s: float = 0.0
    score_request_s: float = 0.0
    score_pair_bytes: float = 44.0
    _weights_ns: float = field(init=False, repr=False, compare=False)
    _fixed_ns: float = field(init=False, repr=False, compare=False)
    _token_ns: float = field(init=False, repr=False, compare=False)
    _sequence_flops_ns: float = field(init=False, repr=False, compare=False)
    _sequence_ns: float = field(init=False, repr=False, compare=False)
    _kv_token_ns: float = field(init=False, repr=False, compare=False)
    _late_slot_ns: float = field(init=False, repr=False, compare=False)
    _gemm_byte_ns: float = field(init=False, repr=False, compare=False)
    _pair_ns: float = field(init=False, repr=False, compare=False)
    _score_pair_ns: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for share in (
            "gemm_bandwidth_efficiency",
            "gemm_flops_efficiency",
            "attention_bandwidth_efficiency",
            "attention_flops_efficiency",
        ):
            value = getattr(self, share)
            require(0 < value <= 1, f"step cost 'roofline', {share}", "a share in (0, 1]", value)
        for time_s in (
            "attention_launch_s",
            "sequence_kv_head_s",
            "step_overhead_s",
            "sequence_overhead_s",
            "score_step_s",
            "score_request_s",
        ):
            value = getattr(self, time_s)
            require(0 <= value < math.inf, f"step cost 'roofline', {time_s}", "at least 0 seconds", value)
        pair_bytes = self.score_pair_bytes
        require(0 <= pair_bytes < math.inf, "step cost 'roofline', score_pair_bytes", "at least 0 bytes", pair_bytes)
        model, hardware = self.model, self.hardware
        gemm_bytes_per_ns = hardware.bandwidth_bytes_per_s * self.gemm_bandwidth_efficiency / 1e9
        gemm_flops_per_ns = hardware.flops_per_s * self.gemm_flops_efficiency / 1e9
        attention_bytes_per_ns = hardware.bandwidth_bytes_per_s * self.attention_bandwidth_efficiency / 1e9
        attention_flops_per_ns = hardware.flops_per_s * self.attention_flops_efficiency / 1e9
        sequence_s = self.sequence_overhead_s + self.sequence_kv_head_s * model.layers * model.kv_heads
        kv_token_ns = model.kv_bytes_per_token / attention_bytes_per_ns
        computed = {
            "_weights_ns": model.step_weight_bytes() / gemm_bytes_per_ns,
            "_fixed_ns": (self.step_overhead_s + self.attention_launch_s * model.layers) * 1e9,
            "_token_ns": 2 * model.layer_matrix_parameters / gemm_flops_per_ns,
            "_sequence_flops_ns": 2 * model.head_parameters / gemm_flops_per_ns,
            "_sequence_ns": sequence_s * 1e9,
            "_kv_token_ns": kv_token_ns,
            "_late_slot_ns": max(0.0, model.decode_flops_per_slot / attention_flops_per_ns - kv_token_ns),
            "_gemm_byte_ns": 1 / gemm_bytes_per_ns,
            "_pair_ns": model.attention_flops_per_pair / attention_flops_per_ns,
            "_score_pair_ns": pair_bytes * model.layers * model.kv_heads * 1e9 / hardware.bandwidth_bytes_per_s,
        }
        for name, ns in computed.items():
            object.__setattr__(self, name, ns)

    def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:
        """Return the time of a step and the part of it during which memory bandwidth is busy, in ns."""
        weights_ns = self._weights_ns
        if self.model.experts is not None:
            weights_ns = self.model.step_weight_bytes(tokens) * self._gemm_byte_ns
        gemm_ns = tokens * self._token_ns + seqs * self._sequence_flops_ns
        kv_ns = (kv_read_tokens + tokens) * self._kv_token_ns
        prefill_pairs = attention_pairs - kv_read_tokens
        step_ns = self._fixed_ns + (gemm_ns if gemm_ns > weights_ns else weights_ns) + kv_ns + seqs * self._sequence_ns
        if prefill_pairs > 0:
            step_ns += prefill_pairs * self._pair_ns
        step_ns += kv_read_tokens * self._late_slot_ns
        return round(step_ns), round(weights_ns + kv_ns)

    def score_ns(self, requests: int, pairs: int) -> int:
        """Return by how much scoring at intervals makes a step longer, in ns.

        Parameters
        ----------
        requests
            Requests scored behind the step; 0 in most steps.
        pairs
            Pairs of live keys over them, each with each: the sum of the squares of their live tokens.
        """
        return round((self.score_step_s + requests * self.score_request_s) * 1e9 + pairs * self._score_pair_ns)


@step_costs.register("linear")
@dataclass(frozen=True)
class LinearStepCost:
    """A fixed time and a time for each scheduled token; exact in nanoseconds.

    Parameters
    ----------
    base_s, per_token_s
        The two times. A step takes ``round(base) + round(per_token * tokens)`` nanoseconds.
    memory_share
        Share of the step during which memory bandwidth is busy, so that a copy beside it costs something: the default
        takes the whole step to be bound by memory.
    """

    name: ClassVar[str]
    base_s: float
    per_token_s: float
    memory_share: float = 1.0
    _base_ns: int = field(init=False, repr=False, compare=False)
    _token_ns: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for time_s in ("base_s", "per_token_s"):
            value = getattr(self, time_s)
            require(0 <= value < math.inf, f"step cost 'linear', {time_s}", "at least 0 seconds", value)
        require(self.base_s + self.per_token_s >= 1e-9, "step cost 'linear'", "a step of at least 1 ns", "0")
        share = self.memory_share
        require(0 <= share <= 1, "step cost 'linear', memory_share", "a share in [0, 1]", share)
        object.__setattr__(self, "_base_ns", round(self.base_s * 1e9))
        object.__setattr__(self, "_token_ns", self.per_token_s * 1e9)

    def step_s(self, tokens: int) -> float:
        """Return the time of a step in seconds, as a clock in floating point adds it up."""
        return self.base_s + self.per_token_s * tokens

    def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the time of a step and the part of it during which memory bandwidth is busy, in ns."""
        step_ns = self._base_ns + round(self._token_ns * tokens)
        return step_ns, step_ns if self.memory_share == 1 else round(step_ns * self.memory_share)
