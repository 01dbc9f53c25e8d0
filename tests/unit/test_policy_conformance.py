"""Every policy of the registry, those of installed packages too, against every check; and checks that can fail."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.kv.policies import EvictionPolicy, ScorePolicy, policies
from sim.kv.policies.base import NOBODY
from sim.kv.view import View
from sim.registry import Registry
from sim.study import conformance
from sim.study.conformance import CHECKS, ConformanceError, check_policy
from sim.study.paper.claims import lines_of_code

MOST_LINES = 50


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", policies.names())
def test_every_policy_conforms(name: str, check: str):
    CHECKS[check](name)


@pytest.mark.parametrize(
    "spec",
    [
        "random:redraw=false",
        "scissorhands:drop=3,history=33",
        "r_kv:buffer=10,window=4",
        "keydiff:every=7",
        "keydiff:every=1",
        "paged_eviction:block_size=5",
        "paged_eviction:block_size=1",
        "snapkv:window=1,pool=1",
        "keyformer:tau_init=2,tau_delta=0",
        "streaming_llm:sinks=0",
        "pyramidkv:window=2,beta=3,inside=true",
        "ada_kv:window=1,pool=1,floor=0",
        "ada_kv:window=3,floor=1",
    ],
)
def test_so_does_one_with_other_parameters(spec: str):
    check_policy(spec)


@pytest.mark.parametrize("name", policies.names())
def test_a_policy_is_one_file_of_fewer_than_50_lines(name: str):
    module = inspect.getmodule(policies.get(name))
    assert module is not None
    inside = [cls for _, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__]
    assert [cls.name for cls in inside if issubclass(cls, EvictionPolicy)] == [name]
    assert lines_of_code(inspect.getsource(module)) < MOST_LINES


def test_lines_of_code_are_counted():
    assert (
        lines_of_code('"""Doc\n\nstring."""\n\nimport a\n\n__all__ = ["f"]\n\n\ndef f():\n    # why\n    return 1\n')
        == 2
    )


@pytest.mark.parametrize("name", policies.names())
def test_a_policy_says_where_it_is_from_and_how_it_differs(name: str):
    text = inspect.getdoc(policies.get(name)) or ""
    first = text.partition("\n\n")[0]
    assert first.endswith(".")
    if name not in ("full", "random"):
        assert "Source: " in text


@dataclass(frozen=True)
class Broken(ScorePolicy):
    """Keep the newest; what the subclasses do wrong is in their names."""

    attends: ClassVar[bool] = False

    def score(self, view: View) -> NDArray[np.float32]:
        return view.position.astype(np.float32)


class TakesTooFew(Broken):
    def select(self, view: View, excess: NDArray[np.int64]) -> Any:
        fewer = np.maximum(excess - 1, 0)
        chosen = fewer > 0
        victims = ScorePolicy.select(self, view.subset(chosen), fewer[chosen])[0] if chosen.any() else NOBODY
        return victims, fewer


class TakesTheNewest(Broken):
    def select(self, view: View, excess: NDArray[np.int64]) -> Any:
        ends = np.repeat(view.start + view.n, excess)
        back = np.concatenate([np.arange(over, 0, -1) for over in excess])
        return ends - back, excess


class TakesWhatItProtects(Broken):
    def protect(self, view: View) -> Any:
        return np.full(len(view), 3), NOBODY

    def select(self, view: View, excess: NDArray[np.int64]) -> Any:
        return np.concatenate([s + np.arange(e) for s, e in zip(view.start, excess, strict=True)]), excess


class LooksAtTheCell(Broken):
    def score(self, view: View) -> NDArray[np.float32]:
        return (np.arange(len(view.position)) % 7).astype(np.float32)


class ScoresBelowNothing(Broken):
    pools: ClassVar[bool] = True

    def score(self, view: View) -> NDArray[np.float32]:
        return -view.position.astype(np.float32)


class LooksAtTheBatch(Broken):
    def score(self, view: View) -> NDArray[np.float32]:
        return (view.position * (1 if len(view) == 1 else -1)).astype(np.float32)


class SpendsTooMuch(Broken):
    splits: ClassVar[str] = "layer"

    def allot(self, view: View) -> NDArray[np.int64]:
        return view.keep + (view.unit == 0) * 5


class DrawsInSequence(Broken):
    draws: ClassVar[np.random.Generator] = np.random.default_rng(0)

    def score(self, view: View) -> NDArray[np.float32]:
        return self.draws.random(len(view.position), np.float32)


@pytest.mark.parametrize(
    ("broken", "check", "says"),
    [
        (TakesTooFew, "keeps to its budget", "tokens live at length"),
        (TakesTooFew, "survives preemption", "live tokens too many"),
        (TakesTheNewest, "keeps to its budget", "the newest token died"),
        (TakesWhatItProtects, "spares what it protects", "a protected token dies"),
        (LooksAtTheCell, "does not see the layout", "other deaths with blocks of"),
        (LooksAtTheBatch, "decides for each request alone", "alone than in a batch"),
        (LooksAtTheBatch, "dies alike under every reclaimer", "under naive"),
        (DrawsInSequence, "survives preemption", "two equal runs differ"),
        (ScoresBelowNothing, "can share a budget if it says so", "a score is negative"),
        (SpendsTooMuch, "keeps to its budget in units", "tokens live at length"),
    ],
)
def test_a_broken_policy_does_not_pass(
    broken: type[EvictionPolicy], check: str, says: str, monkeypatch: pytest.MonkeyPatch
):
    registry: Registry[EvictionPolicy] = Registry("policy", "nobody's")
    registry.register("broken")(broken)
    for module in (conformance, __import__("sim.study.run", fromlist=["policies"])):
        monkeypatch.setattr(module, "policies", registry)
    with pytest.raises(ConformanceError, match=says):
        CHECKS[check]("broken")
