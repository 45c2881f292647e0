"""Folders of libraries, whose lines are not those of the program that is looked at."""

from __future__ import annotations

import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path

BETWEEN = (
    "typing_extensions",
    "einops",
    "opt_einsum",
    "jaxtyping",
    "beartype",
    "wrapt",
    "decorator",
)
"""Libraries through which programs call others, as by a decorator or a notation."""


def folders(*libraries: str) -> tuple[str, ...]:
    """Folders of linop, of Python's own modules, of libraries and of those in `BETWEEN`, by links
    and without, with a separator at the end; the files of libraries that are one module.

    Args:
        libraries: names of installed packages; none is imported.
    """
    # In a checkout the last two are not in the first one's folder.
    names = ("linop", "linop.backends", "linop.layers", *libraries, *BETWEEN)
    files: list[Path] = []
    found = [Path(sysconfig.get_paths()["stdlib"])]
    for spec in map(find_spec, names):
        if spec is not None and spec.submodule_search_locations is None and spec.origin:
            files.append(Path(spec.origin))
        found += [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    inside = {f"{way}{os.sep}" for place in found for way in (place, place.resolve())}
    return tuple({*inside, *(str(way) for one in files for way in (one, one.resolve()))})
