"""`linop.testing.parallel.lifting`: a recorded collective is linop's operator that moves what MPI
and torch say that it moves, over any group, with parts of any sizes; and operators have the names
of the collectives that they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, Partition, Region, Space, TensorSpace
from linop.testing.parallel.lifting.collectives import Ran, lifted, message
from linop.testing.parallel.lifting.naming import Named, in_words, listed
from linop.testing.parallel.lifting.places import UndecidedError
from linop.testing.parallel.recording.records import Collective

Arrays = dict[int, list[np.ndarray]]
"""Tensors, by rank."""


@dataclass(frozen=True)
class Case:
    """A collective that ran: what each rank gave and got, by the rules of MPI."""

    name: str
    ranks: tuple[int, ...]
    given: Arrays
    made: Arrays
    peer: int = -1
    reduction: str = ""
    splits: dict[int, Any] = field(default_factory=dict)

    @property
    def ran(self) -> Ran:
        sizes = (
            {rank: [one.size for one in each] for rank, each in arrays.items()}
            for arrays in (self.given, self.made)
        )
        return Ran(self.name, self.ranks, *sizes, self.reduction, self.peer, self.splits)


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A collective of some ranks in any order, with parts of other sizes on each where it may have
    such."""
    ranks = tuple(draw(st.permutations(range(7)))[: draw(st.integers(1, 5))])
    random = np.random.default_rng(draw(st.integers(0, 99)))
    name = draw(st.sampled_from(sorted(_CASES)))
    uneven = draw(st.booleans())
    n = draw(st.integers(0, 4))

    def vector(size: int) -> np.ndarray:
        return random.integers(-9, 10, size).astype(float)

    def size() -> int:
        return draw(st.integers(0, 4)) if uneven else n

    found: Case = _CASES[name](draw, ranks, vector, size)
    return found


def _same(ranks: Any, vector: Any, size: Any) -> Arrays:
    n = size()
    return {r: [vector(n)] for r in ranks}


def _all_reduce(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    given = _same(ranks, vector, size)
    total = sum(flat(given[r]) for r in ranks)
    if draw(st.booleans()):  # of multiples, so that their mean is a whole number
        multiples = {r: [len(ranks) * flat(each)] for r, each in given.items()}
        return Case("all_reduce", ranks, multiples, {r: [total] for r in ranks},
                    reduction="average")  # fmt: skip
    return Case("all_reduce", ranks, given, {r: [total] for r in ranks}, reduction="sum")


def _broadcast(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    root, x = draw(st.sampled_from(ranks)), vector(size())
    return Case("broadcast", ranks, {r: [x] if r == root else [] for r in ranks},
                {r: [x] for r in ranks}, root)  # fmt: skip


def _reduce(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    root, given = draw(st.sampled_from(ranks)), _same(ranks, vector, size)
    made = {r: [sum(flat(given[s]) for s in ranks)] if r == root else [] for r in ranks}
    return Case("reduce", ranks, given, made, root, "sum")


def _pieces(draw: Any, one_tensor: Any, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """As a tensor for each rank, or all in one."""
    return [flat(arrays)] if draw(one_tensor) else arrays


def _all_gather(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    given = {r: [vector(size())] for r in ranks}
    made = {r: _pieces(draw, st.booleans(), [given[s][0] for s in ranks]) for r in ranks}
    return Case("all_gather", ranks, given, made)


def _gather(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    root, whole = draw(st.sampled_from(ranks)), _all_gather(draw, ranks, vector, size)
    made = {r: whole.made[r] if r == root else [] for r in ranks}
    return Case("gather", ranks, whole.given, made, root)


def _scatter(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    back = _gather(draw, ranks, vector, size)
    return Case("scatter", ranks, back.made, back.given, back.peer)


def _reduce_scatter(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    sizes = [size() for _ in ranks]
    chunks = {r: [vector(n) for n in sizes] for r in ranks}
    made = {r: [sum(chunks[s][k] for s in ranks)] for k, r in enumerate(ranks)}
    given = {r: _pieces(draw, st.booleans(), chunks[r]) for r in ranks}
    return Case("reduce_scatter", ranks, given, made, reduction="sum")


def _all_to_all(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    width = draw(st.integers(1, 3))
    rows = {r: [size() for _ in ranks] for r in ranks}
    chunks = {r: [vector(n * width) for n in rows[r]] for r in ranks}
    got = {r: [chunks[s][k] for s in ranks] for k, r in enumerate(ranks)}
    one_tensor = st.just(draw(st.booleans()))
    given, made = ({r: _pieces(draw, one_tensor, each[r]) for r in ranks} for each in (chunks, got))
    splits = {r: (rows[r], [rows[s][k] for s in ranks]) for k, r in enumerate(ranks)}
    return Case("all_to_all", ranks, given, made, splits=splits)


def _scan(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    given = _same(ranks, vector, size)
    sums = np.cumsum([flat(given[r]) for r in ranks], axis=0)
    made = {r: [sums[k]] for k, r in enumerate(ranks)}
    return Case("scan", ranks, given, made, reduction="sum")


def _exclusive_scan(draw: Any, ranks: Any, vector: Any, size: Any) -> Case:
    whole = _scan(draw, ranks, vector, size)
    behind = {r: whole.made[s] for s, r in pairwise(ranks)}
    return Case("exclusive_scan", ranks, whole.given, {ranks[0]: [], **behind}, reduction="sum")


_CASES = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "scan": _scan,
    "exclusive_scan": _exclusive_scan,
}


@given(cases())
def test_a_collective_makes_what_mpi_says(case: Case) -> None:
    lift = lifted(case.ran, "a")
    op = lift.operator
    x = {name: flat(case.given[rank]) for rank, name in lift.into.items()}
    y = op(op.domain.vector(x)) if x else op.codomain.zeros()
    wanted = {rank: flat(case.made[rank]) for rank in lift.out_of}
    for rank, name in lift.out_of.items():
        assert np.array_equal(y[name], wanted[rank])
    idle = [r for r in case.ranks if r not in lift.out_of]
    assert not any(flat(case.made.get(r, [])).size for r in idle)


@given(cases())
def test_what_is_given_and_made_exchanged_is_the_adjoint(case: Case) -> None:
    """Of a collective, the collective that sends everything back, lifted, is the adjoint."""
    back = {"broadcast": "reduce", "gather": "scatter", "all_gather": "reduce_scatter"}
    name = {**back, **{b: a for a, b in back.items()}}.get(case.name, case.name)
    if name in ("scan", "exclusive_scan"):
        return
    sums = name in ("reduce", "all_reduce", "reduce_scatter")
    splits = {r: each[::-1] for r, each in case.splits.items()}
    reduction = case.reduction if name == "all_reduce" else "sum" * sums
    other = Case(name, case.ranks, case.made, case.given, case.peer, reduction, splits)
    there, back_again = lifted(case.ran, "a").operator, lifted(other.ran, "b").operator
    transposed = there.H.to_matrix("regions")
    assert (transposed != back_again.to_matrix("regions")).nnz == 0


@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_they_are_linops_own(world: int, n: int, data: st.DataObject) -> None:
    ranks, root = tuple(range(world)), data.draw(st.integers(0, world - 1))
    copies = TensorSpace((n,), Partition((world,)), axes=[COPIES])
    blocks = TensorSpace((n * world,), Partition((world,)))
    one = TensorSpace((n,), Partition((1,), [root]))
    alike = {r: [n] for r in ranks}
    whole = {r: [n * world] for r in ranks}
    for name, sent, got, op in (
        ("all_reduce", alike, alike, linop.all_reduce(copies)),
        ("broadcast", {root: [n]}, alike, linop.broadcast(one, Partition((world,)))),
        ("all_gather", alike, whole, linop.all_gather(blocks)),
        ("reduce_scatter", whole, alike, linop.all_gather(blocks).H),
        ("reduce", alike, {root: [n]}, linop.sum_reduce(copies, Partition((1,), [root]))),
    ):
        found = lifted(Ran(name, ranks, sent, got, peer=root), "x").operator
        assert found.equals(op)
    # Rows of each rank become columns: linop.all_to_all, on flat tensors.
    rows = TensorSpace((world, n * world), Partition((world,)))
    found = lifted(Ran("all_to_all", ranks, whole, whole), "x").operator
    theirs = linop.all_to_all(rows, 0, 1).to_matrix("regions")
    assert (found.to_matrix("regions") != theirs).nnz == 0


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=2, max_size=4))
def test_several_tensors_are_gathered_each(order: list[int], sizes: list[int]) -> None:
    """The coalesced collectives of torch: each tensor of each rank is gathered, or scattered."""
    ranks = tuple(order[:3])
    random = np.random.default_rng(0)
    given = {r: [random.integers(-9, 10, n).astype(float) for n in sizes] for r in ranks}
    made = {r: [flat([given[s][k] for s in ranks]) for k in range(len(sizes))] for r in ranks}
    ends = ({r: [one.size for one in each] for r, each in side.items()} for side in (given, made))
    lift = lifted(Ran("all_gather", ranks, *ends), "a")
    found = lift.operator(
        lift.operator.domain.vector({lift.into[r]: flat(given[r]) for r in ranks})
    )
    assert all(np.array_equal(found[lift.out_of[r]], flat(made[r])) for r in ranks)
    ends = ({r: [one.size for one in each] for r, each in side.items()} for side in (made, given))
    back = lifted(Ran("reduce_scatter", ranks, *ends, "sum"), "b").operator
    assert (lift.operator.H.to_matrix("regions") != back.to_matrix("regions")).nnz == 0


def test_a_message_is_a_move() -> None:
    there, back = message(2, 0, 3, 3, "a"), message(0, 2, 3, 3, "b")
    (source,), (target,) = there.operator.domain.regions, there.operator.codomain.regions
    assert (source.workers, target.workers) == ((2,), (0,))
    assert there.operator.equals(linop.move(Space(source), source, target))
    assert (there.operator.H.to_matrix() != back.operator.to_matrix()).nnz == 0
    with pytest.raises(UndecidedError, match="rank 2 sends 3 elements to rank 0, which expects 4"):
        message(2, 0, 3, 4, "a")


def test_what_is_no_linear_collective_of_all_is_undecided() -> None:
    sizes = {0: [2], 1: [2]}
    with pytest.raises(UndecidedError, match="its all-reduce is of maximum"):
        lifted(Ran("all_reduce", (0, 1), sizes, sizes, "maximum"), "a")
    with pytest.raises(UndecidedError, match="no operator of its neighbour-sum"):
        lifted(Ran("neighbour_sum", (0, 1), sizes, sizes), "a")
    with pytest.raises(UndecidedError, match="other sizes on rank 1"):
        lifted(Ran("all_reduce", (0, 1), {0: [2], 1: [3]}, sizes, "sum"), "a")
    with pytest.raises(UndecidedError, match="rank 0 sends 1 elements to rank 1, which expects 2"):
        splits = {0: ([1, 1], [1, 1]), 1: ([1, 1], [2, 0])}
        lifted(Ran("all_to_all", (0, 1), sizes, sizes, splits=splits), "a")
    about = Collective(
        0, "all_reduce", (0, 1), "sum", -1, [], [], None, None, "", "", "forward", 0, -1, "",
        "float64", "",
    )  # fmt: skip
    with pytest.raises(UndecidedError, match="some ranks take no part in the all-reduce"):
        Ran.of({0: about}, {0: [2]}, {0: [2]})


# Names


@given(cases())
def test_an_operator_has_the_name_of_the_collective(case: Case) -> None:
    """Whatever it is made of: here of its matrix's entries, by linop's planner."""
    lift = lifted(case.ran, "a")
    op = lift.operator
    if len(case.ranks) < 3 or min(map(len, map(flat, case.given.values()))) == 0:
        return
    if case.name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
        times = Fraction(1, len(case.ranks)) if case.reduction == "average" else 1
        known = Named(case.name, tuple(sorted(case.ranks)), case.peer, times)
        if case.name != "reduce_scatter" or all(flat(one).size for one in case.made.values()):
            assert in_words(op) == listed([known])


def test_names_of_operators() -> None:
    copies = TensorSpace((4,), Partition((2,)), axes=[COPIES], name="c")
    whole = Space(Region("r", (4,), (0, 1)))
    spread = linop.vstack(*(linop.move(whole, whole["r"], one) for one in copies.regions))
    assert in_words(spread) == "identity"  # what both hold is not sent
    assert in_words(spread.H) == "all-reduce over ranks 0, 1"
    assert in_words(Fraction(1, 2) * spread) == "identity, times 1/2"
    assert in_words(linop.zero(copies, copies)) == "zero"
    blocks = [Region(f"b{r}", (2,), r) for r in (0, 1)]
    own = linop.vstack(
        *(linop.deallocate(Space([whole["r"], b]), whole["r"])
          @ linop.copy(whole, whole["r"][2 * k : 2 * k + 2], b) for k, b in enumerate(blocks))
    )  # fmt: skip
    assert in_words(own) == "own block of each rank"
    assert in_words(own.H) == "all-gather over ranks 0, 1"
    both = [message(a, b, 2, 2, f"{a}{b}").operator for a, b in ((0, 1), (1, 2))]
    assert in_words(both[0]) == "message from rank 0 to rank 1"
    assert in_words(linop.direct_sum(*both)) == "messages 0 to 1, 1 to 2"


def test_collectives_of_groups_are_listed_together() -> None:
    each = [Named("all_reduce", (0, 2)), Named("all_reduce", (1, 3))]
    assert listed(each) == "all-reduce over ranks 0, 2 and 1, 3"
    roots = [Named("scatter", (0, 1), root) for root in (0, 1)]
    assert listed(roots) == "scatter from ranks 0, 1 over ranks 0, 1"
    assert listed([], [(0, 1)]) == "message from rank 0 to rank 1"
    assert listed([], [(k, k + 1) for k in range(9)]).endswith("5 to 6, and 3 more")
