"""The generic tests, over the whole catalogue: three ways to one result.

The rules of the expression, the transposition of its normal form, and its literal interpretation
are independent of each other; plans on threads are a fourth.
"""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import linop
from linop import LinearOperator
from linop.testing.describing import Description, seeds
from support.operators.catalogue import FACTORIES, NAMES, build, describe
from support.operators.properties import (
    backend_agrees,
    conjugates,
    interpretation,
    known_is_composed,
    plans_fit,
    prints,
    rounding,
    simplifies,
    stays_exact,
    two_roads,
)

pytestmark = pytest.mark.filterwarnings("error")

each = pytest.mark.parametrize("name", NAMES)


def drawn(data: st.DataObject, name: str) -> tuple[LinearOperator, Description, float]:
    """An operator, its description, and the tolerance with which it is compared."""
    description = data.draw(describe(name), label=name)
    op = build(name, description)
    assume(stays_exact(op))
    return op, description, 0.0 if FACTORIES[name].exact else rounding(op)


@each
@given(data=st.data())
def test_rules_and_transposition_agree(name: str, data: st.DataObject) -> None:
    """What can be said of an operator without running it."""
    op, description, tolerance = drawn(data, name)
    known_is_composed(op, tolerance)
    two_roads(op, tolerance)
    conjugates(op, tolerance)
    simplifies(op, tolerance)
    simplifies(op.H, tolerance)
    prints(op)
    # Whoever builds it from the same description builds the same operator.
    again = build(name, description)
    assert again.stages.fingerprint == op.stages.fingerprint
    if FACTORIES[name].pure:
        assert op.H.movement() == op.movement().adjoint()
        assert op.equals(again)


@each
@given(data=st.data(), seed=seeds)
def test_interpretation_matrix_and_threads_agree(name: str, data: st.DataObject, seed: int) -> None:
    op, _, tolerance = drawn(data, name)
    interpretation(op, seed, tolerance)
    plans_fit(op)
    backend_agrees(op, "threads", seed, tolerance)


@each
@settings(max_examples=max(1, settings().max_examples // 2))
@given(data=st.data(), seed=seeds)
def test_the_checks_for_users_pass(name: str, data: st.DataObject, seed: int) -> None:
    op, _, _ = drawn(data, name)
    report = linop.testing.check_adjoint(op, seed=seed, trials=1)
    assert report, str(report)
    if max(op.shape) <= 40:  # it applies the operator to every unit vector
        report = linop.testing.check_exact(op)
        assert report, str(report)
