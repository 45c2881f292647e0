"""Folders of libraries, whose lines are not those of the program that is looked at."""

from __future__ import annotations

import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def folders(*libraries: str) -> tuple[str, ...]:
    """Folders of linop, of Python's own modules and of libraries, by links and without, with a
    separator at the end.

    Args:
        libraries: names of installed packages; none is imported.
    """
    # In a checkout the last two are not in the first one's folder.
    names = ("linop", "linop.backends", "linop.layers", *libraries)
    found = [Path(sysconfig.get_paths()["stdlib"])]
    for spec in map(find_spec, names):
        found += [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return tuple({f"{way}{os.sep}" for place in found for way in (place, place.resolve())})
