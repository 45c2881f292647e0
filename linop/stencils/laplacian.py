"""The Laplacian of finite differences, as a stencil."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linop.errors import ArgumentError, ShapeError, expect
from linop.operators.operator import TensorOperator
from linop.provenance import records_origin
from linop.spaces.scalars import Scalar, array_of
from linop.spaces.tensor import TensorSpace
from linop.stencils.boundaries import Boundary
from linop.stencils.stencil import stencil


@records_origin
def laplacian(
    X: TensorSpace,
    weights: Scalar | Sequence[Scalar] = 1,
    boundary: Boundary | Sequence[Boundary] = "zero",
    *,
    name: str = "Δ",
) -> TensorOperator:
    """Second differences, the sum over dimensions of ``weight (x[i+1] - 2 x[i] + x[i-1])``.

    A `stencil` of 2 n + 1 taps: negative definite with the boundary ``zero``, and symmetric with
    all boundaries but ``reflect``, if the weights are real.

    Args:
        X: a tensor of n dimensions in blocks, as for `stencil`.
        weights: 1 / h² of a grid of spacing h, one number for all dimensions or one for each.
        boundary: elements beyond the edges, as for `stencil`.
        name: the symbol.

    Returns:
        The operator from X to X.

    Raises:
        ShapeError: there is not one weight for each dimension. ArgumentError, DTypeError,
            PartitionError: as `stencil`.

    Example:
        >>> X = linop.TensorSpace((5,), linop.Partition(2))
        >>> L = linop.laplacian(X)
        >>> (L @ np.arange(5.0) ** 2).tolist()
        [1.0, 2.0, 2.0, 2.0, -23.0]
        >>> L.H.equals(L)
        True
    """
    n = expect("laplacian", X, TensorSpace).ndim
    given = array_of(weights, "laplacian")
    if given.dtype.kind not in "iufc":
        raise ArgumentError(f"laplacian: weights are numbers; given {weights!r}")
    if given.shape not in ((), (n,)):
        raise ShapeError(
            f"laplacian: one weight, or {n}, one for each dimension; given weights of shape "
            f"{given.shape}"
        )
    each = np.broadcast_to(given, n).tolist()
    around = {
        tuple(side * (d == k) for k in range(n)): weight
        for d, weight in enumerate(each)
        for side in (1, -1)
    }
    return stencil(X, {(0,) * n: -2 * sum(each), **around}, boundary, name=name)
