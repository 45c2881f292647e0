"""Sphinx's settings. The package is installed first: nothing is imported from the tree."""

from importlib.metadata import version as installed_version

project = "linop"
author = "linop developers"
copyright = "2026, linop developers"
version = release = installed_version("linop-algebra")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
default_role = "code"
# Attributes of several classes are called as the type `bytes` is, which signatures name.
suppress_warnings = ["ref.python"]

# The pages of examples/gallery run while the site is built. One that raises, as by an assertion,
# fails the build at its end, so that all that fail are told at once.
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "subsection_order": [
        f"../examples/gallery/{folder}" for folder in ("inverse", "networks", "checks", "messages")
    ],
    "within_subsection_order": "FileNameSortKey",
    "matplotlib_animations": True,
    "download_all_examples": False,
    "show_signature": False,
}

html_theme = "furo"
html_title = f"linop {version}"
html_static_path = ["_static"]
html_css_files = ["linop.css"]
exclude_patterns = ["_build"]
