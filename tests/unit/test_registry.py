"""Names from other packages: where they come from, and what is said when something is wrong with them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import pytest

from sim.errors import InputError
from sim.registry import Registry


@dataclasses.dataclass(frozen=True)
class Thing:
    size: int = 1


class Package:
    def __init__(self, name: str) -> None:
        self.name, self.version = name, "1.2"


@dataclasses.dataclass
class Entry:
    name: str
    found: Any
    dist: Any = dataclasses.field(default_factory=lambda: Package("theirs"))
    value: str = "module:Thing"
    loads: int = 0

    def load(self) -> Any:
        self.loads += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def registry(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> Registry[Any]:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(entries) if group == "things" else [])
    return Registry("thing", "things")


def test_a_part_of_another_package_is_loaded_once_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, other = Entry("big", Thing), Entry("other", RuntimeError("never"))
    things = registry(monkeypatch, entry, other)
    assert list(things) == ["big", "other"]
    assert things.origin("big") == "package theirs 1.2"
    assert entry.loads == 0
    assert things.build("big:size=3") == things.build("big:size=3") == Thing(3)
    assert things.get("big").name == "big"
    assert (entry.loads, other.loads) == (1, 0)


def test_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    things = registry(monkeypatch, Entry("old", Thing, dist=None))
    things.register("here")(dataclasses.make_dataclass("Here", []))
    things._classes["here"].__module__ = "notebook"
    things.register("ours")(dataclasses.make_dataclass("Ours", []))
    things._classes["ours"].__module__ = "sim.somewhere"
    assert [things.origin(name) for name in ("here", "ours", "old")] == ["notebook", "built in", "module:Thing"]


def test_what_cannot_be_loaded_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    things = registry(monkeypatch, Entry("big", ImportError("no module\nnamed x")), Entry("odd", lambda: None))
    with pytest.raises(InputError) as said:
        things.build("big")
    assert str(said.value) == (
        "thing 'big': package theirs 1.2 cannot be loaded (module:Thing): ImportError: no module named x"
    )
    with pytest.raises(
        InputError, match=r"package theirs 1\.2: expected module:Thing to be a dataclass, got <function"
    ):
        things.build("odd")


def test_two_with_one_name_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    things = registry(monkeypatch, Entry("big", Thing), Entry("big", Thing, Package("mine")), Entry("small", Thing))
    for _ in range(2):
        with pytest.raises(InputError, match=r"'big' is there twice: in package theirs 1\.2 .* package mine 1\.2"):
            things.build("big")
    assert things.build("small") == Thing()
    things = registry(monkeypatch, Entry("ours", Thing))
    things.register("ours")(dataclasses.make_dataclass("Ours", []))
    things._classes["ours"].__module__ = "sim.somewhere"
    with pytest.raises(InputError, match=r"package theirs 1\.2 \(module:Thing\) and in vtoken-sim itself; uninstall"):
        things.get("ours")
