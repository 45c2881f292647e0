"""Conjugate gradients for Hermitian positive definite operators, classical and pipelined."""

from __future__ import annotations

import math
from typing import Any, Unpack

from linop.solvers.iteration import Ask, Callback, Control, Method, Named, Steps
from linop.solvers.krylov.systems import LinearMethod, System, solve, tolerances
from linop.solvers.result import Result
from linop.solvers.updates import plus
from linop.spaces.vector import Vector


def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callback | None = None,
    pipelined: bool = False,
    **control: Unpack[Control],
) -> Any:
    """Conjugate gradients for A x = b, A Hermitian and positive definite; SciPy's signature.

    Two reductions an iteration; one with `pipelined`.

    Args:
        A: an operator, the plan of one, or a function of vectors.
        b: right-hand side: a vector, or an array; on workers of an SPMD program that of
            ``backend.vector``, or what the plan takes there, this worker's array or arrays by
            region name. A list of vectors is solved for side by side: with one
            collective call for all of them where one of them needs one.
        x0: initial guess, or a list of them; zero by default.
        rtol, atol: stop when ‖r‖ is at most max(rtol ‖b‖, atol), where r = b - A x is updated in
            every iteration.
        maxiter: 10 times the dimension by default.
        M: approximate inverse of A, Hermitian and positive definite: an operator, a plan, or a
            function of vectors.
        callback: called with a copy of the current x after every iteration; see
            `linop.solvers.iteration.run`. Of several right-hand sides for each; what it stops is
            that one.
        pipelined: take the method of Ghysels & Vanroose (Parallel Computing 40, 2014, algorithm 4):
            one reduction an iteration, for three more vectors and updates. The reduction is not
            overlapped. Rounding drives its r from b - A x: where r is small enough, or A seems to
            be indefinite, the method begins anew from b - A x (two applications, one reduction).
        control: see `Control`.

    Returns:
        A `Result` that unpacks as SciPy's x, info (0: converged, -1: breakdown, else iterations
        done); a list of them for a list b.

    Raises:
        ArgumentError: A or M is no operator, b or x0 no vector, a vector is not finite, or another
            argument is wrong. SpaceError, ShapeError, DTypeError: see
            `linop.solvers.arguments.vector_of`.

    Example:
        Two springs, of stiffness 2 and 4, and the forces on them:

        >>> A = linop.local_operators.matrix(np.diag([2.0, 4.0]))
        >>> x, info = linop.solvers.cg(A, np.array([2.0, 8.0]))
        >>> x["x"].round(6).tolist(), info
        ([1.0, 2.0], 0)

        The result has names, too, and says why it ended:

        >>> found = linop.solvers.cg(A, np.array([2.0, 8.0]))
        >>> found.success, found.nit  # as many iterations as there are different eigenvalues
        (True, 2)
    """
    rtol, atol = tolerances("cg", rtol=rtol, atol=atol)
    return solve(
        lambda system: (_Pipelined if pipelined else _Cg)(system, rtol, atol),
        A,
        b,
        x0,
        M,
        maxiter=maxiter,
        callback=callback,
        problem=[rtol, atol, bool(pipelined)],
        name="cg",
        **control,
    )


class _Cg(LinearMethod):
    """The state of the iteration.

    Attributes:
        r, p: residual and search direction.
        rho: <r, M r>.
    """

    name = "cg"
    recurs = True

    def start(self) -> Steps:
        system = self._system
        self.r = system.residual_at(system.x0)
        self.x = system.first(self.r)
        z, rho, rr = yield from self._preconditioned(False)
        if not self._decide(rho, rr):
            self.p, self.rho = z.copy(), rho  # it changes in place, and z is r, or M's

    def step(self) -> Steps:
        q = self._system.A(self.p)
        (curvature,) = yield Ask([("product A p with the search direction p", self.p, q)])
        if self._indefinite(curvature):
            return
        step = self.rho / curvature.real
        self.x = plus(self.x, step, self.p, self.x)
        self.r = plus(self.r, -step, q, self.r)
        self.nit += 1
        z, rho, rr = yield from self._preconditioned(True)
        if not self._decide(rho, rr):
            self.p, self.rho = plus(z, rho / self.rho, self.p, self.p), rho

    def verify(self) -> Steps:
        self.r = self._system.residual_at(self.x)
        z, self.rho, rr = yield from self._preconditioned(False)
        self.p = z.copy()  # it changes in place
        self.residuals[-1] = math.sqrt(rr)
        self.confirmed(self.residuals[-1] <= 1.001 * self._limit, self.residuals[-1])

    def _preconditioned(self, final: bool) -> Any:
        """M r, <r, M r> and ‖r‖²."""
        r, M = self.r, self._system.M
        z = r if M is None else M(r)
        pairs: list[Named] = [("residual r", r, r)]
        pairs += [] if M is None else [("product M r with the residual r", r, z)]
        squares = yield Ask(pairs, final)
        return z, squares[-1].real, squares[0]

    def _decide(self, rho: float, rr: float) -> bool:
        """True if the method has ended."""
        if self.converged(math.sqrt(rr)) or self.diverged():
            return True
        if rho <= 0:
            self.breakdown(f"M is not positive definite: <r, M r> = {rho:.3g}")
            return True
        return False

    def _indefinite(self, curvature: complex) -> bool:
        """True, and the method ended, if <p, A p> is not a positive number."""
        if not self.nit and abs(curvature.imag) > 1e-3 * abs(curvature.real):
            self.breakdown(f"A is not Hermitian: <p, A p> = {curvature:.3g}; take gmres, bicgstab")
        elif curvature.real <= 0:
            self.breakdown(
                f"A is not positive definite: <p, A p> = {curvature.real:.3g}; take minres, gmres"
            )
        return self.status is not None


class _Recurring(_Cg):
    """Without `verify`."""

    recurs = False


def by_recurrence(A: Any, b: Vector, x0: Vector, *, rtol: float, maxiter: int) -> Result:
    """`cg` that ends by the residual of its recurrence, an application of A earlier, for tolerances
    above the root of the machine epsilon, far above rounding. With others it is `cg`."""

    def kind(system: System) -> Method:
        return (_Recurring if rtol > math.sqrt(system.eps) else _Cg)(system, rtol, 0.0)

    found: Result = solve(
        kind,
        A,
        b,
        x0,
        maxiter=maxiter,
        problem=[rtol],
        name="cg",
    )
    return found


class _Pipelined(_Cg):
    """The state of the pipelined iteration, in the names of Ghysels & Vanroose.

    Attributes:
        u, w: M r and A u.
        z, q, s, p: A q, M s, A p, and the direction.
        gamma, alpha, beta: <r, u>, and the next step and share of the last direction.
    """

    recurs = False  # it begins anew from b - A x by itself

    def start(self) -> Steps:
        system = self._system
        r = system.residual_at(system.x0)
        self.x = system.first(r)
        yield from self._begin(r, False)

    def _begin(self, r: Vector, final: bool) -> Steps:
        """Begin from a residual b - A x, unless it is small enough."""
        self.r, self.u = r, self._precondition(r)
        self.w = self._system.A(self.u)
        self.z, self.q, self.s, self.p = (0 * r for _ in range(4))
        self.gamma, self.alpha = 0.0, 0.0
        rr, gamma, delta = yield from self._products(final)
        if not self._decide(gamma, rr) and not self._indefinite(delta):
            self.beta, self.gamma, self.alpha = 0.0, gamma, gamma / delta.real

    def step(self) -> Steps:
        m = self._precondition(self.w)
        n = self._system.A(m)
        self.z, self.q = plus(n, self.beta, self.z), plus(m, self.beta, self.q)
        self.s, self.p = plus(self.w, self.beta, self.s), plus(self.u, self.beta, self.p)
        self.x = plus(self.x, self.alpha, self.p)
        self.r = plus(self.r, -self.alpha, self.s)
        self.u = self.r if self._system.M is None else plus(self.u, -self.alpha, self.q)
        self.w = plus(self.w, -self.alpha, self.z)
        self.nit += 1
        rr, gamma, delta = yield from self._products(True)
        beta = gamma / self.gamma
        curvature = delta.real - beta * gamma / self.alpha
        if math.sqrt(rr) <= self._limit or min(gamma, curvature) <= 0:  # as it seems
            yield from self._begin(self._system.residual_at(self.x), False)
        else:
            self._decide(gamma, rr)
            self.beta, self.gamma, self.alpha = beta, gamma, gamma / curvature

    def _precondition(self, r: Vector) -> Vector:
        M = self._system.M
        return r if M is None else M(r)

    def _products(self, final: bool) -> Any:
        """‖r‖², <r, u> and <w, u>."""
        pairs: list[Named] = [("residual r", self.r, self.r)]
        pairs += [("product A M r with M r", self.w, self.u)]
        if self._system.M is not None:
            pairs += [("product M r with the residual r", self.r, self.u)]
        rr, delta, *rest = yield Ask(pairs, final)
        return rr, rest[0].real if rest else rr, delta
