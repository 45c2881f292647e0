"""The gradient of a tensor that is cut over workers, and the proximal map of total variation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from linop.errors import ArgumentError, ShapeError, expect
from linop.operators.algebra import Named, direct_sum
from linop.operators.collectives import repartition
from linop.operators.expressions import Identity, compose
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.solvers.prox.differences import differences
from linop.solvers.prox.maps import ProximalMap, counted, mapped, positive, total
from linop.solvers.prox.norms import lengths
from linop.solvers.updates import plus, times
from linop.spaces.decomposition import Bounds
from linop.spaces.distributed import Partials
from linop.spaces.region import integer
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace
from linop.spaces.vector import Vector, summed


@records_origin
def gradient(X: TensorSpace) -> LinearOperator:
    """∇: differences of neighbours, x[i+1] - x[i], in every dimension; zero at the upper border.

    A halo of one element at the upper side of each block, exchanged between workers, and local
    differences.

    Args:
        X: n dimensions; blocks that do not overlap.

    Returns:
        The operator from X to the `TensorSpace` of shape ``(n, *X.global_shape)``, cut as X is; its
        norm is at most 2 √n.

    Raises:
        ArgumentError: X is no `TensorSpace`. ShapeError: it has no dimension. PartitionError: an
            element is in several blocks.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> K = linop.solvers.prox.gradient(X)
        >>> K.codomain.gather(K(X.scatter(np.array([0.0, 1.0, 5.0, 4.0])))).tolist()
        [[1.0, 4.0, -1.0, 0.0]]
        >>> X.gather(K.H(K.codomain.scatter(np.array([[1.0, 0.0, 0.0, 0.0]])))).tolist()
        [-1.0, 1.0, 0.0, 0.0]
    """
    X = expect("gradient", X, TensorSpace)
    if not X.ndim:
        raise ShapeError("gradient: a tensor without dimensions has none")
    wider = dict(enumerate(_wider(bounds) for bounds in X.bounds))
    E = X.like(X.partition, X.axes, wider).euclidean
    G = TensorSpace(
        (X.ndim, *X.global_shape),
        X.partition,
        X.dtype,
        [axis + 1 if isinstance(axis, int) else axis for axis in X.axes],
        f"∇{X.name}",
        bounds={d + 1: bounds for d, bounds in enumerate(X.bounds)},
        memory=X.memory,
    )
    parts = [
        differences(Space(e, X.dtype), Space(g, X.dtype))
        for e, g in zip(E.regions, G.regions, strict=True)
    ]
    return Named("∇", "", compose(Identity(G), direct_sum(*parts), repartition(X, E)))


def _wider(bounds: Bounds) -> Bounds:
    """Blocks with the next element."""
    last = bounds[-1][1]
    return tuple((a, min(b + 1, last) if a < b else b) for a, b in bounds)


def total_variation(
    X: TensorSpace,
    sigma: float = 1.0,
    *,
    niter: int = 200,
    rtol: float = 1e-3,
    backend: Any = None,
) -> ProximalMap:
    """sigma times the isotropic total variation: the sum over all elements of ‖(∇x)[:, i]‖₂, with
    `gradient`.

    The proximal map is the iteration of Beck & Teboulle (IEEE Trans. Image Processing, 2009), fast
    gradient projection on the dual problem. It ends when the duality gap proves that the distance
    to the minimizer is at most rtol ‖v‖ (or the gap is one of rounding errors), or after niter
    iterations; each takes the gradient, its adjoint and one reduction. Momentum restarts where it
    points uphill (O'Donoghue & Candès 2015).

    Args:
        X: space of the vectors, on any partition.
        niter: iterations at most, of each call of `prox`.
        rtol: relative accuracy of `prox`.
        backend: of the vectors, in an SPMD program; compiling is collective.

    Raises:
        ArgumentError: sigma or rtol is not positive, niter no whole number from 1. As `gradient`.

    Example:
        A step of height 4 with noise becomes two flat pieces:

        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> f = linop.solvers.prox.total_variation(X, 0.5, rtol=1e-6)
        >>> v = X.scatter(np.array([1.0, 0.0, 5.0, 4.0]))
        >>> f(v), X.gather(f.prox(v, 1.0)).round(3).tolist()
        (3.5, [0.75, 0.75, 4.25, 4.25])
    """
    sigma, rtol = (
        positive(f"total_variation: {n}", v) for n, v in (("sigma", sigma), ("rtol", rtol))
    )
    if (niter := integer(niter, "niter")) < 1:
        raise ArgumentError(f"total_variation: niter is a whole number from 1; given {niter}")
    op = gradient(X)
    return _TotalVariation(op if backend is None else op.compile(backend), X, sigma, niter, rtol)


class _TotalVariation(ProximalMap):
    def __init__(
        self, gradient: Any, X: TensorSpace, sigma: float, niter: int, rtol: float
    ) -> None:
        self._gradient, self._space, self._sigma = gradient, X, sigma
        self._niter, self._rtol, self.name = niter, rtol, f"total_variation({sigma:g})"

    def check(self, space: Space) -> None:
        super().check(space)
        self._space.same_as(space, self.name)

    def partial(self, v: Vector) -> dict[int, Scalar]:
        return _length(self._gradient(v))

    def of_sum(self, number: Scalar) -> float:
        return self._sigma * super().of_sum(number)

    def _prox(self, v: Vector, step: float) -> Vector:
        """x = v - weight ∇* p, with the dual p that maximizes the minimum over x of
        ‖x - v‖² / 2 + weight Re <∇x, p> over ‖p[:, i]‖ <= 1."""
        weight = self._sigma * step
        slope = self._gradient(v)
        p, best, t = times(0, slope), v, 1.0
        q, slope_q = p, slope
        rounding = float(np.finfo(v.space.dtype).eps)
        ascent = 1 / (4 * self._space.ndim * weight)
        for _ in range(self._niter):
            last, old = p, slope
            p = _within_one(plus(q, ascent, slope_q))
            best = plus(v, -weight, self._gradient.H(p))
            slope = self._gradient(best)
            length, product, square, uphill = self._sums(slope, p, v, (q - p, p - last))
            # The gap bounds the squared distance to the minimizer, halved.
            gap = weight * (length - product)
            if not gap > max(self._rtol**2 / 2 * square, 4 * rounding * weight * length):
                break
            before, t = (1.0, 1.0) if uphill > 0 else (t, (1 + math.sqrt(1 + 4 * t * t)) / 2)
            momentum = (before - 1) / t
            q, slope_q = (plus(a, momentum, a - b) for a, b in ((p, last), (slope, old)))
        return best

    def _sums(
        self, slope: Vector, p: Vector, v: Vector, steps: tuple[Vector, Vector]
    ) -> list[float]:
        """The sum of ‖slope[:, i]‖, Re <slope, p>, ‖v‖², and the product of two steps, in one
        reduction."""
        pairs = [(slope, p), (v, v), steps]

        def partials() -> Partials:
            return [_length(slope), *(a.space.partial_inners(a, b) for a, b in pairs)]

        sums: list[Any] = summed(partials, self.name, pairs)
        return [float(one.real) for one in sums]


def _length(slope: Vector) -> dict[int, Scalar]:
    return counted(lambda a, name: total(lengths(a, 0)), slope)


def _within_one(p: Vector) -> Vector:
    """The nearest p with ‖p[:, i]‖ <= 1."""
    return mapped("project", lambda a, name: a / np.maximum(lengths(a, 0), 1), p)
