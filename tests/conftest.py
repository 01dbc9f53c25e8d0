"""What all tests share."""

from hypothesis import settings

# A first example pays for compiling kernels, and two test processes share the cores: no deadline says anything here.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
