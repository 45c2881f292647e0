"""One plan for all extents that nobody cuts: to the last number what lowering makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, TensorSpace
from linop.normal_form.stages import Stages
from linop.planning.lowering import lower
from linop.planning.placement import Placement
from linop.planning.stretching import Plans, uncut_in

Make = Callable[[TensorSpace], LinearOperator]


def copied(X: TensorSpace, role: Any) -> TensorSpace:
    """With the first cut dimension whole, and this along its grid axis."""
    return X.like(X.partition, [role, X.axes[1]])


def shifted(X: TensorSpace, steps: int) -> LinearOperator:
    return linop.shift(copied(X, COPIES), steps)


OPERATORS: dict[str, Make] = {
    "halo": lambda X: linop.halo_exchange(X, [3 if d in X.axes else 1 for d in range(X.ndim)]),
    "other grid": lambda X: linop.repartition(X, X.like(X.partition.T, X.axes[::-1])),
    "gather": lambda X: linop.repartition(X, X.like(Partition((1,)), [0])),
    "to copies": lambda X: linop.repartition(X, copied(X, COPIES)),
    "to replicated": lambda X: linop.repartition(X, copied(X, REPLICATED)),
    "all-reduce": lambda X: linop.all_reduce(copied(X, COPIES)),
    "all-gather": lambda X: linop.all_gather(X, 0),
    "shift": lambda X: linop.shift(X, 1),
    "padding": lambda X: linop.pad(
        X, [(1, 0) if d in X.axes else (0, 0) for d in range(X.ndim)], "circular"
    ),
    "padding of what is not cut": lambda X: linop.pad(X, [(1, 0)] * X.ndim),
    "in a loop": lambda X: shifted(X, 1).H @ shifted(X, 2),
    "sum": lambda X: shifted(X, 1) + shifted(X, 2),
}


def spaces(cut: list[int], grid: tuple[int, int], first: int, *extents: list[int]) -> Any:
    """Spaces of two cut dimensions, from the dimension `first` on, between others."""
    for others in extents:
        shape = [*others[:first], *cut, *others[first:]]
        yield TensorSpace(shape, Partition(grid), np.float32, [first, first + 1])


@pytest.mark.parametrize("name", OPERATORS)
@given(st.data())
def test_a_stretched_plan_is_the_one_that_lowering_makes(name: str, data: st.DataObject) -> None:
    grid = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    cut = data.draw(st.lists(st.integers(3, 6), min_size=2, max_size=2))
    first = data.draw(st.integers(0, 2))
    others = st.lists(st.integers(name == "halo", 4), min_size=2, max_size=2)
    before, after = spaces(cut, grid, first, data.draw(others), data.draw(others))
    scalar = data.draw(st.sampled_from([1, -2]))
    for op in (OPERATORS[name], lambda X: OPERATORS[name](X).H):
        a, b = ((scalar * op(X)).stages for X in (before, after))
        for worker in range(grid[0] * grid[1]):
            plans = Plans(worker)
            assert plans.of(a) == lower(a, worker)
            assert plans.of(b) == lower(b, worker)
            assert plans.of(a) == lower(a, worker)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Stages]:
    """All stages that `Plans` has lowered."""
    found: list[Stages] = []

    def counted(stages: Stages, worker: int, placement: Placement | None) -> Any:
        found.append(stages)
        return lower(stages, worker, placement)

    monkeypatch.setattr("linop.planning.stretching.lower", counted)
    return found


@pytest.mark.parametrize("name", sorted(set(OPERATORS) - {"padding of what is not cut", "sum"}))
def test_other_extents_are_not_lowered_again(name: str, lowered: list[Stages]) -> None:
    plans = Plans(1)
    for X in spaces([4, 5], (2, 2), 1, [2, 3], [1, 7], [9, 1]):
        plans.of(OPERATORS[name](X).stages)
    assert len(lowered) == 1


def test_what_differs_in_more_than_uncut_extents_is_lowered(lowered: list[Stages]) -> None:
    plans = Plans(0)
    shift = OPERATORS["shift"]
    (X,) = spaces([4, 5], (2, 2), 1, [2, 3])
    (longer,) = spaces([4, 6], (2, 2), 1, [2, 3])
    named = TensorSpace(X.global_shape, X.partition, X.dtype, X.axes, "y")
    double = TensorSpace(X.global_shape, X.partition, np.float64, X.axes)
    every = [shift(X), shift(longer), shift(named), shift(double), shift(X).H, 2 * shift(X)]
    for op in (*every, *every):
        assert plans.of(op.stages) == lower(op.stages, 0)
    assert len(lowered) == len(every)


def test_sums_in_shares_are_lowered_for_each_size() -> None:
    """The cuts depend on how long they are."""
    few, many = (TensorSpace((4, n), Partition((4,)), np.float32, [COPIES]) for n in (1, 2_000_000))
    a, b = (linop.all_reduce(X).stages for X in (few, many))
    assert uncut_in(a)
    assert not uncut_in(b)
    plans = Plans(2)
    assert plans.of(a) == lower(a, 2)
    assert plans.of(b) == lower(b, 2)
    assert len(plans.of(b).patterns) == 2
