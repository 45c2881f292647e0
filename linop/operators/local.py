"""Local operators: linear maps inside one worker's memory, without messages.

Each is a pair of functions, the forward one and its adjoint, and the matrix if it is known. Domain
and codomain are given as a `Region` or a `Space`, on one worker; or replicated over the same
workers, all of which then compute. Convolution is in `linop.operators.sliding`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from linop.errors import ArgumentError, DTypeError, ShapeError, SpaceError
from linop.normal_form.maps import Function, LocalMap, Port
from linop.operators.algebra import Local
from linop.operators.operator import LinearOperator
from linop.provenance import remembered
from linop.spaces.array_modules import HOST, Namespace
from linop.spaces.region import Part, Region, Subset
from linop.spaces.scalars import Array, of_dtype, plain, sparse_dtype
from linop.spaces.space import Space
from linop.spaces.vector import Vector

Place = Region | Space


@remembered
def local(
    domain: Place,
    codomain: Place,
    forward: Function,
    adjoint: Function,
    *,
    name: str = "L",
    dtype: npt.DTypeLike = np.float64,
) -> LinearOperator:
    """A linear map given as a function and its adjoint. Neither is checked here:
    `linop.testing.check_adjoint` tests that they are linear and adjoint.

    Args:
        domain, codomain: regions or spaces, all on one worker.
        forward, adjoint: functions of a bare array if a side has one region, otherwise of a dict of
            arrays by region name; results likewise. They must not change their argument, which is
            read-only in host memory. Results are copied, so they may be views or reused buffers. On
            a device backend, arrays are device arrays; NumPy arrays if all regions are in host
            memory.
        name: the symbol.
        dtype: of the space, if a `Region` is given.

    Raises:
        ArgumentError: a side is neither a `Region` nor a `Space`.
        SpaceError: regions are on different workers, or the sides' dtypes differ.
    """
    source, target = place_space(domain, dtype), place_space(codomain, dtype)
    return local_operator(source, target, lambda namespace: (forward, adjoint), name, fresh=False)


@remembered
def matrix(
    A: npt.ArrayLike | scipy.sparse.sparray,
    domain: Place | None = None,
    codomain: Place | None = None,
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
            _flatly(
                lambda x: forward(x.astype(wide, copy=False)).astype(x.dtype, copy=False),
                source,
                target,
                namespace,
            ),
            _flatly(
                lambda y: backward(y.astype(wide, copy=False)).astype(y.dtype),
                target,
                source,
                namespace,
            ),
        )

    return local_operator(source, target, port, name, lambda: scipy.sparse.csr_array(A))


@remembered
def diagonal(
    d: npt.ArrayLike, domain: Place | None = None, *, name: str = "diag"
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
    space = place_space(Region("x", d.shape) if domain is None else domain, d.dtype)
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


@remembered
def restriction(
    domain: Place, keep: Part | npt.ArrayLike, codomain: Place | None = None, *, name: str = "R"
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
    space = place_space(domain, np.float64)
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
    return matrix(A, space, place_space(codomain or target, space.dtype), name=name)


@remembered
def fft(domain: Place, codomain: Place | None = None, *, name: str = "F") -> LinearOperator:
    """The orthonormal n-d discrete Fourier transform of one region. Unitary: its adjoint is its
    inverse.

    Args:
        domain: one region, of a complex dtype; complex128 if a `Region` is given.
        codomain: by default a region ``<name>^`` of the same shape.
        name: the symbol.

    Raises:
        DTypeError: the space is not complex. ShapeError: domain and codomain differ in shape.
    """
    space = place_space(domain, np.complex128)
    region = single_region("fft", space)
    if space.dtype.kind != "c":
        raise DTypeError(f"fft: a space of dtype {space.dtype} given, a complex one expected")
    target = place_space(
        codomain or Region(f"{region.name}^", region.shape, region.workers, region.memory),
        space.dtype,
    )
    if single_region("fft", target).shape != region.shape:
        raise ShapeError(f"fft: domain {space} and codomain {target} differ in shape")

    def port(namespace: Namespace) -> tuple[Function, Function]:
        # Imported on use: it would be half of the time of `import linop`.
        transforms = namespace.scipy("fft")

        def forward(x: Array) -> Any:
            return transforms.fftn(x, norm="ortho").astype(space.dtype) if x.size else x.copy()

        def backward(y: Array) -> Any:
            return transforms.ifftn(y, norm="ortho").astype(space.dtype) if y.size else y.copy()

        return forward, backward

    def dense() -> scipy.sparse.sparray:
        forward, _ = port(HOST)
        units = np.eye(region.size).reshape(region.size, *region.shape)
        columns = [np.ravel(forward(unit.astype(space.dtype))) for unit in units]
        return scipy.sparse.csr_array(np.reshape(columns, (region.size, region.size)).T)

    return local_operator(space, target, port, name, dense)


@remembered
def from_scipy(
    A: Any,
    domain: Place | None = None,
    codomain: Place | None = None,
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
            _flatly(lambda x: op.matvec(x).astype(source.dtype, copy=False), source, target),
            _flatly(lambda y: op.rmatvec(y).astype(source.dtype, copy=False), target, source),
        )

    said = name or type(A).__name__
    return local_operator(source, target, port, said, portable=False, fresh=False)


def local_operator(
    domain: Space,
    codomain: Space,
    port: Port,
    name: str,
    known: Any = None,
    portable: bool = True,
    fresh: bool = True,
) -> LinearOperator:
    """A pair of functions as an operator.

    Args:
        domain, codomain: spaces, all regions of which are on the same workers.
        port: returns (forward, adjoint) for an array module, such as NumPy's or CuPy's.
        name: the symbol.
        known: returns the sparse matrix; None if it is unknown.
        portable: True if `port` accepts other array modules than NumPy's.
        fresh: True if both functions return newly allocated memory, and write to nothing else; see
            `LocalMap`.

    Raises:
        SpaceError: the regions are on different workers, or dtypes differ.
    """
    holders = {r.workers for space in (domain, codomain) for r in space.regions}
    if len(holders) > 1:
        raise SpaceError(
            f"local operator {name}: its regions are on different workers: {domain} -> {codomain}; "
            f"a local operator stays inside one worker"
        )
    forward, backward = port(HOST)
    ported = port if portable else None
    return Local(LocalMap(domain, codomain, forward, backward, name, known, ported, fresh=fresh))


def place_space(place: Place, dtype: npt.DTypeLike) -> Space:
    """A `Space` as it is; a `Region` as the space of that region alone, with the given dtype.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(place, Space):
        return place
    if isinstance(place, Region):
        return Space(place, dtype)
    raise ArgumentError(f"expected a Region or a Space, given {place!r}")


def single_region(what: str, space: Space) -> Region:
    """The only region of a space.

    Raises:
        SpaceError: it has none, or several.
    """
    if len(space) != 1:
        raise SpaceError(f"{what}: a space of one region expected, given {space}")
    return space.regions[0]


def _values(what: str, values: npt.ArrayLike) -> Array:
    """Numbers given to the constructor `what`, as an array."""
    return np.asarray(values if isinstance(values, np.matrix) else plain(values, what))


def _sides(
    shape: tuple[int, ...], dtype: np.dtype, domain: Place | None, codomain: Place | None
) -> tuple[Space, Space]:
    held = [r for p in (domain, codomain) if p is not None for r in place_space(p, dtype).regions]
    place = (held[0].workers, held[0].memory) if held else ()
    like = next((p.dtype for p in (domain, codomain) if isinstance(p, Space)), dtype)
    source = place_space(Region("x", shape[1], *place) if domain is None else domain, like)
    target = place_space(Region("y", shape[0], *place) if codomain is None else codomain, like)
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


def product(namespace: Namespace, A: Any) -> Function:
    """The function x -> A @ x on flat vectors of an array module.

    CuPy's sparse matrices have no integer dtypes. There, row sums are differences of a cumulative
    sum, which is exact, since integers wrap modulo 2^bits.

    Args:
        namespace: the array module, to which A is copied.
        A: a NumPy array or a SciPy sparse matrix.
    """
    if not scipy.sparse.issparse(A):
        dense = namespace.put(A)
        return lambda x: dense @ x
    A = scipy.sparse.csr_array(A)
    if namespace.ndarray is np.ndarray:
        return lambda x: A @ x
    if A.dtype.kind in "fc":
        sparse = namespace.scipy("sparse").csr_matrix(A)
        return lambda x: sparse @ x
    data, columns, ends = map(namespace.put, (A.data, A.indices, A.indptr))

    def multiply(x: Any) -> Any:
        totals = namespace.module.zeros(len(A.data) + 1, A.dtype)
        totals[1:] = namespace.module.cumsum(data * x[columns], dtype=A.dtype)
        return totals[ends[1:]] - totals[ends[:-1]]

    return multiply


def _flatly(f: Function, source: Space, target: Space, namespace: Namespace = HOST) -> Function:
    """A function of flat vectors as one of the bare array or dict of arrays of two spaces."""
    if namespace.ndarray is not np.ndarray:
        return _flatly_there(f, source, target, namespace)

    def apply(x: Any) -> Any:
        vector = x if isinstance(x, Vector) else source.vector({} if x is None else x)
        return target.unflatten(f(source.flatten(vector))).arrays

    if len(source) != 1 or len(target) != 1:
        return apply
    shape, wanted, dtype = source.regions[0].shape, target.regions[0].shape, target.dtype

    def apply_to_array(x: Any) -> Any:
        if type(x) is not np.ndarray or x.shape != shape:
            return apply(x)
        y = f(x.flatten())
        fits = type(y) is np.ndarray and y.size == target.size and y.dtype == dtype
        return y.reshape(wanted) if fits else target.unflatten(y).arrays

    return apply_to_array


def _flatly_there(f: Function, source: Space, target: Space, namespace: Namespace) -> Function:
    """`_flatly` for device arrays. They come from a plan, which has checked them."""
    starts = [(r, target.offsets[r.name]) for r in target.regions]

    def apply(x: Any) -> Any:
        given = x if len(source) != 1 else {source.regions[0].name: x}
        pieces = [given[r.name].ravel() for r in source.regions]
        flat = (
            namespace.module.concatenate(pieces)
            if pieces
            else namespace.put(np.zeros(0, source.dtype))
        )
        y = f(flat)
        arrays = {r.name: y[k : k + r.size].reshape(r.shape) for r, k in starts}
        return arrays if len(target) != 1 else arrays[target.regions[0].name]

    return apply


def _selection(index: Array, columns: int, values: Array) -> scipy.sparse.csr_array:
    """The sparse matrix with ``values[k]`` in row k, column ``index[k]``, and `columns` columns."""
    entries = (values, (np.arange(index.size), index))
    return scipy.sparse.csr_array(entries, shape=(index.size, columns))
