"""How large the rounding errors of an operator's results may be.

Errors of sums are relative to their terms. Where terms cancel, as in a product of operators that is
zero (the divergence of a curl), results are rounding errors alone, and a check that divided by them
would call a right operator wrong. So noise is let through the operator: whatever a step of its
expression computes gets a random part of the size of its terms, and what the steps after it make of
that noise is the size of rounding errors in the result, in units of the machine epsilon. It grows
and shrinks as the steps make it: no more than values do where nothing cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from linop.operators.expressions import Compound, Local
from linop.operators.flow import SOURCE, TARGET, Arrays, Edge, Flow, accumulate, applied, evaluated
from linop.operators.operator import LinearOperator
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.testing.tested_maps.tested_map import TestedMap, gathered

MOST = 2**24
"""Elements of the domain times those of the codomain up to which noise is made of unit vectors."""
_SAMPLES = 4
"""Of noise: by chance all of them may be small, one time in thousands."""


def size_of_terms(F: TestedMap, x: Any) -> Any:
    """Size of the noise in the image of a random vector whose largest element is x: its largest
    element; 0 if it is not known. Collective."""
    return x * _known(F, lambda noise: noise.max(initial=0))


def size_of_products(F: TestedMap, x: Any, y: Any) -> Any:
    """As `size_of_terms`, of <F x, y>, for the largest elements of both vectors: what is random of
    its terms adds up as squares do. Collective."""
    return x * y * _known(F, lambda noise: np.sqrt((noise**2).sum()))


def noise_of_entries(F: TestedMap) -> Array | None:
    """The size of the noise in each entry of the matrix; None if it is not known here."""
    if not _has_noise(F) or F.domain.size * F.codomain.size > MOST:
        return None
    assert F.op is not None
    try:
        columns = [_noise(F.op, unit) for unit in np.eye(F.domain.size, dtype=F.domain.dtype)]
    except Exception:  # of a user's function, which another worker's data may be meant for
        return None
    found = np.array(columns).reshape(F.domain.size, F.codomain.size).T
    return found if np.isfinite(found).all() else None


def _has_noise(F: TestedMap) -> bool:
    return not (F.op is None or F.exact or F.real)


def _known(F: TestedMap, size: Callable[[Array], Any]) -> float:
    """Size of the noise of a random vector whose largest element is 1, the largest that a worker
    knows."""
    found = 0.0
    if _has_noise(F):
        assert F.op is not None
        given = F.domain.flatten(F.domain.random(0), "regions")
        try:
            noise = _noise(F.op, given)
        except Exception:  # as above
            noise = np.zeros(0)
        most = np.abs(given).max(initial=0)
        found = float(size(noise) / most) if most else 0.0
    return max(one if np.isfinite(one) else 0.0 for one in gathered(F.backend, found))


def _noise(op: LinearOperator, x: Array) -> Array:
    """Size of the noise in each element of ``op(x)``: the root of the mean of its squares over some
    samples, in long double."""
    flow = op.flow if isinstance(op, Compound) else _alone(op)
    rng, dtype = np.random.default_rng(0), op.dtype
    sizes = _Sizes()

    def add(total: list[Arrays], edge: Edge, given: list[Arrays], owned: bool) -> None:
        space = flow.spaces[edge.target]
        terms = [applied(edge, one, False, space, dtype) for one in given]
        for name, size in sizes.of(edge, given[0], terms[0], space, dtype).items():
            for term in terms[1:]:
                term[name] += (_random(rng, size.shape, dtype) * size).astype(dtype)
        for one, term in zip(total, terms, strict=True):
            accumulate(one, term)

    def ended(total: list[Arrays], space: Space) -> None:
        for arrays in total:
            for region in space.regions:
                arrays.setdefault(region.name, np.zeros(region.shape, dtype))

    nothing = [op.domain.zeros().arrays for _ in range(_SAMPLES)]
    given = [dict(op.domain.unflatten(x, "regions").arrays), *map(dict, nothing)]
    with np.errstate(all="ignore"):
        found = evaluated(flow, given, lambda: [{} for _ in range(1 + _SAMPLES)], add, ended)
        each = [op.codomain.flatten(op.codomain.vector(arrays), "regions") for arrays in found[1:]]
        squares = [np.abs(noise).astype(np.longdouble) ** 2 for noise in each]
        size: Array = np.sqrt(np.sum(squares, axis=0) / _SAMPLES)
    return size


def _alone(op: LinearOperator) -> Flow:
    """The flow of an operator that is no expression of others."""
    flow = Flow()
    for space in (op.domain, op.codomain):
        flow.wire(space)
    flow.join(op, SOURCE, TARGET)
    return flow


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    parts = rng.standard_normal((2, *shape))
    drawn: Array = (parts[0] + 1j * parts[1]) / np.sqrt(2) if dtype.kind == "c" else parts[0]
    return drawn


class _Sizes:
    """Sizes of the terms of what edges compute."""

    def __init__(self) -> None:
        self._matrices: dict[int, Any] = {}
        """Of squared absolute values, by the id of a local operator; None where it is unknown."""

    def of(
        self, edge: Edge, given: Arrays, term: Arrays, space: Space, dtype: np.dtype[Any]
    ) -> Arrays:
        """Of each element: the root of the sum of its terms' squares where the matrix is known, the
        size of a sum of them with random signs; else the size of the element."""
        size = math.hypot(edge.scalar.real, edge.scalar.imag)
        if not isinstance(edge.step, Local):
            # Data movement: its terms are elements of its argument.
            every = {name: np.abs(array).astype(dtype) for name, array in given.items()}
            moved = applied(edge._replace(scalar=1), every, True, space, dtype)
            return {name: size * array.real for name, array in moved.items()}
        matrix = self._matrix(edge.step)
        if matrix is None:
            return {name: np.abs(array) for name, array in term.items()}
        before, after = edge.step.domain, edge.step.codomain
        flat = np.concatenate([np.abs(given[r.name]).ravel() for r in before.regions])
        sums = size * np.sqrt(matrix @ flat**2)
        each = iter(np.split(sums, [*after.offsets.values()][1:]))
        return {r.name: next(each).reshape(r.shape) for r in after.regions}

    def _matrix(self, step: Local) -> Any:
        key = id(step)
        if key not in self._matrices:
            known = step.map.matrix
            self._matrices[key] = None if known is None else abs(known()).power(2)
        return self._matrices[key]
