"""Operators on flat vectors, as SciPy's solvers take them.

Imported where one is made: SciPy's submodules take as long to import as all of linop.
"""

from __future__ import annotations

import scipy.sparse.linalg

from linop.operators.operator import LinearOperator
from linop.spaces.scalars import Array


class FlatOperator(scipy.sparse.linalg.LinearOperator):  # type: ignore[misc]
    """A SciPy operator of shape ``op.shape`` that applies `op` in this process. It pickles if `op`
    does.

    Flat vectors are those of `Space.unflatten`, which converts numbers of other dtypes and refuses
    those that the operator's dtype does not hold.
    """

    def __init__(self, op: LinearOperator) -> None:
        super().__init__(op.dtype, op.shape)
        self.op = op

    def _matvec(self, x: Array) -> Array:
        op = self.op
        return op.codomain.flatten(op(op.domain.unflatten(x)))

    def _rmatvec(self, y: Array) -> Array:
        return FlatOperator(self.op.H)._matvec(y)

    def _adjoint(self) -> FlatOperator:
        return FlatOperator(self.op.H)

    def _transpose(self) -> FlatOperator:
        return FlatOperator(self.op.T)
