"""Local operators: linear maps inside one worker's memory (design section 3).

All of them are a pair of functions that are each other's adjoint, with the matrix where it is
known. Domain and codomain may be given as a `Region` or a `Space`, on one worker (or replicated
over the same workers, which then all compute).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import scipy.sparse.linalg

from linop.algebra import Local
from linop.errors import ArgumentError, DTypeError, ShapeError, SpaceError
from linop.halo import PerDim, per_dim
from linop.operator import LinearOperator
from linop.region import Region, Subset
from linop.scalars import Array
from linop.space import Space, Vector
from linop.stages import Function, LocalMap

Place = Region | Space


def local(
    domain: Place,
    codomain: Place,
    forward: Function,
    adjoint: Function,
    *,
    name: str = "L",
    dtype: npt.DTypeLike = np.float64,
) -> LinearOperator:
    """A linear map given by a function and its adjoint; `linop.testing` tells whether they are.

    Args:
        domain, codomain: regions, or spaces, of one worker.
        forward, adjoint: get and return the bare array of a side with one region, a dict by region
            name otherwise; they must not change their argument.
        name: in prints.
        dtype: of the spaces, where a `Region` is given.
    """
    return _operator(_space(domain, dtype), _space(codomain, dtype), forward, adjoint, name)


def matrix(
    A: npt.ArrayLike | scipy.sparse.sparray,
    domain: Place | None = None,
    codomain: Place | None = None,
    *,
    name: str = "A",
) -> LinearOperator:
    """A dense or sparse matrix, acting on regions flattened in C order.

    Args:
        A: of shape (codomain size, domain size).
        domain, codomain: by default regions ``x`` and ``y`` of worker 0.

    Raises:
        ShapeError: the matrix does not fit the spaces.
    """
    A = scipy.sparse.csr_array(A) if scipy.sparse.issparse(A) else np.asarray(A)
    if A.ndim != 2:
        raise ShapeError(f"matrix: expected two dimensions, given shape {A.shape}")
    source, target = _sides(A.shape, A.dtype, domain, codomain)
    A = A.astype(_checked_dtype(A.dtype, source.dtype))
    adjoint = A.conj().T
    return _operator(
        source,
        target,
        _flatly(lambda x: A @ x, source, target),
        _flatly(lambda y: adjoint @ y, target, source),
        name,
        lambda: scipy.sparse.csr_array(A),
    )


def diagonal(
    d: npt.ArrayLike, domain: Place | None = None, *, name: str = "diag"
) -> LinearOperator:
    """Multiplication by an array of the shape of the only region of the domain.

    Args:
        d: the diagonal.
        domain: by default a region ``x`` of worker 0.
    """
    d = np.asarray(d)
    space = _space(Region("x", d.shape) if domain is None else domain, d.dtype)
    if len(space) != 1 or space.regions[0].shape != d.shape:
        raise ShapeError(f"diagonal: shape {d.shape} given for the space {space}")
    d = d.astype(_checked_dtype(d.dtype, space.dtype))
    return _operator(
        space,
        space,
        lambda x: d * x,
        lambda y: np.conj(d) * y,
        name,
        lambda: _selection(np.arange(d.size), d.size, d.ravel()),
    )


def restriction(
    domain: Place, keep: Subset | npt.ArrayLike, codomain: Place | None = None, *, name: str = "R"
) -> LinearOperator:
    """The elements of a region that a subset or flat indices select; its adjoint puts them back.

    Args:
        domain: one region.
        keep: a subset of it, or whole numbers that index it flattened.
        codomain: by default a region ``<name>'`` of the same worker, of the subset's shape.
    """
    space = _space(domain, np.float64)
    (region,) = _single("restriction", space)
    if isinstance(keep, Subset):
        space.require(keep)
        index = np.arange(region.size).reshape(region.shape)[keep.index]
    else:
        index = np.asarray(keep)
        index = index.astype(np.int64) if index.size == 0 else index
        if index.dtype.kind not in "iu":
            raise ArgumentError(f"restriction: expected whole numbers, given {keep!r}")
        if index.size and not (-region.size <= index.min() and index.max() < region.size):
            raise ShapeError(f"restriction: indices outside of a region of {region.size} elements")
    target = Region(f"{region.name}'", index.shape, region.workers)
    ones = np.ones(index.size, space.dtype)
    A = _selection(index.ravel() % max(region.size, 1), region.size, ones)
    return matrix(A, space, _space(codomain or target, space.dtype), name=name)


def fft(domain: Place, codomain: Place | None = None, *, name: str = "F") -> LinearOperator:
    """The orthonormal n-d discrete Fourier transform of one region; its adjoint is its inverse.

    Raises:
        DTypeError: the space is not complex.
    """
    import scipy.fft  # loaded where it is used: half of the time of `import linop` otherwise

    space = _space(domain, np.complex128)
    (region,) = _single("fft", space)
    if space.dtype.kind != "c":
        raise DTypeError(f"fft: a space of dtype {space.dtype} given, a complex one expected")
    target = _space(
        codomain or Region(f"{region.name}^", region.shape, region.workers), space.dtype
    )
    if _single("fft", target)[0].shape != region.shape:
        raise ShapeError(f"fft: domain {space} and codomain {target} differ in shape")

    def forward(x: Array) -> Array:
        return scipy.fft.fftn(x, norm="ortho").astype(space.dtype) if x.size else x

    def backward(y: Array) -> Array:
        return scipy.fft.ifftn(y, norm="ortho").astype(space.dtype) if y.size else y

    def dense() -> scipy.sparse.sparray:
        units = np.eye(region.size).reshape(region.size, *region.shape)
        columns = [np.ravel(forward(unit.astype(space.dtype))) for unit in units]
        return scipy.sparse.csr_array(np.reshape(columns, (region.size, region.size)).T)

    return _operator(space, target, forward, backward, name, dense)


def convolution(
    kernel: npt.ArrayLike,
    domain: Place,
    codomain: Place,
    *,
    stride: PerDim = 1,
    padding: int | Sequence[int | tuple[int, int]] = 0,
    dilation: PerDim = 1,
    name: str = "C",
) -> LinearOperator:
    """The sliding product of a kernel with one region, as torch.nn means it: not flipped, the
    region padded with zeros.

    Args:
        kernel: n-d, as many dimensions as the region.
        domain, codomain: one region each; the codomain's shape is that of the output.
        stride, dilation: one number, or one per dimension.
        padding: one number, or per dimension a number or (left, right).

    Raises:
        ShapeError: shapes do not fit; the message gives the output's.
    """
    import scipy.signal  # as scipy.fft above

    source, target = _space(domain, np.float64), _space(codomain, np.float64)
    (region,), (result,) = _single("convolution", source), _single("convolution", target)
    k = np.asarray(kernel)
    k = k.astype(_checked_dtype(k.dtype, source.dtype))
    if k.ndim != region.ndim:
        raise ShapeError(f"convolution: kernel of shape {k.shape} for a region of {region.shape}")
    steps = per_dim("stride", stride, k.ndim, 1)
    spread = tuple(
        d * (n - 1) + 1
        for d, n in zip(per_dim("dilation", dilation, k.ndim, 1), k.shape, strict=True)
    )
    wide = np.zeros(spread, k.dtype)
    wide[tuple(slice(None, None, d) for d in per_dim("dilation", dilation, k.ndim, 1))] = k
    pads = _pads(padding, k.ndim)
    padded = tuple(n + a + b for n, (a, b) in zip(region.shape, pads, strict=True))
    full = tuple(n - w + 1 for n, w in zip(padded, spread, strict=True))
    expected = tuple(max(0, -(-n // s)) for n, s in zip(full, steps, strict=True))
    empty = result.size == 0 and region.size == 0
    if result.shape != expected and not empty:
        raise ShapeError(f"convolution: output of shape {expected}; {result.shape} given")
    inside = tuple(slice(a, a + n) for n, (a, _) in zip(region.shape, pads, strict=True))
    every = tuple(slice(None, None, s) for s in steps)

    def forward(x: Array) -> Array:
        if not result.size:
            return np.zeros(result.shape, source.dtype)
        whole = np.pad(x, pads)
        slid: Array = scipy.signal.correlate(whole, np.conj(wide), "valid")[every]
        return slid.astype(source.dtype)

    def backward(y: Array) -> Array:
        if not result.size:
            return np.zeros(region.shape, source.dtype)
        spaced = np.zeros(full, y.dtype)
        spaced[every] = y
        spread_out: Array = scipy.signal.convolve(spaced, np.conj(wide), "full")[inside]
        return spread_out.astype(source.dtype)

    def known() -> scipy.sparse.sparray:
        return _convolution_matrix(wide, padded, inside, every, full, (result.size, region.size))

    return _operator(source, target, forward, backward, name, known)


def from_scipy(
    A: Any,
    domain: Place | None = None,
    codomain: Place | None = None,
    *,
    name: str | None = None,
) -> LinearOperator:
    """Any SciPy or PyLops operator (whatever `scipy.sparse.linalg.aslinearoperator` takes), acting
    on regions flattened in C order. Matrices are better given to `matrix`, which knows them.

    Args:
        A: of shape (codomain size, domain size).
        domain, codomain: by default regions ``x`` and ``y`` of worker 0.
    """
    if isinstance(A, np.ndarray) or scipy.sparse.issparse(A):
        return matrix(A, domain, codomain, name=name or "A")
    try:
        op = A if hasattr(A, "matvec") else scipy.sparse.linalg.aslinearoperator(A)
    except TypeError:
        raise ArgumentError(f"from_scipy: expected an operator or a matrix, given {A!r}") from None
    dtype = np.dtype(op.dtype or np.float64)
    source, target = _sides(op.shape, dtype, domain, codomain)
    _checked_dtype(dtype, source.dtype)
    return _operator(
        source,
        target,
        _flatly(lambda x: op.matvec(x).astype(source.dtype, copy=False), source, target),
        _flatly(lambda y: op.rmatvec(y).astype(source.dtype, copy=False), target, source),
        name or type(A).__name__,
    )


def _operator(
    domain: Space,
    codomain: Space,
    forward: Function,
    backward: Function,
    name: str,
    known: Any = None,
) -> LinearOperator:
    holders = {r.workers for space in (domain, codomain) for r in space.regions}
    if len(holders) > 1:
        raise SpaceError(
            f"local operator {name}: its regions are on different workers: {domain} -> {codomain}; "
            f"a local operator stays inside one worker"
        )
    return Local(LocalMap(domain, codomain, forward, backward, name, known))


def _space(place: Place, dtype: npt.DTypeLike) -> Space:
    if isinstance(place, Space):
        return place
    if isinstance(place, Region):
        return Space(place, dtype)
    raise ArgumentError(f"expected a Region or a Space, given {place!r}")


def _single(what: str, space: Space) -> tuple[Region, ...]:
    if len(space) != 1:
        raise SpaceError(f"{what}: a space of one region expected, given {space}")
    return space.regions


def _sides(
    shape: tuple[int, ...], dtype: np.dtype, domain: Place | None, codomain: Place | None
) -> tuple[Space, Space]:
    held = [r for p in (domain, codomain) if p is not None for r in _space(p, dtype).regions]
    workers = held[0].workers if held else (0,)
    like = next((p.dtype for p in (domain, codomain) if isinstance(p, Space)), dtype)
    source = _space(Region("x", shape[1], workers) if domain is None else domain, like)
    target = _space(Region("y", shape[0], workers) if codomain is None else codomain, like)
    if shape != (target.size, source.size):
        raise ShapeError(
            f"a matrix of shape {tuple(shape)} given for {source} -> {target}, which needs "
            f"{(target.size, source.size)}"
        )
    return source, target


def _checked_dtype(given: np.dtype, wanted: np.dtype) -> np.dtype:
    """The space's dtype, if values of the given one can be converted to it.

    Raises:
        DTypeError: they are complex or fractional, and the space is not.
    """
    if not np.can_cast(given, wanted, "same_kind"):
        raise DTypeError(f"values of dtype {given} on a space of dtype {wanted}")
    return wanted


def _flatly(f: Function, source: Space, target: Space) -> Function:
    """A function of flat vectors as one of bare arrays or dicts."""

    def apply(x: Any) -> Any:
        vector = x if isinstance(x, Vector) else source.vector({} if x is None else x)
        return target.unflatten(f(source.flatten(vector))).arrays

    return apply


def _selection(index: Array, columns: int, values: Array) -> scipy.sparse.csr_array:
    """The matrix with one value a row, in the column of the index."""
    entries = (values, (np.arange(index.size), index))
    return scipy.sparse.csr_array(entries, shape=(index.size, columns))


def _pads(padding: Any, ndim: int) -> list[tuple[int, int]]:
    items = [padding] * ndim if isinstance(padding, int) else list(padding)
    if len(items) != ndim:
        raise ShapeError(f"padding: {len(items)} entries for {ndim} dimensions")
    return [(p, p) if isinstance(p, int) else (int(p[0]), int(p[1])) for p in items]


def _convolution_matrix(
    wide: Array,
    padded: tuple[int, ...],
    inside: tuple[slice, ...],
    every: tuple[slice, ...],
    full: tuple[int, ...],
    shape: tuple[int, int],
) -> scipy.sparse.csr_array:
    """One diagonal of ones a kernel entry: output i reads padded input i + offset."""
    if 0 in shape:
        return scipy.sparse.csr_array(shape, dtype=wide.dtype)
    number = np.full(padded, -1)
    number[inside] = np.arange(shape[1]).reshape([s.stop - s.start for s in inside])
    rows, columns, values = [], [], []
    for offset in np.argwhere(wide != 0):
        window = tuple(slice(o, o + n) for o, n in zip(offset, full, strict=True))
        read = number[window][every].ravel()
        written = np.flatnonzero(read >= 0)
        rows.append(written)
        columns.append(read[written])
        values.append(np.full(len(written), wide[tuple(offset)]))
    if not rows:
        return scipy.sparse.csr_array(shape, dtype=wide.dtype)
    index = (np.concatenate(rows), np.concatenate(columns))
    return scipy.sparse.csr_array((np.concatenate(values), index), shape=shape)
