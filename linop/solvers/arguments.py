"""Arguments of iterative methods: operators, vectors and numbers, checked before any message.

Every text opens with the name of the method. Vectors of one process may be given as arrays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from linop.errors import ArgumentError, DTypeError, LinopError, ShapeError, SpaceError, restated
from linop.spaces.scalars import of_dtype
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace
from linop.spaces.vector import Vector


def operator_of(method: str, A: Any, name: str = "A", *, adjoint: bool = False) -> Any:
    """An operator, the plan of one, or another function of vectors, as it was given.

    Args:
        adjoint: the method applies ``A.H`` too.

    Raises:
        ArgumentError: it is none.
    """
    if callable(A) and (hasattr(A, "H") or not adjoint):
        return A
    kind = "an operator or a plan" + (f", with an adjoint {name}.H" if adjoint else "")
    raise ArgumentError(
        f"{method}: {name} is {kind}; given {type(A).__name__}. Of a matrix, "
        f"linop.local_operators.matrix makes one"
    )


def square(method: str, A: Any) -> None:
    """Check that an operator maps a space to itself.

    Raises:
        SpaceError: domain and codomain differ.
    """
    domain, codomain = (getattr(A, side, None) for side in ("domain", "codomain"))
    if isinstance(domain, Space) and isinstance(codomain, Space):
        domain.same_as(codomain, f"{method} needs an operator of a space to itself; A")


def vector_of(method: str, A: Any, given: Any, name: str, side: str, op: str = "A") -> Vector:
    """A right-hand side or an initial guess as a vector that an operator or plan can be applied to.

    Args:
        given: a `Vector`; or arrays by region name; in one process also an array or nested list
            with the elements of the space, in the order of `Space.flatten`; for the plan of one
            worker of several its array, as the plan is called with, or None.
        name: of the argument.
        side: "domain" or "codomain", of A.
        op: the name of the argument A.

    Raises:
        ArgumentError: it is no vector, and cannot be made one. ShapeError: an array of another
            size. DTypeError: an integer space, or numbers that it does not hold. SpaceError: a
            vector of another space; or of one process, for the plan of one of several workers.
    """
    space = getattr(A, side, None)
    backend: Any = getattr(A, "backend", None)
    alone = getattr(backend, "worker", None) is None or backend.workers == 1
    if not (isinstance(given, Vector) or (alone and not isinstance(given, Mapping))):
        return _of_worker(method, given, name, f"{op}.{side}", space, backend)
    vector: Vector = (
        given
        if isinstance(given, Vector)
        else _from_array(method, given, name, f"{op}.{side}", space)
    )
    if isinstance(space, Space):
        space.same_as(vector.space, f"{method}, {name}")
    _check_floating(method, vector.space)
    if getattr(backend, "worker", None) is None or vector.shared is not None:
        return vector
    if alone:
        vector = backend.vector(vector.space, vector)
        return vector
    raise SpaceError(
        f"{method}: {name} is a vector of one process, {op} the plan of one worker of several; "
        f"give backend.vector({op}.{side}, {name}), which keeps the regions of this worker, and "
        f"whose inner products span all workers: for one worker's part "
        f"backend.vector(space, arrays)"
    )


def _of_worker(
    method: str, given: Any, name: str, where: str, space: Space | None, backend: Any
) -> Vector:
    """The vector of arrays by region, or of this worker's array.

    Raises:
        LinopError: they do not fit. DTypeError: an integer space.
    """
    if space is None:
        raise _no_vector(method, given, name, where)
    _check_floating(method, space)
    if isinstance(given, np.ndarray | list | tuple):
        given = of_dtype(given, space.dtype, f"{method}, {name}")
    here = getattr(backend, "worker", None) is not None
    try:
        vector: Vector = (backend.vector if here else Space.vector)(space, given)
    except LinopError as error:
        raise restated(error, f"{method}, {name}: {error}") from error
    return vector


def _no_vector(method: str, given: Any, name: str, where: str) -> ArgumentError:
    return ArgumentError(
        f"{method}: expected a Vector, given {type(given).__name__} as {name}; make one with "
        f"backend.vector({where}, array), or {where}.vector(array) in one process"
    )


def _check_floating(method: str, space: Space) -> None:
    if space.dtype.kind in "iu":
        raise DTypeError(
            f"{method}: it divides, so a floating dtype is expected; given {space.dtype}"
        )


def _from_array(method: str, given: Any, name: str, where: str, space: Space | None) -> Vector:
    """The vector of an array of one process; `space` is None where none can be made.

    Raises:
        ArgumentError, ShapeError, DTypeError: see `vector_of`.
    """
    if space is None or not isinstance(given, np.ndarray | list | tuple):
        raise _no_vector(method, given, name, where)
    array = of_dtype(given, space.dtype, f"{method}, {name}")
    if isinstance(space, TensorSpace) and array.shape == space.global_shape:
        return space.scatter(array)
    if array.size != space.size:
        raise ShapeError(
            f"{method}: {name} has {array.size} elements, shape {array.shape}; {where} has "
            f"{space.size}"
        )
    return space.unflatten(array)


def real(method: str, name: str, value: Any, least: float = -math.inf) -> float:
    """A finite real number given as an argument.

    Raises:
        ArgumentError: it is none, or below `least`.
    """
    try:
        number = float(value) if isinstance(value, Real | np.floating | np.integer) else math.nan
    except OverflowError:  # of an int
        number = math.inf
    if not (math.isfinite(number) and value >= least):
        wanted = "a finite real number" + (" from 0" if least == 0 else "")
        raise ArgumentError(f"{method}: {name} is {wanted}; given {value!r:.40}")
    return number


def whole(method: str, name: str, value: Any, least: int = 0) -> int:
    """A whole number given as an argument.

    Raises:
        ArgumentError: it is none, or below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ArgumentError(f"{method}: {name} is a whole number from {least}; given {value!r:.40}")
    return number


def function_or_none(method: str, name: str, value: Any) -> Callable[..., object] | None:
    """A function given as an argument, or None.

    Raises:
        ArgumentError: it is neither.
    """
    if not (value is None or callable(value)):
        raise ArgumentError(f"{method}: {name} is a function of a Vector; given {value!r}")
    return value  # type: ignore[no-any-return]
