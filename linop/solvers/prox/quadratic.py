"""The proximal map of least squares: in closed form, or by conjugate gradients."""

from __future__ import annotations

from typing import Any

from linop.errors import ArgumentError, SpaceError
from linop.solvers.arguments import operator_of, real, whole
from linop.solvers.krylov.cg import by_recurrence
from linop.solvers.prox.maps import ANY, ProximalMap, positive
from linop.solvers.result import BREAKDOWN, Result
from linop.solvers.updates import plus, times
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space
from linop.spaces.vector import Vector


def squared_l2(
    sigma: float = 1.0,
    b: Vector | None = None,
    Op: Any = None,
    *,
    niter: int = 100,
    rtol: float = 1e-8,
) -> ProximalMap:
    """(sigma / 2) ‖Op x - b‖², by default of Op = 1 and b = 0, in the norm of the codomain.

    Args:
        b: a vector made as the arguments are.
        Op: an operator, or the plan of one; its proximal map takes conjugate gradients, with two
            reductions an iteration, from ``start`` if one is given, else from v.
        niter: their iterations, at most.
        rtol: they end when the residual of the normal equations is at most rtol times their right
            side, so that x is off by at most rtol ‖v + step sigma Op* b‖. From a start that is as
            near, they end at once: let it be below the tolerance of the solver that asks.

    Raises:
        ArgumentError: sigma is not positive, b no `Vector`, Op no operator, or another argument is
            wrong.

    Example:
        In closed form, the point halfway to b; of an operator, by conjugate gradients:

        >>> X, prox = linop.Space(linop.Region("x", (2,))), linop.solvers.prox
        >>> b = X.vector(np.array([2.0, 4.0]))
        >>> prox.squared_l2(1.0, b).prox(X.zeros(), 1.0)["x"].tolist()
        [1.0, 2.0]
        >>> Op = linop.local_operators.matrix(np.diag([1.0, 3.0]), X, X)
        >>> prox.squared_l2(1.0, b, Op).prox(X.zeros(), 1.0)["x"].round(6).tolist()
        [1.0, 1.2]
    """
    if not (b is None or isinstance(b, Vector)):
        raise ArgumentError(f"squared_l2: b is a Vector; given {type(b).__name__}")
    if Op is not None:
        operator_of("squared_l2", Op, "Op", adjoint=True)
    limits = whole("squared_l2", "niter", niter), real("squared_l2", "rtol", rtol, least=0.0)
    return SquaredL2(positive("squared_l2: sigma", sigma), b, Op, *limits)


class SquaredL2(ProximalMap):
    """See `squared_l2`."""

    inner_products = ANY

    def __init__(self, sigma: float, b: Vector | None, Op: Any, niter: int, rtol: float) -> None:
        self._sigma, self._b, self._op, self._limits = sigma, b, Op, (niter, rtol)
        self.name = f"squared_l2({sigma:g})"
        self.starts = Op is not None
        self._known: Vector | None = None

    def __repr__(self) -> str:
        if self._op is None:
            return self.name
        niter, rtol = self._limits
        return f"squared_l2({self._sigma:g}, Op, niter={niter}, rtol={rtol:g})"

    def check(self, space: Space) -> None:
        super().check(space)
        if self._op is None and self._b is not None:
            space.same_as(self._b.space, f"{self.name}, b")
        elif isinstance(domain := getattr(self._op, "domain", None), Space):
            domain.same_as(space, f"{self.name}, domain of Op")

    def _prox(self, v: Vector, step: float) -> Vector:
        if self._op is not None:
            return self._prox_from(v, step, v)
        gain = self._sigma * step
        whole = v if self._b is None else plus(v, gain, self._b)
        return times(1 / (1 + gain), whole)

    def _prox_from(self, v: Vector, step: float, start: Vector) -> Vector:
        return self.minimizer(None, v, 1 / step, start).x  # type: ignore[no-any-return]

    def minimizer(self, M: Any, w: Vector, weight: float, x0: Vector) -> Result:
        """The minimizer of this function of x and (weight / 2) ‖M x - w‖², by conjugate gradients
        for its normal equations; M is an operator or a plan, or None for 1.

        Raises:
            ArgumentError: they break down.
        """
        op, sigma = self._op, self._sigma

        def normal(x: Vector) -> Vector:
            other = times(weight, x if M is None else M.H(M(x)))
            return plus(other, sigma, x if op is None else op.H(op(x)), other)

        right = times(weight, w if M is None else M.H(w))
        if self._b is not None:
            right = plus(right, sigma, self._image())
        niter, rtol = self._limits
        found = by_recurrence(normal, right, x0, rtol=rtol, maxiter=niter)
        if found.status == BREAKDOWN:
            raise ArgumentError(
                f"{self.name}: its normal equations are not positive definite, so that Op.H is not "
                f"the adjoint of Op (see linop.testing.check_adjoint): {found.message}"
            )
        return found

    def _image(self) -> Any:
        """Op* b, which is computed once."""
        if self._known is None:
            self._known = self._b if self._op is None else self._op.H(self._b)
        return self._known

    def partial(self, v: Vector) -> dict[int, Scalar]:
        image = v if self._op is None else self._op(v)
        if self._b is not None and image.space != self._b.space:
            raise SpaceError(f"{self.name}: b is of another space than Op x")
        rest = image if self._b is None else image - self._b
        return rest.space.partial_inners(rest, rest)

    def of_sum(self, number: Scalar) -> float:
        return self._sigma / 2 * super().of_sum(number)
