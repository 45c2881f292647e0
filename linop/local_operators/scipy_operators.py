"""Operators of SciPy and PyLops as local operators, and dtypes that SciPy guessed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy

from linop.errors import ArgumentError, DTypeError
from linop.local_operators.borrowing import borrowing
from linop.local_operators.flat import on_regions
from linop.local_operators.functions import RegionOrSpace, local_operator
from linop.local_operators.matrices import Dims, matrix, sides
from linop.local_operators.real_linear import real_linear
from linop.normal_form.maps import Function
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import Namespace
from linop.spaces.scalars import Array, holds_kind
from linop.spaces.space import Space


@records_origin
def from_scipy(
    A: Any,
    domain: RegionOrSpace | None = None,
    codomain: RegionOrSpace | None = None,
    *,
    name: str | None = None,
) -> LinearOperator:
    """A SciPy or PyLops operator (anything that `scipy.sparse.linalg.aslinearoperator` accepts),
    applied to regions flattened in C order. It runs on host memory; its functions must not change
    their argument, which is read-only unless they fail on such an array. Matrices are passed on to
    `matrix`, so that they stay known.

    An operator of SciPy's that was made without a dtype is one of float64, whatever SciPy guessed
    from whole numbers. SciPy does not say which dtypes were declared: an integer one that it would
    have guessed, too, is taken for a guess. Give a `Space` of integers to have these; whole results
    beyond its dtype wrap, as those of every operator on it do.

    One that says that it is linear over the real numbers only (PyLops' ``clinear=False``) has its
    ``rmatvec`` for the adjoint for real inner products. Domain and codomain may be a real space and
    the complex one with such parts.

    Args:
        A: of shape (codomain size, domain size).
        domain, codomain: by default regions ``x`` and ``y`` of worker 0; of a square A one space
            for both, as for `matrix`. They have the shapes of a PyLops operator's ``dims`` and
            ``dimsd``, and are flat for others.
        name: the symbol; by default the name of A's class.

    Raises:
        ArgumentError: A is neither an operator nor a matrix.
        ShapeError: A does not fit the spaces. DTypeError: the spaces' dtype cannot hold A's; when
            it is applied, that of its results.

    Example:
        >>> import scipy.sparse.linalg
        >>> theirs = scipy.sparse.linalg.aslinearoperator(np.diag([1.0, 2.0]))
        >>> A = linop.local_operators.from_scipy(theirs)
        >>> (A.H @ A @ np.array([1.0, 2.0])).tolist()
        [1.0, 8.0]
    """
    if isinstance(A, np.ndarray) or scipy.sparse.issparse(A):
        return matrix(A, domain, codomain, name=name or "A")
    try:
        op = A if hasattr(A, "matvec") else scipy.sparse.linalg.aslinearoperator(A)
    except TypeError:
        raise ArgumentError(f"from_scipy: expected an operator or a matrix, given {A!r}") from None
    said, dtype = name or type(A).__name__, declared_dtype(op)
    like = dtype or np.dtype(np.float64)
    source, target = sides(op.shape, like, domain, codomain, dims_of(op))
    wide = source.dtype if holds_kind(source.dtype, target.dtype) else target.dtype
    if dtype is not None and not holds_kind(wide, dtype):
        raise DTypeError(f"values of dtype {dtype} on a space of dtype {wide}")

    forward, backward = borrowing(op.matvec), borrowing(op.rmatvec)

    def port(namespace: Namespace) -> tuple[Function, Function]:
        return (
            on_regions(_returning(forward, target, f"matvec of {said}"), source, target),
            on_regions(_returning(backward, source, f"rmatvec of {said}"), target, source),
        )

    return local_operator(source, target, port, said, portable=False, clinear=not real_linear(op))


def dims_of(op: Any) -> Dims | None:
    """The shapes of the results and arguments of a PyLops operator; None for those of others."""
    found: list[Any] = [getattr(op, name, None) for name in ("dimsd", "dims")]
    if not all(isinstance(dims, tuple) for dims in found):
        return None
    outer, inner = (tuple(map(int, dims)) for dims in found)
    return (outer, inner) if (math.prod(outer), math.prod(inner)) == tuple(op.shape) else None


def declared_dtype(op: Any) -> np.dtype[Any] | None:
    """The dtype of a SciPy or PyLops operator; None if it has none, or an integer one that SciPy
    guessed, for the whole of it or for a part."""
    if op.dtype is None:
        return None
    dtype: np.dtype[Any] = np.dtype(op.dtype)
    return None if dtype.kind in "biu" and any(map(_is_guess, _parts(op))) else dtype


def _parts(op: Any) -> Iterator[Any]:
    """The operators that a sum, product, adjoint, … of SciPy's is made of; the operator itself, if
    it is none."""
    todo, seen = [op], set()
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        inner = [p for p in getattr(part, "args", ()) if hasattr(p, "matvec")]
        todo += inner
        if not inner:
            yield part


def _is_guess(op: Any) -> bool:
    """True if SciPy would guess an operator's dtype, had it not been declared; or that of its
    adjoint, which has the dtype of the operator."""
    if not isinstance(op, scipy.sparse.linalg.LinearOperator) or _of_matrix(op):
        return False
    sides = zip((op.matvec, op.rmatvec), reversed(op.shape), strict=True)
    return any(_guess(function, size) == op.dtype for function, size in sides)


def _guess(function: Callable[[Array], Any], size: int) -> np.dtype[Any] | None:
    """The dtype that SciPy guesses of a function, from its result of zeros of int8; None if it
    guesses none."""
    try:
        return np.asarray(function(np.zeros(size, np.int8))).dtype
    except OverflowError:
        return np.dtype(int)  # SciPy's guess for it
    except Exception:
        return None  # SciPy's guess would have failed


def _of_matrix(op: Any) -> bool:
    """True for SciPy's operator of a matrix, whose dtype is the matrix's."""
    return hasattr(getattr(op, "A", None), "dtype") and not hasattr(op.A, "matvec")


def _returning(function: Callable[[Array], Any], space: Space, what: str) -> Function:
    """The function, whose results are converted to a space's dtype.

    Raises:
        DTypeError: in a call, it returns no numbers; or fractions or complex ones for a dtype
            without them.
    """

    def call(x: Array) -> Array:
        y: Array = function(x)
        if not holds_kind(space.dtype, y.dtype):
            numbers = y.dtype.kind in "biufc"
            cure = f"give from_scipy a Space of dtype {y.dtype}" if numbers else "return numbers"
            raise DTypeError(
                f"{what} returned dtype {y.dtype} for {x.dtype}, which a space of dtype "
                f"{space.dtype} cannot hold; {cure}"
            )
        return y.astype(space.dtype, copy=False)

    return call
