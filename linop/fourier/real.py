"""Fourier transforms of real tensors in blocks, and their inverse. The halved axis is transformed
where it is whole, before the others, so that what is sent between these is of half the size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from linop.errors import ArgumentError
from linop.fourier.layouts import Layouts, Way
from linop.fourier.transform import Out, end_of, transformed, ways_of
from linop.local_operators import fourier as local
from linop.local_operators.fourier import DUAL, Norm, real_dtype, transformed_axes
from linop.local_operators.functions import RegionOrSpace
from linop.operators.algebra import Named, direct_sum
from linop.operators.expressions import compose, over_reals_of
from linop.operators.grids import axes_text
from linop.operators.operator import LinearOperator, TensorOperator
from linop.planning.network import Network
from linop.provenance import records_origin
from linop.spaces.real_parts import complex_of
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace


@records_origin
def rfft(
    X: RegionOrSpace,
    axes: int | Sequence[int] | None = None,
    norm: Norm = "ortho",
    *,
    out: Out = "same",
    codomain: TensorSpace | None = None,
    route: Way | Literal["auto"] = "auto",
    network: Network | None = None,
) -> LinearOperator:
    """The n-d discrete Fourier transform of a real global tensor, as `numpy.fft.rfftn`: of the last
    axis, of length n, the n // 2 + 1 frequencies from 0. Its adjoint is that for real inner
    products; its inverse is `irfft`.

    Args:
        X: a `TensorSpace` of a real dtype, whose blocks do not overlap. A region, or a space of one
            region, is transformed as by `linop.local_operators.rfft`.
        axes: dimensions to transform along, the halved one last; by default all.
        norm, route, network: as for `linop.fft`.
        out: ``"same"``: the result is on the grid of X, with balanced blocks of the halved
            dimension. ``"transposed"``: it stays in the blocks of the last local transform.
        codomain: another space for the result, of the complex dtype.

    Returns:
        The operator from X to the result's space.

    Raises:
        DTypeError: the dtype is not real. PartitionError, ArgumentError: as `linop.fft`.

    Example:
        >>> X = linop.TensorSpace((2, 4), linop.Partition(2))
        >>> F = linop.rfft(X, norm="backward")
        >>> F.codomain.global_shape, F.codomain.dtype.name
        ((2, 3), 'complex128')
        >>> (F @ np.ones((2, 4))).tolist() == [[8, 0, 0], [0, 0, 0]]
        True
    """
    if not isinstance(X, TensorSpace):
        return local.rfft(X, codomain, axes=axes, norm=norm)
    dims, others, real = _parts("rfft", X, axes, norm, out, codomain, route, network)
    space, half = real.codomain, others.domain
    steps = [local.rfft(a, b, axes=dims[-1], norm=norm) for a, b in blocks_of(space, half)]
    op = compose(others, direct_sum(*steps, domain=space, codomain=half), real)
    return _named("Fr", dims, op)


@records_origin
def irfft(
    X: RegionOrSpace,
    axes: int | Sequence[int] | None = None,
    norm: Norm = "ortho",
    *,
    out: Out = "same",
    domain: TensorSpace | None = None,
    route: Way | Literal["auto"] = "auto",
    network: Network | None = None,
) -> LinearOperator:
    """The inverse of ``linop.rfft(X, axes, norm)``, as `numpy.fft.irfftn`: from its codomain to X.

    Args:
        X: the space of the real tensor.
        axes, norm, out, route, network: those of `rfft`.
        domain: its `codomain`.

    Raises:
        DTypeError, PartitionError, ArgumentError: as `rfft`.

    Example:
        >>> X = linop.TensorSpace((2, 4), linop.Partition(2))
        >>> x = np.arange(8.0).reshape(2, 4)
        >>> bool(np.allclose(linop.irfft(X) @ linop.rfft(X) @ x, x))
        True
    """
    if not isinstance(X, TensorSpace):
        return local.irfft(X, domain, axes=axes, norm=norm)
    dims, others, real = _parts("irfft", X, axes, norm, out, domain, route, network)
    space, half = real.codomain, others.domain
    steps = [local.irfft(a, b, axes=dims[-1], norm=norm) for a, b in blocks_of(space, half)]
    op = compose(
        real.euclidean_adjoint,
        direct_sum(*steps, domain=half, codomain=space),
        others.euclidean_adjoint,
    )
    return _named("Fr⁻¹", dims, op)


def _parts(
    what: Literal["rfft", "irfft"],
    X: TensorSpace,
    axes: int | Sequence[int] | None,
    norm: Norm,
    out: Out,
    codomain: TensorSpace | None,
    route: Way | Literal["auto"],
    network: Network | None,
) -> tuple[tuple[int, ...], TensorOperator, TensorOperator]:
    """The axes, the halved one last; the transform along the others, whose adjoint is part of
    the inverse; and the repartition of X that makes that one whole."""
    dtype = complex_of(real_dtype(what, X.dtype))
    dims = transformed_axes(dtype, axes, X.ndim, norm)
    ways = ways_of(route)
    if not dims:
        raise ArgumentError(f"{what}: an axis to transform along expected, given {axes}")
    if out not in get_args(Out):
        raise ArgumentError(f"{what}: out is 'same' or 'transposed'; given {out!r}")
    if out == "transposed" and codomain is not None:
        raise ArgumentError(
            f"{what}: out='transposed' and another space both say where the result is"
        )
    last = dims[-1] if axes is None else int(np.atleast_1d(axes)[-1]) % X.ndim
    if not X.global_shape[last]:
        raise ArgumentError(f"{what}: the halved dimension {last} of {X!r} has no element")
    rest = tuple(d for d in dims if d != last)
    layouts, half = Layouts(X), Layouts(halved(X, last, dtype, X.global_shape[last] // 2 + 1))
    *_, (cuts, _) = layouts.route("pencil", [last])
    half.start = cuts
    end = None if out == "transposed" else half.X
    if codomain is not None and end is not None:
        end = end_of(end, codomain)
    scale = norm if what == "rfft" else DUAL[norm]
    others = transformed("F", half, rest, rest, ways, end, scale, network)
    return (*rest, last), others, layouts.move(X, layouts.space(cuts))


def halved(X: TensorSpace, last: int, dtype: np.dtype, count: int) -> TensorSpace:
    """The frequencies, `count` of dimension `last`, on the grid of X."""
    shape = tuple(count if d == last else n for d, n in enumerate(X.global_shape))
    bounds = {d: cuts for d, cuts in enumerate(X.bounds) if d != last}
    return TensorSpace(shape, X.partition, dtype, X.axes, X.name, bounds=bounds, memory=X.memory)


def blocks_of(space: TensorSpace, half: TensorSpace) -> list[tuple[Space, Space]]:
    """Each block of a space, and that of its frequencies."""
    pairs = zip(space.regions, half.regions, strict=True)
    return [(Space(a, space.dtype), Space(b, half.dtype)) for a, b in pairs]


def _named(name: str, dims: Sequence[int], op: LinearOperator) -> LinearOperator:
    return over_reals_of(
        lambda ops, *ends: Named(name, axes_text(tuple(sorted(dims))), ops[0]),
        [op],
        op.domain,
        op.codomain,
    )
