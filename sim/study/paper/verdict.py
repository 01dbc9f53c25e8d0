"""What it means that a claim holds: in every world, in none, or in some.

A *world* is one choice for all that the paper does not tell. A claim holds if it holds in every world that was tried;
it does not if it holds in none; and if it depends on the world, it cannot be said without knowing more than the paper
tells, as little as of something that is not simulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from sim.study.paper.evidence import Evidence, Figure

__all__ = ["CANNOT_SAY", "FAILS", "HOLDS", "Claim", "Judgement", "Verdict", "World", "near", "reaches"]

Verdict = Literal["holds", "does not hold", "cannot be said"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
CANNOT_SAY: Verdict = "cannot be said"

NEAR = 0.25
"""How far a mean may be from the paper's, as a share of it, for both to be called alike."""


@dataclasses.dataclass(frozen=True)
class World:
    """One choice of what is not known, and what came out.

    Attributes
    ----------
    setting
        What was chosen, by name.
    figure
        What came out, with its spread over seeds; in the unit of the claim.
    holds
        Whether the claim does; None if there is nothing to hold it to.
    cell
        Which set-up the figure is of, where it is the least or the most of several.
    """

    setting: Mapping[str, str]
    figure: Figure
    holds: bool | None
    cell: str = ""

    @property
    def name(self) -> str:
        """The setting in words."""
        return ", ".join(f"{key} {value}" if key else value for key, value in self.setting.items())


@dataclasses.dataclass(frozen=True)
class Claim:
    """Something that the paper says.

    Attributes
    ----------
    key
        Short name.
    what
        What is claimed.
    paper
        The paper's figure as text.
    source
        A: abstract; B: readers' digests that agree; C: one digest only.
    rule
        When it holds in a world; empty if nothing is simulated.
    unit
        ``%`` (a change, given as a share), ``share``, or what is counted; empty for a plain number.
    worlds
        Judges it.
    why
        What there is to say, given the worlds.
    """

    key: str
    what: str
    paper: str
    source: str
    rule: str
    unit: str
    worlds: Callable[[Evidence], Sequence[World]]
    why: Callable[[Evidence, Sequence[World]], str]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A claim with what came of it."""

    claim: Claim
    worlds: tuple[World, ...]
    why: str

    @classmethod
    def of(cls, claim: Claim, evidence: Evidence) -> Judgement:
        """Judge a claim."""
        worlds = tuple(claim.worlds(evidence))
        return cls(claim, worlds, claim.why(evidence, worlds))

    @property
    def verdict(self) -> Verdict:
        """Over all worlds."""
        said = [world.holds for world in self.worlds if world.holds is not None]
        if not said or any(said) != all(said):
            return CANNOT_SAY
        return HOLDS if all(said) else FAILS

    @property
    def count(self) -> str:
        """In how many worlds it holds."""
        said = [world.holds for world in self.worlds if world.holds is not None]
        return f"{sum(said)} of {len(said)}" if said else "-"

    @property
    def where(self) -> str:
        """The worlds in which it holds, gathered; empty if it is all of them or none."""
        if self.verdict != CANNOT_SAY:
            return ""
        held = [world for world in self.worlds if world.holds]
        return "; ".join(_gathered([dict(world.setting) for world in held]))

    @property
    def ours(self) -> str:
        """The figures of the worlds, from the least to the most, each with its spread over seeds."""
        figures = [world.figure for world in self.worlds if not math.isnan(world.figure.mean)]
        if not figures:
            return "-"
        low, high = min(figures, key=lambda each: each.mean), max(figures, key=lambda each: each.mean)
        texts = list(dict.fromkeys(shown(each, self.claim.unit) for each in (low, high)))
        return " .. ".join(texts) + {"": "", "share": " %"}.get(self.claim.unit, f" {self.claim.unit}")


def shown(figure: Figure, unit: str) -> str:
    """Return a figure with its spread, without its unit."""
    if math.isnan(figure.mean):
        return "-"
    if unit in ("%", "share"):
        half, sign = round(100 * figure.half, 1), "+" if unit == "%" else ""
        return f"{round(100 * figure.mean, 1) + 0.0:{sign}.1f}" + (f" ±{half:.1f}" if half else "")
    places = 0 if float(figure.mean).is_integer() else 2
    half = round(figure.half, 2)
    return f"{figure.mean:.{places}f}" + (f" ±{half:.2f}" if half else "")


def reaches(figure: Figure, bound: float) -> bool:
    """Tell whether a gain (bound above 0) or a reduction (below 0) is as large as ``bound``, within its spread."""
    return figure.high >= bound if bound > 0 else figure.low <= bound


def near(figure: Figure, value: float) -> bool:
    """Tell whether a figure is the paper's to within :data:`NEAR` of that, or within its spread."""
    return abs(figure.mean - value) <= NEAR * abs(value) or figure.low <= value <= figure.high


def _gathered(settings: list[dict[str, str]]) -> list[str]:
    """Put settings together that differ in one thing, the last: ``memory 0.35, load 0.8 | 1.2``."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for setting in settings:
        *first, (name, value) = setting.items()
        groups.setdefault((*first, (name, "")), []).append(value)
    out = []
    for key, values in groups.items():
        *first, (name, _) = key
        parts = [f"{each} {value}" if each else value for each, value in first]
        together = " | ".join(dict.fromkeys(values))
        out.append(", ".join([*parts, f"{name} {together}" if name else together]))
    return out
