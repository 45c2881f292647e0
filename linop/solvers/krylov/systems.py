"""Linear systems A x = b as methods see them: checked, preconditioned, in units of their own.

b and x0 are divided by a power of two, by 1 in the usual case, so that squares of their norms stay
in the range of floating point; results are multiplied by it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from linop.errors import ArgumentError, ShapeError
from linop.solvers.arguments import operator_of, real, square, vector_of, whole
from linop.solvers.iteration import Callback, Method, Reductions, run
from linop.solvers.krylov.scaling import power_of, times_power
from linop.solvers.result import Result
from linop.spaces.space import Space
from linop.spaces.vector import Vector

ROUNDING = 100
"""Roundings of ‖A‖ ‖x‖ + ‖b‖ of which b - A x may be made, where a method has converged to that."""


class System:
    """One right-hand side.

    Attributes:
        A, H: the operator and its adjoint, applied to vectors; H is None where no method asks.
        M: the preconditioner, applied to vectors; None for none.
        b, x0: in the system's units; x0 is None for zero.
        norm: ‖b‖, in these units.
        eps: rounding of the vectors' dtype.
    """

    def __init__(
        self, method: str, A: Any, b: Vector, x0: Vector | None, M: Any, norm: float, adjoint: bool
    ) -> None:
        self._power = power = power_of(b, norm)
        self.A = _applied(method, A, "A")
        self.H: Any = _applied(method, A.H, "A.H") if adjoint else None
        self.M: Any = None if M is None else _applied(method, M, "M", b)
        self.b = times_power(b, -power)
        solved = not (norm or adjoint)  # A x = 0, by x = 0
        self.x0 = None if x0 is None or solved else times_power(x0, -power)
        self.norm = float(np.ldexp(norm, -power))
        self.eps = float(np.finfo(_wide(b.space.dtype)).eps)

    def residual_at(self, x: Vector | None) -> Vector:
        """b - A x, a new vector; x is None for zero."""
        return self.b.copy() if x is None else self.b - self.A(x)

    def first(self, like: Vector) -> Vector:
        """A copy of x0, or zero, of the space of `like`."""
        return 0 * like if self.x0 is None else self.x0.copy()

    def given(self, x: Vector) -> Vector:
        """A solution in the user's units."""
        return times_power(x, self._power)

    def norm_given(self, norm: float) -> float:
        """A norm of solutions or residuals in the user's units."""
        return float(np.ldexp(norm, self._power))

    def limit(self, rtol: float, atol: float) -> float:
        """max(rtol ‖b‖, atol), in the system's units."""
        return max(rtol * self.norm, float(np.ldexp(atol, -self._power)))


class LinearMethod(Method):
    """A method for A x = b that ends when ‖r‖ is at most max(rtol ‖b‖, atol)."""

    def __init__(self, system: System, rtol: float, atol: float) -> None:
        super().__init__()
        self._system = system
        self._limit = system.limit(rtol, atol)

    def current(self) -> Vector | None:
        return self._system.given(self.x)

    def converged(self, norm: float) -> bool:
        """Record ‖r‖; True, and the method ended, if it is small enough."""
        self.residuals.append(norm)
        if norm > self._limit:
            return False
        given = self._system.norm_given
        self.end(0, f"converged: ‖r‖ = {given(norm):.3g}{self.limits()}")
        return True

    def diverged(self) -> bool:
        """True, and the method ended, if ‖r‖ has grown so much that x has no digit left."""
        if self.residuals[-1] * self._system.eps > max(self.residuals[0], self._system.norm):
            self.breakdown("the residual grows: A is singular to rounding, and b not in its range")
        return self.status is not None

    def progress(self) -> dict[str, float]:
        return {"residual": self._system.norm_given(self.residuals[-1])}

    def limits(self) -> str:
        limit = self._system.norm_given(self._limit)
        return f", where at most max(rtol ‖b‖, atol) = {limit:.3g} is asked"

    def breakdown(self, reason: str) -> None:
        """End the method since it cannot go on."""
        self.ended_outside(3, f"iteration {self.nit + 1}: {reason}")

    def result(self, reductions: Reductions) -> Result:
        system = self._system
        x = system.given(self.x)
        residuals = [system.norm_given(one) for one in self.residuals]
        return self.finished((x, self.info()), x, residuals, reductions)

    def info(self) -> int:
        """SciPy's second value: 0 if converged, iterations at the limit, negative at breakdown, and
        where rounding keeps the residual above what is asked."""
        return {0: 0, 3: -1, 4: -1}.get(self.status or 0, self.nit)


def solve(
    kind: Callable[[System], Method],
    A: Any,
    b: Any,
    x0: Any,
    M: Any = None,
    *,
    maxiter: int | None,
    most: Callable[[int], int] = lambda size: 10 * size,
    callback: Callback | None = None,
    problem: Sequence[Any] = (),
    adjoint: bool = False,
    name: str = "",
    **control: Any,
) -> Any:
    """Solve A x = b, for a right-hand side or a list of them, by methods of a class.

    Args:
        kind: makes the method of one system.
        most: the default of `maxiter`, of the dimension of the domain.
        problem: other arguments that a resumed run must share.
        adjoint: the method applies A.H, and A need not be square.

    Returns:
        A `Result`, or a list of them.
    """
    operator_of(name, A, adjoint=adjoint)
    if not adjoint:
        square(name, A)
    if M is not None:
        operator_of(name, M, "M")
    many = isinstance(b, list | tuple) and any(isinstance(one, Vector) for one in b)
    sides = [vector_of(name, A, one, "b", "codomain") for one in (b if many else [b])]
    guesses = _guesses(name, A, x0, len(sides), many)
    if maxiter is not None:
        maxiter = whole(name, "maxiter", maxiter)
    reductions = Reductions(name)
    named = [("right-hand side b", one) for one in sides]
    named += [("initial guess x0", one) for one in guesses if one is not None]
    norms = reductions.norms(named)
    systems = [
        System(name, A, side, guess, M, norm, adjoint)
        for side, guess, norm in zip(sides, guesses, norms, strict=False)
    ]
    space = getattr(A, "domain", sides[0].space)
    results = run(
        A,
        [kind(system) for system in systems],
        most(unknowns(A, space)) if maxiter is None else maxiter,
        reductions,
        callback,
        problem,
        [*sides, *(one for one in guesses if one is not None)],
        **control,
    )
    return results if many else results[0]


def unknowns(A: Any, space: Space) -> int:
    """The dimension of a space, over the reals if the operator is linear over these alone."""
    clinear = getattr(getattr(A, "op", A), "clinear", True)
    return space.size if clinear or space.dtype.kind != "c" else 2 * space.size


def tolerances(name: str, **given: Any) -> list[float]:
    """Real numbers from 0, by the names of their arguments."""
    return [real(name, key, value, least=0.0) for key, value in given.items()]


def _guesses(name: str, A: Any, x0: Any, count: int, many: bool) -> list[Vector | None]:
    """The initial guess of each right-hand side: one for all of them, or a list.

    Raises:
        ShapeError: a list of another length.
    """
    given = list(x0) if many and isinstance(x0, list | tuple) else [x0] * count
    if len(given) != count:
        raise ShapeError(
            f"{name}: x0 is a vector or a list of {count}, one for each b; given {len(given)}"
        )
    return [None if one is None else vector_of(name, A, one, "x0", "domain") for one in given]


def _applied(method: str, f: Any, name: str, like: Vector | None = None) -> Any:
    """The function, with a check that it returns a vector, in the space of `like` if given."""

    def apply(x: Vector) -> Vector:
        y = f(x)
        if not isinstance(y, Vector):
            raise ArgumentError(f"{method}: {name} returns a Vector; given {type(y).__name__}")
        if like is not None:
            like.space.same_as(y.space, f"{method}: result of {name}")
        return y

    return apply


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype whose rounding NumPy knows: that of bfloat16 is taken for float16's."""
    return dtype if dtype.kind in "fc" else np.dtype(np.float16)
