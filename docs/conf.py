"""Sphinx's settings. The package is installed first: nothing is imported from the tree."""

from importlib.metadata import version as installed_version

project = "linop"
author = "linop developers"
copyright = "2026, linop developers"
version = release = installed_version("linop-algebra")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
default_role = "code"
# Attributes of several classes are called as the type `bytes` is, which signatures name.
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_title = f"linop {version}"
html_static_path = ["_static"]
html_css_files = ["linop.css"]
exclude_patterns = ["_build"]
