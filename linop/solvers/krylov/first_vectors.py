"""First vectors of eigenvalue methods: random ones are the same numbers on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from linop.errors import ArgumentError
from linop.solvers.arguments import vector_of
from linop.solvers.iteration import Reductions
from linop.spaces.region import Region
from linop.spaces.space import Space
from linop.spaces.vector import Vector


def first_vector(method: str, A: Any, given: Any, name: str, seed: int) -> Vector:
    """The first vector of a method: the one given, or a random one.

    Raises:
        ArgumentError, and others: see `vector_of`; or A has no domain, and no vector is given.
    """
    if given is not None:
        return vector_of(method, A, given, name, "domain")
    space = getattr(A, "domain", None)
    if not isinstance(space, Space):
        raise ArgumentError(f"{method}: a function of vectors needs {name}, the first vector")
    backend = getattr(A, "backend", None)
    worker = getattr(backend, "worker", None)
    arrays = _drawn(space, space.regions if worker is None else space.on(worker), seed, backend)
    made: Any = Vector(space, arrays)
    if worker is not None:
        names = list(arrays)
        held = None if not names else arrays[names[0]] if len(names) == 1 else arrays
        made = backend.vector(space, held)  # type: ignore[union-attr]
    return vector_of(method, A, made, name, "domain")


def random_vector(A: Any, like: Vector, seed: int) -> Vector:
    """A random vector of the space and workers of another."""
    space = like.space
    regions = [region for region in space.regions if region.name in like.arrays]
    arrays = _drawn(space, regions, seed, getattr(A, "backend", None))
    shared = None if like.shared is None else like.shared.derived(f"random {seed}")
    return Vector(space, arrays, shared)


def _drawn(space: Space, regions: Any, seed: int, backend: Any) -> dict[str, Any]:
    """Normal random numbers of some regions, those of each from its own place in the space."""
    place = {region.name: k for k, region in enumerate(space.regions)}
    of = getattr(getattr(backend, "arrays", None), "of", None)

    def draw(region: Region) -> Any:
        rng = np.random.default_rng([seed, place[region.name]])
        values = rng.standard_normal(region.shape)
        if space.dtype.kind == "c":
            values = values + 1j * rng.standard_normal(region.shape)
        array = np.asarray(values).astype(space.dtype)
        return array if of is None else of(region.memory).put(array)

    return {region.name: draw(region) for region in regions}


def norm_of_first(reductions: Reductions, first: Vector, name: str) -> float:
    """The norm of the first vector.

    Raises:
        ArgumentError: it is zero, or not finite; on every worker.
    """
    if norm := reductions.norm(first, f"the first vector {name}"):
        return norm
    raise ArgumentError(f"{reductions.method}: the first vector {name} is zero")
