"""Losses: sums over the rows that a worker holds, one number a worker."""

from __future__ import annotations

from functools import partial

import numpy as np

from linop.errors import ShapeError
from linop.networks.blockwise import blockwise, check_fractions, check_tensors, roles, same_layout
from linop.networks.derivatives import Point, functional
from linop.networks.maps import Map
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.scalars import Array
from linop.spaces.tensor import TensorSpace


def softmax_cross_entropy(
    Z: TensorSpace, T: TensorSpace, scale: float | None = None, name: str = "loss"
) -> Map:
    """Σ -t·log softmax(z) over rows, times `scale`.

    Args:
        Z: scores, (n, classes); whole rows on every worker.
        T: wanted probabilities of the same shape, divided alike; rows of 0 and 1 for labels.
        scale: by default 1 / n of the whole batch, so that the sum over all workers is the mean.
        name: of the result: one number, in `COPIES` (terms of a sum over workers), or `REPLICATED`
            where Z is. Their sum is the loss.

    Raises:
        ArgumentError: an argument is no `TensorSpace`. SpaceError: dtypes differ.
        ShapeError: Z's rows are cut. PartitionError: Z and T are not divided alike.
        DTypeError: they have integers.

    Example:
        >>> P = linop.Partition((2,))
        >>> Z, T = (linop.TensorSpace((2, 2), P, name=name) for name in "zt")  # by rows
        >>> F, scores = linop.networks.softmax_cross_entropy(Z, T), [[0.0, 200.0], [400.0, 0.0]]
        >>> at = {**Z.scatter(scores).arrays, **T.scatter(np.eye(2)).arrays}
        >>> {name: loss.tolist() for name, loss in F(at).items()}  # their sum is the mean loss
        {'loss@0': [100.0], 'loss@1': [200.0]}
    """
    check_tensors("softmax_cross_entropy", Z, T)
    check_fractions("softmax_cross_entropy", Z)
    same_layout("softmax_cross_entropy", Z, T)
    if Z.ndim != 2 or 1 in roles(Z) or not Z.global_shape[1]:
        raise ShapeError(
            f"softmax_cross_entropy: expected whole rows (n, classes), given {Z.global_shape} "
            f"divided by {Z.axes}"
        )
    factor = Z.dtype.type(1 / max(Z.global_shape[0], 1) if scale is None else scale)
    ones = np.ones((Z.global_shape[1], 1), Z.dtype)  # a product with it is faster than a sum

    def value(z: Array, t: Array) -> tuple[Array, Array, Array, Array]:
        # Large scores must not overflow.
        logs: Array = z - np.maximum.reduce(z.real, 1, keepdims=True)
        powers = np.exp(logs)
        sums = powers.dot(ones)
        logs -= np.log(sums)
        total = np.array([-factor * np.dot(t.reshape(-1), logs.reshape(-1))], Z.dtype)
        return total, logs, powers, sums

    def slope_z(at: Point, times: Array) -> Array:
        _, t, _, _, powers, sums = at.arrays
        weights = t.dot(ones)
        weights /= sums
        slope: Array = powers * weights
        slope -= t
        slope *= factor * times
        return slope

    return blockwise(
        "cross-entropy",
        [Z, T],
        _numbers(Z, name),
        value,
        lambda z, t, y: (
            lambda at: functional(z, y, Z.dtype, partial(slope_z, at)),
            lambda at: functional(t, y, Z.dtype, lambda times: (-factor * times) * at.arrays[3]),
        ),
    )


def squared_loss(Y: TensorSpace, T: TensorSpace, scale: float = 1, name: str = "loss") -> Map:
    """Σ (y - t)² over all elements, times `scale`.

    Args:
        Y, T: of one shape, divided alike.
        scale: 1 / n for a mean over n elements or rows.
        name: as for `softmax_cross_entropy`.

    Raises:
        ArgumentError: an argument is no `TensorSpace`. SpaceError: dtypes differ.
        PartitionError: Y and T are not divided alike. DTypeError: they have integers, and `scale`
            is no whole number.

    Example:
        >>> P = linop.Partition((2,))
        >>> Y, T = (linop.TensorSpace((4,), P, name=name) for name in "yt")
        >>> F, y = linop.networks.squared_loss(Y, T), np.arange(1.0, 5.0)
        >>> at = {**Y.scatter(y).arrays, **T.scatter(np.zeros(4)).arrays}
        >>> {name: loss.tolist() for name, loss in F(at).items()}  # of each worker's elements
        {'loss@0': [5.0], 'loss@1': [25.0]}
        >>> Y.gather(F.jacobian(at, wrt=Y.regions).H(F.codomain.scatter([1.0]))).tolist()
        [2.0, 4.0, 6.0, 8.0]
    """
    check_tensors("squared_loss", Y, T)
    check_fractions("squared_loss", Y, scale)
    same_layout("squared_loss", Y, T)
    factor = Y.dtype.type(scale)

    def value(y: Array, t: Array) -> Array:
        return np.reshape(factor * np.sum((y - t) ** 2, dtype=Y.dtype), (1,))

    def slope(at: Point, twice: np.generic, times: Array) -> Array:
        y, t, _ = at.arrays
        found: Array = (twice * times) * (y - t)
        return found

    return blockwise(
        "squared loss",
        [Y, T],
        _numbers(Y, name),
        value,
        lambda y, t, loss: (
            lambda at: functional(y, loss, Y.dtype, partial(slope, at, 2 * factor)),
            lambda at: functional(t, loss, Y.dtype, partial(slope, at, -2 * factor)),
        ),
    )


def _numbers(Z: TensorSpace, name: str) -> TensorSpace:
    """One number on every worker; one for all of them along replicated axes."""
    axes = [axis if axis is REPLICATED else COPIES for axis in Z.axes]
    return TensorSpace((1,), Z.partition, Z.dtype, axes, name)
