"""Linear maps inside one worker's memory whose constants are read at each application: partial
derivatives of a function at the point where it was last evaluated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from linop.errors import BackendError
from linop.local_operators.functions import local_operator
from linop.operators.algebra import identity
from linop.operators.memory import move
from linop.operators.operator import LinearOperator
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space

Constant = Callable[[], Array]
"""Gives an array: the same one at each call, or that of the last evaluation."""


class Point(Protocol):
    """The arrays of a function's regions where it was evaluated: the arguments, the value, and what
    else it gave."""

    @property
    def arrays(self) -> Sequence[Array]: ...

    def put(self, arrays: Sequence[Array]) -> None:
        """Remember the arrays."""


class FixedPoint:
    """A point of one evaluation. It has copies: operators that come after a function may work in
    place on its value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._copies: Sequence[Array] = ()

    @property
    def arrays(self) -> Sequence[Array]:
        if not self._copies:
            raise _too_early(self.name)
        return self._copies

    def put(self, arrays: Sequence[Array]) -> None:
        self._copies = [array.copy() for array in arrays]


class CurrentPoint:
    """The point of the program that this thread runs: programs, and virtual workers, that run one
    map have a point each."""

    running = threading.local()
    """Attribute `points`: of the program that runs, by `CurrentPoint`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def arrays(self) -> Sequence[Array]:
        try:
            points: dict[CurrentPoint, Sequence[Array]] = self.running.points
            return points[self]
        except KeyError:
            raise _too_early(self.name) from None

    def put(self, arrays: Sequence[Array]) -> None:
        self.running.points[self] = arrays


def _too_early(name: str) -> BackendError:
    return BackendError(
        f"the derivative of {name} was applied before {name} was evaluated: call the program "
        f"first, then its gradient"
    )


def product(
    x: Region, y: Region, dtype: np.dtype, left: Constant | None, right: Constant | None
) -> LinearOperator:
    """X -> A X B for matrices A (`left`) and B (`right`), one of which may be None. The adjoint is
    Y -> Aᴴ Y Bᴴ."""

    def forward(X: Array) -> Array:
        Y = X if left is None else left() @ X
        return Y if right is None else Y @ right()

    def backward(Y: Array) -> Array:
        X = Y if left is None else left().conj().T @ Y
        return X if right is None else X @ right().conj().T

    symbol = f"{'A' if left else ''}·{'B' if right else ''}"
    return _local(x, y, dtype, forward, backward, symbol)


def rows(x: Region, y: Region, dtype: np.dtype) -> LinearOperator:
    """x -> 1 x, every row of y, for a column 1 of ones. The adjoint adds the rows."""
    ones = np.ones(y.shape[0], dtype)

    def forward(row: Array) -> Array:
        return np.repeat(row[None], y.shape[0], 0)

    def backward(Y: Array) -> Array:
        total: Array = ones.dot(Y)  # two to four times as fast as a sum
        return total

    return _local(x, y, dtype, forward, backward, "1")


def scaling(x: Region, y: Region, dtype: np.dtype, d: Constant) -> LinearOperator:
    """x -> d x, elementwise; the adjoint multiplies by the conjugate of d. Each d is a new array,
    which is overwritten."""

    def forward(X: Array) -> Array:
        product = d()
        product *= X
        return product

    def backward(Y: Array) -> Array:
        product = d().conj()
        product *= Y
        return product

    return _local(x, y, dtype, forward, backward, "diag")


def functional(
    x: Region, y: Region, dtype: np.dtype, times: Callable[[Array], Array]
) -> LinearOperator:
    """x -> Σ g x, one number; the adjoint multiplies the conjugate of g by it. `times` gives g
    times a number, in memory of its own."""
    one = np.ones((), dtype)

    def forward(X: Array) -> Array:
        return np.vdot(times(one).conj(), X).reshape(y.shape)

    def backward(Y: Array) -> Array:
        return times(Y[0].conj()).conj()

    return _local(x, y, dtype, forward, backward, "∇")


def renaming(x: Region, y: Region, dtype: np.dtype) -> LinearOperator:
    """The identity from one region to another of the same shape."""
    space = Space([x], dtype)
    return identity(space) if x == y else move(space, x, y)


def _local(
    x: Region,
    y: Region,
    dtype: np.dtype,
    forward: Callable[[Array], Array],
    backward: Callable[[Array], Array],
    symbol: str,
) -> LinearOperator:
    spaces = Space([x], dtype), Space([y], dtype)
    return local_operator(
        *spaces, lambda namespace: (forward, backward), symbol, portable=False, fresh=True
    )
