"""Every helper of the tests fails where it should, and so do the properties for users.

A check that cannot fail proves nothing. Faults are planted in results, in adjoints, and in linop's
own rules; each must be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, Phase, find, settings

import linop
from linop import LinearOperator, Partition, Region, Space, TensorSpace, Vector
from linop.errors import ArgumentError, ShapeError
from linop.normal_form.maps import LocalMap
from linop.normal_form.stages import Stages
from linop.operators import laws
from linop.operators.named_movement import NamedMovement
from support.operators import properties
from support.operators.catalogue import build, describe

x, y = Region("x", 3), Region("y", 3, 1)
X, XY = Space(x), Space([x, y])
ADD, COPY = linop.add(XY, x, y), linop.copy(XY, x, y)
SUM = linop.all_reduce(TensorSpace(3, Partition(2), axes=(linop.COPIES,)))


def fails(check: Callable[..., None], *args: Any) -> bool:
    """True if a check finds fault, in whatever words."""
    try:
        check(*args)
    except (AssertionError, linop.LinopError, ValueError):
        return True
    return False


def lying(op: LinearOperator, *, to: LinearOperator) -> LinearOperator:
    """A copy of an operator that says its adjoint is another."""
    liar = 1 * op
    liar._h = to
    to._h = liar
    return liar


# The helpers


@pytest.mark.parametrize(
    "given",
    [
        np.array([1.0, 2, 4]),  # one element
        np.array([1.0, 2, np.nan]),
        np.array([1.0, 2]),
        np.array([[1.0, 2, 3]]),
        np.array([1.0, 2, 3], np.float32),
        [1.0, 2, 3],
        np.array([1.0, 2, 3 + 1e-15]),
    ],
)
def test_same_arrays_fails(given: Any) -> None:
    assert fails(properties.same_arrays, given, np.array([1.0, 2, 3]))


def test_same_arrays_with_a_tolerance_fails_beyond_it() -> None:
    wanted = np.array([1.0, 2, 3])
    properties.same_arrays(wanted + 1e-9, wanted, 1e-8)
    assert fails(properties.same_arrays, wanted + 1e-7, wanted, 1e-8)
    assert fails(properties.same_arrays, np.array([1.0, 2, np.nan]), wanted, 1e-8)


def test_same_vectors_fails() -> None:
    v = XY.integers(0)
    w = v.copy()
    w["y"][1] += 1
    assert fails(properties.same_vectors, w, v)
    assert fails(properties.same_vectors, Vector(XY, {"x": v["x"]}), v)
    assert fails(properties.same_vectors, X.integers(0), v)
    properties.same_vectors(v.copy(), v)


def test_same_matrices_fails() -> None:
    one = scipy.sparse.eye_array(3).tocsr()
    off = one + scipy.sparse.csr_array(np.diag([1e-9, 0], k=1))
    assert fails(properties.same_matrices, off, one)
    assert fails(properties.same_matrices, one[:2], one)
    assert fails(properties.same_matrices, one.toarray(), one)
    properties.same_matrices(off, one, 1e-8)


def test_same_stages_fails() -> None:
    assert fails(properties.same_stages, ADD.stages, COPY.stages)
    mixed = linop.direct_sum(
        linop.local_operators.diagonal(np.ones(3), X), linop.identity(Space(y))
    )
    assert fails(properties.same_stages, mixed.stages, ADD.stages)
    properties.same_stages(mixed.stages, linop.identity(XY).stages)


@pytest.mark.parametrize(
    "adjoint",
    [
        linop.add(XY, x, y),  # not transposed
        linop.add(XY, y[:2], x[:2]),  # an element is missing
        2 * linop.add(XY, y, x),
        linop.identity(XY),
        linop.deallocate(XY, y),  # other spaces
    ],
)
def test_two_roads_fails(adjoint: LinearOperator) -> None:
    assert fails(properties.two_roads, lying(ADD, to=adjoint))
    properties.two_roads(lying(ADD, to=linop.add(XY, y, x)))


def test_two_roads_wants_the_adjoint_of_the_adjoint_itself() -> None:
    op = 1 * ADD
    op._h = 1 * linop.add(XY, y, x)
    assert fails(properties.two_roads, op)


def test_known_is_composed_fails() -> None:
    pair = linop.shift(TensorSpace(4, Partition(2)), 1)
    same = NamedMovement("A", "", pair.movement(), lambda: pair)
    properties.known_is_composed(same @ pair)
    for wrong in (2 * pair, linop.identity(pair.domain)):
        lie = NamedMovement("A", "", pair.movement(), lambda wrong=wrong: wrong)  # type: ignore[misc]
        for op in (lie, lie @ pair, 2 * lie + pair, lie.H, linop.direct_sum(lie)):
            assert fails(properties.known_is_composed, op)


def test_untouched_fails() -> None:
    v = X.integers(0)

    def writes(w: Vector) -> Vector:
        w["x"][0] += 1
        return X.zeros()

    assert fails(properties.untouched, writes, v)
    assert fails(properties.untouched, lambda w: w, v)
    assert fails(properties.untouched, lambda w: X.vector(w["x"][::-1]), v)
    shared = np.zeros(3)
    assert fails(properties.untouched, lambda w: Vector(XY, {"x": shared, "y": shared}), v)


class Misapplied(LinearOperator):
    """An add that is applied as a copy: a wrong reference rule with a right normal form."""

    def _interpret(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return COPY._interpret(arrays)

    def _adjoint(self) -> LinearOperator:
        return ADD.H

    def _stages(self) -> Stages:
        return ADD.stages

    def symbol(self, latex: bool = False) -> str:
        return "S_{x→y"  # and a bracket too few


def test_interpretation_and_backend_agrees_fail() -> None:
    wrong = Misapplied(XY, XY)
    assert fails(properties.interpretation, wrong)
    assert fails(properties.backend_agrees, wrong)
    for op in (ADD, COPY, SUM):
        properties.interpretation(op)
        properties.backend_agrees(op)
        properties.backend_agrees(op, "reference")


def test_dot_products_fails() -> None:
    """If forward and adjoint drop the same element it passes: it is never the only check."""
    v, w = XY.vector({"x": [1, 2, 3], "y": [4, 5, 6]}), XY.vector({"x": [7, 8, 9], "y": [1, 2, 4]})
    assert fails(properties.dot_products, ADD(v), w, v, ADD(w))
    part = linop.add(XY, x[:2], y[:2])
    properties.dot_products(part(v), w, v, part.H(w))
    assert fails(properties.dot_products, ADD(v), w, v, part.H(w))


def test_whole_vector_fails() -> None:
    space = Space([Region("r", 2, (0, 1)), y])
    r, one = np.ones(2), np.ones(3)
    good = [{"r": r}, {"r": r.copy(), "y": one}]
    properties.whole_vector(space, good)
    assert fails(properties.whole_vector, space, [{"r": r}, {"r": 2 * r, "y": one}])
    assert fails(properties.whole_vector, space, [{"r": r, "y": one}, good[1]])


def test_plans_fit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    properties.plans_fit(SUM)
    plans = properties.plans_of(SUM)
    assert [plan.worker for plan in plans] == [0, 1]
    silent = [replace(plans[0], steps=()), plans[1]]
    monkeypatch.setattr(properties, "plans_of", lambda op: silent)
    assert fails(properties.plans_fit, SUM)
    # Plans that fit, but are those of something cheaper.
    monkeypatch.setattr(properties, "plans_of", lambda op: [])
    assert fails(properties.plans_fit, SUM)


def test_simplifies_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    properties.simplifies(ADD)
    for wrong in (COPY, linop.deallocate(XY, y)):
        monkeypatch.setattr(LinearOperator, "simplify", lambda self, wrong=wrong: wrong)
        assert fails(properties.simplifies, ADD)


def test_conjugates_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    op = linop.local_operators.diagonal(np.array([1j, 2]))
    properties.conjugates(op)
    monkeypatch.setattr(LinearOperator, "conj", lambda self: self)
    assert fails(properties.conjugates, op)


def test_prints_fails() -> None:
    properties.prints(ADD)
    assert fails(properties.prints, Misapplied(XY, XY))


def test_stays_exact_knows_what_a_dtype_holds() -> None:
    def scaled(scalar: int, dtype: Any) -> LinearOperator:
        return scalar * linop.identity(Space(x, dtype))

    assert properties.stays_exact(scaled(100, np.float16))
    assert not properties.stays_exact(scaled(200, np.float16))
    assert properties.stays_exact(scaled(900_000, np.float32))
    assert not properties.stays_exact(scaled(1_000_000, np.float32))
    assert properties.stays_exact(scaled(2**28, np.int32))  # modulo 2^32


# Faults planted in linop are found by the generic tests

Patch = tuple[Any, str, Callable[[Any], Any]]


def _patched(where: str, name: str, wrong: Callable[[Any], Any]) -> Patch:
    module, _, kind = where.partition(":")
    owner = __import__(f"linop.{module}", fromlist=["_"])
    return (getattr(owner, kind) if kind else owner), name, wrong


def _dropping_the_last(run: Any) -> Any:
    return lambda *args: {worker: steps[:-1] for worker, steps in run(*args).items()}


def _unreversed(self: Any) -> LinearOperator:
    from linop.operators.expressions import Composition

    return Composition([factor.H for factor in self.factors])


def _unconjugated(self: Any) -> LinearOperator:
    from linop.operators.expressions import Scaled

    return Scaled(self.scalar, self.operand.H)


def _untransposed(self: Any) -> LocalMap:
    known = self.matrix
    return LocalMap(self.codomain, self.domain, self.backward, self.forward, "*", lambda: known().T)


def _overwriting(self: Any, arrays: Any, dtype: Any) -> None:
    target = arrays[self.target.region.name]
    target[self.target.index] = arrays[self.source.region.name][self.source.index]


def _without_coefficients(bind: Any) -> Any:
    return lambda self, stage, put, *args: bind(self, stage, replace(put, coefficient=1), *args)


def _without_sums(bind: Any) -> Any:
    return lambda self, stage, put, *args: bind(self, stage, replace(put, accumulate=False), *args)


def _without_its_last_row(made: Any) -> Any:
    def shorter(*args: Any) -> Any:
        factor = made(*args)
        return replace(factor, table=factor.table.take(slice(0, -1)))

    return shorter


def _halved(run: Any) -> Any:
    def scaled(self: Any, scalar: Any) -> Any:
        return run(self, scalar if abs(scalar) < 2 else scalar / 2)

    return scaled


FAULTS: dict[str, tuple[str, str, Callable[[Any], Any], str, Callable[..., None]]] = {
    "the adjoint of an add is itself": (
        "normal_form.primitives:Add", "adjoint", lambda _: property(lambda self: self), "add",
        properties.two_roads,
    ),
    "the adjoint of a product keeps its order": (
        "operators.expressions:Composition", "_adjoint", lambda _: _unreversed, "copy_in_place",
        properties.two_roads,
    ),
    "the adjoint of a multiple is not conjugated": (
        "operators.expressions:Scaled", "_adjoint", lambda _: _unconjugated, "scaled",
        properties.two_roads,
    ),
    "the adjoint of a movement is itself": (
        "normal_form.movement:Movement", "adjoint", lambda _: lambda self: self, "add",
        properties.two_roads,
    ),
    "the matrix of an adjoint local map is not conjugated": (
        "normal_form.stages:LocalMap", "adjoint", lambda _: property(_untransposed), "dense_matrix",
        properties.two_roads,
    ),
    "a relation loses its last pair": (
        "normal_form.matching", "_relation", _without_its_last_row, "halo_exchange",
        properties.known_is_composed,
    ),
    "an add overwrites": (
        "normal_form.primitives:Add", "interpret", lambda _: _overwriting, "add",
        properties.interpretation,
    ),
    "a clear does nothing": (
        "normal_form.primitives:Clear", "interpret", lambda _: lambda *_: None, "clear",
        properties.interpretation,
    ),
    "a normal form loses a factor of 2": (
        "normal_form.movement:Movement", "scale", _halved, "scaled", properties.interpretation,
    ),
    "laws erase too much": (
        "operators.laws", "_lost", lambda _: lambda after, before: laws.LATER, "random_movement",
        properties.simplifies,
    ),
    "a backend ignores coefficients": (
        "backends.engine.execution.program:Program", "_copy", _without_coefficients, "scaled",
        properties.backend_agrees,
    ),
    "a backend overwrites instead of adding": (
        "backends.engine.execution.program:Program", "_copy", _without_sums, "sum_reduce",
        properties.backend_agrees,
    ),
    "a worker's last step is lost": (
        "planning.lowering", "_movement_steps", _dropping_the_last, "send_recv",
        properties.plans_fit,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, wrong, name, check = FAULTS[fault]
    owner, attribute, wrong = _patched(where, attribute, wrong)
    healthy = describe(name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, wrong(getattr(owner, attribute)))
        if owner is laws:
            patch.setattr(laws, "LAWS", dict.fromkeys(laws.LAWS, laws._lost))
        smallest = find(
            healthy,
            lambda description: fails(check, build(name, description)),
            settings=settings(
                max_examples=400,
                database=None,
                derandomize=True,
                deadline=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            ),
        )
    # It was the fault, and nothing else.
    check(build(name, smallest))


# The properties for users


def test_check_adjoint_finds_wrong_adjoints() -> None:
    good = linop.testing.check_adjoint(ADD)
    assert good
    assert good.passed
    assert str(good).startswith("dot-product test on reference passed for <6x6 Primitive")
    for wrong in (ADD, 2 * ADD.H, linop.identity(XY), linop.add(XY, y[:2], x[:2])):
        report = linop.testing.check_adjoint(ADD, adjoint=wrong)
        assert not report
        assert report.error > report.tolerance
        assert "FAILED" in str(report)
        assert "seed=" in str(report)
        threads = linop.testing.check_adjoint(ADD, "threads", adjoint=wrong)
        assert not threads
        with pytest.raises(AssertionError, match="dot-product test on threads FAILED"):
            linop.testing.assert_adjoint(ADD, "threads", adjoint=wrong)
    linop.testing.assert_adjoint(ADD, "threads")


def test_check_adjoint_is_exact_on_integers() -> None:
    space = Space([x, y], np.int64)
    op, wrong = linop.add(space, x, y), linop.add(space, y[:2], x[:2])
    assert linop.testing.check_adjoint(op).tolerance == 0
    assert not linop.testing.check_adjoint(op, adjoint=wrong)


def test_check_adjoint_finds_a_wrong_pair_of_functions() -> None:
    def double(v: np.ndarray) -> np.ndarray:
        return 2 * v

    def triple(v: np.ndarray) -> np.ndarray:
        return 3 * v

    def spoiled(v: np.ndarray) -> np.ndarray:
        return v * np.nan

    for backward in (triple, spoiled, np.zeros_like):
        op = linop.local(x, x, double, backward)
        assert not linop.testing.check_adjoint(op)
        assert not linop.testing.check_exact(op)
    assert linop.testing.check_exact(linop.local(x, x, double, double))


def test_check_exact_finds_wrong_adjoints() -> None:
    assert linop.testing.check_exact(ADD)
    linop.testing.assert_exact(ADD)
    for wrong in (ADD, 2 * ADD.H, linop.identity(XY), linop.add(XY, y[:2], x[:2])):
        report = linop.testing.check_exact(ADD, wrong)
        assert not report
        assert "worst:     row" in str(report)
        with pytest.raises(AssertionError, match="exact adjoint on reference FAILED"):
            linop.testing.assert_exact(ADD, wrong)
    spaces = linop.testing.check_exact(ADD, linop.deallocate(XY, y))
    assert not spaces
    assert "spaces differ" in str(spaces)


def test_check_exact_wants_movement_exact() -> None:
    """Half an ulp is a fault in movement, and rounding in a product."""
    close = (1 + 2**-52) * ADD.H
    assert not linop.testing.check_exact(ADD, close)
    W = np.linspace(0, 1, 6).reshape(2, 3) / 3
    op = linop.local_operators.matrix(W)
    near = linop.local_operators.matrix(W.T * (1 + 2**-52), op.codomain, op.domain)
    assert linop.testing.check_exact(op, near)
    far = linop.local_operators.matrix(W.T * (1 + 1e-9), op.codomain, op.domain)
    assert not linop.testing.check_exact(op, far)


def test_the_checks_want_operators() -> None:
    for check in (linop.testing.check_adjoint, linop.testing.check_exact):
        with pytest.raises(ArgumentError, match="expected an operator, given 3"):
            check(3)
    # A local function of the wrong shape is told, not compared.
    op = linop.local(x, x, lambda v: v[:2], lambda v: v)
    with pytest.raises(ShapeError, match="local operator L returned"):
        linop.testing.check_adjoint(op)
