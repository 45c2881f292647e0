"""Operators on flat vectors, as SciPy's solvers take them.

Imported where one is made: SciPy's submodules take as long to import as all of linop.
"""

from __future__ import annotations

import scipy.sparse.linalg

from linop.operators.operator import LinearOperator
from linop.operators.scipy_protocol import flat_result
from linop.spaces.scalars import Array
from linop.spaces.space import Order, checked_order


class FlatOperator(scipy.sparse.linalg.LinearOperator):  # type: ignore[misc]
    """A SciPy operator of shape ``op.shape`` that applies `op` in this process. It pickles if `op`
    does.

    Flat vectors are those of `Space.unflatten`, which converts numbers of other dtypes and refuses
    those that the operator's dtype does not hold.

    Args:
        op: the operator.
        order: of flat vectors, one of `Space.flatten`.

    Raises:
        ArgumentError: the order is none.
    """

    def __init__(self, op: LinearOperator, order: Order = "global") -> None:
        super().__init__(op.dtype, op.shape)
        self.op, self.order, self.clinear = op, checked_order(order), op.clinear

    def _matvec(self, x: Array) -> Array:
        return flat_result(self.op, x, self.order)

    def _rmatvec(self, y: Array) -> Array:
        return self._adjoint()._matvec(y)

    def _adjoint(self) -> FlatOperator:
        return FlatOperator(self.op.euclidean_adjoint, self.order)

    def _transpose(self) -> FlatOperator:
        return FlatOperator(self.op.T, self.order)
