"""The power method."""

from __future__ import annotations

import math
from typing import Any, Unpack

from linop.solvers.arguments import operator_of, square, whole
from linop.solvers.iteration import Ask, Callback, Control, Method, Reductions, Steps, run
from linop.solvers.krylov.first_vectors import first_vector, norm_of_first
from linop.solvers.krylov.systems import tolerances
from linop.solvers.result import CONVERGED, Result
from linop.solvers.updates import plus, times
from linop.spaces.vector import Vector


def power(
    A: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-6,
    maxiter: int = 1000,
    seed: int = 0,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Result:
    """The eigenvalue of largest absolute value and its eigenvector, by the power method. One
    reduction an iteration. It converges if there is one such eigenvalue.

    Args:
        A: an operator, or the plan of one, of a space to itself.
        x0: first vector; random by default, the same numbers on every backend.
        rtol: stop when ‖A x - λ x‖ is at most rtol abs(λ), for x of norm 1.
        maxiter: iterations, at most.
        seed: of the random vector.
        callback, control: see `linop.solvers.cg`.

    Returns:
        A `Result` that unpacks as λ, x; λ is its `eigenvalue`, and complex in complex spaces.

    Raises:
        ArgumentError, SpaceError, ShapeError, DTypeError: as `linop.solvers.cg`; ArgumentError if
            x0 is zero.

    Example:
        >>> A = linop.local_operators.matrix(np.diag([1.0, -10.0, 3.0]))
        >>> value, x = linop.solvers.power(A)
        >>> round(float(value), 6), abs(x["x"]).round(3).tolist()
        (-10.0, [0.0, 1.0, 0.0])
    """
    (rtol,) = tolerances("power", rtol=rtol)
    operator_of("power", A)
    square("power", A)
    first = first_vector("power", A, x0, "x0", seed)
    reductions = Reductions("power")
    method = _Power(A, first, norm_of_first(reductions, first, "x0"), rtol)
    most = whole("power", "maxiter", maxiter)
    return run(A, [method], most, reductions, callback, [rtol], [first], **control)[0]


class _Power(Method):
    """The state of the iteration.

    Attributes:
        value: the Rayleigh quotient <x, A x>.
        y: A x.
    """

    name = "power"

    def __init__(self, A: Any, first: Vector, norm: float, rtol: float) -> None:
        super().__init__()
        self._A, self._first, self._norm, self._rtol = A, first, norm, rtol

    def start(self) -> Steps:
        self.x = times(1 / self._norm, self._first)
        self.y = self._A(self.x)
        self.value: Any = 0.0
        yield from self._decide()

    def step(self) -> Steps:
        self.x = times(1 / self.norm, self.y)
        self.y = self._A(self.x)
        self.nit += 1
        yield from self._decide()

    def _decide(self) -> Steps:
        """The residual, from its difference to the last quotient, in which little cancels."""
        last = self.value
        d = plus(self.y, -last, self.x)
        pairs = [("product A x with x", self.x, self.y), ("product A x", self.y, self.y)]
        self.value, yy, dd = yield Ask([*pairs, ("residual A x - λ x", d, d)], final=True)
        self.norm = math.sqrt(yy)
        residual = math.sqrt(max(0.0, dd - abs(self.value - last) ** 2))
        self.residuals.append(residual)
        if residual <= self._rtol * abs(self.value) or not self.norm:
            self.end(CONVERGED, f"converged: ‖A x - λ x‖ = {residual:.3g}{self.limits()}")

    def progress(self) -> dict[str, float]:
        return {"residual": self.residuals[-1], "|eigenvalue|": abs(self.value)}

    def limits(self) -> str:
        return f", where at most rtol |λ| = {self._rtol * abs(self.value):.3g} is asked"

    def result(self, reductions: Reductions) -> Result:
        values = self.value, self.x
        return self.finished(values, self.x, self.residuals, reductions, eigenvalue=self.value)
