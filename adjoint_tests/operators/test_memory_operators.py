"""The memory operators: their matrices, adjoints, laws and notation (paper, section 2, appendix A).

The matrices are written down here as the paper prints them, block by block; the laws are those of
`linop.operators.laws`. That operators on random subsets are right, `test_catalogue` says.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.normal_form.primitives import Add, Allocate, Clear, Deallocate
from linop.operators.memory import allocate, clear, copy, deallocate, move
from linop.testing.describing import (
    COMPUTED,
    Description,
    box_in,
    boxes,
    holders,
    pairs,
    part_of,
    seeds,
    shapes,
    space_of,
    spaces,
)
from support.operators.catalogue import build, describe
from support.operators.properties import same_arrays, same_vectors, untouched

a, b = Region("a", 2), Region("b", 2, 1)
ALONE, BOTH = Space(a), Space([a, b])
I2, O2 = np.eye(2), np.zeros((2, 2))


def factors(op: LinearOperator) -> list[type]:
    """The primitives that an operator is composed of, as it is written: the first one is last."""
    return [type(action) for step in op._flattened() for action in step.actions][::-1]  # type: ignore[attr-defined]


def steps(op: LinearOperator) -> int:
    """How many primitives, and other operators, are applied one after the other."""
    return sum(len(getattr(step, "actions", (step,))) for step in op._flattened())


MATRICES = {
    "allocate": (allocate(ALONE, b), [[I2], [O2]]),
    "deallocate": (deallocate(BOTH, b), [[I2, O2]]),
    "clear": (clear(BOTH, b), [[I2, O2], [O2, O2]]),
    "add": (linop.add(BOTH, a, b), [[I2, O2], [I2, I2]]),
    "adjoint add": (linop.add(BOTH, a, b).H, [[I2, I2], [O2, I2]]),
    "copy in place": (copy(BOTH, a, b), [[I2, O2], [I2, O2]]),
    "copy out of place": (copy(ALONE, a, b), [[I2], [I2]]),
    "adjoint copy": (copy(BOTH, a, b).H, [[I2, I2], [O2, O2]]),
    "move in place": (move(BOTH, a, b), [[O2, O2], [I2, O2]]),
    "move out of place": (move(ALONE, a, b), [[I2]]),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_the_papers(name: str) -> None:
    op, blocks = MATRICES[name]
    same_arrays(op.to_matrix().toarray(), np.block(blocks))
    assert (op.movement().to_matrix().toarray() == np.block(blocks)).all()


PRINTED = {
    "allocate": (allocate(ALONE, b), "A_b", "$A_b$", "D_b"),
    "deallocate": (deallocate(BOTH, b), "D_b", "$D_b$", "A_b"),
    "clear": (clear(BOTH, b), "K_b", "$K_b$", "K_b"),
    "add": (linop.add(BOTH, a, b), "S_{a→b}", r"$S_{a \to b}$", "S_{b→a}"),
    "copy in place": (copy(BOTH, a, b), "S_{a→b} K_b", r"$S_{a \to b} K_b$", "K_b S_{b→a}"),
    "copy out": (copy(ALONE, a, b), "S_{a→b} A_b", r"$S_{a \to b} A_b$", "D_b S_{b→a}"),
    "move in place": (
        move(BOTH, a, b),
        "K_a S_{a→b} K_b",
        r"$K_a S_{a \to b} K_b$",
        "K_b S_{b→a} K_a",
    ),
    "move out": (move(ALONE, a, b), "D_a S_{a→b} A_b", r"$D_a S_{a \to b} A_b$", "D_b S_{b→a} A_a"),
    "a subset": (clear(BOTH, a[:1]), "K_{a[0:1]}", "$K_{a[0:1]}$", "K_{a[0:1]}"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_operators_print_as_the_papers_mathematics(name: str) -> None:
    op, text, latex, adjoint = PRINTED[name]
    assert str(op) == text
    assert op._repr_latex_() == latex
    assert str(op.H) == adjoint
    m, n = op.shape
    assert repr(op).startswith(f"<{m}x{n} ")
    assert repr(op).endswith(f"with dtype=float64: {text}>")


def test_names_with_underscores_are_escaped_in_latex() -> None:
    long = Region("x_1", 2)
    assert str(allocate(ALONE, long)) == "A_{x_1}"
    assert allocate(ALONE, long)._repr_latex_() == r"$A_{x\_1}$"


def test_copies_and_moves_are_compositions() -> None:
    assert factors(copy(BOTH, a, b)) == [Add, Clear]
    assert factors(copy(ALONE, a, b)) == [Add, Allocate]
    assert factors(move(BOTH, a, b)) == [Clear, Add, Clear]
    assert factors(move(ALONE, a, b)) == [Deallocate, Add, Allocate]


@given(spaces(8, COMPUTED, least=2), st.data())
def test_adjoint_laws_in_place(described: Description, data: st.DataObject) -> None:
    """K* = K, S_{a→b}* = S_{b→a}, C* = K_b S_{b→a}, M_{a→b}* = M_{b→a}."""
    space = space_of(described)
    x, y = (part_of(space, part) for part in data.draw(pairs(described)))
    assert clear(space, x).H.equals(clear(space, x))
    assert linop.add(space, x, y).H.equals(linop.add(space, y, x))
    assert copy(space, x, y).H.equals(clear(space, y) @ linop.add(space, y, x))
    assert move(space, x, y).H.equals(move(space, y, x))
    assert str(move(space, x, y).H) == str(move(space, y, x))


@given(spaces(8, COMPUTED), shapes(2, 3), holders(8))
def test_adjoint_laws_out_of_place(
    described: Description, shape: tuple[int, ...], to: tuple[int, ...]
) -> None:
    """A* = D, C* = D_b S_{b→a}, M* = D_b S_{b→a} A_a."""
    space = space_of(described)
    first = space.regions[0]
    new, same = Region("new", shape, to), Region("same", first.shape, to)
    bring = allocate(space, new)
    assert bring.H.equals(deallocate(bring.codomain, new))
    assert bring.codomain == Space([*space, new], space.dtype)
    copied = copy(space, first, same)
    assert copied.H.equals(
        deallocate(copied.codomain, same) @ linop.add(copied.codomain, same, first)
    )
    moved = move(space, first, same)
    assert first not in moved.codomain
    assert moved.H.equals(move(moved.codomain, same, first))
    assert (moved.H @ moved).equals(linop.identity(space))
    assert (moved @ moved.H).equals(linop.identity(moved.codomain))


@given(spaces(8, COMPUTED, least=2), st.data(), seeds)
def test_what_they_do_to_arrays(described: Description, data: st.DataObject, seed: int) -> None:
    """Against NumPy's assignments, on any subsets."""
    space = space_of(described)
    x, y = (part_of(space, part) for part in data.draw(pairs(described)))
    v = space.integers(seed)
    here, there = (x.region.name, (*x.slices, ...)), (y.region.name, (*y.slices, ...))

    def changed(**new: np.ndarray | int) -> linop.Vector:
        w = v.copy()
        for (name, index), value in zip((here, there), (new.get("x"), new.get("y")), strict=True):
            if value is not None:
                w[name][index] = value
        return w

    at_x, at_y = v[here[0]][here[1]].copy(), v[there[0]][there[1]].copy()
    same_vectors(untouched(clear(space, x), v), changed(x=0))
    same_vectors(untouched(linop.add(space, x, y), v), changed(y=at_x + at_y))
    same_vectors(untouched(copy(space, x, y), v), changed(y=at_x))
    same_vectors(untouched(move(space, x, y), v), changed(y=at_x, x=0))


@given(spaces(8, COMPUTED), st.data(), seeds)
def test_what_they_do_out_of_place(described: Description, data: st.DataObject, seed: int) -> None:
    space = space_of(described)
    region = space.regions[0]
    part = box_in(region, data.draw(boxes(region.shape)))
    new = Region("new", part.shape, data.draw(holders(8)))
    v = space.integers(seed)
    copied = copy(space, part, new)(v)
    same_arrays(copied["new"], v[region.name][(*part.slices, ...)])
    same_arrays(copied[region.name], v[region.name])
    whole = Region("all", region.shape, data.draw(holders(8)))
    moved = move(space, region, whole)(v)
    assert region.name not in moved
    same_arrays(moved["all"], v[region.name])


def test_several_regions_at_once() -> None:
    c = Region("c", (2, 2), 2)
    bring = allocate(ALONE, b, c)
    assert str(bring) == "A_{b,c}"
    assert bring.codomain == Space([a, b, c])
    drop = deallocate(bring.codomain, b, c)
    assert drop.codomain == ALONE
    assert (drop @ bring).equals(linop.identity(ALONE))
    v = bring.codomain.integers(0)
    same_vectors(
        (drop.H @ drop)(v),
        bring.codomain.vector({**drop(v).arrays, "b": [0, 0], "c": np.zeros((2, 2))}),
    )
    many = [Region(f"r{k}", 1) for k in range(9)]
    assert str(allocate(ALONE, *many)) == "A_{r0,…,r8}"


def test_copies_into_part_of_a_new_region_leave_the_rest_zero() -> None:
    wide = Region("w", 4, 1)
    op = copy(ALONE, a, wide[1:3])
    same_arrays(op(np.array([5.0, 6.0]))["w"], np.array([0.0, 5, 6, 0]))
    assert str(op) == "S_{a→w[1:3]} A_w"


def test_the_same_region_can_be_source_and_target() -> None:
    x = Region("x", 4)
    op = move(Space(x), x[:2], x[2:])
    same_arrays(op(np.array([1.0, 2, 3, 4])), np.array([0.0, 0, 1, 2]))
    same_arrays(op.H(np.array([1.0, 2, 3, 4])), np.array([3.0, 4, 0, 0]))


# simplify()


def simplified(op: LinearOperator) -> str:
    """The text of the simplified operator, which must be equal to it."""
    simple = op.simplify()
    assert simple.equals(op)
    assert simple.domain.regions == op.domain.regions
    assert simple.codomain.regions == op.codomain.regions
    return str(simple)


C, M, K, S = copy(BOTH, a, b), move(BOTH, a, b), clear(BOTH, b), linop.add(BOTH, a, b)
A, COPY, MOVE = allocate(ALONE, b), copy(ALONE, a, b), move(ALONE, a, b)

LAWS = {
    "K K = K": (K @ K, "K_b"),
    "K_b K_{b'} = K_b, b' in b": (K @ clear(BOTH, b[:1]), "K_b"),
    "K_{b'} K_b = K_b, b' in b": (clear(BOTH, b[:1]) @ K, "K_b"),
    "K of all parts": (clear(BOTH, b[:1]) @ clear(BOTH, b[1:]), "K_{b[0:1]} K_{b[1:2]}"),
    "A* A = I": (A.H @ A, "I"),
    "A A* = K": (A @ A.H, "K_b"),
    "D S = D": (A.H @ S, "D_b"),
    "D K = D": (A.H @ K, "D_b"),
    "K S = K": (K @ S, "K_b"),
    "K A = A": (clear(A.codomain, b) @ A, "A_b"),
    "S_{b→a} A_b = A_b": (linop.add(A.codomain, b, a) @ A, "A_b"),
    "S_{b→a} K_b = K_b": (linop.add(BOTH, b, a) @ K, "K_b"),
    "C C = C": (C @ C, "S_{a→b} K_b"),
    "M* M = I, out of place": (MOVE.H @ MOVE, "I"),
    "M M* = I, out of place": (MOVE @ MOVE.H, "I"),
    "M* M = K_b, in place": (M.H @ M, "K_b"),
    "M M* = K_a, in place": (M @ M.H, "K_a"),
    "I I": (linop.identity(BOTH) @ linop.identity(BOTH), "I"),
    "S stays": (S @ S, "S_{a→b} S_{a→b}"),
    "O": (S @ linop.zero(BOTH, BOTH) @ K, "O"),
    "scalars to the front": ((2 * S) @ (3 * K), "6 S_{a→b} K_b"),
    "1": (1 * S, "S_{a→b}"),
    "0": (0 * S, "O"),
    "sum with O": (S + 0 * K, "S_{a→b}"),
}


@pytest.mark.parametrize("law", LAWS)
def test_laws(law: str) -> None:
    op, text = LAWS[law]
    assert simplified(op) == text


def test_an_operator_without_a_law_is_left_as_it_is() -> None:
    for op in (S, S @ S, C, M, linop.identity(BOTH), 2 * S, S + K):
        assert op.simplify() is op


def test_nothing_is_left_to_simplify_in_zero_between_regions_in_another_order() -> None:
    swapped = allocate(deallocate(BOTH, a).codomain, a) @ deallocate(BOTH, a)
    assert simplified(0 * swapped) == "O"
    assert simplified((0 * swapped).H) == "O"


def test_actions_on_other_regions_commute_out_of_the_way() -> None:
    """K_b … K_b = K_b, whatever happens to regions that are not b in between."""
    c, d = Region("c", 2, 2), Region("d", 2, 3)
    space = Space([a, b, c, d])
    between = linop.add(space, c, d) @ clear(space, a)
    op = clear(space, b) @ between @ clear(space, b)
    assert simplified(op) == "S_{c→d} K_a K_b"
    bring = allocate(ALONE, b, c)
    op = bring.H @ linop.add(bring.codomain, b, c) @ bring
    assert simplified(op) == "I"


def test_an_adjoint_is_pushed_inward() -> None:
    assert str((C @ S).H) == "S_{b→a} K_b S_{b→a}"
    assert str((2 * C).H) == "2 K_b S_{b→a}"
    assert str((S + K).H) == "S_{b→a} + K_b"


@pytest.mark.parametrize("name", ["random_movement", "random_composition"])
@given(data=st.data())
def test_simplifying_shortens_and_stays_equal(name: str, data: st.DataObject) -> None:
    op = build(name, data.draw(describe(name)))
    simple = op.simplify()
    assert simple.equals(op)
    assert steps(simple) <= steps(op) + 2
    # A program and its adjoint collapse where it only moves whole regions about.
    again = simple.simplify()
    assert again.equals(op)
