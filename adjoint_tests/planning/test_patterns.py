"""Collectives are recognised by what they do, whoever composed them, and so are their adjoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, LinearOperator, Movement, Partition, TensorSpace
from linop.operators.algebra import identity
from linop.operators.expressions import compose
from linop.operators.memory import add, allocate, copy, deallocate
from linop.planning import Network
from linop.planning.collective_selection import seconds
from linop.planning.patterns import Kind, Pattern, pattern, spans
from linop.planning.plan import LoweredPlan, Message, Put, Receive, Send
from linop.spaces.region import Part, Region
from linop.spaces.space import Space
from linop.testing.describing import seeds
from support.contracts import mpi_collectives
from support.draws import ON_RANKS
from support.operators.catalogue import NAMES, build, describe, operators
from support.operators.properties import plans_of, stays_exact
from support.requirements import needs_mpi
from support.workers import in_job

ADJOINT = {
    Kind.BROADCAST: Kind.REDUCE,
    Kind.ALL_GATHER: Kind.REDUCE_SCATTER,
    Kind.ALL_REDUCE: Kind.ALL_REDUCE,
    Kind.ALL_TO_ALL: Kind.ALL_TO_ALL,
    Kind.POINT_TO_POINT: Kind.POINT_TO_POINT,
    Kind.LOCAL: Kind.LOCAL,
}
ADJOINT |= {there: here for here, there in ADJOINT.items()}


def anew(movement: Movement) -> Movement:
    """The same movement, of which nothing is known."""
    return Movement(movement.domain, movement.codomain, movement.table)


def alone(movement: Movement, worker: int) -> Pattern:
    """The pattern that a worker finds by itself."""
    return pattern(anew(movement), worker)


def workers_of(movement: Movement) -> list[int]:
    return sorted({*movement.domain.workers, *movement.codomain.workers})


def has_replicas(movement: Movement) -> bool:
    return any(r.replicated for s in (movement.domain, movement.codomain) for r in s.regions)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_all_members_of_a_group_agree(name: str, data: st.DataObject) -> None:
    op = data.draw(operators(name))
    for stages in (op.stages, (op.H @ op).stages):
        for movement in stages.movements:
            found = {w: alone(movement, w) for w in workers_of(movement)}
            for worker, mine in found.items():
                assert worker in mine.group
                assert mine == pattern(movement, worker)  # with what is known of others
                if mine.kind.collective:
                    assert all(found[member] is mine or found[member] == mine
                               for member in mine.group)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_adjoints_are_recognised(name: str, data: st.DataObject) -> None:
    for movement in data.draw(operators(name)).stages.movements:
        assume(not has_replicas(movement))
        back = movement.adjoint()
        for worker in workers_of(movement):
            one, other = alone(movement, worker), alone(back, worker)
            assert other.kind is ADJOINT[one.kind]
            assert (other.group, other.root) == (one.group, one.root)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_messages_are_those_of_the_collective(name: str, data: st.DataObject) -> None:
    op = data.draw(operators(name))
    for one in (op, op.H @ op):
        for plan in plans_of(one):
            for k, found in enumerate(plan.patterns):
                fits(plan, 2 * k, found)


def fits(plan: LoweredPlan, stage: int, found: Pattern) -> None:
    """A plan sends and receives what its pattern says."""
    sends = {s.peer: s.size for s in plan.steps if isinstance(s, Send) and s.stage == stage}
    gets = {s.peer: s.size for s in plan.steps if isinstance(s, Receive) and s.stage == stage}
    others = [w for w in found.group if w != plan.worker]
    mine = found.count(plan.worker) if found.counts else 0
    match found.kind:
        case Kind.LOCAL:
            assert not sends and not gets
        case Kind.POINT_TO_POINT:
            assert sorted({*sends, *gets}) == others
        case Kind.BROADCAST:
            root = plan.worker == found.root
            assert sends == (dict.fromkeys(others, mine) if root else {})
            assert gets == ({} if root else {found.root: mine})
        case Kind.REDUCE:
            root = plan.worker == found.root
            assert gets == (dict.fromkeys(others, mine) if root else {})
            assert sends == ({} if root else {found.root: mine})
        case Kind.ALL_REDUCE:
            assert sends == gets == dict.fromkeys(others, mine)
        case Kind.ALL_GATHER:
            assert sends == {w: mine for w in others if mine}
            assert gets == {w: found.count(w) for w in others if found.count(w)}
        case Kind.REDUCE_SCATTER:
            assert gets == {w: mine for w in others if mine}
            assert sends == {w: found.count(w) for w in others if found.count(w)}
        case Kind.ALL_TO_ALL:
            assert sorted(sends) == sorted(gets) == others
            assert sum(sends.values()) == mine


def kinds(op: LinearOperator) -> set[Kind]:
    """Patterns of the stages of all workers."""
    return {found.kind for plan in plans_of(op) for found in plan.patterns}


Named = Callable[[Partition, tuple[int, int], Any], LinearOperator]

NAMED: dict[Kind, Named] = {
    Kind.BROADCAST: lambda grid, shape, other: linop.broadcast(
        TensorSpace(shape, grid[0:1, :], axes=[COPIES, other]), grid
    ),
    Kind.REDUCE: lambda grid, shape, other: linop.sum_reduce(
        TensorSpace(shape, grid, axes=[COPIES, other]), grid[0:1, :]
    ),
    Kind.ALL_REDUCE: lambda grid, shape, other: linop.all_reduce(
        TensorSpace(shape, grid, axes=[COPIES, other]), 0
    ),
    Kind.ALL_GATHER: lambda grid, shape, other: linop.all_gather(
        TensorSpace(shape, grid, axes=[0, other]), 0
    ),
    Kind.REDUCE_SCATTER: lambda grid, shape, other: linop.reduce_scatter(
        TensorSpace(shape, grid, axes=[COPIES, other]), 0, 0
    ),
    Kind.ALL_TO_ALL: lambda grid, shape, other: linop.all_to_all(
        TensorSpace((*shape, 7), grid, axes=[0, other]), 0, 2
    ),
}
"""A named collective along the first axis of a grid, whose other axis does something else."""


@pytest.mark.parametrize("kind", NAMED)
@given(data=st.data())
def test_named_collectives_are_recognised(kind: Kind, data: st.DataObject) -> None:
    size, lines = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2))
    workers = data.draw(st.permutations(range(size * lines)))
    shape = data.draw(st.integers(size, 9)), data.draw(st.integers(lines, 5))
    other = data.draw(st.sampled_from([1, COPIES]))
    op = NAMED[kind](Partition((size, lines), workers), shape, other)
    assert kinds(op) == {kind}
    assert kinds(op.H) == {ADJOINT[kind]}
    columns = {tuple(sorted(workers[k::lines])) for k in range(lines)}
    assert {found.group for plan in plans_of(op) for found in plan.patterns} == columns


def test_ring_is_an_all_reduce() -> None:
    Y = TensorSpace((7, 2), Partition((4,)), axes=[COPIES])
    assert plans_of(linop.ring_all_reduce(Y)) == plans_of(linop.all_reduce(Y))


def test_replicated_regions() -> None:
    X = TensorSpace((10,), Partition((4,)))
    gathered = linop.all_gather(X, into=REPLICATED)
    assert (kinds(gathered), kinds(gathered.H)) == ({Kind.ALL_GATHER}, {Kind.LOCAL})
    shared = TensorSpace((5,), Partition((4,)), axes=[REPLICATED])
    copied = linop.repartition(shared, TensorSpace((5,), Partition((4,)), axes=[COPIES]))
    assert (kinds(copied), kinds(copied.H)) == ({Kind.LOCAL}, {Kind.ALL_REDUCE})


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_neighbours_are_no_group(workers: int) -> None:
    halo = linop.halo_exchange(TensorSpace((12,), Partition((workers,))), 3, padding=1)
    ring = linop.shift(TensorSpace((12,), Partition((workers + 2,))), 1)
    for op in (halo, halo.H, ring, ring.H):
        assert kinds(op) == {Kind.POINT_TO_POINT}


def test_crossed_sums_are_no_all_reduce() -> None:
    """Every box goes to everybody, and every box is a sum over all; but they are different sums."""
    space = Space([Region(f"{n}{w}", 2, w) for w in (0, 1) for n in "ab"])
    names = {r.name: Region("y" + r.name, 2, r.workers) for r in space.regions}
    sums = {"ya0": "a0 a1", "ya1": "a0 b1", "yb0": "b0 b1", "yb1": "b0 a1"}
    pairs = [(space[a], names[y[1:]]) for y, both in sums.items() for a in both.split()]
    op = linop.operators.named_movement.out_of_place(space, Space(names.values()), pairs)
    assert kinds(op) == {Kind.POINT_TO_POINT}


def test_order_of_boxes_is_told() -> None:
    """Two boxes to two workers, which number them in different ways."""
    space = Space([Region("a", 2), Region("b", 3)])
    for swapped in (False, True):
        new = [Region(f"{n}{w}", k, w) for w in (1, 2) for n, k in (("u", 2), ("v", 3))]
        target = Space([*new[:2], *reversed(new[2:])] if swapped else new)
        pairs = [(space["a" if r.shape == (2,) else "b"], r) for r in new]
        (found,) = plans_of(linop.operators.named_movement.out_of_place(space, target, pairs))[
            0
        ].patterns
        assert (found.kind, found.counts, found.aligned) == (Kind.BROADCAST, (5,), not swapped)


# Programs of copies and additions

Hop = tuple[Callable[[Space, Part, Part], LinearOperator], Part, Part]
N = range(4)
LINE = Partition((4,))


def by_hand(
    op: LinearOperator, hops: Callable[[list[Region], list[Region]], list[Hop]]
) -> LinearOperator:
    """From the domain of an operator to its codomain by copies and additions alone. They get the
    arguments under other names (for results may have theirs), and zeros for the results."""
    steps: list[LinearOperator] = [identity(op.domain)]

    def then(make: Callable[..., LinearOperator], *arguments: Any) -> None:
        steps.append(make(steps[-1].codomain, *arguments))

    given = [Region("given " + r.name, r.shape, r.workers) for r in op.domain.regions]
    for region, other in zip(op.domain.regions, given, strict=True):
        then(copy, region, other)
    then(deallocate, *op.domain.regions)
    then(allocate, *op.codomain.regions)
    for hop, a, b in hops(given, list(op.codomain.regions)):
        then(hop, a, b)
    then(deallocate, *given)
    return compose(*reversed(steps))


def quarter(region: Region, k: int) -> Part:
    """The k-th quarter of a region of eight elements."""
    return region[2 * k : 2 * k + 2]


def tree(x: list[Region], y: list[Region]) -> list[Hop]:
    return [(copy, x[0], y[0]), (copy, y[0], y[1]), (copy, y[0], y[2]), (copy, y[1], y[3])]


def chain(x: list[Region], y: list[Region]) -> list[Hop]:
    return [(add, x[3], x[2]), (add, x[2], x[1]), (add, x[1], x[0]), (copy, x[0], y[0])]


def there_and_back(x: list[Region], y: list[Region]) -> list[Hop]:
    return [*chain(x, y), *((copy, y[k], y[k + 1]) for k in N[:-1])]


def passing_on(x: list[Region], y: list[Region]) -> list[Hop]:
    rounds = [(copy, quarter(y[k], (k - r) % 4), quarter(y[(k + 1) % 4], (k - r) % 4))
              for r in N[:-1] for k in N]  # fmt: skip
    return [*((copy, x[k], quarter(y[k], k)) for k in N), *rounds]


def adding_on(x: list[Region], y: list[Region]) -> list[Hop]:
    rounds = [(add, quarter(x[k], (k - r - 1) % 4), quarter(x[(k + 1) % 4], (k - r - 1) % 4))
              for r in N[:-1] for k in N]  # fmt: skip
    return [*rounds, *((copy, quarter(x[k], k), y[k]) for k in N)]


def transposing(x: list[Region], y: list[Region]) -> list[Hop]:
    return [(copy, x[j][:, k : k + 1], y[k][2 * j : 2 * j + 2, :]) for j in N for k in N]


def bulk_then_halos(x: list[Region], y: list[Region]) -> list[Hop]:
    """Blocks copied into larger ones, whose edges then go from one to the next."""
    at = [1 if k or y[0].shape == (4,) else 0 for k in N]
    bulk: list[Hop] = [(copy, x[k], y[k][at[k] : at[k] + 2]) for k in N]
    right: list[Hop] = [(copy, y[k][at[k] + 1 : at[k] + 2], y[k + 1][0:1]) for k in N[:-1]]
    left: list[Hop] = [
        (copy, y[k + 1][at[k + 1] : at[k + 1] + 1], y[k][at[k] + 2 : at[k] + 3]) for k in N[:-1]
    ]
    return [*bulk, *right, *left]


COPIED = TensorSpace((8,), LINE, axes=[COPIES])
CUT = TensorSpace((8,), LINE)
SQUARE = TensorSpace((8, 4), LINE)

HAND = {
    "broadcast": (linop.broadcast(TensorSpace((8,), Partition((1,))), LINE), tree),
    "sum_reduce": (linop.sum_reduce(COPIED, Partition((1,))), chain),
    "all_reduce": (linop.all_reduce(COPIED), there_and_back),
    "ring_all_reduce": (linop.ring_all_reduce(COPIED), there_and_back),
    "all_gather": (linop.all_gather(CUT), passing_on),
    "reduce_scatter": (linop.reduce_scatter(COPIED), adding_on),
    "all_to_all": (linop.all_to_all(SQUARE, 0, 1), transposing),
    "halo_exchange": (linop.halo_exchange(CUT, 3, padding=1), bulk_then_halos),
}
"""Named operators, and programs of copies and additions that do the same."""


@pytest.mark.parametrize("name", HAND)
def test_programs_by_hand_have_the_plans_of_the_named(name: str) -> None:
    op, hops = HAND[name]
    hand = by_hand(op, hops)
    assert hand.equals(op)
    assert plans_of(hand) == plans_of(op)
    assert plans_of(hand.H) == plans_of(op.H)


def test_repartitions_are_one() -> None:
    X = TensorSpace((12, 8), LINE)
    first = linop.repartition(X, Partition((2, 2)))
    twice = linop.repartition(first.codomain, Partition((1, 4))) @ first
    once = linop.repartition(X, Partition((1, 4)))
    assert plans_of(twice) == plans_of(once)
    assert plans_of(twice.H) == plans_of(once.H)
    assert kinds(once) == {Kind.ALL_TO_ALL}


def test_halos_are_received_into_place() -> None:
    op, hops = HAND["halo_exchange"]
    for worker, plan in enumerate(plans_of(by_hand(op, hops))):
        neighbours = 2 if 0 < worker < 3 else 1
        puts = [step for step in plan.steps if isinstance(step, Put)]
        assert [isinstance(p.source, Message) for p in puts] == [False] + [True] * neighbours
        assert not any(p.accumulate for p in puts)


# What they print, and cost


def test_they_print() -> None:
    groups = (1,), (1, 2), (0, 1, 2, 3), (0, 2, 3, 4, 9), (0, 1, 3, 4, 5)
    assert [*map(spans, groups)] == ["1", "1, 2", "0–3", "0, 2–4, 9", "0, 1, 3–5"]
    (found,) = plans_of(0.5 * linop.all_reduce(COPIED))[0].patterns
    assert str(found) == "all-reduce over workers 0–3, 8 elements each, times 0.5"
    (found,) = plans_of(HAND["broadcast"][0])[2].patterns
    assert str(found) == "broadcast from worker 0 over workers 0–3, 8 elements each"
    (found,) = plans_of(linop.all_gather(TensorSpace((9,), LINE)))[2].patterns
    assert str(found) == "all-gather over workers 0–3, up to 3 elements each"
    (found,) = plans_of(HAND["halo_exchange"][0])[0].patterns
    assert str(found) == "point-to-point over workers 0, 1"
    (found,) = plans_of(identity(CUT))[0].patterns
    assert str(found) == "local"
    assert all(
        p.aligned for name in HAND for plan in plans_of(HAND[name][0].H) for p in plan.patterns
    )
    lines = plans_of(HAND["sum_reduce"][0])[1].describe().splitlines()
    assert lines[1] == "  reduce to worker 0 over workers 0–3, 8 elements each:"
    assert "point-to-point" not in plans_of(HAND["halo_exchange"][0])[0].describe()


def test_predicted_times() -> None:
    network = Network(latency=1, per_byte=1, per_byte_added=0)
    (found,) = plans_of(HAND["broadcast"][0])[0].patterns
    assert seconds(found, 1, network) == (3 * 9, 5 + 2 * 6)
    (found,) = plans_of(HAND["all_gather"][0])[0].patterns
    assert seconds(found, 1, network) == (3 * 3, 2 + 6)
    (found,) = plans_of(HAND["all_to_all"][0])[0].patterns
    apart, together = seconds(found, 1, network)
    assert apart == together
    for name in ("broadcast", "all_reduce", "sum_reduce", "all_gather", "reduce_scatter"):
        (found,) = plans_of(HAND[name][0])[0].patterns
        assert seconds(replace(found, counts=(10**6,)), 8, Network())[1] > 0


# Over MPI, where ranks do not share memory


COLLECTIVE = [
    "broadcast",
    "sum_reduce",
    "all_reduce",
    "ring_all_reduce",
    "all_gather",
    "all_gather_replicated",
    "reduce_scatter",
    "all_to_all",
    "repartition",
    "random_movement",
    "random_composition",
    "sum_of_operators",
]


@needs_mpi
@pytest.mark.parametrize("name", COLLECTIVE)
@ON_RANKS
@given(ranks=st.integers(2, 4), data=st.data(), seed=seeds)
def test_mpi_collectives_give_the_bits_of_threads(
    name: str, ranks: int, data: st.DataObject, seed: int
) -> None:
    description = data.draw(describe(name, ranks), label=name)
    assume(stays_exact(build(name, description)))
    in_job(ranks, mpi_collectives.in_collectives, name, description, seed)


@needs_mpi
def test_mpi_collectives_of_some_ranks() -> None:
    in_job(3, mpi_collectives.every_kind)


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "contract",
    [
        mpi_collectives.plans_overlap,
        mpi_collectives.choices,
        mpi_collectives.groups_are_used_again,
        mpi_collectives.too_many_plans,
        mpi_collectives.stuck_in_a_collective,
    ],
)
def test_mpi_groups(contract: Callable[..., None], ranks: int) -> None:
    in_job(ranks, contract)


@needs_mpi
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_mpi_sums_in_any_order(ranks: int, dtype: str) -> None:
    in_job(ranks, mpi_collectives.any_order, dtype, 3)
