"""The generic tests, over the whole catalogue: three ways to one result.

The rules of the expression, the transposition of its normal form, and its literal interpretation
are independent of each other; plans on threads are a fourth.
"""

import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import linop
from linop import LinearOperator
from linop.testing.describing import Description, seeds
from support.operators import catalogue
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
    """Properties of an operator that need no run."""
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
@given(data=st.data(), seed=seeds)
def test_the_checks_for_users_pass(name: str, data: st.DataObject, seed: int) -> None:
    op, _, _ = drawn(data, name)
    report = linop.testing.check_adjoint(op, seed=seed, trials=1)
    assert report, str(report)
    if max(op.shape) <= 40:  # it applies the operator to every unit vector
        report = linop.testing.check_exact(op)
        assert report, str(report)


# The catalogue itself


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_descriptions_are_plain_data(name: str, data: st.DataObject) -> None:
    """Another process builds the same operator from what is sent to it."""
    workers = data.draw(st.sampled_from([2, 4, 8]))
    description = data.draw(describe(name, workers))
    sent = pickle.loads(pickle.dumps(description))
    assert sent == description
    op, other = build(name, description), build(name, sent)
    assert max([*op.domain.workers, *op.codomain.workers], default=0) < workers
    assert op.domain.regions == other.domain.regions
    assert op.codomain.regions == other.codomain.regions
    assert op.stages.fingerprint == other.stages.fingerprint
    if FACTORIES[name].pure:
        assert op.stages.pure


def test_two_factories_of_one_name_are_refused() -> None:
    def identity() -> LinearOperator:
        raise AssertionError("never called")

    with pytest.raises(ValueError, match="two factories are called identity"):
        catalogue.operator_factory(lambda workers: st.none())(identity)


EXPECTED = (
    "allocate deallocate clear add copy_in_place copy_out_of_place move_in_place move_out_of_place "
    "identity zero scaled power sum_of_operators direct_sum hstack vstack "
    "send_recv scatter gather broadcast sum_reduce all_reduce all_gather reduce_scatter all_to_all "
    "repartition halo_exchange shift ring_all_reduce block block_diag kron stencil "
    "dense_matrix sparse_matrix diagonal convolution fft restriction of_scipy of_pylops "
    "distributed_fft spectral_convolution spectral_convolution_of_real real_parts "
    "distributed_rfft time_loop dispatch combine"
).split()


def test_every_operator_is_in_the_catalogue() -> None:
    assert set(EXPECTED) <= set(NAMES)
    # Whatever is public and makes operators has a factory that calls it.
    made = {"matrix", "from_scipy", "local", "copy", "move"}
    made |= {"real", "imag", "conj", "rfft", "irfft", "repeat", "timeloop"}  # under other names
    building = {
        name
        for name in linop.__all__
        if callable(getattr(linop, name))
        and getattr(getattr(linop, name), "__annotations__", {}).get("return") == "LinearOperator"
    }
    assert building - made <= set(NAMES), "a new operator needs a factory in catalogue.py"
