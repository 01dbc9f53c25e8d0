"""A whole process against the peers: 10,000 requests of 1,000 + 200 tokens, start-up included."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.child import FailedError, Taken, vtoken
from benchmarks.figures import Figure, best_and_median
from benchmarks.peers import AISIMULATE, PEERS, SCHED_SIM, NotAvailableError

__all__ = ["measure"]

PART = "process"
PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 200
FULL_MOST = 1.0
EVICTING_MOST = 2.0

FULL = "ours, full, H100, 16/s"
FULL_A100 = "ours, full, A100, 8/s"
EVICTING = "ours, h2o + vtoken, 0.5, H100, 16/s"

_FULL = ("--policy", "full", "--reclaimer", "none")
_EVICTING = ("--policy", "h2o", "--reclaimer", "vtoken", "--budget", "0.5")

Simulate = Callable[[int], Taken]


def _ours(hardware: str, rate: float, *policy: str) -> Simulate:
    def simulate(requests: int) -> Taken:
        trace = f"poisson:rate={rate:g},n={requests},prompt={PROMPT_TOKENS},output={OUTPUT_TOKENS}"
        settings = ("--model", "llama-3.1-8b", "--hardware", hardware, "--block-size", "16", "--trace", trace)
        taken = vtoken("run", *settings, *policy, "--json", "--quiet")
        finished = json.loads(taken.output)["finished"]
        if finished != requests:
            raise FailedError(f"vtoken finished {finished} of {requests} requests")
        return taken

    return simulate


def measure(*, quick: bool = False) -> list[Figure]:
    """Run everything in turn, several rounds; ratios are taken within a round."""
    few, many = (200, 2000) if quick else (1000, 10_000)
    programs: dict[str, Simulate] = {
        FULL: _ours("h100", 16, *_FULL),
        EVICTING: _ours("h100", 16, *_EVICTING),
        FULL_A100: _ours("a100", 8, *_FULL),
    }
    missing: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="vtoken-bench-") as out:
        names = []
        for peer in PEERS:
            try:
                peer.install()
            except NotAvailableError as error:
                missing.append(Figure(PART, peer.requirement, None, "CPU s", note=str(error)))
                continue
            names.append(f"{peer.requirement.partition('.dev')[0]}, {peer.setting}")
            programs[names[-1]] = lambda requests, peer=peer: peer.simulate(requests, Path(out))  # type: ignore[misc]
        for simulate in programs.values():
            simulate(20)  # compiled kernels and bytecode are on disk after this
        rounds = [{name: _both(simulate, few, many) for name, simulate in programs.items()} for _ in range(3)]
    figures = [_process(name, [each[name][1] for each in rounds], many) for name in programs] + missing
    figures += [_loop(name, [each[name] for each in rounds], many - few) for name in programs]
    cpu_s = [{name: taken.cpu_s for name, (_, taken) in each.items()} for each in rounds]
    for ours, peer in ((FULL, AISIMULATE), (FULL_A100, SCHED_SIM)):
        same = [name for name in names if name.startswith(peer.name)]
        figures.append(_ratio(ours, f"by {peer.name}, same setting", cpu_s, same))
    # With fewer requests start-up is most of it, and the bounds mean nothing.
    for ours, most in ((FULL, FULL_MOST), (EVICTING, EVICTING_MOST)):
        figures.append(_ratio(ours, "by the fastest peer", cpu_s, names, None if quick else most))
    return figures


def _both(simulate: Simulate, few: int, many: int) -> tuple[Taken, Taken]:
    return simulate(few), simulate(many)


def _process(name: str, taken: list[Taken], requests: int) -> Figure:
    best, median = best_and_median([each.cpu_s for each in taken])
    wall_s = statistics.median(each.wall_s for each in taken)
    rss = max(each.rss_bytes for each in taken) / 2**20
    note = f"{requests:,} requests, {wall_s:.1f} s wall, {rss:,.0f} MiB"
    return Figure(PART, name, median, "CPU s", best, note=note)


def _loop(name: str, pairs: list[tuple[Taken, Taken]], requests: int) -> Figure:
    """Output tokens a CPU second, with start-up subtracted by the difference of two lengths."""
    rates = [requests * OUTPUT_TOKENS / (many.cpu_s - few.cpu_s) / 1e3 for few, many in pairs]
    name = f"{name}: loop"
    return Figure(PART, name, statistics.median(rates), "k output tokens a CPU s", max(rates))


def _ratio(
    ours: str, label: str, rounds: list[dict[str, float]], peers: list[str], most: float | None = None
) -> Figure:
    """Compare with whichever of ``peers`` took least CPU in the same round."""
    label = f"{ours} {label}"
    if not peers:
        return Figure(PART, label, None, "ratio of CPU s", most=most, note="not available")
    best, median = best_and_median([each[ours] / min(each[peer] for peer in peers) for each in rounds])
    fastest = min(peers, key=lambda peer: statistics.median(each[peer] for each in rounds))
    note = f"{fastest.partition(',')[0]}" + (
        "" if most is None or len(peers) == len(PEERS) else "; not all are available"
    )
    return Figure(PART, label, median, "ratio of CPU s", best, most=most, note=note)
