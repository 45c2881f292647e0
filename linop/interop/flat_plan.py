"""Plans on flat vectors that every worker holds whole, as SciPy's functions take them.

SciPy's solvers keep their vectors in one process. So each worker runs the solver on the same whole
vectors, in step with the others, and only the products are distributed: for vectors that exceed a
worker's memory there is `linop.solvers`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator as SciPyOperator

from linop.backends import BoundPlan
from linop.backends.engine.worker import Worker
from linop.errors import ArgumentError
from linop.operators.named_movement import out_of_place
from linop.operators.operator import LinearOperator
from linop.operators.riesz import between_euclidean
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.spaces.vector import Vector

APPLY = "an operator of linop.interop"


def scipy(plan: BoundPlan | LinearOperator) -> SciPyOperator:
    """A SciPy `LinearOperator` of an operator, or of the plan of one on any backend: SciPy's
    solvers, `scipy.optimize.minimize` and others then run on every worker in step.

    Vectors are flat, whole on every worker, and in the order of `Space.flatten`: the C order of
    global tensors. Each product is collective, and is refused on all workers if their vectors
    differ, as random ones of different seeds: functions that start from one, such as
    `scipy.sparse.linalg.eigsh`, take it as ``v0=``.

    Args:
        plan: an operator, applied in this process; or a plan. Of the plan of one worker of
            several, this call is collective: it compiles the operator between whole vectors.

    Raises:
        ArgumentError: `plan` is neither; in a product, workers give different vectors.

    Example:
        Every worker runs SciPy's solver on whole vectors; the products are distributed:

        >>> from scipy.sparse.linalg import cg
        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> A, b = 2 * linop.identity(X), np.array([2.0, 4.0, 6.0, 8.0])
        >>> def program(backend):
        ...     x, info = cg(linop.interop.scipy(A.compile(backend)), b)
        ...     return x.round(6).tolist(), info
        >>> linop.launch(program, workers=2)
        [([1.0, 2.0, 3.0, 4.0], 0), ([1.0, 2.0, 3.0, 4.0], 0)]
    """
    if isinstance(plan, LinearOperator):
        return plan.to_scipy()
    if not isinstance(plan, BoundPlan):
        raise ArgumentError(f"interop: an operator or a plan expected, given {plan!r}")
    return FlatPlan(plan)


class FlatPlan(SciPyOperator):  # type: ignore[misc]
    """A plan as SciPy's operator; see `scipy`."""

    def __init__(self, plan: BoundPlan, whole: BoundPlan | None = None) -> None:
        super().__init__(plan.op.dtype, plan.op.shape)
        self.plan = plan = euclidean(plan)
        self.clinear = plan.op.clinear
        backend: Any = plan.backend
        self._alone = not isinstance(backend, Worker)
        self._whole = whole or self._compiled(backend)

    def _compiled(self, backend: Any) -> BoundPlan:
        if self._alone:
            return self.plan
        return everywhere(self.plan.op, range(backend.workers)).compile(backend)

    def _matvec(self, x: Array) -> Array:
        domain, codomain = self.plan.op.flat_ends
        arrays = self._alike(lambda: domain.unflatten(x).arrays)
        y = self._whole(self._vector(self._whole.op.domain, arrays))
        return codomain.flatten(Vector(codomain, y.arrays))

    def _vector(self, space: Space, arrays: dict[str, Array]) -> Vector:
        backend: Any = self.plan.backend
        return Vector(space, arrays) if self._alone else backend.vector(space, arrays)

    def _alike(self, given: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        """The arrays of a vector, after a check that all workers hold the same one; collective.

        Raises:
            ArgumentError: they do not. ShapeError, DTypeError: one worker's is no vector of the
                domain. On every worker.
        """
        if self._alone:
            return given()

        def work() -> tuple[dict[str, Array], bytes]:
            arrays = given()
            digest = hashlib.blake2b(digest_size=16)
            for array in arrays.values():
                digest.update(np.ascontiguousarray(array).tobytes())
            return arrays, digest.digest()

        backend: Any = self.plan.backend
        arrays, said = backend.together(work, APPLY)
        if other := next((w for w, one in enumerate(said) if one != said[0]), None):
            raise ArgumentError(
                f"interop: the vector of worker {other} differs from that of worker 0; SciPy's "
                f"functions have to run in step: give all workers the same start, as x0=, v0= or a "
                f"seed"
            )
        found: dict[str, Array] = arrays
        return found

    def _rmatvec(self, y: Array) -> Array:
        return self._adjoint()._matvec(y)

    def _adjoint(self) -> FlatPlan:
        return FlatPlan(self.plan.H, self._whole.H)


def euclidean(plan: BoundPlan) -> BoundPlan:
    """The plan between Euclidean spaces, whose inner product arrays of other packages have; itself
    if it is one. Collective, where it compiles another."""
    plain = between_euclidean(plan.op)
    return plan if plain is plan.op else plan.backend.compile(plain)


def everywhere(op: LinearOperator, workers: Sequence[int]) -> LinearOperator:
    """The operator E_Y op E_X*, between spaces of the same regions, each of which all workers hold
    as one: its matrix is that of `op`."""
    return embedding(op.codomain, workers) @ op @ embedding(op.domain, workers).H


def embedding(space: Space, workers: Sequence[int]) -> LinearOperator:
    """E: the operator that gives all workers each region of a space."""
    held = [Region(r.name, r.shape, workers, r.memory) for r in space.regions]
    return out_of_place(
        space, Space(held, space.dtype), list(zip(space.regions, held, strict=True))
    )
