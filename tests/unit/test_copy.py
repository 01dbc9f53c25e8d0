"""Copy costs: times by hand, and a copy that is never free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import InputError
from sim.serving.copy import Beside, CopyCost, build_copy_cost, contended_stretch, copy_costs
from sim.serving.hardware import get_hardware
from sim.serving.models import get_model


def build(spec: str, hardware: str = "h200") -> CopyCost:
    return build_copy_cost(spec, model=get_model("llama-3.1-8b"), hardware=get_hardware(hardware))


def test_names() -> None:
    assert copy_costs.names() == ["bandwidth", "linear", "profile"]


def test_bandwidth_of_a_thousand_tokens() -> None:
    """Read and written: 262 MB, about 61 us at the 4.3 TB/s that an H200 was measured at."""
    cost = build("bandwidth:launch_s=0")
    assert cost.bandwidth_ns(1000) == pytest.approx(2 * 1000 * 131_072 / 4320, abs=1)
    assert cost.bandwidth_ns(1000) == pytest.approx(61_000, rel=0.01)
    assert cost.copy_ns(1000) == pytest.approx(2 * cost.bandwidth_ns(1000), abs=2)
    assert cost.alone_ns(1000) == cost.bandwidth_ns(1000)


def test_a_launch_takes_time_but_no_bandwidth() -> None:
    with_launch, without = build("bandwidth:launch_s=1e-3"), build("bandwidth:launch_s=0")
    assert with_launch.copy_ns(10) - without.copy_ns(10) == 1_000_000
    assert with_launch.alone_ns(10) - without.alone_ns(10) == 1_000_000
    assert with_launch.bandwidth_ns(10) == without.bandwidth_ns(10)


@pytest.mark.parametrize("per_token_us", [0, 0.5, 20, 200])
def test_linear_is_exact_and_takes_its_share(per_token_us: float) -> None:
    cost = build(f"linear:per_token_s={per_token_us}e-6,base_s=1e-6")
    assert cost.copy_ns(64) == 1000 + 64 * round(per_token_us * 1000)
    assert cost.bandwidth_ns(64) == round(cost.copy_ns(64) / 2)
    assert cost.alone_ns(64) == 1000 + 64 * round(per_token_us * 1000) // 2


@pytest.mark.parametrize("spec", ["bandwidth", "linear:per_token_s=1e-6,base_s=1e-6"])
def test_nothing_to_move_takes_no_time(spec: str) -> None:
    assert build(spec).copy_ns(0) == build(spec).alone_ns(0) == build(spec).bandwidth_ns(0) == 0


@pytest.mark.parametrize("spec", ["bandwidth", "linear:per_token_s=1e-6"])
def test_steps_beside_a_copy_pay_for_it_once(spec: str) -> None:
    """Steps bound by memory are longer by the copy's bytes all together, however many they are."""
    cost = build(spec)
    whole, parts = Beside(cost, 5000), Beside(cost, 5000)
    assert whole.wall_ns == cost.copy_ns(5000)
    long_ns = 4 * whole.wall_ns
    assert whole.stretch_ns(long_ns, long_ns) == pytest.approx(cost.bandwidth_ns(5000), abs=2)
    assert whole.stretch_ns(long_ns, long_ns) == 0, "all is paid"
    short_ns = whole.wall_ns // 20
    paid = [parts.stretch_ns(short_ns, short_ns) for _ in range(40)]
    assert sum(paid) == pytest.approx(cost.bandwidth_ns(5000), rel=0.1)
    assert paid[-1] == 0
    assert parts.left_ns <= 0


@pytest.mark.parametrize(
    ("step", "memory", "copy", "stretch"),
    [
        (100, 60, 40, 24),  # 60 % of it when the step wants the memory too
        (100, 60, 50, 30),
        (100, 60, 500, 60),  # at most as much again as the step's own memory time, at a share of one half
        (100, 0, 500, 0),  # a step that needs no memory is not delayed
        (100, 100, 30, 30),  # a step bound by memory is delayed by all of it
        (100, 100, 0, 0),
    ],
)
def test_stretch_by_hand(step: int, memory: int, copy: int, stretch: int) -> None:
    assert contended_stretch(step, memory, copy, 0.5) == stretch


time_ns = st.integers(0, 10**9)


@given(step=time_ns, share_of_step=st.floats(0, 1), copy=time_ns, share=st.floats(0.01, 0.99))
def test_work_is_conserved(step: int, share_of_step: float, copy: int, share: float) -> None:
    memory = int(step * share_of_step)
    stretch = contended_stretch(step, memory, copy, share)
    assert stretch >= 0
    # No more bandwidth is handed out than there is ...
    assert memory + min(copy, step - memory + stretch) <= step + stretch
    # ... the copy never gets more than its share of what both want ...
    assert stretch <= round(memory * share / (1 - share))
    # ... and more copy work never makes a step shorter.
    assert contended_stretch(step, memory, copy + 1, share) >= stretch


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bandwith", "did you mean 'bandwidth'"),
        ("linear", "needs per_token_s"),
        ("linear:per_token_s=-1", "per_token_s: expected at least 0 seconds"),
        ("linear:per_token_s=1,share=1", "share: expected a share in"),
        ("bandwidth:share=0", "share: expected a share in"),
        ("bandwidth:efficiency=1.2", "efficiency"),
        ("bandwidth:launch_s=-1", "launch_s"),
        ("profile:none.json", "No such file"),
        ("profile:l4", "none comes along for model llama-3.1-8b on l4"),
    ],
)
def test_bad_specifications(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(spec)
