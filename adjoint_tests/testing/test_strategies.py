"""The public strategies: what they draw is valid, small when shrunk, and prints as code."""

from __future__ import annotations

import functools
import importlib
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import scipy.sparse
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import linop
import linop.testing.factories.local
from linop import LinearOperator, Region, Space, Subset, TensorSpace, Vector
from linop.planning.lowering import lower, workers_of
from linop.planning.plan import Send
from linop.spaces.region import MEMORIES, as_subset
from linop.testing import code, strategies
from linop.testing.factories import describe, operators
from linop.testing.factories.real_linear import real_linear
from support.operators.catalogue import NAMES

IN_PYTHON = [name for name in NAMES if name not in ("of_pylops", "of_scipy_without_dtype")]
"""PyLops's operators, and SciPy's of functions, do not print as code."""
HERE = {"linop": linop, "numpy": numpy, "scipy": scipy, "functools": functools}
FOUND = settings(max_examples=2000, database=None, derandomize=True)


def made(text: str) -> object:
    """The value of a text of code."""
    return eval(text, dict(HERE))


def same(given: LinearOperator, wanted: LinearOperator) -> None:
    """Two operators are one, whatever made them. An operator in two places of another one is
    computed once, and code writes it out twice: these normal forms may differ, the maps do not."""
    assert given.stages.fingerprint == wanted.stages.fingerprint or given.equals(wanted)


@pytest.mark.parametrize("name", IN_PYTHON)
@given(data=st.data())
def test_operators_print_as_code_and_pickle(name: str, data: st.DataObject) -> None:
    op = data.draw(operators(name, 4))
    for one in (op, op.H, op.conj(), op.T, (op.H @ op) + 2 * (op.H @ op)):
        again = made(code(one))
        assert isinstance(again, LinearOperator)
        same(again, one)
        same(pickle.loads(pickle.dumps(one)), one)


@given(describe("real_parts", 4))
def test_compositions_over_the_reals_print_as_code(described: dict[str, Any]) -> None:
    """On complex spaces, as users compose them; not yet on rows of parts."""
    op = real_linear(**described)
    for one in (op, op.H, 2 * op, 1j * op, op + op, (op.H @ op) + 2 * (op.H @ op)):
        again = made(code(one))
        assert isinstance(again, LinearOperator)
        assert (again.domain, again.codomain) == (one.domain, one.codomain)
        same(again.over_reals(), one.over_reals())
        same(pickle.loads(pickle.dumps(one)).over_reals(), one.over_reals())


def test_code_of_an_operator_in_two_places() -> None:
    a, b = (Space(Region(name, 1)) for name in "ab")
    twice = linop.identity(b) @ linop.add(b, b["b"][0:0], b["b"][0:0])
    op = linop.direct_sum(linop.local_operators.diagonal(numpy.ones(1), a), twice @ twice)
    assert made(code(op)).stages.fingerprint != op.stages.fingerprint
    for one in (op, op.H, op + op):
        same(made(code(one)), one)
        same(pickle.loads(pickle.dumps(one)), one)


@pytest.mark.parametrize(
    "kind", [numpy.array, scipy.sparse.csr_array, scipy.sparse.csc_matrix, numpy.ndarray.tolist]
)
def test_what_an_array_holds_later_is_not_in_the_operator(kind: Callable[..., Any]) -> None:
    A = kind(numpy.array([[1.0, 2.0], [0.0, 3.0]]))
    kernel, index = numpy.array([1.0, 2.0]), [0, 1]
    x, y = Region("x", 2), Region("y", 1)
    ops = [
        linop.local_operators.matrix(A),
        linop.local_operators.convolution(kernel, x, y),
        linop.local_operators.diagonal(kernel),
        linop.local_operators.restriction(x, index),
    ]
    before = [op.to_matrix().toarray() for op in ops]
    kernel[0] = 9
    if isinstance(A, list):
        A[0][0] = 9
    else:
        A[0, 0] = 9
    index[:] = [1, 0]
    for op, wanted in zip(ops, before, strict=True):
        numpy.testing.assert_array_equal(op.to_matrix().toarray(), wanted)
        for again in (made(code(op)), pickle.loads(pickle.dumps(op))):
            assert isinstance(again, LinearOperator)
            numpy.testing.assert_array_equal(again.to_matrix().toarray(), wanted)


@given(data=st.data())
def test_spaces_and_what_is_in_them_print_as_code(data: st.DataObject) -> None:
    X = data.draw(strategies.spaces(memories=MEMORIES))
    Y = data.draw(strategies.tensors(memories=MEMORIES))
    drawn: list[object] = [
        X,
        Y,
        data.draw(strategies.regions(memories=MEMORIES)),
        data.draw(strategies.partitions()),
    ]
    for one in drawn:
        assert made(code(one)) == one, code(one)
    for part in (data.draw(strategies.parts(X)), data.draw(strategies.parts(Y))):
        again = made(code(part))
        assert isinstance(again, Region | Subset)
        assert as_subset(again) == part
    v = data.draw(strategies.vectors(X))
    vector = made(code(v))
    assert isinstance(vector, Vector)
    assert vector.space == X
    assert all((vector[name] == v[name]).all() for name in v.arrays)


@given(data=st.data())
def test_draws_fit_each_other(data: st.DataObject) -> None:
    """Parts and pairs are of their space, programs lead from it to itself."""
    X = data.draw(strategies.spaces(least=2, ndim=1))
    linop.clear(X, data.draw(strategies.parts(X)))
    linop.add(X, *data.draw(strategies.pairs(X)))
    op = data.draw(strategies.operators_on(X))
    assert op.domain == op.codomain == X
    ndim = data.draw(st.integers(1, 2))
    T = data.draw(strategies.tensors(shape=(12, 12)[:ndim], grid=(2, 1)[:ndim], uneven=False))
    linop.halo_exchange(T, **data.draw(strategies.kernels(ndim)))
    x, y = (data.draw(strategies.vectors(space)) for space in (op.domain, op.codomain))
    assert op(x).inner(y) == x.inner(op.H(y))


def test_a_vector_shrinks_to_zeros_and_a_space_to_one_region() -> None:
    X = Space([Region("x", (2, 1)), Region("y", 3)])
    v = find(strategies.vectors(X), lambda v: v["y"][1] != 0, settings=FOUND)
    assert v["x"].tolist() == [[0], [0]]
    assert v["y"].tolist() == [0, 1, 0]
    assert find(strategies.spaces(), lambda X: True, settings=FOUND) == Space(Region("x0", ()))
    T = find(strategies.tensors(), lambda T: len(T) > 1 and T.size > 1, settings=FOUND)
    assert isinstance(T, TensorSpace)
    assert len(T) == T.size == 2


def test_an_operator_shrinks_to_what_can_be_read() -> None:
    op = find(strategies.operators(), lambda op: op.cost().messages > 0, settings=FOUND)
    assert len(op.domain) + len(op.codomain) <= 4
    assert len(code(op)) < 250, code(op)
    program = find(
        strategies.operators(kinds=["random_movement"]),
        lambda op: abs(op.to_matrix()).max() > 1 if op.domain.size else False,
        settings=FOUND,
    )
    assert op.domain.size <= 4
    assert code(program).count("linop.add") <= 3, code(program)


def test_a_failing_example_prints_as_code() -> None:
    @settings(max_examples=200, database=None, derandomize=True, print_blob=False)
    @given(op=strategies.operators(kinds=["copy_out_of_place"]))
    def property_of(op: LinearOperator) -> None:
        assert op.domain.size == op.codomain.size

    with pytest.raises(AssertionError) as failed:
        property_of()
    (printed,) = [note for note in failed.value.__notes__ if "op=" in note]
    found = re.search(r"op=(linop\..*),\n", printed)
    assert found, printed
    op = made(found[1])
    assert isinstance(op, LinearOperator)
    assert op.domain.size == 0 or op.codomain.size - op.domain.size == 1


def test_functions_that_are_no_operators_say_their_names() -> None:
    x = Region("x", 2)
    op = linop.local(x, x, numpy.negative, numpy.negative)
    assert "numpy" in code(op) or "negative" in code(op)
    assert code(linop.local_operators.fft(Space(x, complex)).H).endswith(", dtype='complex128')).H")


def test_strategies_want_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "linop.testing.strategies")
    with pytest.raises(
        linop.errors.MissingExtraError, match=r"pip install 'linop-algebra\[testing"
    ):
        importlib.import_module("linop.testing.strategies")


@pytest.mark.slow
def test_half_of_the_operators_send_and_a_quarter_in_several_stages() -> None:
    sending: list[int] = []
    empty = []

    @settings(max_examples=400, database=None, derandomize=True, phases=[Phase.generate])
    @given(op=strategies.operators(workers=4))
    def look(op: LinearOperator) -> None:
        plans = [lower(op.stages, w) for w in workers_of(op.stages)]
        steps = [step for plan in plans for step in plan.steps]
        sending.append(len({step.stage for step in steps if isinstance(step, Send)}))
        empty.append(0 in op.shape)

    look()
    assert sum(n > 0 for n in sending) >= 0.5 * len(sending)
    assert sum(n > 1 for n in sending) >= 0.25 * len(sending)
    assert sum(empty) <= 0.2 * len(empty)


def test_an_operator_that_sends_shrinks_to_one_number() -> None:
    def sends(op: LinearOperator) -> bool:
        plans = [lower(op.stages, w) for w in workers_of(op.stages)]
        return any(isinstance(step, Send) for plan in plans for step in plan.steps)

    found = find(strategies.operators(workers=4), sends, settings=FOUND)
    assert max(found.shape) <= 2
    assert len(workers_of(found.stages)) == 2
