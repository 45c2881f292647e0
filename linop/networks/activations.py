"""Elementwise functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from linop.networks.blockwise import blockwise, check_fractions, check_tensors, same_layout
from linop.networks.derivatives import Point, scaling
from linop.networks.maps import Map
from linop.spaces.scalars import Array
from linop.spaces.tensor import TensorSpace

Elementwise = Callable[[Array], Array]


def sigmoid(X: TensorSpace, name: str = "h") -> Map:
    """1 / (1 + exp(-x)), elementwise.

    Args:
        X: of any shape and division, of floating-point numbers.
        name: of the result, which is divided as `X` is.

    Raises:
        ArgumentError: `X` is no `TensorSpace`. DTypeError: it has integers.

    Example:
        >>> F = linop.networks.sigmoid(linop.TensorSpace((2,), linop.Partition((1,))))
        >>> F(np.zeros(2)).tolist()
        [0.5, 0.5]
        >>> F.jacobian(np.zeros(2)).to_matrix().toarray().tolist()
        [[0.25, 0.0], [0.0, 0.25]]
    """
    check_tensors("sigmoid", X)
    check_fractions("sigmoid", X)
    return _elementwise("σ", X, name, _sigmoid, _slope_of_sigmoid)


def relu(X: TensorSpace, name: str = "h") -> Map:
    """max(x, 0), elementwise; its derivative at 0 is 0. Arguments as for `sigmoid`; integers too.

    Raises:
        ArgumentError: `X` is no `TensorSpace`.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> F, x = linop.networks.relu(X), X.scatter([-1.0, 2.0, -3.0, 4.0])
        >>> F.codomain.gather(F(x)).tolist()
        [0.0, 2.0, 0.0, 4.0]
        >>> X.gather(F.jacobian(x).H(F.codomain.scatter(np.ones(4)))).tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    return _elementwise(
        "relu", X, name, lambda x: np.maximum(x, 0), lambda y: (y > 0).astype(y.dtype)
    )


def multiply(X: TensorSpace, Y: TensorSpace, name: str = "z") -> Map:
    """x y, elementwise.

    Args:
        X, Y: of one shape, divided alike.
        name: of the result, which is divided as `X` is.

    Raises:
        ArgumentError: an argument is no `TensorSpace`. SpaceError: dtypes differ.
        PartitionError: X and Y are not divided alike.

    Example:
        >>> X, Y = (linop.TensorSpace((2,), linop.Partition((1,)), name=name) for name in "xy")
        >>> F = linop.networks.multiply(X, Y)
        >>> at = {"x@0": np.array([2.0, 3.0]), "y@0": np.array([5.0, 7.0])}
        >>> F(at).tolist()
        [10.0, 21.0]
        >>> F.jacobian(at, wrt=["x@0"]).H(np.ones(2)).tolist()  # y
        [5.0, 7.0]
    """
    check_tensors("multiply", X, Y)
    same_layout("multiply", X, Y)
    return blockwise(
        "multiply",
        [X, Y],
        _renamed(X, name),
        np.multiply,
        lambda x, y, z: (
            lambda at: scaling(x, z, X.dtype, partial(_copy, at, 1)),
            lambda at: scaling(y, z, X.dtype, partial(_copy, at, 0)),
        ),
    )


def _copy(at: Point, k: int) -> Array:
    """The k-th argument, in memory of its own."""
    return at.arrays[k].copy()


def _sigmoid(x: Array) -> Array:
    # tanh does not overflow, and takes complex arguments: derivatives by complex steps. In place:
    # in new memory each operation on a large array takes several times as long.
    y = np.asarray(0.5 * x)
    np.tanh(y, out=y)
    y *= 0.5
    y += 0.5
    return y


def _slope_of_sigmoid(y: Array) -> Array:
    slope = np.asarray(1 - y)
    slope *= y
    return slope


def _elementwise(
    symbol: str, X: TensorSpace, name: str, value: Elementwise, slope: Elementwise
) -> Map:
    """An elementwise function; `slope` is its derivative, as a function of its value, in memory of
    its own."""
    check_tensors(symbol, X)
    return blockwise(
        symbol,
        [X],
        _renamed(X, name),
        value,
        lambda x, y: (lambda at: scaling(x, y, X.dtype, lambda: slope(at.arrays[1])),),
    )


def _renamed(X: TensorSpace, name: str) -> TensorSpace:
    """The space of a result, which is divided as X is."""
    bounds = dict(enumerate(X.bounds))
    return TensorSpace(X.global_shape, X.partition, X.dtype, X.axes, name, bounds=bounds)
