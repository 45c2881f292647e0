"""Checks of adjoints: the paper's dot-product test on any backend, and exact ones.

Each check returns a `Report`, true if it passed; each ``assert_`` form raises with the report's
text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from linop import backends
from linop.backends.base import Backend
from linop.errors import ArgumentError
from linop.operator import LinearOperator
from linop.space import Vector


@dataclass(frozen=True)
class Report:
    """What a check found. True if it passed."""

    check: str
    operator: str
    passed: bool
    error: float
    """The largest error found: relative for `check_adjoint`, absolute for `check_exact`."""
    tolerance: float
    details: str

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{self.check} {verdict} for {self.operator}: error {self.error:.3g}, "
            f"tolerance {self.tolerance:.3g}. {self.details}"
        )


def check_adjoint(
    op: LinearOperator,
    backend: Backend | str = "reference",
    *,
    adjoint: LinearOperator | None = None,
    seed: int = 0,
    trials: int = 3,
) -> Report:
    """The dot-product test (paper, equation 13), for random x and y:
    ``abs(<F x, y> - <x, F* y>) / max(‖F x‖ ‖y‖, ‖x‖ ‖F* y‖)`` is below rounding. Integer spaces are
    compared exactly.

    Args:
        op: the operator F.
        backend: a backend or its name. On one worker's backend every worker makes the same call.
        adjoint: what to test as F*; by default ``op.H``.
        seed, trials: the random vectors; the same on every worker.

    Returns:
        The report, the same on every worker.
    """
    _check_operator("check_adjoint", op)
    chosen = backends.get(backend) if isinstance(backend, str) else backend
    plan = op.compile(chosen)
    back = plan.H if adjoint is None else adjoint.compile(chosen)
    worst, exact = 0.0, op.dtype.kind in "iu"
    which = 0
    for trial in range(trials):
        x = _local(op.domain.random(seed + 2 * trial), chosen)
        y = _local(op.codomain.random(seed + 2 * trial + 1), chosen)
        forward, backward = plan(x), back(y)
        left, right = forward.inner(y), x.inner(backward)
        scale = max(forward.norm() * y.norm(), x.norm() * backward.norm())
        error = abs(left - right) if exact or scale == 0 else abs(left - right) / scale
        if error > worst or not math.isfinite(error):
            worst, which = float(error), trial
    tolerance = 0.0 if exact else dot_tolerance(op)
    passed = math.isfinite(worst) and worst <= tolerance
    return Report(
        f"dot-product test on {chosen.name}",
        repr(op),
        passed,
        worst,
        tolerance,
        f"worst of {trials} trials: seed={seed + 2 * which}",
    )


def dot_tolerance(op: LinearOperator) -> float:
    """The relative error that rounding may cause in an inner product of an operator's vectors: sums
    of n terms of random sign err by about √n ulps."""
    kind = op.dtype.kind
    eps = np.finfo(op.dtype).eps if kind in "fc" else 2.0**-7
    return float(16 * eps * math.sqrt(max(1, *op.shape)))


def check_exact(op: LinearOperator, adjoint: LinearOperator | None = None) -> Report:
    """Whether the matrix of ``op.H`` is the conjugate transpose of that of ``op``, entry by entry.

    Both are found independently: of local operators given as functions, both functions are applied
    to all unit vectors, and entries may then differ by rounding; of movement, not at all.

    Args:
        op: the operator; small, since its matrix is built.
        adjoint: what to test as its adjoint; by default ``op.H``.
    """
    _check_operator("check_exact", op)
    other = op.H if adjoint is None else adjoint
    if op.domain != other.codomain or op.codomain != other.domain:
        return Report(
            "exact adjoint",
            repr(op),
            False,
            math.inf,
            0.0,
            f"spaces differ: {op.domain} -> {op.codomain}, "
            f"adjoint {other.domain} -> {other.codomain}",
        )
    forward, backward = _applied(op), _applied(other)
    difference = np.abs(backward - forward.conj().T).astype(np.float64)
    difference[np.isnan(difference)] = math.inf
    worst = float(difference.max()) if difference.size else 0.0
    tolerance = 0.0
    if not op.stages.pure and op.dtype.kind in "fc":
        largest = float(np.abs(forward).max()) if forward.size else 0.0
        tolerance = dot_tolerance(op) * largest
    details = "all entries equal"
    if worst > tolerance:
        i, j = np.unravel_index(int(np.argmax(difference)), difference.shape)
        details = (
            f"worst at row {i}, column {j} of the adjoint: {backward[i, j]} there, "
            f"{forward.conj().T[i, j]} in the transpose"
        )
    return Report("exact adjoint", repr(op), worst <= tolerance, worst, tolerance, details)


def assert_adjoint(
    op: LinearOperator, backend: Backend | str = "reference", **options: Any
) -> None:
    """`check_adjoint`, or an AssertionError with the report."""
    report = check_adjoint(op, backend, **options)
    if not report:
        raise AssertionError(str(report))


def assert_exact(op: LinearOperator, adjoint: LinearOperator | None = None) -> None:
    """`check_exact`, or an AssertionError with the report."""
    report = check_exact(op, adjoint)
    if not report:
        raise AssertionError(str(report))


def _check_operator(what: str, op: Any) -> None:
    if not isinstance(op, LinearOperator):
        raise ArgumentError(f"{what}: expected an operator, given {op!r}")


def _local(vector: Vector, backend: Backend) -> Vector:
    """The part of a whole vector that a backend holds, with its inner product."""
    return backend.vector(vector.space, vector)


def _applied(op: LinearOperator) -> np.ndarray:
    """The dense matrix, by applying the expression to every unit vector."""
    columns = []
    for k in range(op.domain.size):
        unit = np.zeros(op.domain.size, op.domain.dtype)
        unit[k] = 1
        columns.append(op.codomain.flatten(op(op.domain.unflatten(unit))))
    shape = (op.domain.size, op.codomain.size)
    dense = np.array(columns).reshape(shape).T
    return dense if dense.dtype.kind in "iufc" else dense.astype(np.float64)
