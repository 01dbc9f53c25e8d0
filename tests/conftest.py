"""What all tests share."""

import os

import pytest
from hypothesis import settings

# Test processes share the cores. Where several threads wait for each other in each of them, torch on toy sizes takes
# twenty times as long. For this process and those it starts; to be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A first example pays for compiling kernels, and two test processes share the cores: no deadline says anything here.
settings.register_profile("project", deadline=None)
settings.load_profile("project")

# A package of its own, whose tests run where it is installed: tests/packaging/test_plugins.py.
collect_ignore = ["example_plugin"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that have slow tests first: what is long and starts last leaves the other test processes idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
