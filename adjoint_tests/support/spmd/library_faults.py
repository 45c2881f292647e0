"""The check of operators over MPI, with faults in the library: each must make it fail."""

from __future__ import annotations

from functools import partialmethod
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from linop.testing.describing import Description
from support.contracts import mpi_operators

if TYPE_CHECKING:
    from mpi4py import MPI


def broken(comm: MPI.Comm, what: str, name: str, description: Description) -> None:
    """The check of operators, with a fault in the library; on every rank."""
    path, attribute, wrong = BREAKS[what]
    owner = resolve_name(path)
    right = getattr(owner, attribute)
    setattr(owner, attribute, partialmethod(wrong, right))
    try:
        mpi_operators.operator(comm, name, description, 0, what == SENDS)
    finally:
        setattr(owner, attribute, right)


def _sends_zeros(self: Any, sender: Any, peer: int, tag: int, buffer: Any) -> Any:
    return sender(self, peer, tag, np.zeros_like(buffer))


def _writes_elsewhere(self: Any, views: Any, place: Any, rank: int, dtype: Any) -> Any:
    return [array.copy() for array in views(self, place, rank, dtype)]


def _changes_its_argument(self: Any, run: Any, x: Any, out: Any) -> Any:
    results = run(self, x, out)
    for array in x.arrays.values():
        array += 1
    return results


def _returns_its_argument(self: Any, run: Any, x: Any, out: Any) -> Any:
    given = {array.shape: array for array in x.arrays.values()}
    return [given.get(array.shape, array) for array in run(self, x, out)]


def _inner_products_of_its_own(self: Any, vector: Any, space: Any, arrays: Any) -> Any:
    local = vector(self, space, arrays)
    local._total = lambda partial: sum(partial.values())
    return local


SENDS = "sends zeros"
"""The one that only messages show."""

BREAKS: dict[str, tuple[str, str, Any]] = {
    SENDS: ("linop.backends.mpi.backend:Ranks", "sender", _sends_zeros),
    "writes elsewhere": ("linop.backends.mpi.shared_memory.pool:Pool", "views", _writes_elsewhere),
    "changes its argument": (
        "linop.backends.engine.worker_plan:WorkerPlan",
        "_run",
        _changes_its_argument,
    ),
    "returns its argument": (
        "linop.backends.engine.worker_plan:WorkerPlan",
        "_run",
        _returns_its_argument,
    ),
    "inner products of its own": (
        "linop.backends.engine.worker:Worker",
        "vector",
        _inner_products_of_its_own,
    ),
}
"""A class of the library, a method of it, and what stands in for it, given the right one."""
