"""Taps of a stencil as users give them: numbers, arrays, vectors or functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from linop.errors import ArgumentError, ShapeError
from linop.spaces.region import Region, integer
from linop.spaces.scalars import Array, is_scalar, of_dtype
from linop.spaces.tensor import TensorSpace
from linop.spaces.vector import Vector

Offset = tuple[int, ...]
Coefficient: TypeAlias = "Any"
"""A number; a global array; a `Vector`; or a function of the slices of a block."""
Blockwise = Callable[[Region], Any]
"""The weights of a tap on the block of a region: a number, or an array of the block's shape."""


def taps_of(X: TensorSpace, weights: Any, origin: Any) -> list[tuple[Offset, Blockwise]]:
    """The offsets of a stencil and the weights of each; taps of zeros are left out.

    Args:
        X: the space.
        weights, origin: as for `linop.stencil`.

    Raises:
        ShapeError, DTypeError, ArgumentError: as `linop.stencil`.
    """
    if isinstance(weights, Mapping):
        if origin is not None:
            raise ArgumentError("stencil: origin is for an array of weights; a dict has offsets")
        given = [(_offset(X, at), weight) for at, weight in weights.items()]
    else:
        given = _of_array(X, weights, origin)
    given = [(at, weight) for at, weight in given if not _is_zero(weight)]
    # One array for taps of one weight: `SlidingSums` multiplies their sum by it.
    known = {id(weight): _blockwise(X, weight) for _, weight in given}
    return [(at, known[id(weight)]) for at, weight in given]


def _offset(X: TensorSpace, given: Any) -> Offset:
    several = given if isinstance(given, Sequence) else (given,)
    if len(several) != X.ndim:
        raise ShapeError(f"stencil: offset {given!r} in a tensor of {X.ndim} dimensions")
    return tuple(integer(k, "stencil: offset") for k in several)


def _of_array(X: TensorSpace, weights: Any, origin: Any) -> list[tuple[Offset, Any]]:
    values = of_dtype(weights, X.dtype, "stencil")
    if values.ndim != X.ndim:
        raise ShapeError(
            f"stencil: weights of shape {values.shape} for a tensor of shape {X.global_shape}; "
            f"one side for each dimension expected"
        )
    if origin is None:
        if any(n % 2 == 0 for n in values.shape):
            raise ShapeError(
                f"stencil: weights of shape {values.shape}, which have no middle; give origin=, "
                f"the index of the weight of the element itself"
            )
        origin = [n // 2 for n in values.shape]
    centre = _offset(X, origin)
    return [
        (tuple(k - c for k, c in zip(at, centre, strict=True)), weight)
        for at, weight in np.ndenumerate(values)
    ]


def _is_zero(weight: Any) -> bool:
    return (
        bool(weight == 0)
        if is_scalar(weight)
        else isinstance(weight, np.ndarray) and not weight.any()
    )


def _blockwise(X: TensorSpace, weight: Coefficient) -> Blockwise:
    """The weights of one tap by region, checked as far as they are known here.

    Raises:
        ShapeError, DTypeError, SpaceError: they do not fit the space.
    """
    if isinstance(weight, Vector):
        X.same_as(weight.space, "stencil: coefficients")
        held = weight.copy()
        return lambda region: held[region.name]
    if callable(weight):
        return lambda region: _evaluated(X, weight, region)
    values = of_dtype(weight, X.dtype, "stencil")
    if values.ndim == 0:
        return lambda region: values[()]
    if values.shape != X.global_shape:
        raise ShapeError(
            f"stencil: coefficients of shape {values.shape}; a number, or an array of shape "
            f"{X.global_shape} expected"
        )
    return lambda region: values[X.block(region)]


def _evaluated(X: TensorSpace, function: Callable[..., Any], region: Region) -> Array:
    """The function's coefficients of a block.

    Raises:
        ShapeError, DTypeError: they do not fit.
    """
    at = X.block(region)
    values = of_dtype(function(at), X.dtype, "stencil")
    if values.shape != region.shape:
        raise ShapeError(
            f"stencil: the function of coefficients returned shape {values.shape} for the block "
            f"{at}; {region.shape} expected"
        )
    return values
