"""The lowest frequencies of real tensors in blocks, of the halved axis those from 0: half of the
transforms and of the bytes of complex ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from linop.errors import ArgumentError, ShapeError
from linop.fourier.layouts import Layouts, Way
from linop.fourier.real import blocks_of, halved
from linop.fourier.transform import fastest, transformed
from linop.local_operators import fourier as local
from linop.local_operators.fourier import real_dtype, transformed_axes
from linop.operators.algebra import direct_sum
from linop.operators.expressions import compose
from linop.operators.operator import LinearOperator, TensorOperator
from linop.spaces.real_parts import complex_of
from linop.spaces.region import naturals
from linop.spaces.tensor import TensorSpace


class HalfModes(NamedTuple):
    """The transforms of a real space, in their parts.

    Attributes:
        real: the repartition that makes the halved axis whole.
        others: the transform along the other axes, of the lowest frequencies of the halved one.
        last: the halved axis.
        way: the route of `others`.
    """

    real: TensorOperator
    others: TensorOperator
    last: int
    way: Way

    @property
    def forward(self) -> LinearOperator:
        """From the real space to its lowest frequencies, those of the orthonormal transform."""
        space, half = self.real.codomain, self.others.domain
        steps = [local.rfft(a, b, axes=self.last) for a, b in blocks_of(space, half)]
        return compose(self.others, direct_sum(*steps, domain=space, codomain=half), self.real)

    @property
    def inverse(self) -> LinearOperator:
        """From the lowest frequencies to the real space; all others are zero. It is not the adjoint
        of `forward`, since frequencies that stand for two count twice."""
        space, half = self.real.codomain, self.others.domain
        steps = [local.irfft(a, b, axes=self.last) for a, b in blocks_of(space, half)]
        return compose(
            self.real.euclidean_adjoint,
            direct_sum(*steps, domain=half, codomain=space),
            self.others.euclidean_adjoint,
        )


def half_modes(
    X: TensorSpace,
    modes: int | Sequence[int],
    axes: int | Sequence[int] | None,
    whole: Sequence[int],
    ways: Sequence[Way],
) -> HalfModes:
    """The transforms of a real space.

    Args:
        X: blocks that do not overlap.
        modes: for each of the axes, the number of frequencies: of the last axis, of length n, those
            from 0, at most n // 2 + 1; of others as for `low_modes`. One number is for all.
        axes: dimensions to transform along, in increasing order; by default all but `whole`.
        whole: other dimensions that no block of the frequencies cuts.
        ways: routes of the other axes, of which the one that is predicted to be faster is taken.

    Raises:
        DTypeError: the dtype is not real. ShapeError: modes do not fit. PartitionError,
            ArgumentError: as `low_modes`.
    """
    dtype = complex_of(real_dtype("low_modes", X.dtype))
    kept = transformed_axes(dtype, whole, X.ndim, "ortho")
    axes = [d for d in range(X.ndim) if d not in kept] if axes is None else axes
    dims = transformed_axes(dtype, axes, X.ndim, "ortho")
    if not dims:
        raise ArgumentError(f"low_modes: an axis to transform along expected, given {axes}")
    last, rest = dims[-1], dims[:-1]
    counts = _counts(X, modes, dims)
    real = Layouts(X, fixed=kept)
    *_, (cuts, _) = real.route("pencil", [last])
    half = Layouts(halved(X, last, dtype, counts[last]), {d: counts[d] for d in rest}, kept)
    half.start = cuts
    every = tuple(sorted({*rest, *kept}))
    way = fastest(half, rest, every, ways, None)
    others = transformed("F", half, rest, every, [way], None, "ortho")
    return HalfModes(real.move(X, real.space(cuts)), others, last, way)


def _counts(X: TensorSpace, modes: Any, dims: Sequence[int]) -> dict[int, int]:
    """The number of frequencies of each dimension.

    Raises:
        ShapeError: there is not one for each, or one is too large. ArgumentError: one is no number.
    """
    given = naturals(modes, "low_modes: modes", ArgumentError)
    counts = given * len(dims) if np.ndim(modes) == 0 else given
    lengths = [X.global_shape[d] for d in dims]
    most = [*lengths[:-1], lengths[-1] // 2 + 1]
    if len(counts) != len(dims) or any(m > n for m, n in zip(counts, most, strict=True)):
        raise ShapeError(
            f"low_modes: {modes} modes of dimensions {tuple(dims)}, of lengths {tuple(lengths)}; "
            f"at most {tuple(most)} of a real tensor, of the last one from 0"
        )
    if not lengths[-1]:
        raise ShapeError(f"low_modes: the halved dimension {dims[-1]} of {X!r} has no element")
    return dict(zip(dims, counts, strict=True))
