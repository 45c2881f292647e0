"""The emitter: the text of numbers, conditions and operations, and what it computes."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linop.backends.engine.arrays.interface import NUMPY
from linop.backends.engine.execution.emitter import Emitter
from linop.backends.engine.execution.instructions import (
    Add,
    Call,
    Copy,
    For,
    If,
    Operation,
    Set,
    Spin,
)
from linop.backends.engine.execution.numbers import (
    Arithmetic,
    Condition,
    Field,
    Item,
    Joined,
    Number,
    Variable,
)
from linop.backends.engine.execution.views import Buffer, View, cut, fixed, whole

N = Variable("n")


def run(*operations: Operation, **variables: Any) -> None:
    emitter = Emitter(NUMPY, np.dtype(float))
    emitter.function(variables, emitter.lines(operations))(**variables)


def value(number: Number, **variables: Any) -> int:
    found = [0]
    run(Set([Item(found, 0)], number), **variables)
    return found[0]


numbers = st.recursive(
    st.just(N),
    lambda inner: st.tuples(
        inner, st.sampled_from(["__add__", "__mul__", "__mod__"]), st.integers(1, 9) | inner
    ).map(lambda drawn: getattr(drawn[0], drawn[1])(drawn[2])),
    max_leaves=6,
)


@given(number=numbers, n=st.integers(1, 1000))
def test_numbers_are_computed_as_they_were_composed(number: Number, n: int) -> None:
    signs = {"+": operator.add, "*": operator.mul, "%": operator.mod}

    def of(one: Number | int) -> int:
        if isinstance(one, int | Variable):
            return n if isinstance(one, Variable) else one
        assert isinstance(one, Arithmetic)
        result: int = signs[one.sign](of(one.left), of(one.right))
        return result

    try:
        expected = of(number)
    except ZeroDivisionError:
        return
    assert value(number, n=n) == expected


def test_fields_and_items_are_set_together() -> None:
    counter = Condition(N, "==", 0)
    items = [1, 2]
    holder = type("Holder", (), {"number": 4})()
    run(Set([Variable("m"), Field(holder, "number"), Item(items, 1)], Field(holder, "number") + 3))
    assert (holder.number, items) == (7, [1, 7])
    run(If(counter, [Set([Item(items, 0)], 8)], [Set([Item(items, 0)], 9)]), n=0)
    assert items[0] == 8
    run(If(counter, [Set([Item(items, 0)], 8)], [Set([Item(items, 0)], 9)]), n=1)
    assert items[0] == 9


@pytest.mark.parametrize(("held", "calls"), [(True, 0), (False, 1)])
def test_a_spin_calls_only_where_its_condition_never_holds(held: bool, calls: int) -> None:
    made: list[str] = []
    come = Joined("and", [Condition(N, "==", 1), Condition(N, "<", 2)])
    run(Spin(3, come, Call(made.append, ["late"])), n=1 if held else 0)
    assert len(made) == calls


def test_pieces_are_copied_and_summed_in_a_loop() -> None:
    a, b, to = np.arange(6.0), np.ones(6), np.zeros(6)
    i, k = Variable("i"), Variable("k")
    seen: list[int] = []
    parts = [((slice(0, 2),), 1), ((slice(2, 6),), 2)]
    one, other, target = fixed(a).at(i), fixed(b).at(i), fixed(to).at(i)
    run(For([i, k], parts, [Add(target, one, other), Call(seen.append, [k])]))
    assert to.tolist() == (a + 1).tolist()
    assert seen == [1, 2]
    run(For([i, k], parts, [Copy(target, one)]))
    assert to.tolist() == a.tolist()


def test_buffers_that_a_run_chooses_cuts_or_sets() -> None:
    arrays = [np.zeros(4), np.zeros(4)]
    chosen = whole(Buffer((4,), choice=(arrays, N % 2)))
    run(Copy(chosen, fixed(np.arange(4.0))), n=3)
    assert [array.sum() for array in arrays] == [0, 6]
    flat = Buffer((4,))
    part = cut(whole(flat), 2, (2, 1))
    nested = cut(cut(whole(flat), 2, (2,)), 1, (1,))
    memory = np.zeros(4)
    run(
        Call(lambda: memory, (), [flat]),
        Copy(part, fixed(np.ones((2, 1)))),
        Copy(nested, fixed(np.full(1, 5.0))),
    )
    assert memory.tolist() == [0, 0, 1, 5]


def test_multiples_and_narrow_boxes() -> None:
    rows = np.zeros((300, 4))
    box = View(Buffer(rows.shape, rows), (300, 2), (slice(0, 300), slice(1, 3)))
    run(Copy(box, fixed(np.ones((300, 2)))))
    run(Copy(box, fixed(np.ones((300, 2))), 3.0, accumulate=True))
    assert rows.tolist() == [[0, 4, 4, 0]] * 300
