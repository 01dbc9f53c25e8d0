"""The kernels compile for sm_90 ahead of time: no spills, and 16 bytes at a time where it is the bytes that count."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
MOVERS = ["copy 2048", "copy 384", "copy 32"]
DECODES = [
    "decode bf16 128",
    "decode bf16 64 live",
    "decode fp16 128 unsplit",
    "decode fp32 128",
    "decode fp8 128",
    "decode fp8 64 live",
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what tests/gpu/sm90.py says of each kernel."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sm90.py")],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def count(kernel: dict[str, Any], *prefixes: str) -> int:
    return sum(n for name, n in kernel["operations"].items() if name.startswith(prefixes))


def test_nothing_spills(kernels: dict[str, dict[str, Any]]) -> None:
    assert kernels.keys() == {*MOVERS, *DECODES, "store bf16", "store fp8", "combine 64"}
    for name, kernel in kernels.items():
        assert kernel["architecture"].startswith("sm_90"), name
        assert (kernel["stack"], kernel["local"]) == (0, 0), name
        assert count(kernel, "LDL", "STL") == 0, name
        # At least two programs of 128 threads a multiprocessor, as the number of splits counts on.
        assert kernel["registers"] * 128 * 2 <= 65536, name
        assert kernel["shared"] * 2 <= 227 * 1024, name


@pytest.mark.parametrize("name", MOVERS)
def test_the_mover_moves_16_bytes_at_a_time(kernels: dict[str, dict[str, Any]], name: str) -> None:
    kernel = kernels[name]
    # 16 KiB a program, 128 threads: eight each.
    assert count(kernel, "LDG.E.128") == 8
    assert count(kernel, "STG.E.128") == 8
    assert count(kernel, "STG") == 8
    # All of them in flight before the first store waits for one.
    assert kernel["loads_before_the_first_store"] == 8
    # What else is loaded: the two addresses and the slots.
    assert count(kernel, "LDG") - 8 == count(kernel, "LDG.E.64") <= 18


@pytest.mark.parametrize("name", DECODES)
def test_decode_reads_16_bytes_of_keys_and_values_at_a_time(kernels: dict[str, dict[str, Any]], name: str) -> None:
    kernel = kernels[name]
    wide = count(kernel, "LDGSTS.E.BYPASS.128", "LDGSTS.E.128")
    if "fp8" in name:
        # Values of one byte are laid out for the transposed product, eight bytes a thread; still whole rows a warp.
        assert wide == 8
        assert count(kernel, "LDGSTS.E.64") == 16
    else:
        assert wide == 32
        assert count(kernel, "LDGSTS.E.64") == 0
    # Nothing narrower but table entries, scales and bits: 4 bytes each.
    narrow = count(kernel, "LDGSTS") - wide - count(kernel, "LDGSTS.E.64")
    assert narrow == kernel["operations"]["LDGSTS.E"]


@pytest.mark.parametrize("name", DECODES)
def test_products_are_made_by_tensor_cores(kernels: dict[str, dict[str, Any]], name: str) -> None:
    assert (count(kernels[name], "HMMA") > 0) == ("fp32" not in name)


def test_new_tokens_are_written_16_bytes_at_a_time(kernels: dict[str, dict[str, Any]]) -> None:
    kernel = kernels["store bf16"]
    # 1,024 elements of 2 bytes by 128 threads: one access each.
    assert count(kernel, "LDG.E.128") == count(kernel, "STG.E.128") == count(kernel, "STG") == 1
    assert count(kernels["store fp8"], "LDG.E.128") == count(kernels["store fp8"], "STG.E.64") == 1
