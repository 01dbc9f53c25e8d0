"""Kernels run on the GPU if there is one, else in Triton's interpreter: settled before anything imports Triton."""

import importlib.util
import os

import pytest


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    torch.set_num_threads(1)  # toy sizes, and the test processes share the cores
    return bool(torch.cuda.is_available())


HAS_GPU = _has_gpu()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def kernel_device() -> str:
    """Where kernels run."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="needs a GPU"))])
def device(request: pytest.FixtureRequest) -> str:
    """Each kind of device that torch has here."""
    return str(request.param)
