"""Expressions are graphs: what occurs several times is one node, and no walk over one is recursive.

The model of a graph is its matrix, computed node by node.
"""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import example, given, settings
from hypothesis import strategies as st

import linop
from linop import LinearOperator
from linop.errors import ArgumentError
from linop.planning.lowering import lower_all
from linop.planning.plan import Apply
from linop.testing import code
from support.operators.graphs import (
    SPACE,
    Step,
    X,
    Y,
    counted,
    graphs,
    leaves,
    matrix_of,
    nodes_of,
    recurrence,
)
from support.operators.properties import backend_agrees

S = linop.copy(SPACE, X, Y)


@given(graphs())
def test_a_graph_is_its_matrix_forward_adjoint_and_in_stages(steps: list[Step]) -> None:
    op, matrix = nodes_of(steps, leaves([]))[-1], matrix_of(steps)
    assert (op.to_matrix().toarray() == matrix).all()
    assert (op.H.to_matrix().toarray() == matrix.T).all()
    x = SPACE.integers(1)
    for one, of in ((op, matrix), (op.H, matrix.T)):
        assert (SPACE.flatten(one(x)) == of @ SPACE.flatten(x)).all()
        assert (one.stages.to_matrix().toarray() == of).all()
        assert not any(one.stages.spread.carried)
        linop.verify_plans(one)
    assert (op.simplify().to_matrix().toarray() == matrix).all()


@given(graphs(most=6))
def test_plans_of_graphs_run(steps: list[Step]) -> None:
    backend_agrees(nodes_of(steps, leaves([]))[-1])


@given(graphs(kinds=("left", "sum", "difference", "adjoint")), st.booleans())
def test_copies_of_graphs_keep_what_is_shared(steps: list[Step], deep: bool) -> None:
    S, R = linop.copy(SPACE, X, Y), linop.add(SPACE, Y, X)
    nodes = nodes_of(steps, [S, R, S.H, R.H, linop.identity(SPACE)])
    op = nodes[-1] if not deep else recurrence(nodes[-1], 30)
    for dump in (pickle.dumps, pickle._dumps):  # type: ignore[attr-defined]
        again, first = pickle.loads(dump((op, nodes[0])))
        assert again.equals(op)
        assert first.equals(nodes[0])
        assert len(dump(again)) <= 1.1 * len(dump(op))
    assert copy.copy(op) is copy.deepcopy(op) is op
    text = code(op)
    assert eval(text, {"linop": linop, "numpy": np, "scipy": scipy}).equals(op)
    assert str(op.simplify())


@given(st.integers(2, 30), st.booleans())
def test_a_value_is_computed_once(steps: int, right: bool) -> None:
    """Forward and adjoint, in the reference and in plans."""
    calls: list[int] = []
    A = linop.direct_sum(counted(calls), linop.identity(linop.Space(Y)))
    op = recurrence(A, steps, right)
    for one in (op, op.H):
        calls.clear()
        one(SPACE.zeros())
        assert len(calls) == steps + 1
        plans = lower_all(one.stages)
        applied = [step for plan in plans for step in plan.steps if isinstance(step, Apply)]
        assert len(applied) == steps + 1
        most = max(len(movement.codomain) for movement in one.stages.movements)
        assert most <= 3 * len(SPACE)


@given(
    st.lists(st.sampled_from(["L", "S"]), min_size=1, max_size=3).filter(lambda F: "L" in F),
    st.sampled_from(["I", "L", "S", "before"]),
    st.booleans(),
)
@settings(deadline=None)
def test_each_step_costs_what_the_others_cost(factors: list[str], term: str, right: bool) -> None:
    """Regions of stages and steps of plans grow with the length of a recurrence, forward and
    adjoint, and no faster: u ← F u + T, or u F + T."""
    nodes = {"I": linop.identity(SPACE), "L": LOCAL, "S": S}
    F = functools.reduce(operator.matmul, (nodes[name] for name in factors))

    def costs(steps: int) -> tuple[int, int]:
        op = before = nodes["I"]
        for _ in range(steps):
            T = before if term == "before" else nodes[term]
            before, op = op, (op @ F if right else F @ op) + T
        kept = sum(len(m.codomain) for one in (op, op.H) for m in one.stages.movements)
        done = sum(len(p.steps) for one in (op, op.H) for p in lower_all(one.stages))
        return kept, done

    for few, many in zip(costs(12), costs(36), strict=True):
        assert many <= 1.2 * 3 * few


@given(st.integers(0, 2**32), st.integers(100, 200), st.booleans())
@settings(deadline=None)
def test_stages_list_what_they_read(seed: int, steps: int, blocks: bool) -> None:
    """However far back a graph reaches, and in blocks beside others."""
    draw = random.Random(seed)
    nodes = [linop.identity(SPACE), LOCAL]
    for _ in range(steps):
        a, b = nodes[-1], draw.choice(nodes)
        leaf = draw.choice([LOCAL, S, S.H])
        nodes.append(draw.choice([leaf @ a - b, leaf @ a + 2 * b, leaf @ b + a]))
    op = nodes[-1]
    if blocks:
        op = linop.direct_sum(op, linop.identity(linop.Space(linop.Region("p", 2))))
    for one in (op, op.H):
        assert max(one.stages.carried) > steps / 20
        listed = sum(len(m.domain) + len(m.codomain) for m in one.stages.movements)
        assert listed <= 12 * steps
        assert sum(len(plan.steps) for plan in lower_all(one.stages)) <= 30 * steps
    linop.verify_plans(op)


@given(st.integers(1, 12), st.booleans())
def test_movements_of_graphs_are_one_movement(steps: int, right: bool) -> None:
    op = recurrence(S + S.H, steps, right)
    assert op.stages.pure
    assert op.H.stages.pure
    assert op.equals(op.H)
    assert op.equals(recurrence(S + S.H, steps, not right))


def test_long_movements_are_taken_in_stages() -> None:
    """A power of a shift by one of many elements has ever more transfers."""
    x = linop.Region("x", 400)
    space = linop.Space(x)
    y = linop.Region("y", 400)
    there = linop.move(space, x, y)
    shift = (
        linop.operators.named_movement.out_of_place(there.codomain, space, [(y[:-1], x[1:])])
        @ there
    )
    op = recurrence(shift, 120)
    assert 1 < len(op.stages.movements) < 60
    assert op.movement() == op.stages.merged
    v = space.integers(3)
    given, wanted = space.flatten(op(v)), op.to_matrix() @ space.flatten(v)
    assert np.abs(given - wanted).max() <= 1e-12 * np.abs(wanted).max()  # beyond 2^53: rounded


def test_coefficients_do_not_outgrow_the_dtype_on_the_way() -> None:
    space = linop.Space(linop.Region("x", 2), np.float32)
    op, one = linop.identity(space), linop.identity(space)
    for _ in range(40):
        op = 100 * (op + op) - 200 * op + one
    assert (op.stages.to_matrix().toarray() == np.eye(2)).all()


MATRIX = linop.local_operators.matrix(np.array([[1.0, 2, 0], [0, 1, 0], [1, 0, -1]]), X, X)
LOCAL = linop.direct_sum(MATRIX, linop.identity(linop.Space(Y)))
DEEP: dict[str, Callable[[Any, LinearOperator], LinearOperator]] = {
    "recurrence": lambda k, op: S @ op - op,
    "local": lambda k, op: LOCAL @ op + S,
    "products": lambda k, op: op @ S,
    "products from the left": lambda k, op: S @ op,
    "sums": lambda k, op: op + S,
    "multiples": lambda k, op: 2 * (op + S),
    "transposes": lambda k, op: (S @ op + S).T,
    "steps": lambda k, op: linop.in_steps(S, op),
    "stacks": lambda k, op: linop.hstack(op) - S,
}


def used_in_every_way(op: LinearOperator, run: bool) -> None:
    assert len(str(op)) + len(repr(op)) + len(op._repr_latex_()) < 20_000
    assert op.H.H is op
    assert op.T.shape == op.shape
    again = pickle.loads(pickle.dumps(op))
    assert str(again) == str(op)
    assert copy.deepcopy(op) is op
    op.simplify()
    code(op)
    if run:
        op(op.domain.zeros())
        assert op.cost() is not None
        linop.verify_plans(op)


@pytest.mark.parametrize("kind", DEEP)
def test_no_depth_is_too_large(kind: str) -> None:
    """In a thread with a small stack, too."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            op = S
            for k in range(1500):
                op = DEEP[kind](k, op)
            used_in_every_way(op, run=False)
            op = S
            for k in range(200):
                op = DEEP[kind](k, op)
            used_in_every_way(op, run=True)
        except BaseException as error:
            errors.append(error)

    size = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    assert not errors, errors


def test_shared_products_and_sums_double() -> None:
    """A product of n shared products stands for 2^n factors, which nothing lists."""
    op = total = S
    for _ in range(64):
        op, total = op @ op, total + total
    for one in (op, total):
        assert len(str(one)) < 1000
        assert one.H.H is one
        pickle.loads(pickle.dumps(one))
    assert op.equals(S)
    assert total.equals(2**64 * S)
    assert (S ** (2**60)).equals(S)
    local = leaves([])[3]
    for _ in range(64):
        local = local @ local
    with pytest.raises(ArgumentError, match="stands for more than"):
        _ = local.stages
    assert len((LOCAL**20_000).stages.movements) == 20_001


def test_what_is_shared_on_both_sides_is_refused_in_seconds() -> None:
    """u ← A u + u B, of local maps: A and B do not commute, so that u is of as many terms as there
    are words of n letters."""
    A, B = LOCAL, LOCAL @ S
    op = linop.identity(SPACE)
    for _ in range(24):
        op = A @ op + op @ B
    with pytest.raises(ArgumentError, match="multiply the matrices of those that are shared"):
        _ = op.stages


def test_what_occurs_twice_is_printed_once() -> None:
    text = str(recurrence(S, 40))
    assert len(text.splitlines()[0]) < 40
    assert "where ⟨" in text
    assert len(text.splitlines()) < 12
    short = (S + S.H) @ (S + S.H)
    assert "⟨" not in str(short)


@given(st.sampled_from([np.complex64, np.complex128]), st.integers(1, 8))
def test_conjugates_are_shared(dtype: Any, steps: int) -> None:
    space = linop.Space(X, dtype)
    A = linop.local_operators.diagonal(np.array([1, 1j, 2 - 1j], dtype), space)
    op = recurrence(A, steps)
    assert op.conj().conj() is op
    assert (op.conj().to_matrix().toarray() == op.to_matrix().toarray().conj()).all()
    assert (op.T.to_matrix().toarray() == op.to_matrix().toarray().T).all()


NAMES = ("a", "b", "c", "a⟨0⟩", "a⟨1⟩", "b⟨1⟩")


@st.composite
def blocks(draw: st.DrawFn) -> LinearOperator:
    """A chain of moves, allocations and local operators, through regions of a few names."""
    at = linop.Region(draw(st.sampled_from(NAMES)), 2)
    op = linop.identity(linop.Space(at))
    for _ in range(draw(st.integers(1, 3))):
        to = linop.Region(draw(st.sampled_from([n for n in NAMES if n != at.name])), 2)
        if draw(st.booleans()):
            op = linop.move(op.codomain, at, to) @ op
        else:
            op = linop.local_operators.matrix(np.array([[1.0, 2], [0, 1]]), at, to) @ op
        at = to
    if draw(st.booleans()):
        more = linop.Region(draw(st.sampled_from([n for n in NAMES if n != at.name])), 3)
        op = linop.allocate(op.codomain, more) @ op
    return op


def crossing() -> list[LinearOperator]:
    """Blocks of which one waits with its argument, another with its result, of the same name."""
    x, y, more, p, q = (linop.Region(name, 2) for name in "xympq")
    there, back = (linop.move(linop.Space(one), one, to) for one, to in ((x, y), (y, x)))
    slow = linop.local_operators.matrix(np.array([[1.0, 2], [0, 1]]), p, q)
    return [linop.allocate(there.codomain, more) @ there, back, slow]


def swapped() -> list[LinearOperator]:
    """Blocks whose direct sum has the regions of its domain, in another order, as its codomain."""
    ends = [linop.Region(name, 2) for name in "ab"]
    table = np.array([[1.0, 2], [0, 1]])
    return [linop.local_operators.matrix(table, at, to) for at, to in (ends, ends[::-1])]


@given(st.lists(blocks(), min_size=2, max_size=3))
@example(crossing())
@example(swapped())
def test_blocks_may_have_any_names_inside(given: Sequence[LinearOperator]) -> None:
    """A direct sum, or a stack, that can be built has a matrix and plans."""
    matrices = [block.to_matrix("regions") for block in given]
    for join, wanted in (
        (linop.direct_sum, lambda: scipy.sparse.block_diag(matrices).toarray()),
        (linop.hstack, lambda: np.hstack([m.toarray() for m in matrices])),
        (linop.vstack, lambda: np.vstack([m.toarray() for m in matrices])),
    ):
        try:
            op = join(*given)
        except linop.errors.SpaceError:
            continue
        # Block after block: "global" is one order of both sides, where they have the same regions.
        assert (op.to_matrix("regions").toarray() == wanted()).all()
        linop.verify_plans(op)
        x = op.domain.integers(1)
        result = op.codomain.flatten(op(x), "regions")
        assert (result == wanted() @ op.domain.flatten(x, "regions")).all()
