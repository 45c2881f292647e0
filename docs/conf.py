"""Sphinx's settings. The package is installed first: nothing is imported from the tree."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import linop_reference  # noqa: E402

project = "linop"
author = "linop developers"
copyright = "2026, linop developers"
version = release = installed_version("linop-algebra")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "breakable",
    "error_anchors",
    "inline_pictures",
    "linop_reference",
    "sphinx_gallery.gen_gallery",
]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

# The reference: the pages of docs/api list the names, of each of which autosummary makes a page.
templates_path = ["_templates"]
autosummary_generate = True
globals().update(linop_reference.settings(HERE / "api"))
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_param = False  # parameters that are described together stay together
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
autodoc_type_aliases = {
    "npt.ArrayLike": "numpy.typing.ArrayLike",
    "npt.DTypeLike": "numpy.typing.DTypeLike",
}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
default_role = "py:obj"
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
    "write_computation_times": False,
}

# Names of other projects. Their inventories are here, as text, and hold what docstrings name: so
# the site is built without a network, and is the same wherever it is built.
intersphinx_mapping = {
    project: (f"https://{site}/", f"_inventories/{project}.txt")
    for project, site in {
        "python": "docs.python.org/3",
        "numpy": "numpy.org/doc/stable",
        "scipy": "docs.scipy.org/doc/scipy",
        "torch": "docs.pytorch.org/docs/stable",
        "mpi4py": "mpi4py.readthedocs.io/en/stable",
    }.items()
}

html_theme = "furo"
html_title = f"linop {version}"
html_static_path = ["_static"]
html_css_files = ["linop.css"]
exclude_patterns = ["_build"]
