from pathlib import Path

import pytest

from sim import InputError, read_trace
from sim.kv.policies import policies
from sim.study.conformance import CHECKS
from sim.study.plugin_checks import (
    check_attention,
    check_copy_cost,
    check_reclaimer,
    check_step_cost,
    check_trace_reader,
)


@pytest.mark.parametrize("check", CHECKS)
def test_the_policy(check: str) -> None:
    CHECKS[check]("every_other")


def test_the_reclaimer() -> None:
    check_reclaimer("patient:blocks=2")


def test_the_attention_model() -> None:
    check_attention("sink_and_recent")


def test_the_costs() -> None:
    check_step_cost("per_request")
    check_copy_cost("per_launch")


def test_the_trace_reader(tmp_path: Path) -> None:
    sample = tmp_path / "requests.txt"
    sample.write_text("# arrival_s prompt output\n0.5 10 3\n0.25 20 4\n")
    check_trace_reader("space_separated", sample)
    assert read_trace(sample).prompt_tokens.tolist() == [20, 10]
    sample.write_text("# arrival_s prompt output\n0.5 ten 3\n")
    with pytest.raises(InputError, match=r":2: expected seconds"):
        read_trace(sample)


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="recent"):
        policies.build("every_other:recent=-1")
