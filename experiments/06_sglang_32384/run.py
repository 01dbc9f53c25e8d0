"""Count the whole pages that eviction frees, and compare with the zero of SGLang discussion 32384.

python experiments/06_sglang_32384/run.py             simulate: simulated.csv, differences.csv, pictures, tables
python experiments/06_sglang_32384/run.py --draw      the pictures and tables again, from the files
python experiments/06_sglang_32384/run.py --captures FOLDER    from captures of a real model: shared_table.csv,
                                                               measured.csv, recorded.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pages
import pandas as pd
from pages import CEILINGS, HEAVY_ONLY, PAGE_SIZES

from sim.study.plots.style import legend_beside, log_axis, new_figure, policy_colour, save, styled

HERE = Path(__file__).parent
ARMS = ("grow", "fixed", "prompt")
SHORT = (256, 512, 1024, 2048, 4096, 8192)
LONG = (*SHORT, 16_384, 32_768)
FAMILY = ("h2o", HEAVY_ONLY, "h2o:recent=0.1", "h2o:recent=0.9", "scissorhands")
CONTROLS = ("random", "streaming_llm")
RECENT = {"h2o": 0.5, HEAVY_ONLY: 0.0, "h2o:recent=0.1": 0.1, "h2o:recent=0.9": 0.9, "random": 0.0}
"""Share of the ceiling that the newest tokens have for themselves; for policies with a closed form beside them."""
NAMES = {
    "h2o": "H2O, half of the ceiling recent",
    HEAVY_ONLY: "H2O without a recent window",
    "h2o:recent=0.1": "H2O, a tenth recent",
    "h2o:recent=0.9": "H2O, nine tenths recent",
    "scissorhands": "Scissorhands",
    "random": "random (control)",
    "streaming_llm": "StreamingLLM (control)",
}
# Blues, because the policy is H2O everywhere: the darker, the lower the ceiling.
SHADES = dict(zip(CEILINGS, ("#9ecae9", "#6baed6", "#3787c0", "#0072B2", "#08306b"), strict=True))


def simulate() -> pd.DataFrame:
    """Run the grid; every file of figures comes from here."""
    parts = []
    for policy in (*FAMILY, *CONTROLS):
        contexts = LONG if policy in ("h2o", HEAVY_ONLY) else SHORT
        # A page of one token can only be seen to work: one policy shows it.
        sizes = (1, *PAGE_SIZES) if policy == "h2o" else PAGE_SIZES
        for arm in ARMS:
            for ceiling in CEILINGS:
                parts += [pages.freed(policy, arm, ceiling, size, contexts) for size in sizes]
    table = pd.concat(parts, ignore_index=True)
    columns = zip(table.context, table.ceiling, table.page_size, table.policy.map(RECENT), strict=True)
    table["independent"] = [pages.expected_freed(*values) for values in columns]
    return table


def zero_up_to(table: pd.DataFrame) -> int:
    """Return the longest context up to which, at every ceiling, at least half of the requests free no page."""
    agrees = table.groupby("context").none.min() >= 0.5
    return int(agrees.index[agrees.cummin()].max()) if agrees.iloc[0] else 0


def differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row a (policy, arm, page size): how far ours agrees with "zero pages at every ceiling"."""
    rows = []
    for (policy, arm, size), some in table.groupby(["policy", "arm", "page_size"], sort=False):
        at = some[some.context == 8192].set_index("ceiling")
        share = 100 * at.freed / at.pages
        up_to, longest = zero_up_to(some), some.context.max()
        verdict = "yes" if up_to == longest else f"up to {up_to}" if up_to else "no"
        rows.append((policy, arm, size, verdict, *share.round(2)[list(CEILINGS)]))
    names = [f"freed_pct_at_{c:.2f}" for c in CEILINGS]
    return pd.DataFrame(rows, columns=["policy", "arm", "page_size", "zero_at_every_ceiling", *names])


def thresholds(table: pd.DataFrame) -> pd.DataFrame:
    """Return, for H2O, the context at which one page is free: independent deaths, and each arm (first of the grid)."""
    rows = []
    for ceiling in CEILINGS:
        for size in PAGE_SIZES:
            some = table[(table.policy == "h2o") & (table.ceiling == ceiling) & (table.page_size == size)]
            first = [some[(some.arm == arm) & (some.freed >= 1)].context.min() for arm in ARMS]
            rows.append((ceiling, size, round(pages.first_page(ceiling, size, 0.5)), *first))
    return pd.DataFrame(rows, columns=["ceiling", "page_size", "independent", *ARMS]).astype(
        {arm: "Int64" for arm in ARMS}
    )


def recorded(captures: Iterable[Path]) -> pd.DataFrame:
    """Return what naive reclamation frees when the attention is a real model's, request by request."""
    rows = [
        (capture.stem, policy, ceiling, size, *pages.replay(capture, policy, ceiling, size))
        for capture in captures
        for policy in ("h2o", HEAVY_ONLY)
        for ceiling in CEILINGS
        for size in PAGE_SIZES
    ]
    return pd.DataFrame(rows, columns=["capture", "policy", "ceiling", "page_size", "freed", "pages"])


# -- pictures ----------------------------------------------------------------------------------------------------------


@styled
def draw_contexts(table: pd.DataFrame, path: Path) -> None:
    """Pages freed over the context, H2O, growing ceiling: simulated and for independent deaths."""
    figure = new_figure(10.5, 3.8)
    panels = figure.subplots(1, len(PAGE_SIZES), sharey=True)
    rows = table[(table.policy == "h2o") & (table.arm == "grow")]
    for panel, size in zip(panels, PAGE_SIZES, strict=True):
        for ceiling in CEILINGS:
            some = rows[(rows.page_size == size) & (rows.ceiling == ceiling)]
            panel.plot(some.context, some.freed, "o-", ms=3.5, color=SHADES[ceiling], label=f"ceiling {ceiling:.2f}")
            panel.plot(some.context, some.independent, ":", lw=1.2, color=SHADES[ceiling])
        panel.axhline(0, color="#D55E00", lw=2, zorder=0, label="reported: 0 at every ceiling")
        panel.plot([], [], ":", color="#595959", label="independent deaths")
        panel.set_title(f"page of {size} tokens")
        panel.set_xscale("log", base=2)
        panel.set_xticks(LONG, [f"{n // 1024}k" if n >= 1024 else str(n) for n in LONG])
        panel.set_yscale("symlog", linthresh=1, linscale=0.6)
        panel.set_yticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1000"])
        panel.set_ylim(-0.15, 1000)
        panel.set_xlabel("context (tokens)")
    panels[0].set_ylabel("pages freed of a request")
    legend_beside(panels[-1])
    save(figure, path)


@styled
def draw_family(table: pd.DataFrame, path: Path) -> None:
    """Share of pages freed over the ceiling, by policy, growing ceiling, 8,192 tokens."""
    figure = new_figure(10.5, 3.6)
    panels = figure.subplots(1, len(PAGE_SIZES), sharey=True)
    looks: dict[str, Any] = {"h2o": "o-", HEAVY_ONLY: "s:", "h2o:recent=0.1": "v-.", "h2o:recent=0.9": "^--"}
    rows = table[(table.context == 8192) & (table.arm == "grow")]
    for panel, size in zip(panels, PAGE_SIZES, strict=True):
        for policy in (*FAMILY, *CONTROLS):
            some = rows[(rows.page_size == size) & (rows.policy == policy)]
            share = 100 * some.freed / some.pages
            panel.plot(
                some.ceiling, share, looks.get(policy, "o-"), ms=4, color=policy_colour(policy), label=NAMES[policy]
            )
        panel.axhline(0, color="#D55E00", lw=2, zorder=0, label="reported")
        panel.set_title(f"page of {size} tokens")
        panel.set_xticks(CEILINGS)
        panel.set_xlabel("ceiling (share of the tokens kept)")
    panels[0].set_ylabel("pages freed (% of all, 8,192 tokens)")
    legend_beside(panels[-1])
    save(figure, path)


@styled
def draw_shared(table: pd.DataFrame, path: Path) -> None:
    """Share of pages freed over the number of layers that share a page table, from captures."""
    figure = new_figure(10.5, 3.6)
    panels = figure.subplots(1, len(PAGE_SIZES), sharey=True)
    for panel, size in zip(panels, PAGE_SIZES, strict=True):
        for ratio, colour in ((0.6, SHADES[0.6]), (0.4, SHADES[0.4]), (0.2, SHADES[0.25])):
            some = table[(table.page_size == size) & (table.ceiling == ratio)]
            panel.plot(some.layers, some.freed_pct, "o-", ms=4, color=colour, label=f"ceiling {ratio:.2f}")
        panel.axhline(0, color="#D55E00", lw=2, zorder=0, label="reported: 0 from 0.60 to 0.25")
        panel.axvline(16, color="#595959", lw=0.8, ls=":", label="layers of Llama-3.2-1B")
        panel.set_title(f"page of {size} tokens")
        panel.set_xscale("log")
        log_axis(panel.xaxis)
        panel.set_xticks([1, 2, 4, 8, 16, 30], ["1", "2", "4", "8", "16", "30"])
        panel.set_yscale("symlog", linthresh=0.01, linscale=0.5)
        panel.set_yticks([0, 0.01, 0.1, 1, 10], ["0", "0.01", "0.1", "1", "10"])
        panel.set_ylim(-0.002, 40)
        panel.set_xlabel("layers with one page table")
    panels[0].set_ylabel("pages freed (% of all)")
    legend_beside(panels[-1])
    save(figure, path)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="do not simulate again")
    parser.add_argument("--captures", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.captures:
        captures = sorted(options.captures.glob("*.npz"))
        if not captures:
            raise SystemExit(f"error: {options.captures}: expected captures (*.npz), found none")
        pages.shared_table(captures, (1, 2, 4, 8, 16, 30)).round(4).to_csv(HERE / "shared_table.csv", index=False)
        pages.measured(options.captures).round(4).to_csv(HERE / "measured.csv", index=False)
        recorded(captures).to_csv(HERE / "recorded.csv", index=False)
    elif not options.draw:
        simulate().round(4).to_csv(HERE / "simulated.csv", index=False)
    table = pd.read_csv(HERE / "simulated.csv")
    differences(table).to_csv(HERE / "differences.csv", index=False)
    thresholds(table).to_csv(HERE / "thresholds.csv", index=False)
    shared, real = pd.read_csv(HERE / "shared_table.csv"), pd.read_csv(HERE / "recorded.csv")
    draw_contexts(table, HERE / "contexts.png")
    draw_family(table, HERE / "family.png")
    draw_shared(shared, HERE / "shared_table.png")
    totals = real.groupby(["policy", "page_size", "ceiling"], sort=False)[["freed", "pages"]].sum()
    for frame in (
        differences(table).set_index("policy"),
        thresholds(table).set_index("ceiling"),
        (100 * totals.freed / totals.pages).round(2).unstack(),
        shared.pivot(index=["ceiling", "page_size"], columns="layers", values="freed_pct").round(2),
    ):
        print(frame.to_string(), end="\n\n")


if __name__ == "__main__":
    main()
