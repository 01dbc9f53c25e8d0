"""The checks that other packages run over their parts: what is built in passes, and what is broken does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from sim.errors import InputError
from sim.kv.reclaim import reclaimers
from sim.registry import Registry
from sim.serving.attention import attention_models
from sim.serving.attention.uniform import Uniform
from sim.serving.copy import LinearCopyCost, copy_costs
from sim.serving.cost import LinearStepCost, step_costs
from sim.study import plugin_checks
from sim.study.conformance import ConformanceError
from sim.study.plugin_checks import (
    check_attention,
    check_copy_cost,
    check_reclaimer,
    check_step_cost,
    check_trace_reader,
)
from sim.workload.readers import Head, TraceReader, trace_readers
from sim.workload.trace import Trace


@pytest.mark.slow
@pytest.mark.parametrize("name", reclaimers.names())
def test_reclaimers_conform(name: str) -> None:
    check_reclaimer(name, **({"block_size": 1} if name == "token" else {}))


@pytest.mark.parametrize("name", sorted({*attention_models.names()} - {"recorded"}))
def test_attention_models_conform(name: str) -> None:
    check_attention(name)


@pytest.mark.parametrize("spec", ["auto", "roofline", "linear:base_s=0.01,per_token_s=1e-5", "profile:h100"])
def test_step_costs_conform(spec: str) -> None:
    check_step_cost(spec)


@pytest.mark.parametrize("spec", ["bandwidth", "linear:per_token_s=1e-6"])
def test_copy_costs_conform(spec: str) -> None:
    check_copy_cost(spec)


def test_a_trace_reader_conforms(tmp_path: Path) -> None:
    sample = tmp_path / "vidur.csv"
    sample.write_text("num_prefill_tokens,num_decode_tokens\n10,5\n7,1\n")
    check_trace_reader("vidur", sample)
    with pytest.raises(ConformanceError, match="is taken for 'vidur'"):
        check_trace_reader("azure", sample)


@dataclasses.dataclass(frozen=True)
class Unfair(Uniform):
    def attend(self, view: Any, out: Any) -> None:
        super().attend(view, out)
        out[int(view.start[0])] *= np.float32(len(view))


@dataclasses.dataclass(frozen=True)
class Faster(LinearStepCost):
    name: ClassVar[str] = "faster"
    base_s: float = 0.01
    per_token_s: float = 0.0

    def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:
        return 10**9 // tokens, 0


@dataclasses.dataclass(frozen=True)
class Greedy(LinearStepCost):
    name: ClassVar[str] = "greedy"
    base_s: float = 0.01
    per_token_s: float = 0.0

    def step_ns(self, tokens: int, seqs: int, kv_read_tokens: int, attention_pairs: int) -> tuple[int, int]:
        return 1000, 1001


@dataclasses.dataclass(frozen=True)
class Hasty(LinearCopyCost):
    name: ClassVar[str] = "hasty"
    per_token_s: float = 1e-6

    def copy_ns(self, tokens: int) -> int:
        return self.alone_ns(tokens) - 1


@dataclasses.dataclass(frozen=True)
class BackInTime(TraceReader):
    summary: ClassVar[str] = "takes everything for its own"

    def matches(self, head: Head) -> bool:
        return True

    def read(self, path: Path, how: Any) -> Trace:
        return Trace(np.arange(3), np.ones(3, np.int64), np.ones(3, np.int64))


@pytest.mark.parametrize(
    ("registry", "broken", "check", "says"),
    [
        (attention_models, Unfair, check_attention, "attend, a prompt of 1: sums to 5.0, not 1.0"),
        (step_costs, Faster, check_step_cost, "cheaper than with fewer tokens"),
        (step_costs, Greedy, check_step_cost, "1000 ns, memory 1001 ns"),
        (copy_costs, Hasty, check_copy_cost, "faster beside a step than alone"),
    ],
)
def test_what_is_broken_does_not_pass(
    registry: Registry[Any], broken: type[Any], check: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.names()
    monkeypatch.setitem(registry._classes, "broken", broken)
    with pytest.raises(ConformanceError, match=f"^broken: .*{says}"):
        check("broken")


def test_a_reader_that_takes_everything_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_readers.names()
    monkeypatch.setitem(trace_readers._classes, "a_broken_one", BackInTime)
    monkeypatch.setattr(BackInTime, "name", "a_broken_one")
    sample = tmp_path / "sample"
    sample.write_text("anything\n")
    with pytest.raises(ConformanceError, match="takes the canonical format for its own"):
        check_trace_reader("a_broken_one", sample)


def test_a_broken_reclaimer_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that packs at once, but whose deaths are not the policy's."""
    naive = reclaimers.get("naive")

    @dataclasses.dataclass(frozen=True)
    class Meddling(naive):  # type: ignore[misc, valid-type]
        def after_step(self, cache: Any, rows: Any, pressure: Any, busy: bool) -> list[Any]:
            for row in rows.tolist():
                record = cache.store.s.rows[row]
                if record["live"] > 3 and record["decode_from"] >= 0 and record["length"] > record["decode_from"]:
                    cells = np.array([int(record["start"])])
                    cache.evict_cells(np.array([row]), cells, np.array([1]))
            return []

    monkeypatch.setitem(reclaimers._classes, "broken", Meddling)
    with pytest.raises(ConformanceError, match="others die than under naive"):
        check_reclaimer("broken")


def test_what_does_not_exist_is_refused() -> None:
    for check in (check_reclaimer, check_attention, check_step_cost, check_copy_cost):
        with pytest.raises(InputError, match="unknown"):
            check("nobody")
    assert plugin_checks.__all__ == sorted(plugin_checks.__all__)
