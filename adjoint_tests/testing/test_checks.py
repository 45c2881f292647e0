"""The checks for users: what is right passes; of what is wrong they name the very entry, with its
region, index and worker, on every backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
import linop.testing as lt
from linop import Region, Space
from linop.errors import UndecidableError
from linop.testing import Element, pair
from support.spmd import check_programs
from support.spmd.check_programs import COMPLEX

ROTATION = np.array([[0.6, 0.8], [-0.8, 0.6]])
DIFFERENCES = np.diff(np.eye(4), axis=0)


def by(matrix: Any, adjoint: Any = None, **options: Any) -> lt.Pair:
    """The pair of functions that a matrix, and that of an adjoint, stand for."""
    A = np.asarray(matrix)
    B = A.conj().T if adjoint is None else np.asarray(adjoint)
    m, n = A.shape
    return pair(lambda x: A @ x, lambda y: B @ y, n, m, dtype=A.dtype, **options)


def drifting() -> Callable[[np.ndarray], np.ndarray]:
    """A function whose factor grows with every call."""
    calls = [0]

    def function(x: np.ndarray) -> np.ndarray:
        calls[0] += 1
        return x * calls[0]

    return function


# What is right passes

RIGHT: dict[str, tuple[Callable[..., lt.Report], Any, tuple[Any, ...]]] = {
    "adjoint": (lt.check_adjoint, by(COMPLEX), ()),
    "adjoint, single precision": (lt.check_adjoint, by(COMPLEX.astype(np.complex64)), ()),
    "adjoint, half precision": (lt.check_adjoint, by(ROTATION.astype(np.float16)), ()),
    "adjoint, whole numbers": (lt.check_adjoint, by(np.arange(6).reshape(2, 3)), ()),
    "adjoint, from real to complex": (
        lt.check_adjoint,
        pair(
            np.fft.rfft,
            lambda y: np.fft.irfft(np.r_[y[:1], y[1:] / 2], 5) * 5,
            Space(Region("x", 5)),
            Space(Region("y", 3), complex),
        ),
        (),
    ),
    "exact dot": (lt.check_dot_exact, by(COMPLEX), ()),
    "exact": (partial(lt.check_exact), by(COMPLEX), ()),
    "linear": (lt.check_linear, by(COMPLEX), ()),
    "equal": (lt.check_equal, by(COMPLEX), (COMPLEX,)),
    "inverse": (lt.check_inverse, by([[2.0, 1], [1, 1]]), (np.array([[1.0, -1], [-1, 2]]),)),
    "unitary": (lt.check_unitary, by(ROTATION), ()),
    "self-adjoint": (lt.check_self_adjoint, by([[1, 1j], [-1j, 2]]), ()),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("backend", ["reference", "threads"])
def test_what_is_right_passes(name: str, backend: str) -> None:
    check, op, others = RIGHT[name]
    report = check(op, *others, backend=backend)
    assert report, str(report)
    assert report.error <= report.tolerance
    assert report.worst is None
    assert f"on {backend} passed for <" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["passed"] is True


# What is wrong is named

LINE = Space([Region("a", (2, 2)), Region("b", 3, 1)])
ADD = linop.add(LINE, LINE["a"][:, :1], LINE["a"][:, 1:])
WRONG: dict[str, tuple[Callable[..., lt.Report], Any, tuple[Any, ...], str]] = {
    "missing entry": (
        lt.check_adjoint,
        by(DIFFERENCES, DIFFERENCES.T * (np.arange(4)[:, None] != 2)),
        (),
        "from x[2] (worker 0) to y[",
    ),
    "no conjugation": (
        lt.check_adjoint,
        by(np.diag([1, 2, 3j]), np.diag([1, 2, 3j])),
        (),
        "from x[2] (worker 0) to y[2] (worker 0): F has 0+3j, the conjugate transpose of the "
        "adjoint has 0-3j",
    ),
    "factor": (
        lt.check_adjoint,
        by(np.diag([0, 1.5, 0]), np.diag([0, 3.0, 0])),
        (),
        "from x[1] (worker 0) to y[1] (worker 0): F has 1.5, the conjugate transpose of the "
        "adjoint has 3",
    ),
    "sign": (
        lt.check_dot_exact,
        by(np.diag([1.0, 1, 1]), np.diag([1, -1.0, 1])),
        (),
        "from x[1] (worker 0) to y[1] (worker 0): F has 1, the conjugate transpose of the adjoint "
        "has -1",
    ),
    "exactly": (
        lt.check_exact,
        by(DIFFERENCES, DIFFERENCES.T + 1e-9 * np.outer([0, 1, 0, 0], [0, 0, 1])),
        (),
        "row 1, column 2 of the adjoint, from y[2] (worker 0) to x[1] (worker 0): the "
        "adjoint has 1e-09, the conjugate transpose of F has 0",
    ),
    "affine": (
        lt.check_linear,
        pair(lambda x: x + np.array([0, 0, 4.0]), None, 3, 3),
        (),
        "the forward function is not linear: of zero it makes 4 at y[2] (worker 0)",
    ),
    "affine, by dot products": (
        lt.check_adjoint,
        pair(lambda x: x + np.array([0, 0, 4.0]), np.copy, 3, 3),
        (),
        "the forward function is not linear: of zero it makes 4 at y[2] (worker 0)",
    ),
    "absolute values": (
        lt.check_linear,
        pair(lambda x: np.r_[x[:2], abs(x[2])], None, 3, 3),
        (),
        "at y[2] (worker 0): the forward function of -x has 0.640422650443, the opposite of that "
        "of x has -0.640422650443",
    ),
    "absolute values, by dot products": (
        lt.check_adjoint,
        pair(np.abs, np.copy, 3, 3),
        (),
        "one of the two is not linear (check_linear)",
    ),
    "linear over real numbers": (
        lt.check_linear,
        pair(np.conj, np.conj, 3, 3, dtype=np.complex128),
        (),
        "F(a x + y) has",
    ),
    "another entry": (
        lt.check_equal,
        linop.local_operators.matrix(DIFFERENCES, Region("r", (2, 2)), Region("s", 3)),
        (DIFFERENCES + np.eye(3, 4, 2),),
        "from r[1, 1] (worker 0) to s[1] (worker 0): F has 0, G has 1",
    ),
    "a region": (
        lt.check_equal,
        ADD,
        (linop.add(LINE, LINE["a"][:1, :1], LINE["a"][:1, 1:]),),
        "from a[1, 0] (worker 0) to a[1, 1] (worker 0): F has 1, G has 0",
    ),
    "not the inverse": (
        lt.check_inverse,
        by(np.diag([1.0, 2, 4])),
        (np.diag([1.0, 0.5, 0.5]),),
        "from x[2] (worker 0) to x[2] (worker 0): inverse F has 2, the identity has 1",
    ),
    "half an inverse": (
        lt.check_inverse,
        by(np.eye(3, 2)),
        (np.eye(2, 3),),
        "from y[2] (worker 0) to y[2] (worker 0): F inverse has 0, the identity has 1",
    ),
    "not unitary": (
        lt.check_unitary,
        by(np.diag([1, 1j, 2j])),
        (),
        "from x[2] (worker 0) to x[2] (worker 0): F* F has 4+0j, the identity has 1",
    ),
    "symmetric, not Hermitian": (
        lt.check_self_adjoint,
        by([[1, 1j], [1j, 2]]),
        (),
        "F has 0+1j, its conjugate transpose has 0-1j",
    ),
    "other sizes": (lt.check_self_adjoint, by(COMPLEX), (), "spaces differ"),
    "other spaces": (lt.check_equal, ADD, (linop.identity(Space(LINE["b"])),), "spaces differ"),
    "other regions": (
        lt.check_equal,
        linop.identity(Space(Region("b", 2))),
        (linop.identity(Space(Region("c", 2))),),
        "spaces differ: b[2]@0 -> b[2]@0 (float64, float64) wanted, given c[2]@0 -> c[2]@0",
    ),
    "beyond floating point": (
        lt.check_adjoint,
        by(1e200 * np.eye(2), 2e200 * np.eye(2)),
        (),
        "F has 1e+200, the conjugate transpose of the adjoint has 2e+200",
    ),
    "an inverse beyond floating point": (
        lt.check_inverse,
        by(5e307 * np.eye(30)),
        (2e-300 * np.eye(30),),
        "norms are beyond what floating point holds",
    ),
    "an inverse whose squares are beyond floating point": (
        lt.check_inverse,
        by(1e300 * np.eye(2)),
        (2e-300 * np.eye(2),),
        "inverse F has 2, the identity has 1",
    ),
    "other numbers": (lt.check_equal, by(COMPLEX), (COMPLEX.real,), "spaces differ"),
    "another shape": (
        lt.check_adjoint,
        pair(np.diff, np.diff, 4, 3),
        (),
        "the adjoint function returned shape (2,) for x (worker 0); expected (4,)",
    ),
    "another dtype": (
        lt.check_linear,
        pair(np.float32, None, 3, 3),
        (),
        "the forward function returned dtype float32 for y (worker 0); expected float64",
    ),
    "nothing": (
        lt.check_linear,
        pair(lambda x: None, None, 3, 3),
        (),
        "the forward function returned NoneType for y (worker 0); expected a numpy.ndarray",
    ),
    "regions that are not there": (
        lt.check_linear,
        pair(lambda x: {"a": x["a"].copy(), "c": x["b"].copy()}, None, LINE, LINE),
        (),
        "the forward function returned ['a', 'c']; expected arrays for ['a', 'b']",
    ),
    "memory of the argument": (
        lt.check_adjoint,
        pair(lambda x: x[::-1], lambda y: y[::-1].copy(), 3, 3),
        (),
        "the forward function returned memory of its argument x as its result y",
    ),
    "infinity": (
        lt.check_adjoint,
        pair(np.copy, lambda y: y / np.array([[1.0, 1], [0, 1]]), (2, 2), (2, 2)),
        (),
        "the adjoint function gives ",
    ),
    "another result every time": (lt.check_linear, pair(drifting(), None, 3, 3), (), "at y["),
}
"""A check, what it is applied to, and what it says."""


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", ["reference", "threads"])
def test_what_is_wrong_is_named(name: str, backend: str) -> None:
    check, op, others, words = WRONG[name]
    report = check(op, *others, backend=backend)
    assert not report
    assert words in str(report)
    assert f"on {backend} FAILED for <" in str(report)
    assert not report.error <= report.tolerance
    assert json.loads(json.dumps(report.as_dict()))["worst"]["text"] == report.details
    assertion = getattr(lt, check.__name__.replace("check", "assert"))
    with pytest.raises(AssertionError) as raised:
        assertion(op, *others, backend=backend)
    assert words in str(raised.value)
    assert name == "another result every time" or str(raised.value) == str(report)


def test_a_changed_argument_is_named() -> None:
    def forward(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        result = {name: array.copy() for name, array in x.items()}
        x["b"][1] = 7
        return result

    report = lt.check_adjoint(pair(forward, forward, LINE, LINE))
    assert "changed its argument in place: b[1] (worker 1) was " in report.details
    assert report.details.endswith(", is 7")
    assert report.worst is not None and report.worst.target == Element("b", (1,), (1,))


def test_a_function_that_gives_another_result_the_second_time() -> None:
    calls = [0]

    def forward(x: np.ndarray) -> np.ndarray:
        calls[0] += 1
        return x if calls[0] <= 4 else x + x * np.array([0, 0, 1])  # of 0, x, y, a x + y: the same

    report = lt.check_linear(pair(lambda x: forward(x) + 0, None, 3, 3), trials=1)
    assert "at y[2] (worker 0): F x, the second time, has " in report.details


def test_a_report_says_how_to_see_it_again() -> None:
    op = by(DIFFERENCES, 2 * DIFFERENCES.T)  # named in the line of the report
    for check in (lt.check_adjoint, lt.check_dot_exact):
        report = check(op, seed=11, trials=5)
        again = eval(report.reproduce)
        assert (again.error, again.worst) == (report.error, report.worst)
    passed = lt.check_linear(op, "threads", seed=3, trials=2)
    assert passed.reproduce == "linop.testing.check_linear(op, 'threads', seed=3, trials=2)"


# Any wrong entry is found

DOMAIN = Space([Region("p", (3, 2)), Region("q", (), 1), Region("r", 5, 2)])
CODOMAIN = Space([Region("s", 4, 2), Region("t", (2, 3), (0, 1))])


def placed(space: Space, flat: int) -> Element:
    """Position of an element of a flat vector."""
    region = next(r for r in space if flat - space.offsets[r.name] in range(r.size))
    index = np.unravel_index(flat - space.offsets[region.name], region.shape)
    return Element(region.name, tuple(map(int, index)), region.workers)


def of_matrices(A: np.ndarray, B: np.ndarray) -> lt.Pair:
    """A pair of functions between spaces of several regions, by two matrices."""

    def by(matrix: np.ndarray, source: Space, target: Space) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            return target.unflatten(matrix @ source.flatten(source.vector(x))).arrays

        return apply

    domain, codomain = (Space(s.regions, A.dtype) for s in (DOMAIN, CODOMAIN))
    forward = by(A, domain, codomain)
    return pair(forward, by(B, codomain, domain), domain, codomain)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    row=st.integers(0, CODOMAIN.size - 1),
    column=st.integers(0, DOMAIN.size - 1),
    by=st.sampled_from([1.0, -2.0, 1e-6, 1e6]),
    dtype=st.sampled_from([np.float64, np.complex128]),
    density=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_any_wrong_entry_is_named(
    seed: int, row: int, column: int, by: float, dtype: Any, density: float
) -> None:
    rng = np.random.default_rng(seed)
    shape = CODOMAIN.size, DOMAIN.size
    A = rng.integers(-3, 3, shape) * (rng.random(shape) < density)
    A = (A + (1j * rng.integers(-3, 3, shape) if dtype is np.complex128 else 0)).astype(dtype)
    B = A.conj().T.copy()
    assert all(check(of_matrices(A, B)) for check in (lt.check_adjoint, lt.check_exact))
    B[column, row] += by
    source, target = placed(DOMAIN, column), placed(CODOMAIN, row)
    for check in (lt.check_adjoint, lt.check_dot_exact, lt.check_exact):
        if check is lt.check_dot_exact and by == 1e-6:
            continue
        worst = check(of_matrices(A, B)).worst
        assert worst is not None
        ends = {str(worst.source), str(worst.target)}
        assert ends == {str(source), str(target)}, worst.text
    worst = lt.check_equal(of_matrices(A, B), of_matrices(B.conj().T, B), seed=seed).worst
    assert worst is not None
    assert (worst.source, worst.target) == (source, target)


def test_a_wrong_entry_of_many_is_found_by_few_applications() -> None:
    n, calls = 10**5, [0]

    def forward(x: np.ndarray) -> np.ndarray:
        calls[0] += 1
        return 2 * x

    def adjoint(y: np.ndarray) -> np.ndarray:
        calls[0] += 1
        x = 2 * y
        x[54321] = 0
        return x

    report = lt.check_adjoint(pair(forward, adjoint, n, n))
    assert "from x[54321] (worker 0) to y[54321] (worker 0): F has 2" in report.details
    # Of zeros, whole vectors and single elements 12; then of two halves, 17 times on either side.
    assert calls[0] == 12 + 2 * 17 + 2 * 17


# Exactness


def test_exact_dot_products_want_exact_numbers() -> None:
    wave = pair(lambda x: np.fft.fft(x, norm="ortho"), lambda y: np.fft.ifft(y, norm="ortho"), 3, 3,
                dtype=complex)  # fmt: skip
    with pytest.raises(UndecidableError, match=r"the forward function makes .* at y\[0\]"):
        lt.check_dot_exact(wave)
    with pytest.raises(UndecidableError, match=r"use check_adjoint"):
        lt.check_dot_exact(by(2.0**50 * np.eye(3)))
    with pytest.raises(UndecidableError, match=r"makes -?\d+ of whole numbers"):
        lt.check_dot_exact(by(2.0**9 * np.ones((2, 2), np.float16)))
    lt.assert_dot_exact(by(2.0**40 * np.eye(3)))
    # What a tolerance hides.
    almost = by(2.0**40 * np.eye(3), 2.0**40 * np.eye(3) + np.eye(3)[::-1] / 256)
    assert lt.check_adjoint(almost)
    with pytest.raises(UndecidableError):
        lt.check_dot_exact(almost)
    assert not lt.check_dot_exact(by(2.0**44 * np.eye(3), 2.0**44 * np.eye(3) + np.eye(3)[::-1]))


def test_nothing_passes() -> None:
    empty = Space([])
    for space in (empty, Space(Region("x", 0)), Space(Region("x", (3, 0)), complex)):
        op = linop.zero(space, Space(Region("y", 2, 1), space.dtype))
        for one in (op, op.H, linop.identity(space)):
            for backend in ("reference", "threads"):
                assert all(check_programs.checked(linop.backends.get(backend), one))
    lt.assert_adjoint(pair(lambda x: np.zeros(2), lambda y: None, None, 2))
    lt.assert_unitary(pair(np.copy, np.copy, 0, 0))
