"""The report of ``on_gpu.sh``: what was to be shown, what was measured, and whether it is enough."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Target", "main", "targets"]

COPY_SHARE = 0.85
"""Of the device's copy rate, that a repack must reach from :data:`FROM_TOKENS` tokens on."""

FROM_TOKENS = 4096
BEYOND_BYTES = 0.05
"""By how much more than its bytes explain a copy may slow decode."""


class Target(NamedTuple):
    """One line of the report.

    Attributes
    ----------
    name, wanted, found
        What, how much was wanted, and what there is.
    met
        None where it was not measured, or does not apply.
    """

    name: str
    wanted: str
    found: str
    met: bool | None


def targets(folder: Path, *, on_gpu: bool) -> Iterator[Target]:
    """Judge the files of a run.

    Parameters
    ----------
    folder
        What ``on_gpu.sh`` wrote.
    on_gpu
        Whether targets of speed apply.
    """
    for name in ("verify", "verify_paged", "verify_fp8"):
        if name == "verify" or on_gpu:
            yield from _verified(name, _read(folder / f"{name}.json"), on_gpu=on_gpu)
    yield _layouts(_read(folder / "layouts.json"))
    facts = _read(folder / "profile.facts.json")
    yield _of_speed("repack against the copy rate", facts, _repack, on_gpu=on_gpu)
    yield _of_speed("decode beside a copy", facts, _beside, on_gpu=on_gpu)
    yield _of_speed("predicted total time", _read(folder / "validation" / "summary.json"), _total, on_gpu=on_gpu)


def _verified(name: str, result: dict[str, Any] | None, *, on_gpu: bool) -> Iterator[Target]:
    wanted = "every token's bytes and attention's output right, copies seen"
    if result is None:
        yield Target(name, wanted, "not measured", None)
        return
    right = (
        result["layouts_checked"] == result["steps"] > 0
        and (result["tokens_verified"] or 0) > 0
        and (result["outputs_verified"] or 0) > 0
        and result["tokens_seen_moved"] == result["tokens_copied"] > 0
    )
    yield Target(
        f"{name} ({result['attention']}, {result['dtype']})",
        wanted,
        f"{result['steps']:,} steps, {result['tokens_verified']:,} tokens, {result['outputs_verified']:,} rows, "
        f"largest error {result['max_error']:.1e}; {result['tokens_copied']:,} tokens copied",
        right,
    )
    captured = result["graph"] == ("captured" if on_gpu else "recorded")
    yield Target(
        f"{name}: graph",
        "the same bytes as kernel by kernel",
        f"{result['graph']}, {result['graph_checks']:,} steps compared",
        captured and result["graph_checks"] > 0,
    )


def _layouts(result: dict[str, Any] | None) -> Target:
    name, wanted = "block counts", "the simulator's layout, block for block, after every step"
    if result is None:
        return Target(name, wanted, "not measured", None)
    exact = result["layouts_checked"] == result["steps"] == result["last_step"] - result["first_step"] + 1
    return Target(name, wanted, f"equal after {result['layouts_checked']:,} of {result['steps']:,} steps", exact)


def _of_speed(
    name: str,
    measured: dict[str, Any] | None,
    judge: Callable[[dict[str, Any]], tuple[str, str, bool | None]],
    *,
    on_gpu: bool,
) -> Target:
    """Judge a speed; on a CPU it is told, and is no target."""
    if measured is None:
        return Target(name, "", "not measured", None)
    wanted, found, met = judge(measured)
    return Target(name, wanted, found, met) if on_gpu else Target(name, f"{wanted} (on a GPU)", found, None)


def _repack(facts: dict[str, Any]) -> tuple[str, str, bool | None]:
    rows = [row for row in facts["repack"] if row["tokens"] >= FROM_TOKENS]
    wanted = f"at least {COPY_SHARE:.0%} from {FROM_TOKENS:,} tokens up"
    if not rows:
        return wanted, "no copy of that many tokens", None
    least = min(rows, key=lambda row: float(row["of_copy_rate"]))
    found = (
        f"least {least['of_copy_rate']:.1%}, {least['bytes_per_s'] / 1e9:,.0f} GB/s with {least['tokens']:,} tokens "
        f"({'scattered' if least['scattered'] else 'neighbours'}); copy rate "
        f"{facts['plain_copy_bytes_per_s'] / 1e9:,.0f} GB/s"
    )
    return wanted, found, least["of_copy_rate"] >= COPY_SHARE


def _beside(facts: dict[str, Any]) -> tuple[str, str, bool | None]:
    rows = facts["beside"]
    wanted = f"slower by what the copy's bytes explain, plus {BEYOND_BYTES:.0%} at most"
    if not rows:
        return wanted, "no copy beside decode", None
    worst = max(rows, key=lambda row: float(row["slower"] - row["bytes_explain"]))
    found = (
        f"worst {worst['slower']:+.1%} where bytes explain {worst['bytes_explain']:.1%} "
        f"({worst['tokens']:,.0f} tokens beside {worst['steps']:.0f} steps of {worst['batch']:.0f} requests)"
    )
    return wanted, found, worst["slower"] - worst["bytes_explain"] <= BEYOND_BYTES


def _total(summary: dict[str, Any]) -> tuple[str, str, bool | None]:
    found = (
        f"{summary['difference']:+.1%} over {summary['groups']['all']['steps']:,} steps; "
        f"{summary['repeats']} runs differ by {summary['spread_of_repeated_totals']:.1%}"
    )
    return f"within {summary['tolerance']:.0%} of the measured one", found, summary["within_tolerance"]


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def report(folder: Path, found: list[Target]) -> str:
    """Return the report as Markdown."""
    words = {True: "PASS", False: "FAIL", None: "-"}
    lines = ["# What was measured", ""]
    lines += ["```", (folder / "versions.txt").read_text().strip(), "```", ""]
    lines += ["| | target | wanted | found |", "|---|---|---|---|"]
    lines += [f"| {words[one.met]} | {one.name} | {one.wanted} | {one.found} |" for one in found]
    facts = _read(folder / "profile.facts.json")
    if facts is not None:
        rate = facts["plain_copy_bytes_per_s"] / 1e9
        lines += ["", f"Repack, all layers in one launch (copy rate {rate:,.0f} GB/s, read and written):", ""]
        lines += ["| tokens | | us | us, eager | GB/s | of the copy rate |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {row['tokens']:,} | {'scattered' if row['scattered'] else 'neighbours'} | {row['ns'] / 1e3:,.1f} "
            f"| {row['eager_ns'] / 1e3:,.1f} | {row['bytes_per_s'] / 1e9:,.0f} | {row['of_copy_rate']:.1%} |"
            for row in facts["repack"]
        ]
    table = folder / "validation" / "report.md"
    if table.is_file():
        lines += ["", *table.read_text().splitlines()[2:]]
    lines += ["", "Parts:", "", *(f"- {line}" for line in (folder / "parts.txt").read_text().splitlines())]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write ``report.md`` and say whether all targets that apply are met and every part has run.

    Parameters
    ----------
    arguments
        The folder, and the device.
    """
    folder, device = Path(arguments[0]), arguments[1]
    found = list(targets(folder, on_gpu=device.startswith("cuda")))
    text = report(folder, found)
    (folder / "report.md").write_text(text)
    print(text)
    parts = (folder / "parts.txt").read_text().splitlines()
    # Validation's exit code says what its target says.
    complete = all("exit 0" in line or line.startswith("validate: exit 1") for line in parts)
    return 0 if complete and not any(one.met is False for one in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
