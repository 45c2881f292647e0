"""Matrices, diagonals and restrictions as local operators."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy

from linop.errors import ArgumentError, ShapeError
from linop.local_operators.flat import on_regions, product
from linop.local_operators.functions import (
    RegionOrSpace,
    as_space,
    local_operator,
    single_region,
)
from linop.normal_form.diagonals import multiplication
from linop.normal_form.maps import Function
from linop.operators.expressions import Local
from linop.operators.operator import LinearOperator
from linop.operators.real_linear import between_parts
from linop.provenance import records_origin
from linop.spaces.array_modules import Namespace
from linop.spaces.real_parts import complex_of
from linop.spaces.region import Part, Region, Subset
from linop.spaces.scalars import Array, array_of, of_dtype, sparse_dtype
from linop.spaces.space import Space

Dims = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of a codomain and a domain."""


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
        domain, codomain: by default regions ``x`` and ``y`` of worker 0; of a square matrix one
            space for both, so that it has powers: the given one, or a region ``x``. Of a real and a
            complex one, real results are the real parts.
        name: the symbol.

    Raises:
        ShapeError: the matrix is not 2-d, or does not fit the spaces.
        DTypeError: a number is complex or fractional, and the spaces' dtype is not; it is out of
            range; or it is an integer that the dtype does not represent exactly. Others are rounded
            to the dtype, once.

    Example:
        >>> A = linop.local_operators.matrix(np.array([[1.0, 2.0], [0.0, 3.0], [4.0, 0.0]]))
        >>> (A @ np.array([1.0, 1.0])).tolist(), (A.H @ np.ones(3)).tolist()
        ([3.0, 3.0, 4.0], [5.0, 5.0])
    """
    sparse = scipy.sparse.issparse(A)
    A = scipy.sparse.csr_array(A) if sparse else _values("matrix", A)
    if A.ndim != 2:
        raise ShapeError(f"matrix: expected two dimensions, given shape {A.shape}")
    source, target = sides(A.shape, A.dtype, domain, codomain)
    if source.dtype != target.dtype:
        ends = (space.with_dtype(complex_of(space.dtype)) for space in (source, target))
        return between_parts(matrix(A, *ends, name=name), source, target)
    values = of_dtype(A.data if sparse else A, source.dtype, "matrix")
    wide = sparse_dtype(source.dtype)
    A = _with_values(A, values.astype(wide)) if sparse else values.astype(wide, copy=False)
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

    Example:
        >>> D = linop.local_operators.diagonal(np.array([1.0, 2.0, 3.0]))
        >>> (D @ np.array([10.0, 10.0, 10.0])).tolist()
        [10.0, 20.0, 30.0]
    """
    d = _values("diagonal", d)
    space = as_space(Region("x", d.shape) if domain is None else domain, d.dtype)
    if len(space) != 1 or space.regions[0].shape != d.shape:
        raise ShapeError(f"diagonal: shape {d.shape} given for the space {space}")
    d = of_dtype(d, space.dtype, "diagonal")
    return Local(multiplication(d, space, name))


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

    Example:
        >>> R = linop.local_operators.restriction(linop.Region("x", 5), [4, 0, 4])
        >>> (R @ np.arange(5.0)).tolist()
        [4.0, 0.0, 4.0]
        >>> (R.H @ np.ones(3)).tolist()
        [1.0, 0.0, 0.0, 0.0, 2.0]
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
        if index.size and not (-region.size <= int(index.min()) <= int(index.max()) < region.size):
            raise ShapeError(f"restriction: indices outside of a region of {region.size} elements")
    target = Region(f"{region.name}'", index.shape, region.workers, region.memory)
    ones = np.ones(index.size, sparse_dtype(space.dtype))
    A = _selection(index.ravel().astype(np.int64) % max(region.size, 1), region.size, ones)
    return matrix(A, space, as_space(codomain or target, space.dtype), name=name)


def _values(what: str, values: npt.ArrayLike) -> Array:
    """Numbers given to the constructor `what`, as an array."""
    return np.asarray(values) if isinstance(values, np.matrix) else array_of(values, what)


def sides(
    shape: tuple[int, ...],
    dtype: np.dtype,
    domain: RegionOrSpace | None,
    codomain: RegionOrSpace | None,
    dims: Dims | None = None,
) -> tuple[Space, Space]:
    """The domain and codomain of a matrix. A missing one is a region ``x`` or ``y`` where the other
    one is; if the matrix is square, it is the other one itself, so that the matrix has powers.

    Args:
        shape: of the matrix.
        dtype: of the spaces, if none is given as a `Space`.
        domain, codomain: as given; None if missing.
        dims: shapes of missing regions, of the codomain and the domain; by default those of flat
            vectors.

    Raises:
        ShapeError: the matrix does not fit the spaces.
    """
    held = [r for p in (domain, codomain) if p is not None for r in as_space(p, dtype).regions]
    held_in = (held[0].workers, held[0].memory) if held else ()
    like = next((p.dtype for p in (domain, codomain) if isinstance(p, Space)), dtype)
    outer, inner = dims or ((shape[0],), (shape[1],))
    if shape[0] == shape[1] and (domain is None or codomain is None):
        known = next((p for p in (domain, codomain) if p is not None), None)
        if known is not None or outer == inner:
            domain = codomain = known or Region("x", inner)
    source = as_space(Region("x", inner, *held_in) if domain is None else domain, like)
    target = as_space(Region("y", outer, *held_in) if codomain is None else codomain, like)
    if shape != (target.size, source.size):
        raise ShapeError(
            f"a matrix of shape {tuple(shape)} given for {source} -> {target}, which needs "
            f"{(target.size, source.size)}"
        )
    return source, target


def _with_values(A: scipy.sparse.csr_array, values: Array) -> scipy.sparse.csr_array:
    """A new sparse matrix with other values for the same entries, without those that are zero."""
    made = scipy.sparse.csr_array((values, A.indices.copy(), A.indptr.copy()), shape=A.shape)
    made.eliminate_zeros()
    return made


def _selection(index: Array, columns: int, values: Array) -> scipy.sparse.csr_array:
    """The sparse matrix with ``values[k]`` in row k, column ``index[k]``, and `columns` columns."""
    entries = (values, (np.arange(index.size), index))
    return scipy.sparse.csr_array(entries, shape=(index.size, columns))
