"""What all tests share."""

from hypothesis import settings

# A first example pays for compiling kernels, and two test processes share the cores: no deadline says anything here.
settings.register_profile("project", deadline=None)
settings.load_profile("project")

# A package of its own, whose tests run where it is installed: tests/packaging/test_plugins.py.
collect_ignore = ["example_plugin"]
