"""Convolution in the space of the lowest frequencies, as in a Fourier neural operator's layer."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, ShapeError, expect
from linop.fourier.half_modes import half_modes
from linop.fourier.layouts import Layouts, Way
from linop.fourier.transform import fastest, transformed, ways_of
from linop.local_operators.fourier import transformed_axes
from linop.local_operators.functions import local_operator
from linop.normal_form.maps import Function
from linop.operators.algebra import DirectSum
from linop.operators.expressions import compose
from linop.operators.operator import TensorOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import Namespace
from linop.spaces.real_parts import complex_of
from linop.spaces.region import integer, naturals
from linop.spaces.scalars import Array, of_dtype
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace


@records_origin
def low_modes(
    X: TensorSpace,
    modes: int | Sequence[int],
    axes: int | Sequence[int] | None = None,
    whole: Sequence[int] = (),
    *,
    route: Way | Literal["auto"] = "auto",
) -> TensorOperator:
    """F: the lowest frequencies of the orthonormal Fourier transform. Its adjoint is the inverse
    transform of these, with zeros for all others.

    A dimension is shortened as soon as it is transformed, before anything is sent.

    Args:
        X: a `TensorSpace` of a complex dtype, whose blocks do not overlap.
        modes: for each of the axes, the number m of frequencies, in the order of a transform of
            length m: 0, 1, …, -2, -1. One number is for all.
        axes: dimensions to transform along; by default all but those in `whole`.
        whole: other dimensions that no block of the result cuts.
        route: as for `linop.fft`.

    Returns:
        The operator from X to the space of the frequencies, in the blocks of the last local
        transform.

    Raises:
        DTypeError: the dtype is not complex. PartitionError: blocks of X overlap, or leave gaps.
        ArgumentError: an axis does not exist, or is named twice. ShapeError: there is not one
            number of modes for each axis, or one is larger than the dimension.

    Example:
        >>> X = linop.TensorSpace((8, 8), linop.Partition(2), complex)
        >>> F = linop.fourier.low_modes(X, 3)
        >>> F.codomain.global_shape
        (3, 3)
        >>> bool(linop.testing.check_equal(F @ F.H, linop.identity(F.codomain)))
        True
    """
    layouts, dims, every = _shortened(X, modes, axes, whole)
    return transformed("F", layouts, dims, every, ways_of(route), None, "ortho")


def _shortened(
    X: TensorSpace, modes: Any, axes: int | Sequence[int] | None, whole: Sequence[int]
) -> tuple[Layouts, tuple[int, ...], tuple[int, ...]]:
    """The layouts of `low_modes`, the dimensions that are transformed, and those that no block of
    the result cuts."""
    X = expect("low_modes", X, TensorSpace)
    kept = transformed_axes(X.dtype, whole, X.ndim, "ortho")
    axes = [d for d in range(X.ndim) if d not in kept] if axes is None else axes
    dims = transformed_axes(X.dtype, axes, X.ndim, "ortho")
    given = naturals(modes, "low_modes: modes", ArgumentError)
    counts = given * len(dims) if np.ndim(modes) == 0 else given
    lengths = tuple(X.global_shape[d] for d in dims)
    if len(counts) != len(dims) or any(m > n for m, n in zip(counts, lengths, strict=True)):
        raise ShapeError(f"low_modes: {modes} modes of dimensions {dims}, of lengths {lengths}")
    layouts = Layouts(X, dict(zip(dims, counts, strict=True)), kept)
    every = tuple(sorted({*dims, *kept}))
    return layouts, dims, every


@records_origin
def spectral_convolution(
    X: TensorSpace,
    weights: npt.ArrayLike,
    axes: int | Sequence[int] | None = None,
    channels: int | None = None,
    codomain: TensorSpace | None = None,
) -> TensorOperator:
    """F* W F: the lowest frequencies of a tensor multiplied by weights, and transformed back; zero
    for all others (Li et al., "Fourier neural operator for parametric partial differential
    equations", 2021, equation 5).

    Of a real tensor the transforms are those of `numpy.fft.rfftn` and ``irfftn``, of half the work
    and bytes: the last axis is the halved one, best whole in the blocks of X. Weights of
    frequencies that are their own mirror images along it (0, and n/2 of an even length n) count as
    ``irfftn`` counts them: with their Hermitian part along the other axes.

    Args:
        X: a `TensorSpace` of a complex or real dtype, whose blocks do not overlap.
        weights: a number for each frequency, of shape (modes of each axis), in the order of
            `low_modes`, for a real X of the last axis those from 0, at most n // 2 + 1; with
            `channels`, a matrix, of shape (channels of X, channels of the result, modes of each
            axis). Complex ones for a real X, too.
        axes: dimensions to transform along, in increasing order; by default the last ones.
        channels: the dimension of channels, which are mixed.
        codomain: the space of the result; by default X. It is cut as X is.

    Raises:
        ShapeError: the weights do not fit X and the codomain. DTypeError: a dtype is neither
            complex nor real, or does not hold the weights. PartitionError, ArgumentError: as
            `low_modes`.

    Example:
        >>> X = linop.TensorSpace((4, 4), linop.Partition(2), complex)
        >>> mean = linop.fourier.spectral_convolution(X, np.ones((1, 1)))
        >>> y = mean @ np.arange(16.0).reshape(4, 4).astype(complex)
        >>> bool(np.allclose(y, 7.5))
        True
    """
    X = expect("spectral_convolution", X, TensorSpace)
    Y = X if codomain is None else expect("spectral_convolution", codomain, TensorSpace)
    of = None if channels is None else integer(channels, "spectral_convolution: channels") % X.ndim
    dtype = complex_of(X.dtype) if X.dtype.kind == "f" else X.dtype
    values = of_dtype(weights, dtype, "spectral_convolution")
    mixed, whole = (0, ()) if of is None else (2, (of,))
    axes = range(X.ndim - values.ndim + mixed, X.ndim) if axes is None else axes
    along = transformed_axes(dtype, axes, X.ndim, "ortho")
    if [int(d) % X.ndim for d in np.atleast_1d(axes)] != list(along):
        raise ArgumentError(
            f"spectral_convolution: axes in increasing order expected, as the weights' dimensions "
            f"are; given {axes}"
        )
    modes = values.shape[mixed:]
    there, back = _both(X, Y, modes, along, whole)
    Z, T = there.codomain, back.domain
    ends = () if of is None else (X.global_shape[of], Y.global_shape[of])
    if values.shape[:mixed] != ends or not _alike(Z, T, of):
        raise ShapeError(
            f"spectral_convolution: weights of shape {values.shape} from {X!r} to {Y!r}; they "
            f"begin with the numbers of channels, and the spaces differ in these alone"
        )
    blocks = []
    for source, target in zip(Z.regions, T.regions, strict=True):
        own = (slice(None),) * mixed + tuple(Z.block(source)[d] for d in along)
        ports = _weighted(values[own], X.ndim, along, of)
        ends_of = Space(source, Z.dtype), Space(target, Z.dtype)
        blocks.append(local_operator(*ends_of, ports, "W"))
    return compose(back, DirectSum(blocks, Z, T), there)


def _both(
    X: TensorSpace, Y: TensorSpace, modes: Sequence[int], along: Sequence[int], whole: Sequence[int]
) -> tuple[Any, Any]:
    """The transform of X to its lowest frequencies, and that of those of Y back, by one route."""
    ways = ways_of("auto")
    if X.dtype.kind == "f":
        first = half_modes(X, modes, along, whole, ways)
        return first.forward, half_modes(Y, modes, along, whole, [first.way]).inverse
    way = fastest(*_shortened(X, modes, along, whole), ways, None)
    there, back = (low_modes(space, modes, along, whole, route=way) for space in (X, Y))
    return there, back.euclidean_adjoint


def _alike(Z: TensorSpace, T: TensorSpace, channels: int | None) -> bool:
    """True if two spaces are cut alike, and differ in the number of channels alone."""
    pairs = enumerate(zip(Z.global_shape, T.global_shape, strict=False))
    return (
        (Z.ndim, Z.dtype, Z.partition, Z.axes) == (T.ndim, T.dtype, T.partition, T.axes)
        and all(n == m for d, (n, m) in pairs if d != channels)
        and all(
            a == b
            for d, (a, b) in enumerate(zip(Z.bounds, T.bounds, strict=False))
            if d != channels
        )
    )


def _weighted(weights: Array, ndim: int, axes: Sequence[int], channels: int | None) -> Any:
    """The product of each frequency's channels and its matrix, and its adjoint."""
    x = ascii_letters[:ndim]
    y, w = x, "".join(x[d] for d in axes)
    if channels is not None:
        y = x.replace(x[channels], "Z")
        w = x[channels] + "Z" + w

    def port(namespace: Namespace) -> tuple[Function, Function]:
        here, einsum = namespace.put(weights), namespace.module.einsum
        back = here.conj()
        return (
            lambda block: einsum(f"{x},{w}->{y}", block, here),
            lambda block: einsum(f"{y},{w}->{x}", block, back),
        )

    return port
