"""Sphinx's configuration; ``python docs/build.py`` (``make docs``) puts the pages together and calls it."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "vtoken-sim"
author = "vtoken-sim authors"
copyright = author
version = release = version_of("vtoken-sim")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "vtoken_options"]
templates_path = ["_templates"]
exclude_patterns = ["_ext", "_templates"]
# Options of commands are written with two dashes.
smartquotes = False
html_theme = "furo"
html_title = f"vtoken-sim {release}"

# Notebooks carry the outputs of the run that was committed; the tests execute them.
nb_execution_mode = "off"
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
