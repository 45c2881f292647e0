"""Estimate of the norm of an operator, for the steps of methods that are not given one."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from linop.solvers.iteration import Ask
from linop.solvers.krylov.first_vectors import random_vector
from linop.solvers.updates import times
from linop.spaces.vector import Vector

POWERS = 20
"""Iterations, at most."""


def squared_norm(Op: Any, like: Vector) -> Generator[Ask, list[Any], float]:
    """‖Op‖² from below, by at most `POWERS` power iterations, which end when the estimate grows by
    less than a percent; one reduction each. Methods watch their steps, since it is an estimate.

    Args:
        like: a vector of the domain.
    """
    v, found = random_vector(Op, like, 0), 0.0
    for _ in range(POWERS):
        image = Op(v)
        named = ("product Op v, for the norm of Op,", image, image)
        above, below = yield Ask([named, ("vector v, for the norm of Op,", v, v)])
        last, found = found, above / below if below else 0.0
        if found <= 1.01 * last:
            break
        v = times(1 / found, Op.H(image))
    return found
