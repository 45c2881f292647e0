"""Programs of actions: their matrix, the runs they are cut into, and the laws that shorten them.

Regions go away and come back, in other shapes too. What a program is, running it on unit vectors
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linop import Movement, Region, Space, Subset
from linop.normal_form.primitives import (
    Action,
    Add,
    Allocate,
    BetweenSpaces,
    Clear,
    Deallocate,
    InPlace,
    adjoints,
    in_columns,
    independent_batches,
)
from linop.operators import laws
from linop.spaces.region import as_subset
from linop.testing.describing import box_in, boxes

# Programs of actions

Program = list[BetweenSpaces]


@st.composite
def programs(draw: st.DrawFn, most: int = 8) -> Program:
    """Actions on a few regions that come, go, and come back, maybe in another shape or memory."""
    rank = draw(st.integers(0, 2))
    names = ["a", "b", "c", "d"]

    def region(name: str) -> Region:
        shape = draw(st.sampled_from([(2,) * rank, (3,) * rank, (0,) * rank]))
        return Region(name, shape, memory=draw(st.sampled_from(["default", "host"])))

    space = Space(map(region, draw(st.permutations(names))[: draw(st.integers(1, 4))]))
    placed: Program = []
    for _ in range(draw(st.integers(1, most))):
        absent = [name for name in names if name not in space]
        kinds = ["clear", "add", "add", "deallocate"] if len(space) else []
        kind = draw(st.sampled_from(kinds + ["allocate"] * bool(absent)))
        chosen = draw(st.permutations(absent if kind == "allocate" else [r.name for r in space]))
        chosen = chosen[: draw(st.integers(1, 2))]
        if kind == "allocate":
            action: Action = Allocate(tuple(map(region, chosen)))
        elif kind == "deallocate":
            action = Deallocate(tuple(space[name] for name in chosen))
        else:
            action = draw(_in_place(kind, [space[name] for name in chosen]))
        placed.append((space, [action], action.codomain(space)))
        space = placed[-1][2]
    return placed


@st.composite
def _in_place(draw: st.DrawFn, kind: str, regions: list[Region]) -> Action:
    one, other = regions[0], regions[-1]
    part = box_in(one, draw(boxes(one.shape)))
    fits = all(b <= n for b, n in zip(part.stop, other.shape, strict=True))
    if kind == "clear" or one == other or not fits:
        return Clear(part)
    return Add(part, Subset(other, part.start, part.stop))


def actions_of(program: Program) -> list[Any]:
    return [action for _, actions, _ in program for action in actions]


def by_running(program: Program) -> np.ndarray:
    """The matrix of a program, by running its actions on unit vectors."""
    domain, codomain = program[0][0], program[-1][2]
    matrix = np.zeros((codomain.size, domain.size))
    for k, unit in enumerate(np.eye(domain.size)):
        arrays = domain.unflatten(unit).arrays
        for action in actions_of(program):
            action.interpret(arrays, domain.dtype)
        matrix[:, k] = codomain.flatten(codomain.vector(arrays))
    return matrix


@given(programs())
def test_a_program_is_the_product_of_its_actions(program: Program) -> None:
    matrix = by_running(program)
    movement = Movement.of_actions(program)
    assert (movement.to_matrix().toarray() == matrix).all()
    product = Movement.of_actions(program[:1])
    for step in program[1:]:
        product = Movement.of_actions([step]) @ product
    assert movement == product


@given(programs())
def test_independent_runs_are_sums(program: Program) -> None:
    """The product of each run is I + ΣX, on the memory that stays."""
    runs = independent_batches(program)
    assert [step for run in runs for step in run] == program
    for run in runs:
        domain, codomain = run[0][0], run[-1][2]
        changes = [
            delta
            for action in actions_of(run)
            for delta in action.delta
            if delta[0].region in codomain and delta[1].region in domain
        ]
        total = Movement.between(domain, codomain) + Movement.of_blocks(domain, codomain, changes)
        assert (total.to_matrix().toarray() == by_running(run)).all()


def test_many_adds_are_one_run() -> None:
    regions = [Region(f"r{k}", 2, k) for k in range(6)]
    space, first = Space(regions), as_subset(regions[0])
    gathered = [Add(as_subset(r), first) for r in regions[1:]]
    spread = [Add(first, as_subset(r)) for r in regions[1:]]

    def runs(*programs: list[Add]) -> list[int]:
        placed = [(space, actions, space) for actions in programs]
        return [len(actions_of(run)) for run in independent_batches(placed)]

    assert runs(gathered) == runs(spread) == [5]
    assert runs(gathered, spread) == runs([*gathered, *spread]) == [5, 5]


def test_boxes_that_are_written_again_and_again_are_compared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand steps of a recurrence write few boxes; each is compared with these alone."""
    x = Region("x", 4)
    space, looks, overlaps = Space(x), 0, Subset.overlaps

    def counted(box: Subset, other: Subset) -> bool:
        nonlocal looks
        looks += 1
        return overlaps(box, other)

    monkeypatch.setattr(Subset, "overlaps", counted)
    steps = [(space, [Add(x[:1], x[k % 3 + 1 : k % 3 + 2])], space) for k in range(1000)]
    assert len(independent_batches(steps)) == 1
    assert looks <= 3 * len(steps)


@given(programs())
def test_actions_in_columns_are_those_that_went_in(program: Program) -> None:
    """And so are their adjoints, and the runs that they are cut into."""
    given = [action for action in actions_of(program) if isinstance(action, Add | Clear)]
    columns = InPlace([a.parts[-1] for a in given], [a.parts[0] for a in given])
    assert list(columns) == given == [*columns[:2], *columns[2:]]
    assert [columns[k] for k in range(len(columns))] == given
    targets, sources = in_columns(columns)
    assert (list(targets), list(sources)) == in_columns(given)
    assert list(adjoints(columns)) == adjoints(given)
    space = Space({part.region.name: part.region for a in given for part in a.parts}.values())
    if all(part.region in space for action in given for part in action.parts):
        for actions in (given, list(adjoints(columns))):
            alone = independent_batches([(space, [action], space) for action in actions])
            together = independent_batches([(space, actions, space)])
            assert list(map(actions_of, together)) == list(map(actions_of, alone))


# Laws


def reduced_by_laws(factors: Sequence[Any]) -> list[Any]:
    """The reduced product, action by action."""
    reduced = laws.reduced_by_laws(factors)
    return [f for some in reduced for f in (some if isinstance(some, InPlace) else [some])]


def placed_in(space: Space, actions: Sequence[Any]) -> Program:
    """Actions after one another, from a space."""
    program: Program = []
    for action in actions:
        program.append((space, [action], action.codomain(space)))
        space = program[-1][2]
    return program


@given(programs())
def test_reducing_a_program_keeps_its_matrix_and_shortens_it(program: Program) -> None:
    reduced = reduced_by_laws(actions_of(program))
    domain, codomain = program[0][0], program[-1][2]
    assert len(reduced) <= len(program)
    after = placed_in(domain, reduced)
    ends = after[-1][2] if after else domain
    assert ends == codomain
    matrix = by_running(after) if after else np.eye(domain.size)
    order = Movement.between(ends, codomain).to_matrix()  # a region that returns comes last
    assert (order @ matrix == by_running(program)).all()


@given(programs(), st.data())
def test_nothing_is_reduced_past_a_barrier(program: Program, data: st.DataObject) -> None:
    actions = actions_of(program)
    cut, barrier = data.draw(st.integers(0, len(actions))), object()
    reduced = reduced_by_laws([*actions[:cut], barrier, *actions[cut:]])
    at = reduced.index(barrier)
    assert reduced[:at] == reduced_by_laws(actions[:cut])
    assert reduced[at + 1 :] == reduced_by_laws(actions[cut:])


R, Q = Region("r", 3), Region("q", 3, 1)
r, q, p = as_subset(R), as_subset(Q), as_subset(Region("p", 3, 2))
K, A, D = Clear(q), Allocate((Q,)), Deallocate((Q,))
S, BACK = Add(r, q), Add(q, r)
LAWS: dict[str, tuple[list[Action], list[Action]]] = {  # first applied first
    "K_b K_c = K_b": ([Clear(Q[1:]), K], [K]),
    "K_c K_b = K_b": ([K, Clear(Q[1:])], [K]),
    "D A = I": ([A, D], []),
    "A D = K": ([D, A], [K]),
    "D K = D": ([K, D], [D]),
    "D S = D": ([S, D], [D]),
    "K S = K": ([S, K], [K]),
    "K A = A": ([A, K], [A]),
    "S A = A": ([A, BACK], [A]),
    "S K = K": ([K, BACK], [K]),
    "S_{b→a} K_a S_{a→b} A_b": ([A, S, Clear(r), BACK], [A, S]),
    "S_{b→a} K_a S_{a→b} K_b": ([K, S, Clear(r), BACK], [K, S]),
    "K_b and K_c stay": ([Clear(Q[1:]), Clear(Q[:1])], [Clear(Q[1:]), Clear(Q[:1])]),
    "K after a part of S stays": ([S, Clear(Q[1:])], [S, Clear(Q[1:])]),
    "S S stays": ([S, S], [S, S]),
    "K S = K once what stood between has gone": (
        [Add(p, r), S, Clear(r), K],
        [Clear(r), K],
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_each_law_fires(law: str) -> None:
    before, after = LAWS[law]
    assert reduced_by_laws(before) == after


def test_a_law_does_not_break_what_is_allocated_together() -> None:
    """A_{a,b,c} D_b is two steps, and A_c K_b A_a would be three."""
    one, two = Region("one", 1), Region("two", 1)
    program = [D, Allocate((one, Q, two))]
    assert len(reduced_by_laws(program)) <= len(program)
