"""Backends and array modules by name: linop's own, and those that other packages register as entry
points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from linop.errors import ArgumentError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
        module, _, attribute = own[name].partition(":")
        found = import_module(module)
        return attrgetter(attribute)(found) if attribute else found
    for other in _others(group):
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
    return [*own, *sorted({other.name for other in _others(group)} - own.keys())]


def _others(group: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # needed for these alone

    return entry_points(group=group)
