"""A sweep's specification, and the runs it stands for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.errors import InputError, did_you_mean
from sim.study.config import BUDGETS, SimConfig, overlay, read_toml

__all__ = ["Plan", "Run", "SweepSpec"]

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    config: SimConfig
    config_hash: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The runs of a sweep in their defined order, and what was left out of them."""

    runs: tuple[Run, ...]
    excluded: int
    duplicates: int


@dataclasses.dataclass(frozen=True)
class SweepSpec:
    """What to run.

    Attributes
    ----------
    base
        Fields of :class:`SimConfig` that all runs share.
    grid
        Lists of values by field; every combination is run.
    seeds
        Each combination is run with each of these.
    exclude
        Partial settings; a combination that matches all fields of one of them is left out. A list matches any of its
        values.
    include
        Settings laid over ``base`` for extra runs outside the grid; lists span a small grid of their own.
    name
        For titles.
    where
        File that it was read from, for errors.
    """

    base: Settings = dataclasses.field(default_factory=dict)
    grid: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
    exclude: list[Settings] = dataclasses.field(default_factory=list)
    include: list[Settings] = dataclasses.field(default_factory=list)
    name: str = "sweep"
    where: str = dataclasses.field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_fields("base", self.base)
        _check_fields("grid", self.grid)
        for place, entries in (("exclude", self.exclude), ("include", self.include)):
            _expect(isinstance(entries, list), f"{place}: expected a list of tables, write [[{place}]]")
            for number, entry in enumerate(entries, start=1):
                _check_fields(f"{place} {number}", entry)
                _expect(bool(entry), f"{place} {number}: expected at least one field")
        for field, values in self.grid.items():
            _expect(
                isinstance(values, list) and bool(values),
                f"grid.{field}: expected a list of at least one value, got {values!r}",
            )
        seeds = self.seeds
        _expect(
            isinstance(seeds, list) and bool(seeds) and all(type(seed) is int and seed >= 0 for seed in seeds),
            f"seeds: expected a list of whole numbers, 0 or more, got {seeds!r}",
        )
        _expect("seed" not in self.grid, "grid.seed: list the seeds as seeds = [0, 1, ...]")
        both = sorted(self.base.keys() & self.grid.keys())
        _expect(not both, f"{', '.join(both)}: given in base and in grid; keep one of them")

    @classmethod
    def from_toml(cls, path: str | Path) -> SweepSpec:
        """Read a specification.

        Raises
        ------
        InputError
            If the file cannot be read or something in it cannot be used; the line starts with the file's name.
        """
        return dataclasses.replace(cls.from_dict(read_toml(path), where=str(path)), where=str(path))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, where: str = "sweep") -> SweepSpec:
        """Build from what a TOML file holds; an error starts with ``where``."""
        known = [field.name for field in dataclasses.fields(cls) if field.name != "where"]
        try:
            for key, value in content.items():
                _expect(key in known, f"unknown part {key!r}: expected {', '.join(known)}{did_you_mean(key, known)}")
                if key in ("base", "grid"):
                    _expect(isinstance(value, dict), f"{key}: expected a table, write [{key}]")
            base = dict(content.get("base", {}))
            seeds = [base.pop("seed")] if "seed" in base and "seeds" not in content else None
            return cls(**{**content, "base": base} | ({} if seeds is None else {"seeds": seeds}))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return what :meth:`from_dict` reads."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "where"}

    def with_flags(self, flags: Mapping[str, Sequence[Any]]) -> SweepSpec:
        """Return a copy in which flags win: one value of a field fixes it, several are its axis of the grid."""
        base, grid = dict(self.base), dict(self.grid)
        for field in flags:
            for replaced in BUDGETS if field in BUDGETS else (field,):
                base.pop(replaced, None)
                grid.pop(replaced, None)
        for field, values in flags.items():
            if field == "seed":
                continue
            if len(values) == 1:
                base[field] = values[0]
            else:
                grid[field] = list(values)
        return dataclasses.replace(self, base=base, grid=grid, seeds=list(flags.get("seed", self.seeds)))

    def expand(self) -> Plan:
        """Return the runs: the grid in the order it is written, last axis fastest, seeds innermost; then the includes.

        Raises
        ------
        InputError
            If a combination means nothing, or no run is left.
        """
        try:
            return self._expand()
        except InputError as error:
            raise InputError(f"{self.where}: {error}" if self.where else str(error)) from None

    def _expand(self) -> Plan:
        grid = list(self._combinations(self.grid))
        kept = [settings for settings in grid if not any(_matches(settings, pattern) for pattern in self.exclude)]
        extra = [settings for axes in self.include for settings in self._combinations(axes)]
        runs: dict[str, Run] = {}
        for settings in kept + extra:
            run = self._run(settings)
            runs.setdefault(run.config_hash, run)
        _expect(bool(runs), f"no run is left: {len(grid)} excluded")
        return Plan(tuple(runs.values()), len(grid) - len(kept), len(kept) + len(extra) - len(runs))

    def _combinations(self, axes: Mapping[str, Any]) -> Iterator[Settings]:
        """Yield the settings of every combination of the axes and the seeds."""
        for combination in _product({**axes, "seed": axes.get("seed", self.seeds)}):
            yield overlay(self.base, combination)

    def _run(self, settings: Settings) -> Run:
        try:
            config = SimConfig(**settings)
        except InputError as error:
            varied = {key: value for key, value in settings.items() if key not in self.base}
            told = ", ".join(f"{key} {value}" for key, value in varied.items())
            raise InputError(f"{told}: {error} (or leave the combination out with [[exclude]])") from None
        return Run(config, config.hash())


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def _check_fields(place: str, entry: Any) -> None:
    """Refuse anything but a table whose keys are fields of SimConfig."""
    _expect(isinstance(entry, dict), f"{place}: expected a table of fields, got {entry!r}")
    for field in entry:
        hint = did_you_mean(field.replace("-", "_"), SimConfig.model_fields)
        _expect(field in SimConfig.model_fields, f"{place}: unknown field {field!r}{hint}")


def _product(axes: Mapping[str, Any]) -> Iterator[Settings]:
    """Yield every combination of the axes' values, the last axis fastest; a single value is an axis of one."""
    lists = [value if isinstance(value, list) else [value] for value in axes.values()]
    for values in itertools.product(*lists):
        yield dict(zip(axes, values, strict=True))


def _matches(settings: Settings, pattern: Settings) -> bool:
    """Tell whether the settings, completed by the defaults, have every value of the pattern."""
    for field, wanted in pattern.items():
        value = settings.get(field, SimConfig.model_fields[field].default)
        if value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True
