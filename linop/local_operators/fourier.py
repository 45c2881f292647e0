"""The discrete Fourier transform as a local operator. Transforms of tensors in blocks on several
workers are in `linop.fourier`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import scipy

from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.local_operators.functions import (
    RegionOrSpace,
    as_space,
    local_operator,
    single_region,
)
from linop.normal_form.maps import Function
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import HOST, Namespace
from linop.spaces.region import Region, integer
from linop.spaces.scalars import Array

Norm = Literal["backward", "ortho", "forward"]
"""NumPy's normalizations: the transform is not scaled, scaled by n^(-1/2), or by 1/n."""
DUAL: dict[Norm, Norm] = {"backward": "forward", "ortho": "ortho", "forward": "backward"}
"""The normalization of the inverse transform that is the adjoint."""


@records_origin
def fft(
    domain: RegionOrSpace,
    codomain: RegionOrSpace | None = None,
    *,
    axes: int | Sequence[int] | None = None,
    norm: Norm = "ortho",
    name: str = "F",
) -> LinearOperator:
    """The n-d discrete Fourier transform of one region. With the norm ``"ortho"`` it is unitary:
    its adjoint is its inverse.

    Args:
        domain: one region, of a complex dtype; complex128 if a `Region` is given.
        codomain: by default a region ``<name>^`` of the same shape.
        axes: to transform along; by default all.
        norm: ``"ortho"``, ``"backward"`` (not scaled) or ``"forward"`` (divided by the number n of
            transformed elements), as NumPy's. The adjoint is the inverse times 1, n or 1/n.
        name: the symbol.

    Raises:
        DTypeError: the space is not complex. ShapeError: domain and codomain differ in shape.
        ArgumentError: an axis does not exist, or is named twice; or the norm is none of these.
    """
    space = as_space(domain, np.complex128)
    region = single_region("fft", space)
    along = transformed_axes(space.dtype, axes, len(region.shape), norm)
    target = as_space(
        codomain or Region(f"{region.name}^", region.shape, region.workers, region.memory),
        space.dtype,
    )
    if single_region("fft", target).shape != region.shape:
        raise ShapeError(f"fft: domain {space} and codomain {target} differ in shape")

    def port(namespace: Namespace) -> tuple[Function, Function]:
        # Imported on use: it would be half of the time of `import linop`.
        transforms = namespace.scipy("fft")

        def forward(x: Array) -> Any:
            if not x.size or not along:
                return x.copy()
            return transforms.fftn(x, axes=along, norm=norm).astype(space.dtype, copy=False)

        def backward(y: Array) -> Any:
            if not y.size or not along:
                return y.copy()
            made = transforms.ifftn(y, axes=along, norm=DUAL[norm])
            return made.astype(space.dtype, copy=False)

        return forward, backward

    def inside(transform: str, scale: Norm) -> Callable[[Array], None]:
        def overwrite(x: Array) -> None:
            if x.size and along:
                change = getattr(HOST.scipy("fft"), transform)
                made = change(x, axes=along, norm=scale, overwrite_x=True)
                if not np.may_share_memory(made, x):
                    x[...] = made

        return overwrite

    def dense() -> scipy.sparse.sparray:
        forward, _ = port(HOST)
        units = np.eye(region.size).reshape(region.size, *region.shape)
        columns = [np.ravel(forward(unit.astype(space.dtype))) for unit in units]
        return scipy.sparse.csr_array(np.reshape(columns, (region.size, region.size)).T)

    both = inside("fftn", norm), inside("ifftn", DUAL[norm])
    return local_operator(space, target, port, name, dense, inside=both)


def transformed_axes(
    dtype: np.dtype[Any], axes: int | Sequence[int] | None, ndim: int, norm: Norm
) -> tuple[int, ...]:
    """The axes of a transform in increasing order, after a check of its arguments.

    Raises:
        DTypeError: the dtype is not complex.
        ArgumentError: an axis does not exist, or is named twice; or the norm is none of NumPy's.
    """
    if dtype.kind != "c":
        raise DTypeError(f"fft: a space of dtype {dtype} given, a complex one expected")
    if norm not in get_args(Norm):
        raise ArgumentError(f"fft: norm is one of {', '.join(get_args(Norm))}; given {norm!r}")
    if axes is None:
        return tuple(range(ndim))
    given = tuple(integer(d, "fft: axes") for d in (axes if np.iterable(axes) else (axes,)))  # type: ignore[union-attr]
    if any(not -ndim <= d < ndim for d in given):
        raise ArgumentError(f"fft: axes {given} of a tensor of {ndim} dimensions")
    chosen = {d % ndim for d in given}
    if len(chosen) < len(given):
        raise ArgumentError(f"fft: axes {given} name a dimension twice")
    return tuple(sorted(chosen))
