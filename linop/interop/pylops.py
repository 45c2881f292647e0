"""Operators and plans as PyLops' operators."""

from __future__ import annotations

from typing import Any

from linop.backends import BoundPlan
from linop.errors import MissingExtraError
from linop.interop.flat_plan import scipy
from linop.operators.operator import LinearOperator
from linop.operators.scipy_protocol import natural_shape


def to_pylops(plan: BoundPlan | LinearOperator) -> Any:
    """A `pylops.LinearOperator` of an operator or a plan, for PyLops' solvers, sums and stacks.

    ``dims`` and ``dimsd`` are the global shapes of tensor spaces, or those of a space's only
    region. Vectors are those of `linop.interop.scipy`, whose rules hold for plans of workers: whole
    on each, and products are collective.

    Raises:
        ArgumentError: `plan` is neither. MissingExtraError: PyLops is not installed.

    Example:
        >>> X = linop.TensorSpace((2, 3), linop.Partition((2, 1)))
        >>> Op = linop.interop.to_pylops(2 * linop.identity(X))
        >>> tuple(Op.dims), Op.shape, (Op @ np.arange(6.0).reshape(2, 3)).tolist()
        ((2, 3), (6, 6), [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]])
    """
    try:
        import pylops
    except ImportError as error:
        raise MissingExtraError(
            f"linop.interop.to_pylops needs PyLops: pip install pylops ({error})"
        ) from None
    op = plan if isinstance(plan, LinearOperator) else plan.op
    sides = zip(op.flat_ends, op.shape[::-1], strict=True)
    dims, dimsd = (natural_shape(space) or (size,) for space, size in sides)
    return pylops.LinearOperator(
        Op=scipy(plan), dims=dims, dimsd=dimsd, clinear=op.clinear, name=str(op)
    )
