"""Matrices, diagonals, restrictions, and operators of SciPy and PyLops as local operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.local_operators.flat import on_regions, product
from linop.local_operators.functions import (
    RegionOrSpace,
    as_space,
    local_operator,
    single_region,
)
from linop.normal_form.maps import Function
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import Namespace
from linop.spaces.region import Part, Region, Subset
from linop.spaces.scalars import Array, array_of, of_dtype, sparse_dtype
from linop.spaces.space import Space


@records_origin
def matrix(
    A: npt.ArrayLike | scipy.sparse.sparray,
    domain: RegionOrSpace | None = None,
    codomain: RegionOrSpace | None = None,
    *,
    name: str = "A",
) -> LinearOperator:
    """A dense or sparse matrix, applied to regions flattened in C order.

    Args:
        A: of shape (codomain size, domain size).
        domain, codomain: by default regions ``x`` and ``y`` of worker 0.
        name: the symbol.

    Raises:
        ShapeError: the matrix is not 2-d, or does not fit the spaces.
        DTypeError: the spaces' dtype cannot represent one of its numbers (see `check_values`).
    """
    A = scipy.sparse.csr_array(A) if scipy.sparse.issparse(A) else _values("matrix", A)
    if A.ndim != 2:
        raise ShapeError(f"matrix: expected two dimensions, given shape {A.shape}")
    source, target = _sides(A.shape, A.dtype, domain, codomain)
    check_values("matrix", A.data if scipy.sparse.issparse(A) else A, source.dtype)
    wide = sparse_dtype(source.dtype)
    A = A.astype(wide, copy=False)
    adjoint = A.conj().T if wide.kind == "c" else A.T

    def port(namespace: Namespace) -> tuple[Function, Function]:
        forward, backward = product(namespace, A), product(namespace, adjoint)
        return (
            on_regions(
                lambda x: forward(x.astype(wide, copy=False)).astype(x.dtype, copy=False),
                source,
                target,
                namespace,
            ),
            on_regions(
                lambda y: backward(y.astype(wide, copy=False)).astype(y.dtype),
                target,
                source,
                namespace,
            ),
        )

    return local_operator(source, target, port, name, lambda: scipy.sparse.csr_array(A))


@records_origin
def diagonal(
    d: npt.ArrayLike, domain: RegionOrSpace | None = None, *, name: str = "diag"
) -> LinearOperator:
    """Elementwise multiplication by an array; maps a space of one region to itself.

    Args:
        d: the diagonal, of the region's shape.
        domain: by default a region ``x`` of worker 0.
        name: the symbol.

    Raises:
        ShapeError: the shapes differ. DTypeError: as for `matrix`.
    """
    d = _values("diagonal", d)
    space = as_space(Region("x", d.shape) if domain is None else domain, d.dtype)
    if len(space) != 1 or space.regions[0].shape != d.shape:
        raise ShapeError(f"diagonal: shape {d.shape} given for the space {space}")
    check_values("diagonal", d, space.dtype)
    d = d.astype(space.dtype, copy=False)

    def port(namespace: Namespace) -> tuple[Function, Function]:
        here = namespace.put(d)
        return (lambda x: here * x), (lambda y: here.conj() * y)

    return local_operator(
        space,
        space,
        port,
        name,
        lambda: _selection(np.arange(d.size), d.size, d.ravel().astype(sparse_dtype(d.dtype))),
    )


@records_origin
def restriction(
    domain: RegionOrSpace,
    keep: Part | npt.ArrayLike,
    codomain: RegionOrSpace | None = None,
    *,
    name: str = "R",
) -> LinearOperator:
    """Selection of elements of one region. The adjoint writes them to their positions in zeros, and
    sums those selected twice.

    Args:
        domain: one region.
        keep: the region, a subset of it, or integer indices into the region flattened in C order.
        codomain: by default a region ``<name>'`` on the same workers and in the same memory, of the
            shape of the selection.
        name: the symbol.

    Raises:
        SpaceError: the domain has not one region, or lacks the subset's.
        ArgumentError: indices are no integers. ShapeError: an index is out of range.
    """
    space = as_space(domain, np.float64)
    region = single_region("restriction", space)
    if isinstance(keep, Region | Subset):
        index = np.arange(region.size).reshape(region.shape)[space.require(keep).index]
    else:
        index = _values("restriction", keep)
        index = index.astype(np.int64) if index.size == 0 else index
        if index.dtype.kind not in "iu":
            raise ArgumentError(f"restriction: expected whole numbers, given {keep!r}")
        if index.size and not (-region.size <= index.min() and index.max() < region.size):
            raise ShapeError(f"restriction: indices outside of a region of {region.size} elements")
    target = Region(f"{region.name}'", index.shape, region.workers, region.memory)
    ones = np.ones(index.size, sparse_dtype(space.dtype))
    A = _selection(index.ravel() % max(region.size, 1), region.size, ones)
    return matrix(A, space, as_space(codomain or target, space.dtype), name=name)


@records_origin
def from_scipy(
    A: Any,
    domain: RegionOrSpace | None = None,
    codomain: RegionOrSpace | None = None,
    *,
    name: str | None = None,
) -> LinearOperator:
    """A SciPy or PyLops operator (anything that `scipy.sparse.linalg.aslinearoperator` accepts),
    applied to regions flattened in C order. It runs on host memory. Matrices are passed on to
    `matrix`, so that they stay known.

    Args:
        A: of shape (codomain size, domain size).
        domain, codomain: by default regions ``x`` and ``y`` of worker 0.
        name: the symbol; by default the name of A's class.

    Raises:
        ArgumentError: A is neither an operator nor a matrix.
        ShapeError: A does not fit the spaces. DTypeError: the spaces' dtype cannot hold A's.
    """
    if isinstance(A, np.ndarray) or scipy.sparse.issparse(A):
        return matrix(A, domain, codomain, name=name or "A")
    try:
        op = A if hasattr(A, "matvec") else scipy.sparse.linalg.aslinearoperator(A)
    except TypeError:
        raise ArgumentError(f"from_scipy: expected an operator or a matrix, given {A!r}") from None
    dtype = np.dtype(op.dtype or np.float64)
    source, target = _sides(op.shape, dtype, domain, codomain)
    checked_dtype(dtype, source.dtype)

    def port(namespace: Namespace) -> tuple[Function, Function]:
        return (
            on_regions(lambda x: op.matvec(x).astype(source.dtype, copy=False), source, target),
            on_regions(lambda y: op.rmatvec(y).astype(source.dtype, copy=False), target, source),
        )

    said = name or type(A).__name__
    return local_operator(source, target, port, said, portable=False, fresh=False)


def _values(what: str, values: npt.ArrayLike) -> Array:
    """Numbers given to the constructor `what`, as an array."""
    return np.asarray(values) if isinstance(values, np.matrix) else array_of(values, what)


def _sides(
    shape: tuple[int, ...],
    dtype: np.dtype,
    domain: RegionOrSpace | None,
    codomain: RegionOrSpace | None,
) -> tuple[Space, Space]:
    held = [r for p in (domain, codomain) if p is not None for r in as_space(p, dtype).regions]
    held_in = (held[0].workers, held[0].memory) if held else ()
    like = next((p.dtype for p in (domain, codomain) if isinstance(p, Space)), dtype)
    source = as_space(Region("x", shape[1], *held_in) if domain is None else domain, like)
    target = as_space(Region("y", shape[0], *held_in) if codomain is None else codomain, like)
    if shape != (target.size, source.size):
        raise ShapeError(
            f"a matrix of shape {tuple(shape)} given for {source} -> {target}, which needs "
            f"{(target.size, source.size)}"
        )
    return source, target


def checked_dtype(given: np.dtype, wanted: np.dtype) -> np.dtype:
    """The dtype `wanted`, checked: values of dtype `given` are of the same kind or of a narrower
    one (integer, floating, complex).

    Raises:
        DTypeError: `given` is of a wider kind.
    """
    if not np.can_cast(given, wanted, "same_kind"):
        raise DTypeError(f"values of dtype {given} on a space of dtype {wanted}")
    return wanted


def check_values(what: str, values: Any, dtype: np.dtype) -> None:
    """Check that numbers can be cast to a dtype: integers exactly, others with rounding.

    Raises:
        DTypeError: a number is complex or fractional, and the dtype is not; it is out of range; or
            it is an integer that the dtype does not represent exactly.
    """
    if values.dtype != dtype:
        of_dtype(values, dtype, what)


def _selection(index: Array, columns: int, values: Array) -> scipy.sparse.csr_array:
    """The sparse matrix with ``values[k]`` in row k, column ``index[k]``, and `columns` columns."""
    entries = (values, (np.arange(index.size), index))
    return scipy.sparse.csr_array(entries, shape=(index.size, columns))
