"""The check of operators over MPI, with faults in the library: each must make it fail."""

from __future__ import annotations

from functools import partialmethod
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

import mpi_checks
from describing import Description

if TYPE_CHECKING:
    from mpi4py import MPI


def broken(comm: MPI.Comm, what: str, name: str, description: Description) -> None:
    """The check of operators, with a fault in the library; on every rank."""
    path, attribute, wrong = BREAKS[what]
    owner = resolve_name(path)
    right = getattr(owner, attribute)
    setattr(owner, attribute, partialmethod(wrong, right))
    try:
        mpi_checks.operator(comm, name, description, 0)
    finally:
        setattr(owner, attribute, right)


def _sends_zeros(self: Any, send: Any, peer: int, tag: int, buffer: Any) -> Any:
    return send(self, peer, tag, np.zeros_like(buffer))


def _changes_its_argument(self: Any, end: Any, running: Any) -> Any:
    results = end(self, running)
    for array in running.given.values():
        array += 1
    return results


def _returns_its_argument(self: Any, end: Any, running: Any) -> Any:
    given = {array.shape: array for array in running.given.values()}
    return {name: given.get(array.shape, array) for name, array in end(self, running).items()}


def _inner_products_of_its_own(self: Any, vector: Any, space: Any, arrays: Any) -> Any:
    local = vector(self, space, arrays)
    local._total = lambda partial: sum(partial.values())
    return local


BREAKS: dict[str, tuple[str, str, Any]] = {
    "sends zeros": ("linop.backends.mpi:Messages", "send", _sends_zeros),
    "changes its argument": ("linop.backends.base:WorkerPlan", "_end", _changes_its_argument),
    "returns its argument": ("linop.backends.base:WorkerPlan", "_end", _returns_its_argument),
    "inner products of its own": (
        "linop.backends.base:Worker",
        "vector",
        _inner_products_of_its_own,
    ),
}
"""A class of the library, a method of it, and what stands in for it, given the right one."""
