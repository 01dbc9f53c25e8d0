"""Hardware presets: plausible, sourced, found by the names people use."""

import pytest

from sim.errors import InputError
from sim.serving.hardware import HARDWARE, Hardware, get_hardware, table


@pytest.mark.parametrize(
    ("alias", "name"),
    [("h100", "h100-sxm"), ("H100", "h100-sxm"), ("a100", "a100-80g"), ("h200", "h200-sxm"), (" L40S ", "l40s")],
)
def test_aliases(alias: str, name: str) -> None:
    assert get_hardware(alias).name == name


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(InputError, match=r"unknown hardware 'h10'.*did you mean 'h100'"):
        get_hardware("h10")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("a100-80g", 312),
        ("h100-sxm", 1979 / 2),
        ("h100-pcie", 1513 / 2),
        ("h100-nvl", 1671 / 2),
        ("b200", 4500 / 2),
        ("l4", 242 / 2),
    ],
)
def test_rates_are_dense(name: str, tflops: float) -> None:
    """Datasheets print the figure with sparsity, twice the dense one."""
    assert get_hardware(name).flops_per_s == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("device", HARDWARE.values(), ids=HARDWARE)
def test_a_preset_is_plausible_and_sourced(device: Hardware) -> None:
    assert device.source
    assert device.memory_source
    # The ridge of the roofline in operations a byte: 153 on an A100, 419 on an L40S.
    assert 100 < device.flops_per_s / device.bandwidth_bytes_per_s < 450


@pytest.mark.parametrize(
    ("name", "sold_as_gb"),
    [
        ("a100-40g", 40),
        ("a100-80g", 80),
        ("h100-sxm", 80),
        ("h100-nvl", 94),
        ("h200-sxm", 141),
        ("l40s", 48),
        ("l4", 24),
    ],
)
def test_memory_is_what_the_driver_offers(name: str, sold_as_gb: int) -> None:
    """Less than so many GiB; and not so little that a figure in GB was taken for one in GiB."""
    assert 0.90 * sold_as_gb * 2**30 < get_hardware(name).memory_bytes < sold_as_gb * 2**30


def test_table_has_a_row_a_preset() -> None:
    rows = table()
    assert [row["hardware"] for row in rows] == list(HARDWARE)
    assert next(row for row in rows if row["hardware"] == "h100-sxm")["also"].startswith("h100")
