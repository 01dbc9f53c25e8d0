"""What one run is: a frozen, validated configuration that reads and writes TOML and JSON and has a hash."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.errors import InputError, did_you_mean
from sim.registry import parse_spec

__all__ = ["BUDGETS", "SimConfig", "memory_bytes", "overlay", "read_toml"]

DEFAULT_BUDGET = 0.5

WORKLOAD = "Workload"
MACHINE = "Model and hardware"
EVICTION = "Eviction and reclamation"
SCHEDULER = "Scheduler"
REPACK = "Repacking"
COSTS = "Attention and costs"


def _field(group: str, default: Any, description: str, **rules: Any) -> Any:
    """Describe a field; ``group`` is the heading its flag appears under in ``--help``."""
    return Field(default, description=description, json_schema_extra={"group": group}, **rules)


BUDGETS = ("budget", "budget_tokens", "budget_memory")
"""Fields of which a run has only one."""

_LATER = (
    "async_scheduling",
    "shared_blocks",
    "budget_memory",
    "kv_dtype",
    "budget_scope",
    "granularity",
    "block_tables",
    "simulated_layers",
    "table_us",
    "evict_every",
)
"""Fields that came after the first release: see :meth:`SimConfig.hash`."""


class SimConfig(BaseModel):
    """The full configuration of one simulation.

    Field names are the command line's flags with underscores. Objects are frozen; :meth:`replace` makes a changed copy.
    A value that cannot be used raises :class:`sim.errors.InputError` with one line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, title="vtoken-sim run")

    trace: str = _field(
        WORKLOAD,
        "default",
        "Trace file in any supported format, 'default' (the embedded small trace), or a generator such as "
        "poisson:rate=16,n=10000,prompt=1000,output=200.",
        min_length=1,
    )
    format: str | None = _field(WORKLOAD, None, "Format of the trace file; recognised by its content when not given.")
    arrivals: str | None = _field(
        WORKLOAD, None, "Arrival process for a file that holds lengths only, such as poisson:rate=4 (requests/s)."
    )
    head: int | None = _field(WORKLOAD, None, "Use only the first requests of the trace, this many.", ge=1)
    rate_scale: float = _field(
        WORKLOAD, 1.0, "Divide every gap between arrivals by this: 2 offers the requests twice as fast.", gt=0
    )

    model: str = _field(MACHINE, "llama-3.1-8b", "Model preset; `vtoken models` lists them.", min_length=1)
    hardware: str = _field(MACHINE, "h100", "Hardware preset; `vtoken hardware` lists them.", min_length=1)
    gpu_memory_utilization: float = _field(
        MACHINE,
        0.9,
        "Share of the device memory for weights, activations and KV cache together "
        "(vLLM: 0.9; 0.92 in newer versions).",
        gt=0,
        le=1,
    )
    kv_blocks: int | None = _field(
        MACHINE,
        None,
        "Blocks in the KV pool, block 0 included, which is never handed out (vLLM's num_gpu_blocks); worked out from "
        "model, hardware and utilisation when not given.",
        ge=2,
    )
    block_size: int = _field(MACHINE, 16, "Token slots in a block (vLLM: 16 on NVIDIA devices).", ge=1)
    kv_dtype: Literal["auto", "bf16", "fp8", "int4"] = _field(
        MACHINE,
        "auto",
        "Number format of the KV cache: the model's own (bf16), or 2, 1 or half a byte an element. int4 adds 4 bytes "
        "of scale and zero point for each token, layer and KV head, keys and values by themselves; fp8 has one scale a "
        "layer. Answer quality is not modelled.",
    )

    policy: str = _field(
        EVICTION,
        "h2o",
        "Eviction policy, name or name:key=value,...; `vtoken policies` lists them. 'full' evicts nothing.",
        min_length=1,
    )
    budget: float | None = _field(
        EVICTION,
        None,
        "Tokens a request keeps, as a share of its current length, from the end of the prompt on "
        f"({DEFAULT_BUDGET} when no budget is given; not used by policy full).",
        gt=0,
        le=1,
    )
    budget_tokens: int | None = _field(EVICTION, None, "Tokens a request keeps, as a fixed number.", ge=1)
    budget_memory: str | None = _field(
        EVICTION,
        None,
        "KV memory that the tokens a request keeps may take, such as 512MiB or 2GB; by the model's bytes a token.",
    )
    budget_scope: Literal["request", "batch"] = _field(
        EVICTION,
        "request",
        "Whose tokens compete for a budget: each request's for its own, or those of all requests that decode for the "
        "sum of their budgets. With batch, who dies depends on who runs beside whom, so reclaimers see other deaths.",
    )
    evict_every: int = _field(
        EVICTION,
        1,
        "Decode steps of a request from one eviction to the next: its tokens are over the budget by up to that many "
        "less one. Every request is cut to its budget at the end of its prompt.",
        ge=1,
    )
    reclaimer: str = _field(
        EVICTION,
        "vtoken",
        "What happens to the slots of dead tokens, name or name:key=value,...; `vtoken reclaimers` lists them.",
        min_length=1,
    )

    granularity: Literal["shared", "per_layer", "per_head"] = _field(
        EVICTION,
        "shared",
        "Who decides alone which tokens live: the whole model (shared), each layer, or each KV head of each layer.",
    )
    block_tables: Literal["per_unit", "shared"] = _field(
        EVICTION,
        "per_unit",
        "Whose blocks: each layer or head that decides alone has block tables of its own (per_unit), or all share one, "
        "and a slot is free only when each of them has dropped its token. Not used with granularity shared.",
    )
    simulated_layers: int | None = _field(
        EVICTION,
        None,
        "Layers to simulate one by one, each standing for an equal share of the model's; all when not given. Fewer are "
        "faster; with block_tables shared they understate what stays alive. Not used with granularity shared.",
        ge=1,
    )

    max_num_seqs: int = _field(
        SCHEDULER,
        256,
        "Most requests that run at once (vLLM: 256; 1024 in newer versions on devices from 70 GiB).",
        ge=1,
    )
    max_num_batched_tokens: int = _field(
        SCHEDULER, 8192, "Most tokens scheduled in a step (vLLM's server: 8192 on an H100-class device).", ge=1
    )
    max_model_len: int | None = _field(
        SCHEDULER, None, "Longest prompt + output that is served; the model's own limit when not given (as vLLM).", ge=2
    )
    long_prefill_token_threshold: int = _field(
        SCHEDULER, 0, "Most prompt tokens of one request scheduled in a step; 0 is no such limit (vLLM: 0).", ge=0
    )
    watermark: float = _field(
        SCHEDULER,
        0.0,
        "Share of the pool that an admission must leave free while anything runs (vLLM: 0).",
        ge=0,
        lt=1,
    )
    reserve_full_prompt: bool = _field(
        SCHEDULER, True, "Admit a request only when its whole current sequence fits (vLLM: yes)."
    )
    async_scheduling: bool = _field(
        SCHEDULER,
        False,
        "Decide on the next step while one is on the device (vLLM's default on GPUs).",
    )
    prefix_caching: bool = _field(
        SCHEDULER,
        False,
        "Share blocks between requests with equal prefixes (vLLM: on).",
    )

    repack_when: Literal["pressure", "always"] = _field(
        REPACK, "pressure", "Repack under memory pressure only (the paper), or whenever a repack frees a block."
    )
    theta_f: float = _field(
        REPACK, 0.25, "Repack only while the fragmentation is above this (the paper: 0.25).", ge=0, le=1
    )
    low_watermark: float = _field(
        REPACK,
        0.1,
        "Memory pressure: fewer than this share of the pool is free. Our choice, the paper does not name one.",
        ge=0,
        le=1,
    )
    shared_blocks: Literal["skip", "copy_out"] = _field(
        REPACK,
        "skip",
        "Blocks that several requests read: leave them alone (the paper), or have all readers copy their tokens out "
        "of them together where that takes fewer blocks than it frees.",
    )
    headroom_blocks: int | None = _field(
        REPACK,
        None,
        "Blocks kept free as destinations of a repack; 2 % of the pool, at least 1, when not given. Our choice, "
        "the paper does not name one.",
        ge=0,
    )

    attention: str = _field(
        COSTS,
        "synthetic",
        "What the policy sees: synthetic, uniform, or recorded:FILE.",
        min_length=1,
    )
    step_cost: str = _field(
        COSTS,
        "auto",
        "Time of a step: auto (the measured profile that comes along for model and hardware, roofline where there is "
        "none), roofline, linear:base_s=0.008,per_token_s=2e-5, profile:h100, or profile:FILE.",
        min_length=1,
    )
    copy_cost: str = _field(
        COSTS,
        "bandwidth",
        "Time of a repack's copy: bandwidth, linear:base_s=0,per_token_s=2e-5, profile:h100, or profile:FILE.",
        min_length=1,
    )
    score_reads: float = _field(
        COSTS,
        0.5,
        "What a policy that looks at attention in every step costs: share of the KV that a step reads once more to get "
        "the probabilities, which FlashAttention does not give (keys are half of K and V). Our choice; 0 assumes that "
        "they come for free.",
        ge=0,
        le=100,
    )
    table_us: float = _field(
        COSTS,
        0.6,
        "Time of a step for each block table of a request beyond its first, in microseconds. Ours, measured on a CPU "
        "(docs/granularity.md); not used where a request has one table.",
        ge=0,
    )
    seed: int = _field(WORKLOAD, 0, "Seed of everything that is drawn.", ge=0)

    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise InputError(_one_line(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Accept paths and numpy scalars, and settle which budget applies."""
        values = {key: _plain(value) for key, value in fields.items()}
        given = [name for name in BUDGETS if values.get(name) is not None]
        if len(given) > 1:
            raise InputError(f"{given[0]} and {given[1]} exclude each other: give one of {', '.join(BUDGETS)}")
        if _name(values.get("policy")) == "full":
            # Full retention has no budget: equal runs get equal configurations, and equal hashes.
            values |= dict.fromkeys(BUDGETS)
            values.pop("budget_scope", None)
            values.pop("evict_every", None)
        elif not given:
            values["budget"] = DEFAULT_BUDGET
        elif given == ["budget_memory"]:
            values["budget_memory"] = _memory(values["budget_memory"])
        if values.get("granularity", "shared") == "shared":
            # There is one table and one decision, however many layers.
            for name in ("block_tables", "simulated_layers"):
                values.pop(name, None)
        return values

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        """Refuse combinations that mean nothing."""
        policy, reclaimer = _name(self.policy), _name(self.reclaimer)
        if reclaimer == "none" and policy not in ("full", "quest"):
            raise InputError(f"reclaimer none keeps every token, but policy {policy} evicts: use policy full with it")
        if self.evict_every > 1 and self.budget_scope == "batch":
            raise InputError("evict_every: a budget of the whole batch is kept in every step, leave evict_every at 1")
        return self

    def replace(self, **changes: Any) -> SimConfig:
        """Return a copy with some fields changed; a new budget of either kind takes the place of the old one."""
        return SimConfig(**overlay(self.model_dump(), changes))

    @property
    def keeps(self) -> str:
        """The budget in words: ``"0.5"``, ``"512 tokens"``, ``"2GiB"`` or ``"all"``."""
        if self.budget_tokens is not None:
            return f"{self.budget_tokens} tokens"
        return self.budget_memory or ("all" if self.budget is None else f"{self.budget:g}")

    def tokens_kept(self, kv_bytes_per_token: int) -> int | None:
        """Return the budget as a number of tokens, if it is one or is memory; None if it is a share.

        Raises
        ------
        InputError
            If the memory does not hold one token.
        """
        if self.budget_memory is None:
            return self.budget_tokens
        tokens = memory_bytes(self.budget_memory) // kv_bytes_per_token
        if tokens < 1:
            raise InputError(
                f"budget_memory: {self.budget_memory} is less than one token of {self.model}, "
                f"which takes {kv_bytes_per_token:,} bytes"
            )
        return tokens

    @property
    def label(self) -> str:
        """Policy, budget and reclaimer, for titles."""
        keeps = "" if self.keeps == "all" else f" keeping {self.keeps}"
        return f"{self.policy}{keeps}, {self.reclaimer}"

    def hash(self) -> str:
        """Return 16 hex digits that name everything which influences the result.

        A file (trace, recorded attention, cost profile) enters by its content, so that moving it changes nothing; so
        does a profile that comes along, and the step cost ``auto`` enters as what it stands for. Specifications enter
        with their parameters sorted. A field that is younger than the first stores enters only
        where it is not at its default, so that these stores keep their names.
        """
        values = self.model_dump()
        values["step_cost"], values["copy_cost"] = _costs(self)
        for key in ("trace", "policy", "reclaimer", "attention", "step_cost", "copy_cost", "arrivals"):
            values[key] = _identity(values[key])
        for key in _LATER:
            if values[key] == type(self).model_fields[key].default:
                del values[key]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the configuration as a JSON object."""
        return json.dumps(self.model_dump(), indent=2)

    def to_toml(self) -> str:
        """Return the configuration as TOML; fields without a value are left out."""
        return "".join(f"{key} = {_toml(v)}\n" for key, v in self.model_dump().items() if v is not None)

    @classmethod
    def from_json(cls, text: str, *, where: str = "configuration") -> SimConfig:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        InputError
            If it is not a JSON object or a field cannot be used; the line starts with ``where``.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InputError(f"{where}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise InputError(f"{where}: expected a JSON object, got {type(values).__name__}")
        return cls.from_fields(values, where=where)

    @classmethod
    def from_toml(cls, path: str | Path, **overrides: Any) -> SimConfig:
        """Read a TOML file; ``overrides`` win over what it says.

        Raises
        ------
        InputError
            If the file cannot be read, is not TOML, or a field cannot be used.
        """
        return cls.from_fields(overlay(read_toml(path), overrides), where=str(path))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, where: str = "") -> SimConfig:
        """Build from a mapping; an error starts with ``where``."""
        try:
            return cls(**fields)
        except InputError as error:
            raise InputError(f"{where}: {error}" if where else str(error)) from None


def overlay(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay ``changes`` over ``base``; a budget of one kind removes the other kind from the base."""
    merged = dict(base)
    if any(changes.get(key) is not None for key in BUDGETS):
        for key in BUDGETS:
            merged.pop(key, None)
    return merged | dict(changes)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file into a dictionary.

    Raises
    ------
    InputError
        If it cannot be read or is not TOML; the line says where.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected TOML text, got bytes that are not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from None


_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def memory_bytes(text: str) -> int:
    """Return the bytes that ``"512MiB"`` or ``"1.5 GB"`` means.

    Raises
    ------
    InputError
        If it is not a number of at least 0 with a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise InputError(f"budget_memory: expected a number with one of {', '.join(_UNITS)}, got {text!r}")
    return round(float(match[1]) * units[match[2].lower()])


def _memory(value: object) -> object:
    """Write a size in the largest unit that divides it, so that equal sizes are equal text."""
    if not isinstance(value, str):
        return value  # of a wrong type: pydantic says so
    size = memory_bytes(value)
    unit = max((unit for unit in _UNITS if size % _UNITS[unit] == 0), key=lambda unit: _UNITS[unit])
    return f"{size // _UNITS[unit]}{unit}" if size else "0B"


def _toml(value: Any) -> str:
    """Write a string, number or truth value as TOML: as JSON does, but for two things about strings."""
    # TOML has no surrogate pairs, and wants the delete character escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(value: Any) -> Any:
    """Turn paths into strings and numpy scalars into Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _name(spec: object) -> str:
    """Return the name part of ``name:key=value,...``."""
    return str(spec).partition(":")[0].strip()


def _one_line(error: ValidationError) -> str:
    """Say the first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return str(cause)
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown field {field!r}{did_you_mean(field.replace('-', '_'), SimConfig.model_fields)}"
    expected = first["msg"].replace("Input should be", "expected")
    hint = ""
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        hint = did_you_mean(first["input"], get_args(SimConfig.model_fields[field].annotation))
    return f"{field}: {expected}, got {first['input']!r}{hint}"


def _identity(spec: str | None) -> str | None:
    """Return what a trace or specification stands for, whatever it is called.

    ``FILE`` and ``name:FILE`` become the sha256 of the file; ``name:b=1,a=2`` gets its parameters sorted.
    """
    if spec is None:
        return None
    name, _, rest = spec.partition(":")
    if Path(spec).is_file():
        return "sha256:" + _digest(spec)
    if rest and Path(rest).is_file():
        return f"{name}:sha256:{_digest(rest)}"
    try:
        name, parameters = parse_spec(spec)
    except InputError:
        return spec  # not a specification: the run will say so
    for key, value in parameters.items():
        if Path(value).is_file():
            parameters[key] = "sha256:" + _digest(value)
    return name + ":" + ",".join(f"{key}={parameters[key]}" for key in sorted(parameters))


def _costs(config: SimConfig) -> tuple[str, str]:
    """Return the two cost specifications with ``auto`` resolved, and profiles by their files."""
    from sim.serving.cost import resolve_step_cost, with_path
    from sim.serving.hardware import get_hardware
    from sim.serving.models import get_model
    from sim.serving.profile_cost import find_profile

    try:
        model, hardware = get_model(config.model, config.kv_dtype), get_hardware(config.hardware)
        found = []
        for spec in (resolve_step_cost(config.step_cost, model=model, hardware=hardware), with_path(config.copy_cost)):
            name, parameters = parse_spec(spec)
            if name == "profile" and "path" in parameters:
                parameters["path"] = str(find_profile(parameters["path"], model.name, model.kv_dtype))
            found.append(name + ":" + ",".join(f"{key}={value}" for key, value in parameters.items()))
    except InputError:
        return config.step_cost, config.copy_cost  # the run will say so
    return found[0], found[1]


def _digest(path: str) -> str:
    """Return the sha256 of a file; a sweep asks for the same one again and again."""
    status = os.stat(path)
    return _digest_as_of(os.path.abspath(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _digest_as_of(path: str, size: int, mtime_ns: int) -> str:  # noqa: ARG001 - they are the cache's key
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
