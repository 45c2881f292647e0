"""Public checks of linear maps and their adjoints, on any backend.

A check takes anything that `linop.testing.tested_maps.foreign` turns into a `TestedMap`: linop's
operators and plans, pairs of functions, matrices, operators of SciPy and PyLops. One of SciPy's
whose dtype was guessed is checked in float64, and in complex128 if it takes that
(`linop.testing.dtypes`). A check returns a `Report`, true if it passed. On a backend of one worker
a check is collective: every worker makes the same call and gets the same report. A result with NaN
or infinity fails every check. Each ``assert_`` form raises an AssertionError with the report's
text. How errors are measured is in `linop.testing.trials` and `linop.testing.matrices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from linop.backends.engine.base import Backend
from linop.spaces.vector import Vector
from linop.testing.cancellation import size_of_terms
from linop.testing.drawing import of_any_parity, random_vector
from linop.testing.dtypes import in_every_dtype
from linop.testing.localise import largest, wrong_column
from linop.testing.matrices import matrix_of, unlike_matrix, worst_of_matrices
from linop.testing.report import Report
from linop.testing.tested_maps.foreign import tested_map
from linop.testing.tested_maps.tested_map import Fault
from linop.testing.tested_maps.whole import seen_as, with_inner
from linop.testing.trials import (
    Check,
    Where,
    adjoint_of,
    difference,
    dot_products,
    dot_tolerance,
    element_tolerance,
    entry_tolerance,
    linear,
    there_and_back,
)

Parameters = ParamSpec("Parameters")


@in_every_dtype
def check_adjoint(
    op: Any,
    backend: Backend | str = "reference",
    *,
    adjoint: Any = None,
    inner: tuple[Any, Any] | None = None,
    seed: int = 0,
    trials: int = 3,
    tolerance: float | None = None,
) -> Report:
    """The dot-product test (paper, equation 13), for random x and y: the relative error
    ``abs(<F x, y> - <x, F* y>) / max(‖F x‖ ‖y‖, ‖x‖ ‖F* y‖)`` must not exceed the tolerance.

    In integer dtypes the two inner products must be equal modulo 2**bits of the narrower dtype:
    arithmetic wraps there, and maps are linear over that ring. Numbers are drawn up to the largest
    of the dtype, so that what saturates, or computes in a shorter one, is found.

    The report of a failed test names a wrong entry of the matrix. Each trial calls F and F* twice,
    and fails if a call overwrites the result of the call before it.

    Args:
        op: the operator F.
        backend: a backend or its name. The check is collective on a backend of one worker.
        adjoint: the map to test as F*; by default the adjoint of `op`.
        inner: the inner products of domain and codomain, each as for `linop.Space`: an array of
            weights, for instance, or None for the Euclidean one. By default those of the spaces.
        seed, trials: first seed and number of random pairs x, y; the same on every worker.
        tolerance: the largest relative error that passes; by default `dot_tolerance`, a bound of
            rounding errors. An ill-conditioned operator, such as the inverse of a matrix, needs a
            larger one.

    Returns:
        The report, the same on every worker.

    Raises:
        ArgumentError: `op` cannot be checked, or the tolerance, seed or number of trials is
            invalid; on every worker.

    Example:
        Differences of neighbours, and two functions, of which one is the adjoint:

        >>> def right(y):
        ...     return np.pad(y, (1, 0)) - np.pad(y, (0, 1))
        >>> def wrong(y):
        ...     return np.pad(y, (1, 0)) + np.pad(y, (0, 1))
        >>> bool(linop.testing.check_adjoint(linop.testing.pair(np.diff, right, 4, 3)))
        True
        >>> report = linop.testing.check_adjoint(linop.testing.pair(np.diff, wrong, 4, 3))
        >>> bool(report), report.details
        (False, 'from x[...] (worker 0) to y[...] (worker 0): F has -1, ... adjoint has 1')
    """
    F = with_inner(tested_map("check_adjoint", op, backend), inner)
    call = f"check_adjoint(op, {{}}{_said(adjoint, inner)})"
    check = Check(
        "dot-product test", "<F x, y> with <x, F* y>", call, F, dot_tolerance(F), tolerance
    )

    def trial(seed: int) -> tuple[float, Where]:
        return dot_products(F, adjoint_of("check_adjoint", F, adjoint), seed)

    return check.tried(trial, seed, trials)


@in_every_dtype
def check_dot_exact(
    op: Any,
    backend: Backend | str = "reference",
    *,
    adjoint: Any = None,
    inner: tuple[Any, Any] | None = None,
    seed: int = 0,
    trials: int = 3,
) -> Report:
    """The dot-product test on vectors of whole numbers, without tolerance; modulo 2**bits in
    integer dtypes, as in `check_adjoint`.

    Args:
        op, backend, adjoint, inner, seed, trials: as for `check_adjoint`.

    Raises:
        UndecidableError: in floating point, a result is fractional, or larger than the integers
            that its dtype represents exactly, so that its arithmetic may round; on every worker.

    Example:
        >>> A, B = np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[1.0, 0.0], [5.0, 3.0]])
        >>> report = linop.testing.check_dot_exact(A, adjoint=A.T)
        >>> bool(report), report.error, report.tolerance
        (True, 0.0, 0.0)
        >>> linop.testing.check_dot_exact(A, adjoint=B).details
        'from x[1] (worker 0) to y[0] (worker 0): F has 2, the conjugate ... adjoint has 5'
    """
    F = with_inner(tested_map("check_dot_exact", op, backend), inner)
    extra = _said(adjoint, inner)
    compared = "<F x, y> with <x, F* y>, on whole numbers"
    call = f"check_dot_exact(op, {{}}{extra})"
    check = Check("exact dot-product test", compared, call, F, 0.0)

    def trial(seed: int) -> tuple[float, Where]:
        G = adjoint_of("check_dot_exact", F, adjoint)
        return dot_products(F, G, seed, exact=True)

    return check.tried(trial, seed, trials)


def _said(adjoint: Any, inner: Any) -> str:
    """Arguments of the call that repeats a check."""
    return ("" if adjoint is None else ", adjoint=adjoint") + (
        "" if inner is None else ", inner=inner"
    )


@in_every_dtype
def check_self_adjoint(
    op: Any,
    backend: Backend | str = "reference",
    *,
    seed: int = 0,
    trials: int = 3,
    tolerance: float | None = None,
) -> Report:
    """Self-adjointness, ``<F x, y> = <x, F y>``: the dot-product test with F as its own adjoint;
    modulo 2**bits in integer dtypes, as in `check_adjoint`.

    Args:
        op, backend, seed, trials, tolerance: as for `check_adjoint`.

    Example:
        >>> A = np.array([[1.0, 2.0], [0.0, 3.0]])
        >>> bool(linop.testing.check_self_adjoint(A + A.T))
        True
        >>> linop.testing.check_self_adjoint(A).details
        'from x[0] (worker 0) to y[1] (worker 0): F has 0, its conjugate transpose has 2'
    """
    F = tested_map("check_self_adjoint", op, backend)
    compared, call = "<F x, y> with <x, F y>", "check_self_adjoint(op, {})"
    check = Check("self-adjointness", compared, call, F, dot_tolerance(F), tolerance)

    def trial(seed: int) -> tuple[float, Where]:
        G = seen_as(F, F.codomain, F.domain, not F.anonymous)
        return dot_products(F, G, seed, other="its conjugate transpose")

    return check.tried(trial, seed, trials)


@in_every_dtype
def check_exact(
    op: Any,
    adjoint: Any = None,
    *,
    backend: Backend | str = "reference",
    tolerance: float | None = None,
) -> Report:
    """The matrix of the adjoint against the conjugate transpose of the operator's, entry by entry
    (G_X^-1 A^H G_Y in spaces of other inner products); and linearity of both, without which a
    matrix does not determine a map.

    The two dense matrices are built independently, by applying each map to all unit vectors. If no
    arithmetic rounds (data movement, integers) entries must be equal; otherwise they may differ by
    the tolerance, relative to the largest entry of their row and column. Linearity is tested on
    random vectors, as in `check_linear`, and each map on one beside its matrix.

    Args:
        op: the operator; small, since dense matrices are built.
        adjoint: the map to test as its adjoint; by default the adjoint of `op`.
        backend, tolerance: as for `check_adjoint`.

    Example:
        >>> A, B = np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[1.0, 0.0], [5.0, 3.0]])
        >>> bool(linop.testing.check_exact(A, A.T))
        True
        >>> print(linop.testing.check_exact(A, B).details)
        row 1, column 0 of the adjoint, ...: the adjoint has 5, the conjugate transpose of F has 2
    """
    F = tested_map("check_exact", op, backend)
    extra = "" if adjoint is None else "adjoint, "
    compared = "the matrix of F* with the conjugate transpose of that of F; both for linearity"
    call = f"check_exact(op, {extra}backend={{}})"
    weighed = any(space.inner_product is not None for space in (F.domain, F.codomain))
    try:
        G = adjoint_of("check_exact", F, adjoint)
        rounds = not (F.exact and G.exact) or weighed
        most = max(entry_tolerance(F), entry_tolerance(G)) if rounds else 0.0
        check = Check("exact adjoint", compared, call, F, most, tolerance)
        matrices = matrix_of(F), matrix_of(G)
        error, worst = worst_of_matrices(F, G, *matrices, check.tolerance, weighed)
        if error <= check.tolerance:
            pairs = list(zip((F, G), matrices, strict=True))
            tried = [linear(S, seed, tolerance is None) for S, _ in pairs for seed in (0, 2, 4)]
            tried += [unlike_matrix(S, A) for S, A in pairs]
            bent, where = max(tried, key=lambda found: found[0])
            if not bent <= max(check.tolerance, element_tolerance(F)):
                return check.report(bent, where())
    except Fault as fault:
        return Check("exact adjoint", compared, call, F, 0.0, tolerance).report(
            math.inf, fault.worst
        )
    return check.report(error, None if error <= check.tolerance else worst)


@in_every_dtype
def check_linear(
    op: Any,
    backend: Backend | str = "reference",
    *,
    seed: int = 0,
    trials: int = 3,
    tolerance: float | None = None,
) -> Report:
    """Linearity on random vectors: ``F(a x + y) = a F x + F y``, also where x and y have zeros,
    ``F 0 = 0``, ``F(-x) = -F x`` (except in unsigned dtypes) and ``F(2**k x) = 2**k F x`` for a
    large and a small power. F must also be repeatable, and not change its argument. The adjoint is
    not called. Errors are relative to the largest element. In short formats, where the tolerance of
    a sum of so many terms would hide all errors, those of signs and powers, which rounding does not
    affect, may be two roundings; unless F rounds otherwise each time, or a tolerance is given.

    Args:
        op, backend, seed, trials, tolerance: as for `check_adjoint`.

    Example:
        >>> bool(linop.testing.check_linear(linop.testing.pair(lambda x: 2 * x, None, 3, 3)))
        True
        >>> print(linop.testing.check_linear(linop.testing.pair(abs, None, 3, 3)))
        linearity on reference FAILED for <3x3 abs>: ...
    """
    F = tested_map("check_linear", op, backend)
    compared = (
        "F(a x + y) with a F x + F y, F 0 with 0, F x with F x again, at other scales and signs"
    )
    call = "check_linear(op, {})"
    check = Check("linearity", compared, call, F, element_tolerance(F), tolerance)
    return check.tried(lambda seed: linear(F, seed, tolerance is None), seed, trials)


@in_every_dtype
def check_equal(
    op: Any,
    other: Any,
    backend: Backend | str = "reference",
    *,
    seed: int = 0,
    trials: int = 3,
    tolerance: float | None = None,
) -> Report:
    """Equality of two operators on random vectors: up to rounding, and exactly in integer dtypes.
    (`LinearOperator.equals` is a proof for all vectors.)

    Args:
        op, other: the two maps. If the spaces of one have no region names of their own (SciPy,
            PyLops), elements correspond by their position in flattened vectors.
        backend, seed, trials, tolerance: as for `check_adjoint`.

    Example:
        >>> A, B = np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[1.0, 2.0], [5.0, 3.0]])
        >>> bool(linop.testing.check_equal(A + A, 2 * A))
        True
        >>> linop.testing.check_equal(A, B).details
        'from x[0] (worker 0) to y[1] (worker 0): F has 0, G has 5'
    """
    F, second = tested_map("check_equal", op, backend), tested_map("check_equal", other, backend)
    most = max(element_tolerance(F), element_tolerance(second))
    check = Check("equality", "F x with G x", "check_equal(op, other, {})", F, most, tolerance)

    def trial(seed: int) -> tuple[float, Where]:
        G = seen_as(second, F.domain, F.codomain, not F.anonymous)

        def at(x: Vector) -> tuple[float, Where]:
            most = largest(x, F.backend)[1]
            error, _ = difference(
                F, F(x), G(x), ("F", "G"), [], lambda: max(size_of_terms(S, most) for S in (F, G))
            )
            return error, lambda: wrong_column(F, F, G, x, ("F", "G"))

        every = [random_vector(F, F.domain, seed), *of_any_parity(F, F.domain, seed)]
        return max(map(at, every), key=lambda one: one[0])

    return check.tried(trial, seed, trials)


@in_every_dtype
def check_inverse(
    op: Any,
    inverse: Any,
    backend: Backend | str = "reference",
    *,
    seed: int = 0,
    trials: int = 3,
    tolerance: float | None = None,
) -> Report:
    """Two-sided inverse on random vectors: ``inverse(F x) = x`` and ``F(inverse(y)) = y``. Errors
    are relative to the largest element, and divided by the product of the two maps' gains on the
    random vectors if that is above 1, since rounding errors grow with it.

    Args:
        op, inverse: the two maps.
        backend, seed, trials, tolerance: as for `check_adjoint`.

    Example:
        >>> A = np.array([[1.0, 2.0], [0.0, 1.0]])
        >>> bool(linop.testing.check_inverse(A, np.array([[1.0, -2.0], [0.0, 1.0]])))
        True
        >>> bool(linop.testing.check_inverse(A, A.T))
        False
    """
    F, G = tested_map("check_inverse", op, backend), tested_map("check_inverse", inverse, backend)
    compared = "inverse(F x) with x, F(inverse(y)) with y"
    most = max(element_tolerance(F), element_tolerance(G))
    check = Check("inverse", compared, "check_inverse(op, inverse, {})", F, most, tolerance)

    def trial(seed: int) -> tuple[float, Where]:
        back = seen_as(G, F.codomain, F.domain, not F.anonymous)
        return there_and_back(F, back, seed, "inverse")

    return check.tried(trial, seed, trials)


@in_every_dtype
def check_unitary(
    op: Any,
    backend: Backend | str = "reference",
    *,
    seed: int = 0,
    trials: int = 3,
    tolerance: float | None = None,
) -> Report:
    """Unitarity on random vectors: ``F* F x = x`` and ``F F* y = y``. The adjoint itself is not
    tested here, but by `check_adjoint`.

    Args:
        op, backend, seed, trials, tolerance: as for `check_adjoint`.

    Example:
        A rotation by 90 degrees, and twice that matrix:

        >>> A = np.array([[0.0, 1.0], [-1.0, 0.0]])
        >>> bool(linop.testing.check_unitary(A)), bool(linop.testing.check_unitary(2 * A))
        (True, False)
    """
    F = tested_map("check_unitary", op, backend)
    compared, call = "F* F x with x, F F* y with y", "check_unitary(op, {})"
    check = Check("unitarity", compared, call, F, element_tolerance(F), tolerance)
    return check.tried(lambda seed: there_and_back(F, F.H, seed, "F*"), seed, trials)


_ASSERTION = """`{check}`, or an AssertionError with the report. Arguments are the same.

    Raises:
        AssertionError: the check failed. Others: as `{check}`.

    Example:
        >>> A, B = np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([[1.0, 0.0], [5.0, 3.0]])
        >>> linop.testing.{name}({right})
        >>> linop.testing.{name}({wrong})
        Traceback (most recent call last):
        AssertionError: {words} on reference FAILED for ...
    """
"""The docstring of an ``assert_`` form."""


def _asserting(
    check: Callable[Parameters, Report], right: str, wrong: str, words: str
) -> Callable[Parameters, None]:
    """The ``assert_`` form of a check, which raises AssertionError if the check fails.

    Args:
        right, wrong: arguments in its example, of two matrices A and B, of which the second fail.
        words: first words of the report.
    """

    @wraps(check)
    def assertion(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        __tracebackhide__ = True  # hides this frame in pytest's tracebacks
        report = check(*arguments, **options)
        if not report:
            raise AssertionError(str(report))

    name = check.__name__.replace("check_", "assert_")
    assertion.__name__ = assertion.__qualname__ = name
    assertion.__doc__ = _ASSERTION.format(
        check=check.__name__, name=name, right=right, wrong=wrong, words=words
    )
    return assertion


_OTHER = "A, adjoint=A.T", "A, adjoint=B"
assert_adjoint = _asserting(check_adjoint, *_OTHER, "dot-product test")
assert_dot_exact = _asserting(check_dot_exact, *_OTHER, "exact dot-product test")
assert_exact = _asserting(check_exact, "A, A.T", "A, B", "exact adjoint")
assert_linear = _asserting(check_linear, "A", "linop.testing.pair(abs, None, 2, 2)", "linearity")
assert_equal = _asserting(check_equal, "A + A, 2 * A", "A, B", "equality")
assert_inverse = _asserting(check_inverse, "A, np.linalg.inv(A)", "A, B", "inverse")
assert_unitary = _asserting(check_unitary, "np.eye(2)", "A", "unitarity")
assert_self_adjoint = _asserting(check_self_adjoint, "A + A.T", "A", "self-adjointness")
