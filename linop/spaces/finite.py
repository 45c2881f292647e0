"""Elements of vectors that are not finite, found on all workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from linop.spaces.distributed import Partials
from linop.spaces.scalars import Scalar
from linop.spaces.vector import Vector, summed


def not_finite(vector: Vector) -> str:
    """The first element that is not finite and the number of all of them, in words; empty if there
    is none. Collective for vectors made by a backend, and the same on every worker."""
    regions = vector.space.regions
    bad = {name: ~np.isfinite(array) for name, array in vector.arrays.items()}

    def counted() -> Partials:
        # A replicated region counts for the first of its holders.
        return [{r.workers[0]: int(bad[r.name].sum())} if r.name in bad else {} for r in regions]

    counts: list[Any] = summed(counted, "look for NaN", [(vector, vector)])
    if not any(counts):
        return ""
    region = regions[next(k for k, count in enumerate(counts) if count)]

    def located() -> Partials:
        if region.name not in bad:
            return [{}, {}]
        k = int(bad[region.name].ravel().argmax())
        value: Scalar = vector[region.name].ravel()[k].item()
        return [{region.workers[0]: k}, {region.workers[0]: value}]

    where: list[Any] = summed(located, "look for NaN", [(vector, vector)])
    index = [int(i) for i in np.unravel_index(int(where[0]), region.shape)]
    many = f"{sum(counts)} of {vector.space.size} elements are not finite"
    return f"{where[1]} at {index} of region {region.name!r} ({many})"
