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
from linop.spaces.real_parts import complex_of
from linop.spaces.region import Region, integer
from linop.spaces.scalars import Array
from linop.spaces.space import Space

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

    Example:
        >>> F = linop.local_operators.fft(linop.Region("x", 4))
        >>> (F @ np.ones(4, complex)).tolist() == [2, 0, 0, 0]
        True
        >>> bool(linop.testing.check_unitary(F))
        True
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


@records_origin
def rfft(
    domain: RegionOrSpace,
    codomain: RegionOrSpace | None = None,
    *,
    axes: int | Sequence[int] | None = None,
    norm: Norm = "ortho",
    name: str = "Fr",
) -> LinearOperator:
    """The n-d discrete Fourier transform of one region of real numbers, as `numpy.fft.rfftn`: of
    the last axis, of length n, the n // 2 + 1 frequencies from 0, which determine the others. Its
    adjoint, for real inner products, is not its inverse (`irfft`), as those count twice.

    Args:
        domain: one region, of a real dtype; float64 if a `Region` is given.
        codomain: by default a region ``<name>^`` on the same worker, of the complex dtype. One that
            is shorter along the halved axis has the lowest frequencies alone.
        axes: to transform along, the halved one last; by default all.
        norm: as for `fft`.
        name: the symbol.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `fft`.

    Example:
        >>> F = linop.local_operators.rfft(linop.Region("x", 4))
        >>> F.shape, F.dtype.name
        ((3, 4), 'complex128')
        >>> (F @ np.ones(4)).tolist() == [2, 0, 0]
        True
    """
    ends, along, lengths, halves = _half("rfft", domain, codomain, axes, norm)

    def port(namespace: Namespace) -> tuple[Function, Function]:
        half, (there, back) = namespace.put(halves), _transforms(namespace, ends, along, lengths)
        return (lambda x: there(x, norm)), (lambda y: back(half * y, DUAL[norm]))

    def dense() -> scipy.sparse.sparray:
        return _half_matrix(ends, along, norm)

    return local_operator(*ends, port, name, dense)


@records_origin
def irfft(
    codomain: RegionOrSpace,
    domain: RegionOrSpace | None = None,
    *,
    axes: int | Sequence[int] | None = None,
    norm: Norm = "ortho",
    name: str = "Fr⁻¹",
) -> LinearOperator:
    """The inverse of `rfft` of a region, as `numpy.fft.irfftn`: from its codomain to the region;
    frequencies that a shorter domain has not are zero.

    Args:
        codomain: the region of real numbers.
        domain: the codomain of `rfft`; by default a region ``<name>^``.
        axes, norm: those of `rfft`.
        name: the symbol.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `rfft`.

    Example:
        >>> x = linop.Region("x", 4)
        >>> F, back = linop.local_operators.rfft(x), linop.local_operators.irfft(x)
        >>> (back @ F @ np.array([1.0, 2.0, 3.0, 6.0])).tolist()
        [1.0, 2.0, 3.0, 6.0]
    """
    ends, along, lengths, halves = _half("irfft", codomain, domain, axes, norm)

    def port(namespace: Namespace) -> tuple[Function, Function]:
        double = namespace.put(1 / halves)
        there, back = _transforms(namespace, ends, along, lengths)
        return (lambda y: back(y, norm)), (lambda x: double * there(x, DUAL[norm]))

    def dense() -> scipy.sparse.sparray:
        twice = np.broadcast_to(1 / halves, ends[1].regions[0].shape).reshape(-1, 1)
        return scipy.sparse.csr_array((_half_matrix(ends, along, DUAL[norm]) * twice).conj().T)

    return local_operator(*ends[::-1], port, name, dense)


def _half(
    what: str,
    real: RegionOrSpace,
    other: RegionOrSpace | None,
    axes: int | Sequence[int] | None,
    norm: Norm,
) -> tuple[tuple[Space, Space], tuple[int, ...], tuple[int, ...], Array]:
    """The real space and that of the frequencies, the axes, their lengths, and the factors of the
    frequencies in the adjoint: a half of those that stand for two.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `rfft`.
    """
    space = as_space(real, np.float64)
    region, dtype = single_region(what, space), complex_of(real_dtype(what, space.dtype))
    ndim = len(region.shape)
    every = transformed_axes(dtype, axes, ndim, norm)
    if not every:
        raise ArgumentError(f"{what}: an axis to transform along expected, given {axes}")
    last = every[-1] if axes is None else int(np.atleast_1d(axes)[-1]) % ndim
    n = region.shape[last]
    if not n:
        raise ShapeError(f"{what}: the halved axis {last} of {region} has no element")
    shape = tuple(n // 2 + 1 if d == last else m for d, m in enumerate(region.shape))
    made = Region(f"{region.name}^", shape, region.workers, region.memory)
    target = as_space(made if other is None else other, dtype)
    given = single_region(what, target).shape
    kept = given[last] if len(given) == ndim else -1
    low = tuple(min(kept, n) if d == last else n for d, n in enumerate(shape))
    if given != low or target.dtype != dtype:
        raise ShapeError(
            f"{what}: of {region} the frequencies are {shape} of {dtype}, or fewer along dimension "
            f"{last}; given {target!r}"
        )
    halves = np.full(n // 2 + 1, 0.5, space.dtype)
    halves[0] = 1
    if n % 2 == 0:
        halves[-1] = 1
    along = (*(d for d in every if d != last), last)
    lengths = tuple(region.shape[d] for d in along)
    return (space, target), along, lengths, halves[:kept].reshape([-1] + [1] * (ndim - 1 - last))


def _transforms(
    namespace: Namespace,
    ends: tuple[Space, Space],
    along: Sequence[int],
    lengths: Sequence[int],
) -> tuple[Callable[[Array, Norm], Any], Callable[[Array, Norm], Any]]:
    """The transform of real arrays and its inverse, of arrays and a norm."""
    transforms, zeros = namespace.scipy("fft"), namespace.module.zeros
    (x, real), (y, made) = ((s.regions[0].shape, s.dtype) for s in ends)
    low = (*(slice(None) for _ in range(along[-1])), slice(y[along[-1]]))

    def there(array: Array, norm: Norm) -> Any:
        if not array.size:
            return zeros(y, made)
        return transforms.rfftn(array, axes=along, norm=norm)[low].astype(made, copy=False)

    def back(array: Array, norm: Norm) -> Any:
        if not array.size:
            return zeros(x, real)
        return transforms.irfftn(array, lengths, axes=along, norm=norm).astype(real, copy=False)

    return there, back


def real_dtype(what: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype, after a check that it is a real one.

    Raises:
        DTypeError: it is not.
    """
    if dtype.kind != "f":
        raise DTypeError(f"{what}: a space of dtype {dtype} given, a real one expected")
    return dtype


def _half_matrix(
    ends: tuple[Space, Space], along: Sequence[int], norm: Norm
) -> scipy.sparse.csr_array:
    region, half = (space.regions[0] for space in ends)
    units = np.eye(region.size).reshape(region.size, *region.shape)
    low = tuple(slice(n) for n in half.shape)
    columns = [np.ravel(np.fft.rfftn(unit, axes=along, norm=norm)[low]) for unit in units]
    return scipy.sparse.csr_array(np.reshape(columns, (region.size, half.size)).T)


def transformed_axes(
    dtype: np.dtype[Any], axes: int | Sequence[int] | None, ndim: int, norm: Norm
) -> tuple[int, ...]:
    """The axes of a transform in increasing order, after a check of its arguments.

    Raises:
        DTypeError: the dtype is not complex.
        ArgumentError: an axis does not exist, or is named twice; or the norm is none of NumPy's.
    """
    if dtype.kind != "c":
        raise DTypeError(
            f"fft: a space of dtype {dtype} given, a complex one expected; rfft takes real ones"
        )
    if norm not in get_args(Norm):
        raise ArgumentError(f"fft: norm is one of {', '.join(get_args(Norm))}; given {norm!r}")
    if axes is None:
        return tuple(range(ndim))
    given = tuple(integer(d, "fft: axes") for d in (axes if np.iterable(axes) else (axes,)))
    if any(not -ndim <= d < ndim for d in given):
        raise ArgumentError(f"fft: axes {given} of a tensor of {ndim} dimensions")
    chosen = {d % ndim for d in given}
    if len(chosen) < len(given):
        raise ArgumentError(f"fft: axes {given} name a dimension twice")
    return tuple(sorted(chosen))
