"""Extreme eigenvalues and singular values by Lanczos' method, with thick restarts."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, Unpack

import numpy as np

from linop.errors import ArgumentError
from linop.solvers.arguments import operator_of, square, whole
from linop.solvers.iteration import (
    Ask,
    Callback,
    Control,
    Method,
    Named,
    Reductions,
    Steps,
    run,
)
from linop.solvers.krylov.first_vectors import first_vector, norm_of_first, random_vector
from linop.solvers.krylov.orthogonal import orthogonalised
from linop.solvers.krylov.systems import tolerances
from linop.solvers.result import CONVERGED, Result
from linop.solvers.updates import combined, times
from linop.spaces.vector import Vector

_WHICH = {
    "LM": lambda values: -abs(values),
    "SM": abs,
    "LA": lambda values: -values,
    "SA": lambda values: values,
}
"""Keys to sort by, the most wanted first."""
_PAIR = 1 << 30
"""Added to seeds of the vectors by which A is found to be Hermitian."""


def lanczos(
    A: Any,
    k: int = 6,
    which: str = "LM",
    *,
    singular: bool = False,
    v0: Any = None,
    ncv: int | None = None,
    tol: float = 0.0,
    maxiter: int | None = None,
    seed: int = 0,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Result:
    """Extreme eigenvalues of a Hermitian operator, as `scipy.sparse.linalg.eigsh` finds them; or
    singular values of any, as `svds`.

    Lanczos' method with all vectors kept orthogonal, and thick restarts (Wu & Simon, SIAM J. Matrix
    Anal. Appl. 22, 2000); for singular values Golub-Kahan bidiagonalisation, in the same way
    (Baglama & Reichel, SIAM J. Sci. Comput. 27, 2005). Two reductions for each application of A,
    and of A.H. That A is Hermitian is checked for two random vectors first, in one reduction; of
    singular values, that A.H is the adjoint.

    Args:
        A: an operator, or the plan of one; with an adjoint ``A.H`` for singular values.
        k: number of values.
        which: "LM" largest, "SM" smallest absolute value; "LA" largest, "SA" smallest value. The
            smallest ones in the middle of a spectrum converge slowly.
        singular: find singular values, the "LM" or "SM" ones.
        v0: first vector; random by default, the same numbers on every backend.
        ncv: number of vectors kept; at least 20 and twice k by default.
        tol: stop when estimated residuals are at most tol times the values; 0 for rounding.
        maxiter: applications of A, at most; 10 times the dimension, and 1000, by default.
        seed: of random vectors.
        callback: called with a copy of the first vector after every restart; see
            `linop.solvers.cg`.
        control: see `Control`.

    Returns:
        A `Result` that unpacks as eigenvalues, ascending, and a list of eigenvectors; or as left
        vectors, singular values, ascending, and right vectors. The values are its `eigenvalues` or
        `singular_values`, the vectors its `x`, or `u` and `x`. Those that have not converged are
        among them, unless `success`.

    Raises:
        ArgumentError: A is not Hermitian, or A.H not its adjoint; or as `linop.solvers.cg`.
        SpaceError, ShapeError, DTypeError: as `linop.solvers.cg`.

    Example:
        The largest two eigenvalues, and the largest singular value:

        >>> A = linop.local_operators.matrix(np.diag([1.0, 5.0, 3.0]))
        >>> values, vectors = linop.solvers.lanczos(A, 2, "LA")
        >>> values.round(6).tolist(), len(vectors)
        ([3.0, 5.0], 2)
        >>> B = linop.local_operators.matrix(np.array([[0.0, -7.0], [2.0, 0.0], [0.0, 0.0]]))
        >>> left, values, right = linop.solvers.lanczos(B, 1, singular=True)
        >>> values.round(6).tolist()
        [7.0]
    """
    operator_of("lanczos", A, adjoint=singular)
    wide = False
    if singular:
        wide = A.codomain.size < A.domain.size
    else:
        square("lanczos", A)
    if which not in (allowed := ("LM", "SM") if singular else tuple(_WHICH)):
        raise ArgumentError(f"lanczos: which is one of {', '.join(allowed)}; given {which!r}")
    (tol,) = tolerances("lanczos", tol=tol)
    B = A.H if wide else A
    first = first_vector("lanczos", B, v0, "v0", seed)
    size, k = first.space.size, whole("lanczos", "k", k, 1)
    if k > size:
        raise ArgumentError(f"lanczos: k is at most {size}, the smaller dimension of A; given {k}")
    kept = max(20, 2 * k + 1) if ncv is None else whole("lanczos", "ncv", ncv, k + 1)
    reductions = Reductions("lanczos")
    norm = norm_of_first(reductions, first, "v0")
    kind = _Singular if singular else _Lanczos
    method = kind(B, wide, times(1 / norm, first), k, which, min(kept, size), tol, seed)
    most = max(10 * size, 1000) if maxiter is None else whole("lanczos", "maxiter", maxiter)
    problem = [k, which, singular, kept, tol, seed]
    return run(A, [method], most, reductions, callback, problem, [first], **control)[0]


class _Lanczos(Method):
    """The state of the iteration.

    Attributes:
        basis: orthonormal vectors; the last one has not been multiplied by A.
        projected: (ncv, ncv) array, A in the basis.
        columns: number of its columns that are known.
        norm: of what A times the last vector has outside of the basis.
        drawn: random vectors drawn so far.
        restarted: True after a step with a restart.
    """

    name = "lanczos"
    _wrong = "A is not Hermitian (linop.testing.check_self_adjoint; singular=True takes any A)"

    def __init__(
        self, A: Any, wide: bool, first: Vector, k: int, which: str, ncv: int, tol: float, seed: int
    ) -> None:
        super().__init__()
        self._A, self._wide, self._first, self._seed = A, wide, first, seed
        self._k, self._which, self._ncv = k, which, ncv
        dtype = first.space.dtype
        self._real = dtype.kind != "c"
        self._eps = float(np.finfo(dtype if dtype.kind in "fc" else np.float16).eps)
        self._tol = max(tol, self._eps)

    def start(self) -> Steps:
        self.basis = [self._first]
        self.projected = self._empty()
        self.columns, self.norm, self.drawn, self.restarted = 0, 0.0, 0, False
        yield from self._compare_sides()

    def _compare_sides(self) -> Steps:
        """Check <A x, y> = <x, A* y> for random x and y.

        Raises:
            ArgumentError: they differ; on every worker.
        """
        x = random_vector(self._A, self._first, self._seed + _PAIR)
        ax = self._A(x)
        y = random_vector(self._A, ax, self._seed + _PAIR + 1)
        ay = self._adjoint(y)
        pairs: list[Named] = [("product A x with y", ax, y), ("product A* y with x", x, ay)]
        pairs += [("random vector or its image", v, v) for v in (x, y, ax, ay)]
        one, other, *squares = yield Ask(pairs)
        xx, yy, aa, bb = map(math.sqrt, squares)
        if abs(one - other) > math.sqrt(self._eps) * (aa * yy + xx * bb):
            raise ArgumentError(
                f"lanczos: {self._wrong}: of random x and y, <A x, y> = {one:.6g} and <x, A* y> = "
                f"{other:.6g}"
            )

    @property
    def _adjoint(self) -> Any:
        return self._A

    def _empty(self) -> Any:
        return np.zeros((self._ncv, self._ncv), float if self._real else complex)

    def step(self) -> Steps:
        self.restarted = False
        w = yield from self._applied()
        self.nit += 1
        if self.columns < self._ncv:
            yield from self._append(self.basis, w, self.norm)
            return
        values, bounds, change = self._ritz()
        limits = self._tol * np.maximum(abs(values), self._eps ** (2 / 3) * abs(values).max())
        wanted = slice(0, self._k)
        self.residuals.append(float(bounds[wanted].max()))
        met = int((bounds <= limits)[wanted].sum())
        if met == self._k:
            self.end(
                CONVERGED,
                f"converged: residuals of {met} values are at most {self.residuals[-1]:.3g}, where "
                f"{self._tol:.3g} times the value is asked",
            )
            return
        keep = min(self._k + (self._ncv - self._k) // 2, self._ncv - 1)
        self._restart(values[:keep], change, keep)
        self.columns, self.restarted = keep, True
        yield from self._append(self.basis, w, self.norm)

    def _applied(self) -> Generator[Ask, list[Any], Vector]:
        """Multiply the last vector by A; enter its column, and return what is outside the basis."""
        w, column, norm, before = yield from orthogonalised(
            self._A(self.basis[-1]), self.basis, "product A v"
        )
        self._enter(column)
        self.norm = norm if norm > self._eps * before else 0.0
        return w

    def _enter(self, column: list[Any]) -> None:
        j = self.columns
        self.projected[: j + 1, j] = column
        self.columns += 1

    def _append(self, basis: list[Vector], w: Vector, norm: float) -> Steps:
        """Append a vector divided by its norm; a random one where the norm is zero, since the basis
        is of an invariant subspace."""
        while not norm:
            self.drawn += 1
            drawn = random_vector(self._A, w, self._seed + self.drawn)
            w, _, norm, before = yield from orthogonalised(drawn, basis, "random vector")
            norm = norm if norm > 100 * self._eps * before else 0.0
        basis.append(times(1 / norm, w))

    def _ritz(self) -> tuple[Any, Any, Any]:
        """Ritz values, the most wanted first; bounds of their residuals; and vectors in the
        basis."""
        j = self.columns
        upper = np.triu(self.projected[:j, :j])
        values, change = np.linalg.eigh(upper + np.triu(upper, 1).conj().T, UPLO="U")
        order = np.argsort(_WHICH[self._which](values), kind="stable")
        return values[order], self.norm * abs(change[j - 1, order]), change[:, order]

    def _restart(self, values: Any, change: Any, keep: int) -> None:
        self.basis = _rotated(self.basis, change, keep)
        self.projected = self._empty()
        self.projected[range(keep), range(keep)] = values

    def current(self) -> Vector | None:
        return self.basis[0] if self.restarted else None

    def progress(self) -> dict[str, float]:
        return {"residual": self.residuals[-1] if self.residuals else math.inf}

    def limits(self) -> str:
        return f", where {self._tol:.3g} times the value is asked"

    def result(self, reductions: Reductions) -> Result:
        count = min(self._k, self.columns)
        if not count:
            return self._results(np.zeros(0), [], reductions)
        values, _, change = self._ritz()
        ascending = np.argsort(values[:count], kind="stable")
        change = change[:, :count][:, ascending]
        return self._results(values[ascending], _rotated(self.basis, change, count), reductions)

    def _results(self, values: Any, x: list[Vector], reductions: Reductions) -> Result:
        return self.finished((values, x), x, self.residuals, reductions, eigenvalues=values)


class _Singular(_Lanczos):
    """The state of the bidiagonalisation, of A or of its adjoint if that has the smaller domain.

    Attributes:
        left: orthonormal vectors in the codomain; `basis` are those in the domain.
        projected: A between them: <left, A basis>.
    """

    _wrong = "A.H is not the adjoint of A (linop.testing.check_adjoint)"

    def start(self) -> Steps:
        yield from super().start()
        self.left: list[Vector] = []

    @property
    def _adjoint(self) -> Any:
        return self._A.H

    def _applied(self) -> Generator[Ask, list[Any], Vector]:
        u = self._A(self.basis[-1])
        u, column, norm, before = yield from orthogonalised(u, self.left, "product A v")
        norm = norm if norm > self._eps * before else 0.0
        yield from self._append(self.left, u, norm)
        self._enter([*column, norm])
        w = self._A.H(self.left[-1])
        w, _, outside, before = yield from orthogonalised(w, self.basis, "product A* u")
        self.norm = outside if outside > self._eps * before else 0.0
        return w

    def _ritz(self) -> tuple[Any, Any, Any]:
        j = self.columns
        left, values, right = np.linalg.svd(self.projected[:j, :j])
        order = np.argsort(_WHICH[self._which](values), kind="stable")
        bounds = self.norm * abs(left[j - 1, order])
        return values[order], bounds, np.stack([left[:, order], right[order].conj().T])

    def _restart(self, values: Any, change: Any, keep: int) -> None:
        self.left = _rotated(self.left, change[0], keep)
        super()._restart(values, change[1], keep)

    def result(self, reductions: Reductions) -> Result:
        count = min(self._k, self.columns)
        values, change = np.zeros(0), np.zeros((2, 0, 0))
        if count:
            values, _, change = self._ritz()
        ascending = np.argsort(values[:count], kind="stable")
        sides = self.left, self.basis
        u, x = (
            _rotated(vectors, some[:, :count][:, ascending], count)
            for vectors, some in zip(sides, change, strict=True)
        )
        u, x = (x, u) if self._wide else (u, x)
        found = values[ascending]
        return self.finished(
            (u, found, x), x, self.residuals, reductions, u=u, singular_values=found
        )


def _rotated(basis: list[Vector], change: Any, count: int) -> list[Vector]:
    """Combinations of the basis, by the columns of an array."""
    rows = change.shape[0]
    return [combined(change[:, i].tolist(), basis[:rows]) for i in range(count)]
