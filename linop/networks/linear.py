"""Affine maps: a matrix product, and a row added."""

from __future__ import annotations

from linop.errors import PartitionError, ShapeError
from linop.networks.blockwise import blockwise, check_tensors, roles
from linop.networks.derivatives import product, renaming, rows
from linop.networks.maps import Map
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.scalars import Array
from linop.spaces.tensor import TensorSpace


def linear(X: TensorSpace, W: TensorSpace, b: TensorSpace | None = None, name: str = "z") -> Map:
    """X W + b, of rows X (n, k), weights W (k, m) and a bias b (m).

    Along each grid axis, rows, columns and contracted dimension may be cut:

    ====================  ====================  ======================================
    X                     W                     the result, and b
    ====================  ====================  ======================================
    splits its rows (0)   COPIES                splits its rows; b COPIES
    COPIES                splits columns (1)    splits its columns; b splits 0
    splits columns (1)    splits rows (0)       COPIES, of terms of a sum; no b
    COPIES                COPIES                COPIES; b COPIES
    REPLICATED            REPLICATED            REPLICATED; b REPLICATED
    ====================  ====================  ======================================

    Terms of a sum are added by an operator (`linop.all_reduce`, `linop.sum_reduce`); a bias is
    added after that, and once: see `bias`.

    Args:
        X, W, b: on one grid, of one dtype.
        name: of the result.

    Raises:
        ArgumentError: an argument is no `TensorSpace`. SpaceError: dtypes differ.
        ShapeError: the shapes do not fit. PartitionError: the divisions do not.

    Example:
        >>> P = linop.Partition((2,))
        >>> X = linop.TensorSpace((3, 2), P, axes=[linop.COPIES], name="x")
        >>> W = linop.TensorSpace((2, 4), P, axes=[1], name="W")  # two columns on each worker
        >>> F, w = linop.networks.linear(X, W), np.arange(8.0).reshape(2, 4)
        >>> at = {**X.scatter(np.ones((3, 2))).arrays, **W.scatter(w).arrays}
        >>> F.codomain.gather(F(at)).tolist()
        [[4.0, 6.0, 8.0, 10.0], [4.0, 6.0, 8.0, 10.0], [4.0, 6.0, 8.0, 10.0]]
        >>> J, ones = F.jacobian(at, wrt=W.regions), F.codomain.scatter(np.ones((3, 4)))
        >>> W.gather(J.H(ones)).tolist()  # the gradient Xᵀ 1, cut as W is
        [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    check_tensors("linear", X, W)
    if X.ndim != 2 or W.ndim != 2 or X.global_shape[1] != W.global_shape[0]:
        raise ShapeError(
            f"linear: expected X (n, k) and W (k, m), given {X.global_shape} and {W.global_shape}"
        )
    axes = tuple(_role(X, W, k) for k in range(len(X.axes)))
    if X.bounds[1] != W.bounds[0]:
        raise PartitionError("linear: X's columns and W's rows are cut differently")
    n, m = X.global_shape[0], W.global_shape[1]
    cuts = {0: X.bounds[0], 1: W.bounds[1]}
    Y = TensorSpace((n, m), X.partition, X.dtype, axes, name, bounds=cuts)
    if b is None:
        return blockwise(
            "linear",
            [X, W],
            Y,
            lambda x, w: x @ w,
            lambda x, w, y: (
                lambda at: product(x, y, X.dtype, None, lambda: at.arrays[1]),
                lambda at: product(w, y, X.dtype, lambda: at.arrays[0], None),
            ),
        )
    if (1, 0) in zip(roles(X), roles(W), strict=True):
        raise PartitionError(
            "linear: the result is a sum whose terms workers hold, and every worker would add the "
            "bias; add the terms first, then linop.networks.bias"
        )
    _check_bias(Y, b)
    return blockwise(
        "linear",
        [X, W, b],
        Y,
        _affine,
        lambda x, w, b, y: (
            lambda at: product(x, y, X.dtype, None, lambda: at.arrays[1]),
            lambda at: product(w, y, X.dtype, lambda: at.arrays[0], None),
            lambda at: rows(b, y, X.dtype),
        ),
    )


def bias(X: TensorSpace, b: TensorSpace, name: str = "z") -> Map:
    """X + b, of rows X (n, m) and a row b (m).

    Args:
        X, b: on one grid, of one dtype. Along a grid axis that splits X's columns, b is split;
            along one of `COPIES` or `REPLICATED`, it is the same; else it has `COPIES`.
        name: of the result, which is divided as X is.

    Raises:
        LinopError: X and b do not fit, as for `linear`.

    Example:
        >>> P = linop.Partition((2,))
        >>> X = linop.TensorSpace((2, 3), P, name="x")  # a row on each worker
        >>> b = linop.TensorSpace((3,), P, axes=[linop.COPIES], name="b")
        >>> F = linop.networks.bias(X, b)
        >>> at = {**X.scatter(np.zeros((2, 3))).arrays, **b.scatter([1.0, 2.0, 3.0]).arrays}
        >>> F.codomain.gather(F(at)).tolist()
        [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """
    check_tensors("bias", X, b)
    if X.ndim != 2:
        raise ShapeError(f"bias: expected X (n, m), given {X.global_shape}")
    _check_bias(X, b)
    Y = TensorSpace(
        X.global_shape, X.partition, X.dtype, X.axes, name, bounds=dict(enumerate(X.bounds))
    )
    return blockwise(
        "bias",
        [X, b],
        Y,
        lambda x, b: x + b,
        lambda x, b, y: (
            lambda at: renaming(x, y, X.dtype),
            lambda at: rows(b, y, X.dtype),
        ),
    )


def _affine(x: Array, w: Array, b: Array) -> Array:
    y: Array = x @ w
    y += b  # in place: in new memory a large one takes ten times as long
    return y


def _role(X: TensorSpace, W: TensorSpace, k: int) -> Axis:
    """The role of grid axis k in the product."""
    table: dict[tuple[Axis, Axis], Axis] = {
        (0, COPIES): 0,
        (COPIES, 1): 1,
        (1, 0): COPIES,
        (COPIES, COPIES): COPIES,
        (REPLICATED, REPLICATED): REPLICATED,
    }
    found = table.get((roles(X)[k], roles(W)[k]))
    if found is None:
        raise PartitionError(
            f"linear: grid axis {k} has role {X.axes[k]} in {X.name} and {W.axes[k]} in {W.name}; "
            f"expected (0, COPIES), (COPIES, 1), (1, 0), or both COPIES or both REPLICATED: bring "
            f"one of them there by an operator such as linop.broadcast or linop.repartition"
        )
    return found


def _check_bias(Y: TensorSpace, b: TensorSpace) -> None:
    check_tensors("bias", Y, b)
    if b.global_shape != Y.global_shape[1:]:
        raise ShapeError(f"bias: shape {Y.global_shape[1:]} expected, given {b.global_shape}")
    table: dict[Axis, Axis] = {0: COPIES, 1: 0}
    wanted = tuple(table.get(axis, axis) for axis in roles(Y))
    if roles(b) != wanted or b.bounds[0] != Y.bounds[1]:
        raise PartitionError(
            f"bias: along the grid's axes, roles {wanted} expected in {b.name}, given {b.axes}"
        )
