"""What a program names by a word, a backend or an array module: linop's own, and those of other
packages, which register them as entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from linop.errors import ArgumentError

BACKENDS, ARRAYS = "linop.backends", "linop.arrays"
"""Groups of entry points."""


def found(group: str, own: Mapping[str, str], name: object, what: str) -> Any:
    """The object registered under a name.

    Args:
        group: of the entry points.
        own: linop's, by name, each as an entry point: ``module`` or ``module:attribute``. Another
            package cannot replace them.
        what: the argument, in an error's text.

    Raises:
        ArgumentError: there is no such name; or what it names cannot be imported from the package
            that registers it.
    """
    # Own names first: looking through all packages takes milliseconds.
    if isinstance(name, str) and name in own:
        return EntryPoint(name, own[name], group).load()
    for other in entry_points(group=group):
        if other.name == name:
            try:
                return other.load()
            except (ImportError, AttributeError) as error:
                whose = other.dist.name if other.dist else "a package"
                raise ArgumentError(
                    f"{what} {name!r} of {whose} cannot be loaded from {other.value!r}: {error}"
                ) from error
    raise ArgumentError(f"{what}: expected one of {', '.join(names(group, own))}; given {name!r}")


def names(group: str, own: Mapping[str, str]) -> list[str]:
    """All names, linop's first."""
    return [*own, *sorted({other.name for other in entry_points(group=group)} - own.keys())]
