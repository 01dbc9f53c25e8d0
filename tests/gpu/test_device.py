"""What was measured on; CUDA's part with a stand-in for the driver."""

import subprocess
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from gpu_validate import device as module
from gpu_validate.device import Device, find_device, read_clocks
from sim.errors import InputError


def test_a_cpu_says_its_name_and_its_libraries() -> None:
    device = find_device("cpu")
    assert (device.spec, device.hardware, device.is_cuda) == ("cpu", None, False)
    assert device.versions["torch"] == torch.__version__
    assert device.memory_bytes > 0
    assert read_clocks(device) is None
    provenance = device.provenance("a command")
    assert (provenance.device, provenance.source, provenance.kind) == (device.name, "a command", "measured")


@pytest.mark.parametrize("spec", ["tpu", "", "cud"])
def test_an_unknown_device_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match="expected 'cpu', 'cuda' or 'cuda:N'"):
        find_device(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(InputError, match="sees no CUDA device here"):
        find_device("cuda")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Pretend that there is an H200, and note what nvidia-smi is asked."""
    properties = SimpleNamespace(name="NVIDIA H200", L2_cache_size=50 << 20, uuid="abc", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(module, "free_bytes", lambda _: 139 << 30)
    asked: list[list[str]] = []
    answers = {"driver_version": "570.1", "clocks.sm,clocks.mem,temperature.gpu,power.draw": "1980, 3201, 45, [N/A]"}

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        names = next(word for word in command if word.startswith("--query-gpu=")).partition("=")[2]
        return SimpleNamespace(stdout=answers[names] + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_a_gpu_says_name_driver_and_preset(h200: list[list[str]]) -> None:
    device = find_device("cuda")
    assert (device.name, device.spec, device.hardware) == ("NVIDIA H200", "cuda:0", "h200-sxm")
    assert (device.l2_bytes, device.memory_bytes) == (50 << 20, 139 << 30)
    assert device.versions["driver"] == "570.1"
    assert h200[0][:2] == ["nvidia-smi", "--id=GPU-abc"]


def test_clocks_are_read_and_what_is_not_told_is_left_out(h200: list[list[str]]) -> None:
    assert read_clocks(find_device("cuda:0")) == {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "temperature_c": 45.0}
    assert not any("-lgc" in word or "--lock" in word for command in h200 for word in command)


def test_without_nvidia_smi_there_are_no_clocks(h200: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    device = find_device("cuda")
    assert h200

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert read_clocks(device) is None
    assert "driver" not in find_device("cuda").versions


@pytest.mark.usefixtures("h200")
def test_a_device_number_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="there are 1 CUDA devices"):
        find_device("cuda:3")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_names_that_drivers_give(name: str, preset: str | None) -> None:
    assert module._preset(name) == preset


def test_a_device_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Device("x", "cpu", 0, 0, None).name = "y"  # type: ignore[misc]
