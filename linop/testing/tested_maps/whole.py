"""Gathering of distributed vectors on every worker, and maps reinterpreted between other spaces of
the same size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from linop.backends.engine.worker import Worker
from linop.errors import ArgumentError
from linop.spaces.scalars import Array
from linop.spaces.space import Order, Space
from linop.spaces.vector import Vector
from linop.testing.report import Worst
from linop.testing.tested_maps.tested_map import Fault, TestedMap, gathered, host_vector


def everything(vector: Vector, F: TestedMap, order: Order = "regions") -> Array:
    """All elements of a vector, in an order of `Space.flatten`, on every worker. Collective."""
    space, backend = vector.space, F.backend
    if not isinstance(backend, Worker):
        return space.flatten(vector, order)
    said = b"".join(vector[r.name].tobytes() for r in space.on(backend.worker))
    arrays = {}
    for worker, data in enumerate(gathered(backend, said)):
        flat, begin = np.frombuffer(data, space.dtype), 0
        for region in space.on(worker):
            arrays[region.name] = flat[begin : begin + region.size].reshape(region.shape)
            begin += region.size
    return space.flatten(Vector(space, arrays), order)


def seen_as(F: TestedMap, domain: Space, codomain: Space, named: bool) -> TestedMap:
    """The map itself, if it is between these spaces, or between them with other inner products;
    otherwise, if region names of either side are generated, a map between these spaces in which
    elements correspond by position in the order of `Space.flatten`.

    Args:
        named: True if the spaces' region names were given by the user.

    Raises:
        Fault: sizes or dtypes differ; or the spaces differ, and all names were given by users.
    """
    if F.domain == domain and F.codomain == codomain:
        return F
    if F.domain.has_regions_of(domain) and F.codomain.has_regions_of(codomain):
        return replace(F, domain=domain, codomain=codomain, _last={})
    sides = ((F.domain, domain), (F.codomain, codomain))
    fits = all(a.size == b.size and a.dtype == b.dtype for a, b in sides)
    if not fits or (named and not F.anonymous):
        raise Fault(
            Worst(
                f"spaces differ: {domain} -> {codomain} ({domain.dtype}, {codomain.dtype}) wanted, "
                f"given {F.domain} -> {F.codomain} "
                f"({F.domain.dtype}, {F.codomain.dtype})"
            )
        )

    def between(F: TestedMap, target: Space) -> Callable[[Vector], Vector]:
        def into(space: Space, x: Vector) -> Vector:
            return host_vector(space, space.unflatten(everything(x, F, "global")), F.backend)

        return lambda x: into(target, F(into(F.domain, x)))

    back = None if F.adjoint is None else between(F.H, domain)
    functions = {"forward": between(F, codomain), "adjoint": back}
    return Seen(**{**vars(F), "domain": domain, "codomain": codomain, **functions})


def with_inner(F: TestedMap, inner: Any) -> TestedMap:
    """The map between the same spaces with other inner products.

    Args:
        inner: those of domain and codomain, each as for `Space`; None for those that they have.

    Raises:
        ArgumentError: it is no pair; others as `Space`.
    """
    if inner is None:
        return F
    if not (isinstance(inner, tuple) and len(inner) == 2):
        raise ArgumentError(
            f"inner: a pair expected, the inner products of domain and codomain; given {inner!r}"
        )
    sides = (s.with_inner(one) for s, one in zip((F.domain, F.codomain), inner, strict=True))
    domain, codomain = sides
    return replace(F, domain=domain, codomain=codomain, _last={})


class Seen(TestedMap):
    """A map reinterpreted between other spaces. Its functions map vectors to vectors; the original
    map, which they call, validates arrays."""

    def __call__(self, x: Vector) -> Vector:
        result: Vector = self.forward(x)
        return result
