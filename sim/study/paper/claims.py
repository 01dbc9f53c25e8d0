"""The paper's claims, each with how it is judged (arXiv 2608.13263, by its abstract and readers' digests)."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sim.serving.models import get_model
from sim.study.paper.evidence import Evidence, Figure, cells, figure, grouped
from sim.study.paper.setups import ALWAYS, BASE, FRONTIER, MODELS, POLICIES, RATIOS, REPACK_ALWAYS, VTOKEN, FrontierRow
from sim.study.paper.verdict import Claim, World, near, reaches

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CLAIMS", "lines_of_code"]

RETAINED, THROUGHPUT, P95 = "retained_blocks_mean_change", "requests_per_s_change", "e2e_s_p95_change"
MOST_BLOCKS = 0.5
UNDER_PRESSURE = "under pressure"
SLA_TOLERANCE = 0.03
LINES = 50
LLAMA, MISTRAL, _ = MODELS


def in_worlds(table: pd.DataFrame) -> Iterator[tuple[dict[str, str], pd.DataFrame]]:
    """Yield the runs with vtoken of each world: when it repacks, lengths, memory, load; or one thing changed."""
    mine = table[table["reclaimer"].str.startswith(VTOKEN)]
    mine = mine[(mine["part"] == "main") | ~mine["variant"].isin((BASE, REPACK_ALWAYS))]
    by = ["part", "reclaimer", "variant", "lengths", "memory", "load"]
    for (_, reclaimer, variant, lengths, memory, load), group in grouped(mine, by):
        told = f"{load:g}" if isinstance(load, float) else str(load)
        name = f"{lengths}, {REPACK_ALWAYS if reclaimer == ALWAYS else UNDER_PRESSURE}"
        setting = {"": name if variant == BASE else f"{lengths}, {variant}", "memory": f"{memory:g}", "load": told}
        yield setting, group


def extremes(table: pd.DataFrame, column: str, paper: float, *, most: bool) -> World:
    """Return the world of the set-up with the most (or the least) of a change in the direction of the paper's."""
    pick = max if (paper > 0) == most else min
    cell = pick(cells(table, column), key=lambda each: each.figure.mean)
    return World({}, cell.figure, reaches(cell.figure, paper), f"{cell.policy} evicting {cell.ratio:g}, {cell.model}")


def end_of_range(column: str, paper: float, *, most: bool, parts: tuple[str, ...], model: str | None = None) -> Any:
    """Judge one end of a range of changes: the least or the most over all set-ups of a world."""

    def worlds(evidence: Evidence) -> list[World]:
        table = evidence.part(*parts)
        if model is not None:
            table = table[table["model"] == model]
        out = []
        for setting, group in in_worlds(table):
            found = extremes(group, column, paper, most=most)
            out.append(World(setting, found.figure, found.holds, found.cell))
        return out

    return worlds


def mean_change(column: str, paper: float, model: str) -> Any:
    """Judge the mean of a change over the set-ups of a model in each world."""

    def worlds(evidence: Evidence) -> list[World]:
        table = evidence.part("main")
        return [
            World(setting, found, near(found, paper))
            for setting, group in in_worlds(table[table["model"] == model])
            for found in [figure(group, column)]
        ]

    return worlds


def sla_most(paper: float) -> Any:
    """Judge the highest gain in SLA-constrained throughput."""

    def worlds(evidence: Evidence) -> list[World]:
        out = []
        for reclaimer, when in ((VTOKEN, UNDER_PRESSURE), (ALWAYS, REPACK_ALWAYS)):
            gains = list(sla_gains(evidence, reclaimer))
            for lengths, load in dict.fromkeys(about[1:] for about, *_ in gains):
                mine = [(gain, about, what) for about, what, gain in gains if about[1:] == (lengths, load)]
                gain, about, what = max(mine, key=lambda each: each[0])
                setting = {"": f"{lengths}, {when}", "load of the baseline": f"{load:g}"}
                cell = f"{what}, {about[0].model}, {about[0].memory:g} of the memory"
                out.append(World(setting, Figure(gain, gain, gain), gain * (1 + SLA_TOLERANCE) >= paper, cell))
        return out

    return worlds


def sla_gains(evidence: Evidence, reclaimer: str) -> Iterator[tuple[Any, str, float]]:
    """Yield (server, lengths, load), policy and ratio, and how many times naive's rate a reclaimer's is."""
    naive = {(each.about, each.policy, each.ratio): each.value for each in evidence.sla if each.reclaimer == "naive"}
    for each in evidence.sla:
        base = naive[each.about, each.policy, each.ratio]
        if each.reclaimer == reclaimer and base > 0 and not math.isnan(each.value):
            yield each.about, f"{each.policy} evicting {each.ratio:g}", each.value / base


def frontier_row(place: int) -> Any:
    """Judge a row of the frontier: natively as many as the paper's, and with vtoken as many."""

    def worlds(evidence: Evidence) -> list[World]:
        out = []
        for row, limit in evidence.frontier:
            if row == FRONTIER[place] and limit.reclaimer.startswith(VTOKEN):
                when = "always" if limit.reclaimer == ALWAYS else UNDER_PRESSURE
                setting = {"policy": limit.policy, "evicting": f"{limit.ratio:g}", "repack": when}
                same = limit.value == row.vtoken and native_limit(evidence, row) == row.native
                out.append(World(setting, Figure(limit.value, limit.value, limit.value), same))
        return out

    return worlds


def native_limit(evidence: Evidence, row: FrontierRow) -> float:
    """Return how many requests fit without eviction."""
    return next(limit.value for each, limit in evidence.frontier if each == row and limit.policy == "full")


def frontier_ratio(evidence: Evidence) -> list[World]:
    """Judge whether twice as many fit somewhere, in each world."""
    best: dict[tuple[str, ...], float] = {}
    for row, limit in evidence.frontier:
        if limit.reclaimer.startswith(VTOKEN):
            when = "always" if limit.reclaimer == ALWAYS else UNDER_PRESSURE
            key = (limit.policy, f"{limit.ratio:g}", when)
            best[key] = max(best.get(key, 0.0), limit.value / native_limit(evidence, row))
    return [
        World(dict(zip(("policy", "evicting", "repack"), key, strict=True)), Figure(ratio, ratio, ratio), ratio >= 2)
        for key, ratio in best.items()
    ]


def utilisation(model: str, paper: float) -> Any:
    """Judge how much fuller of living tokens the blocks are; in points, or as a share of what naive has."""

    def worlds(evidence: Evidence) -> list[World]:
        table = evidence.part("main")
        out = []
        for setting, group in in_worlds(table[table["model"] == model]):
            ours, naive = 1 - group["fragmentation_mean"], 1 - group["naive_fragmentation"]
            for measure, values in (("in points", ours - naive), ("of naive's", ours / naive - 1)):
                found = figure(group.assign(gain=values), "gain")
                out.append(World({**setting, "counted": measure}, found, near(found, paper)))
        return out

    return worlds


def fragmentation_at_16k(evidence: Evidence) -> list[World]:
    """Judge F of naive eviction at a context of 16K tokens."""
    out = []
    for cell in cells(evidence.part("16k"), "fragmentation_mean"):
        setting = {"": cell.lengths, "evicting": f"{cell.ratio:g}", "policy": cell.policy}
        out.append(World(setting, cell.figure, cell.figure.high >= 0.4 and cell.figure.low <= 0.6))
    return out


def half_used_at_16k(evidence: Evidence) -> list[World]:
    """Judge whether most blocks are at most half used there."""
    return [
        World(dict(zip(("", "evicting", "policy"), key, strict=True)), Figure(s, s, s), s > MOST_BLOCKS)
        for key, s in evidence.liveness.items()
    ]


def shared_prefix(paper: float) -> Any:
    """Judge the blocks of requests that share a prefix with seven others."""

    def worlds(evidence: Evidence) -> list[World]:
        table = evidence.part("prefix")
        mine = table[table["reclaimer"].str.startswith(VTOKEN)]
        by = ["lengths", "policy", "ratio", "variant"]
        out = []
        for (lengths, policy, ratio, variant), group in grouped(mine, by):
            found = figure(group, RETAINED)
            when = UNDER_PRESSURE if variant == BASE else variant
            setting = {"": f"{lengths}, {when}", "evicting": f"{ratio:g}", "policy": policy}
            out.append(World(setting, found, near(found, paper)))
        return out

    return worlds


def lines_a_policy(_: Evidence) -> list[World]:
    """Count the lines of code of this package's policies that the paper has, too; the longest decides."""
    name, most = max(_policy_lines().items(), key=lambda each: each[1])
    return [World({}, Figure(most, most, most), most < LINES, name)]


def _policy_lines() -> dict[str, int]:
    modules = {name: importlib.import_module(f"sim.kv.policies.{name}") for name in POLICIES}
    return {name: lines_of_code(inspect.getsource(module)) for name, module in modules.items()}


def lines_of_code(source: str) -> int:
    """Count the lines of a module without docstrings, comments, imports and ``__all__``."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        if isinstance(node, ast.stmt) and (docstring or names or imports):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in left_out for n, line in lines)


def each_repack_wins(evidence: Evidence) -> list[World]:
    """Judge whether every repack in effect frees more blocks than it takes, from the totals of each run."""
    out = []
    for setting, group in in_worlds(evidence.part("main", "variant")):
        runs = group[group["repacks_committed"] > 0]
        if len(runs):
            least = float((runs["blocks_freed_by_repack"] / runs["repacks_committed"]).min())
            out.append(World(setting, Figure(least, least, least), least >= 1))
    return out


def varied(prefix: str, column: str) -> Any:
    """Show how a change depends on something: no figure of the paper's is known to hold it to."""

    def worlds(evidence: Evidence) -> list[World]:
        table = evidence.part("variant")
        mine = table[table["reclaimer"].str.startswith(VTOKEN)]
        told = mine["variant"].str.startswith(prefix) | (mine["variant"] == BASE)
        groups = grouped(mine[told], ("variant",))
        return [World({"": variant}, figure(group, column), None) for (variant,), group in groups]

    return worlds


def distribution(evidence: Evidence) -> list[World]:
    """Show the quantiles of the reductions over all set-ups that were tried."""
    import numpy as np

    table = evidence.part("main")
    quantiles = (("largest", 0.0), ("a quarter at least", 0.25), ("half at least", 0.5), ("smallest", 1.0))
    out = []
    for reclaimer, when in ((VTOKEN, UNDER_PRESSURE), (ALWAYS, REPACK_ALWAYS)):
        values = [cell.figure.mean for cell in cells(table[table["reclaimer"] == reclaimer], RETAINED)]
        found = [(name, float(np.quantile(values, q))) for name, q in quantiles]
        out += [World({"": f"{when}, {name}"}, Figure(value, value, value), None) for name, value in found]
    return out


def nothing(_: Evidence) -> list[World]:
    """Return no world: it is not simulated."""
    return []


def says(text: str) -> Callable[[Evidence, Sequence[World]], str]:
    """Return what says the same whatever came out."""
    return lambda _, __: text


def why_least(_: Evidence, worlds: Sequence[World]) -> str:
    """Say which set-up is the weakest, and how many worlds repack nothing at all."""
    idle = sum(world.figure.mean == 0 and world.figure.half == 0 for world in worlds)
    return f"In {idle} of {len(worlds)} worlds some set-up is never short of memory, and nothing is repacked."


def why_most(evidence: Evidence, _: Sequence[World]) -> str:
    """Say what a cache without any holes has, which nothing can beat."""
    table = evidence.part("main", "variant")
    bound = table[table["reclaimer"] == "ideal"][RETAINED].min()
    share = max(RATIOS)
    return (
        f"With {share:.0%} of the tokens evicted, a cache without holes (ideal) holds at most {-bound:.1%} fewer "
        f"blocks here; by its closed form {share:.0%}."
    )


def why_frontier(_: Evidence, __: Sequence[World]) -> str:
    """Say what decides."""
    return (
        "Below theta_f nothing is repacked, so at most 1 - theta_f of the pool comes to live: half of the tokens kept "
        "make 1.5 times native under pressure, 2 times if repacking looks at no threshold (experiment 05)."
    )


def why_indirection(_: Evidence, __: Sequence[World]) -> str:
    """Compare the bytes of the tables with those of K and V."""
    kv_bytes = get_model(LLAMA).kv_bytes_per_token
    return (
        "What looking slots up costs on the host and on the device is not simulated; a profile measured on a GPU has "
        f"it (vtoken calibrate). In bytes: 8 a token and step beside the {kv_bytes:,} of its K and V, "
        f"{8 / kv_bytes:.4%}."
    )


def why_lines(_: Evidence, __: Sequence[World]) -> str:
    """Say what was counted."""
    counts = ", ".join(f"{name} {count}" for name, count in _policy_lines().items())
    return (
        f"This project's policies, without blank lines, comments, docstrings and imports: {counts}. What integrating "
        "one into vLLM by hand takes (500 and more) is not counted here."
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "retained_least", "fewer KV blocks a request than Naive-Evict: at least", "-27.2 %", "A",
        "every set-up of a world reaches it", "%",
        end_of_range(RETAINED, -0.272, most=False, parts=("main", "variant")), why_least,
    ),
    Claim(
        "retained_most", "fewer KV blocks a request than Naive-Evict: up to", "-72.3 %", "A",
        "some set-up of a world reaches it", "%",
        end_of_range(RETAINED, -0.723, most=True, parts=("main", "variant")), why_most,
    ),
    Claim(
        "sla", "SLA-constrained throughput, times Naive-Evict's: up to", "1.37", "A",
        "some set-up of a world reaches it, within the 3 % of the search", "x", sla_most(1.37),
        says(
            "p95 latency at most 1.05 times that of naive eviction at the load of the baseline; at which load the "
            "paper measures it is not known."
        ),
    ),
    Claim(
        "mistral_throughput_least", "throughput, Mistral-7B: at least", "+9.9 %", "B",
        "every set-up of a world reaches it", "%",
        end_of_range(THROUGHPUT, 0.099, most=False, parts=("main",), model=MISTRAL), why_least,
    ),
    Claim(
        "mistral_throughput_most", "throughput, Mistral-7B: up to", "+37.3 %", "B",
        "some set-up of a world reaches it", "%",
        end_of_range(THROUGHPUT, 0.373, most=True, parts=("main",), model=MISTRAL),
        says("Where requests arrive more slowly than they can be served, throughput is what arrives."),
    ),
    Claim(
        "mistral_p95_least", "p95 latency, Mistral-7B: at least", "-9.9 %", "B",
        "every set-up of a world reaches it", "%",
        end_of_range(P95, -0.099, most=False, parts=("main",), model=MISTRAL), why_least,
    ),
    Claim(
        "mistral_p95_most", "p95 latency, Mistral-7B: up to", "-27.5 %", "B",
        "some set-up of a world reaches it", "%",
        end_of_range(P95, -0.275, most=True, parts=("main",), model=MISTRAL),
        says("Beyond saturation latency says how long one watched."),
    ),
    Claim(
        "llama_throughput", "throughput, Llama-3.1-8B, mean", "+18.9 %", "B",
        "the mean over a world's set-ups is the paper's to within a quarter", "%",
        mean_change(THROUGHPUT, 0.189, LLAMA), says("The mean is over 9 set-ups: 3 policies, 3 ratios."),
    ),
    Claim(
        "llama_p95", "p95 latency, Llama-3.1-8B, mean", "-14.7 %", "B",
        "the mean over a world's set-ups is the paper's to within a quarter", "%",
        mean_change(P95, -0.147, LLAMA), says("As for the throughput."),
    ),
    *(
        Claim(
            f"frontier_{name}", f"requests that fit together, {title}", paper, "B",
            "both figures come out", "requests", frontier_row(place), why_frontier,
        )
        for place, (name, title, paper) in enumerate((
            ("llama_35", "Llama-3.1-8B, 0.35 of the memory", "5 -> 8"),
            ("llama_50", "Llama-3.1-8B, 0.50", "11 -> 22"),
            ("qwen", "Qwen2.5-14B", "3 -> 6"),
        ))
    ),
    Claim(
        "frontier_ratio", "requests that fit together, times native: up to", "2", "A",
        "some row has it", "x", frontier_ratio, why_frontier,
    ),
    Claim(
        "utilisation_llama", "KV memory utilisation, Llama-3.1-8B", "+21.9 %", "B",
        "the mean over a world's set-ups is the paper's to within a quarter", "%", utilisation(LLAMA, 0.219),
        says("Live tokens over slots of allocated blocks. Whether the paper's is in points or a share is not known."),
    ),
    Claim(
        "utilisation_mistral", "KV memory utilisation, Mistral-7B", "+21.7 %", "B",
        "the mean over a world's set-ups is the paper's to within a quarter", "%", utilisation(MISTRAL, 0.217),
        says("As for Llama-3.1-8B."),
    ),
    Claim(
        "fragmentation_16k", "fragmentation F of naive eviction at 16K tokens", "0.4 .. 0.6", "B",
        "F is in the range", "", fragmentation_at_16k,
        says("Random eviction in one go leaves F at the share evicted, whatever the context; clustered deaths less."),
    ),
    Claim(
        "half_used_16k", "share of blocks at most half used at 16K tokens", "most", "B",
        "more than half of the blocks", "share", half_used_at_16k,
        says("Of the blocks allocated at the last sample of a run."),
    ),
    Claim(
        "prefix", "blocks a request, 8 sharing a prefix", "-42.2 %", "C",
        "the figure is the paper's to within a quarter", "%", shared_prefix(-0.422),
        says("The shared part is left alone, so the share of the prompt that is shared decides (experiment 03)."),
    ),
    Claim(
        "each_repack_wins", "a repack frees more blocks than it takes", "always", "B",
        "no run frees fewer blocks than it has repacks", "blocks", each_repack_wins,
        says("Least blocks won a repack, of all runs. The plan is checked again when it takes effect."),
    ),
    Claim(
        "lines", "lines of code a policy", f"< {LINES}", "A", f"each of the paper's three is under {LINES}", "lines",
        lines_a_policy, why_lines,
    ),
    Claim(
        "indirection", "cost of the token table alone", "< 1 %", "B", "", "%", nothing, why_indirection,
    ),
    Claim(
        "stability", "outputs with and without repacking alike (ROUGE-L F1 -0.0016, 93.1 % within 0.01)", "alike", "B",
        "", "", nothing,
        says(
            "No text is generated here. The same tokens die with and without a repack, and the replay checks that "
            "every byte of a moved token is where it should be; the order of sums in a kernel is what is left."
        ),
    ),
    Claim(
        "theta_f", "sensitivity to theta_f: blocks a request", "not known", "B", "", "%", varied("theta_f", RETAINED),
        says("No figure of the paper's is known to us. Llama-3.1-8B at 0.35 of the memory, mean over the set-ups."),
    ),
    Claim(
        "block_size", "sensitivity to the block size (16, 32, 48): blocks a request", "not known", "B", "", "%",
        varied("block_size", RETAINED), says("As for theta_f; the pool has the same bytes."),
    ),
    Claim(
        "headroom", "headroom: requests a second", "not known", "B", "", "%", varied("headroom", THROUGHPUT),
        says("As for theta_f."),
    ),
    Claim(
        "distribution", "distribution of the reductions of retained blocks", "not known", "B", "", "%", distribution,
        says("Over all set-ups, memories and loads."),
    ),
)  # fmt: skip
