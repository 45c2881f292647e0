"""Movements between machines in factors: the same operator, and boxes cross the network once."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, Region, Space, TensorSpace
from linop.backends.engine.base import Backend
from linop.normal_form.movement import Movement
from linop.operators.named_movement import out_of_place
from linop.planning import Link, Network, Placement, hierarchy
from linop.planning.hierarchy import hierarchical
from linop.planning.lowering import lower, lower_all
from linop.planning.patterns import Kind
from linop.planning.routing import messages, routes
from linop.planning.stage_passes import passed, prepared
from linop.planning.stretching import Plans
from support.operators.catalogue import FACTORIES, NAMES, operators
from support.operators.properties import dot_products, forms, rounding, same_vectors
from support.planning.interpreter import interpret

SHORT, LONG = 12, 120_000
"""Numbers, of eight bytes, that one worker of a machine sends; and that all share."""
PAIRS, MIXED, UNEVEN, THREE = (Placement(p) for p in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1],
                                                     [0, 0, 1, 2]))  # fmt: skip
SIX = Placement.of_blocks(6, 2)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network that decides, whatever is assumed later."""
    known = Network(latency=1e-5, between=Link(latency=3e-5, per_byte=1e-9))
    monkeypatch.setattr("linop.planning.network.ASSUMED", known)


def copies(n: int, workers: int) -> TensorSpace:
    return TensorSpace((n,), Partition((workers,)), axes=[COPIES])


def broadcast(n: int, workers: int) -> LinearOperator:
    return linop.sum_reduce(copies(n, workers), Partition((1,))).H


def all_gather(n: int, workers: int) -> LinearOperator:
    return linop.all_gather(TensorSpace((n * workers,), Partition((workers,))))


def all_reduce(n: int, workers: int) -> LinearOperator:
    return linop.all_reduce(copies(n, workers))


def replicated_sum(n: int, workers: int) -> LinearOperator:
    """The adjoint of copies made of a replicated region: Megatron's, or of a data-parallel step."""
    one = TensorSpace((n,), Partition((workers,)), axes=[REPLICATED])
    return linop.repartition(one, copies(n, workers)).H


def shift(n: int, workers: int) -> LinearOperator:
    return linop.shift(TensorSpace((n * workers,), Partition((workers,))), 1)


def crossing(movements: tuple[Movement, ...], placement: Placement) -> int:
    """Elements that movements send between machines."""
    found = 0
    for movement in movements:
        sender, receiver, elements = messages(routes(movement, placement))
        found += int(elements[placement.of(sender) != placement.of(receiver)].sum())
    return found


@pytest.mark.parametrize("n", [SHORT, LONG])
@pytest.mark.parametrize(
    ("make", "placement", "once", "before"),
    [
        # A machine receives a broadcast once, however many workers it has.
        (broadcast, PAIRS, 1, 2),
        (broadcast, MIXED, 1, 2),
        (broadcast, UNEVEN, 1, 1),
        (broadcast, SIX, 2, 4),
        # Each block goes once to each other machine.
        (all_gather, PAIRS, 4, 8),
        (all_gather, MIXED, 4, 8),
        (all_gather, UNEVEN, 4, 6),
        (all_gather, THREE, 8, 10),
        (all_gather, SIX, 12, 24),
        (shift, PAIRS, 2, 2),
    ],
)
def test_a_box_crosses_once_to_each_machine(
    make: Any, placement: Placement, once: int, before: int, n: int
) -> None:
    op = make(n, len(placement))
    for direction in (op, op.H):  # terms are added before they cross, as many times
        assert crossing(direction.stages.movements, placement) == before * n
        assert crossing(prepared(direction.stages, placement).movements, placement) == once * n
        found = linop.simulate(direction, placement=placement)
        assert found.bytes_between_machines.sum() == 8 * once * n
        assert direction.cost(placement=placement).bytes_between_machines == 8 * once * n


@pytest.mark.parametrize("make", [all_reduce, replicated_sum])
@pytest.mark.parametrize("placement", [PAIRS, MIXED, UNEVEN, THREE, SIX])
def test_an_all_reduce_crosses_as_little_as_it_can(make: Any, placement: Placement) -> None:
    """Over m machines, short: every machine sends its sum to the m - 1 others. Long: as a
    reduce-scatter and an all-gather between machines, 2 n (m - 1), which is the least that there
    is: each machine but one has to send n, and to receive n."""
    m, P = len(placement.names), len(placement)
    for n, boxes in ((SHORT, m * (m - 1)), (LONG, 2 * (m - 1))):
        op = make(n, P)
        stages = prepared(op.stages, placement)
        assert crossing(stages.movements, placement) == boxes * n
        assert len(stages.movements) == (3 if m == 2 or n == SHORT else 4)


@pytest.mark.parametrize(
    ("make", "machines", "each"),
    [(make, machines, 1) for make in (broadcast, all_gather, all_reduce) for machines in (4, 8, 16)]
    + [(broadcast, 4, 2), (all_gather, 4, 2)],
)
def test_short_messages_take_logarithmically_many_rounds(
    make: Any, machines: int, each: int
) -> None:
    """Trees, recursive doubling and halving: none is known to the pass."""
    placement, rounds = Placement.of_blocks(machines * each, each), machines.bit_length() - 1
    op = make(SHORT, machines * each)
    for direction in (op, op.H):
        stages = prepared(direction.stages, placement)
        assert len(stages.movements) == rounds + (each > 1)
        sent, received = np.zeros((2, len(placement)), int)
        for movement in stages.movements:
            senders, receivers, _ = messages(routes(movement, placement))
            crosses = placement.of(senders) != placement.of(receivers)
            np.add.at(sent, senders[crosses], 1)
            np.add.at(received, receivers[crosses], 1)
        assert max(sent.max(), received.max()) == rounds
        assert sent.sum() == (machines - 1 if make is broadcast else rounds * len(placement))
    runs(op, placement)


def test_levels_are_left_out_where_bytes_count() -> None:
    """A long all-gather between machines gains nothing by rounds, and copies more."""
    four = Placement.of_blocks(4, 1)
    assert len(prepared(all_gather(LONG, 4).stages, four).movements) == 1
    assert len(prepared(all_gather(SHORT, 4).stages, four).movements) == 2


def test_all_workers_take_a_share_of_a_long_sum() -> None:
    op = all_reduce(LONG, 4)
    kinds = [[one.kind for one in lower(op.stages, w, PAIRS).patterns] for w in range(4)]
    assert kinds == [[Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_GATHER]] * 4
    groups = [one.group for one in lower(op.stages, 0, PAIRS).patterns]
    assert groups == [(0, 1), (0, 2), (0, 1)]
    one, *others = (lower(all_reduce(SHORT, 4).stages, w, PAIRS) for w in range(4))
    assert [one.kind for one in one.patterns] == [Kind.REDUCE, Kind.ALL_REDUCE, Kind.BROADCAST]
    assert sum(len(plan.sends) for plan in [one, *others]) == 2 + 2 + 2


def test_leaders_take_turns() -> None:
    """Each worker of a machine receives one of the other machine's two blocks."""
    for direction in (all_gather(SHORT, 4), all_gather(SHORT, 4).H):
        first, last = prepared(direction.stages, PAIRS).movements
        between = first if crossing((first,), PAIRS) else last
        senders, receivers, _ = messages(routes(between, PAIRS))
        out = PAIRS.of(senders) != PAIRS.of(receivers)
        assert sorted(senders[out]) == [0, 1, 2, 3] == sorted(receivers[out])


def test_nothing_changes_on_one_machine() -> None:
    alone = Placement([7, 7, 7, 7, 3])
    for make in (all_reduce, all_gather, broadcast, shift):
        for n in (SHORT, LONG):
            stages = make(n, 4).stages
            assert prepared(stages, alone) is prepared(stages)
            assert lower_all(stages, alone) == lower_all(stages)
    stages = shift(SHORT, 4).stages
    assert prepared(stages, PAIRS) is stages


def test_long_tables_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    (movement,) = all_reduce(SHORT, 4).stages.movements
    monkeypatch.setattr(hierarchy, "LARGEST_MOVEMENT", 15)
    assert hierarchical(movement, PAIRS) == (movement,)
    monkeypatch.setattr(hierarchy, "LARGEST_MOVEMENT", 16)
    assert len(hierarchical(movement, PAIRS)) == 3
    (movement,) = all_gather(SHORT, 4).stages.movements
    four = Placement.of_blocks(4, 1)
    assert len(hierarchical(movement, four)) == 2
    monkeypatch.setattr(hierarchy, "LARGEST_IN_LEVELS", 15)
    assert hierarchical(movement, four) == (movement,)


NETWORKS = st.sampled_from([Network(between=Link(latency=1)), Network(0, between=Link(0, 1))])
placements = st.sampled_from([3, 8]).flatmap(
    lambda machines: st.lists(st.integers(0, machines - 1), min_size=8, max_size=8).map(Placement)
)


@st.composite
def movements(draw: st.DrawFn) -> Movement:
    """Regions of 6 numbers on one worker of eight or several, and boxes of any to any."""

    def space(name: str) -> Space:
        held = draw(st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=4), min_size=1,
                             max_size=6))  # fmt: skip
        return Space([Region(f"{name}{k}", 6, sorted(on)) for k, on in enumerate(held)])

    domain, codomain = space("x"), space("y")
    boxes = st.sampled_from([slice(0, 6), slice(0, 4), slice(2, 6)])
    blocks = []
    for _ in range(draw(st.integers(1, 12))):
        box, number = draw(boxes), draw(st.sampled_from([1, 1, 1, -1, 3]))
        sources = draw(st.lists(st.sampled_from(domain.regions), min_size=1, max_size=3))
        targets = draw(st.lists(st.sampled_from(codomain.regions), min_size=1, max_size=3))
        blocks += [(t[box], s[box], number) for t in targets for s in sources]
    return Movement.of_blocks(domain, codomain, blocks)


@given(movement=movements(), placement=placements)
def test_factors_multiply_to_the_movement_and_cross_less(
    movement: Movement, placement: Placement
) -> None:
    for one in (movement, movement.adjoint()):
        every = hierarchy.combinations(one)
        cut = [part for each in every for part in hierarchy.shares(each, 2)]
        for parts in (every, cut):
            factors = hierarchy._across(one, parts, placement)
            assert len(factors) <= 3
            assert reduce(lambda first, then: then @ first, factors) == one
            if not any(placement.spans(region.workers) for region in one.domain):
                assert crossing(factors, placement) <= crossing((one,), placement)
        chosen = hierarchical(one, placement)
        assert reduce(lambda first, then: then @ first, chosen) == one


def runs(op: LinearOperator, placement: Placement, tolerance: float = 0.0) -> None:
    """Plans for a placement are proven, and run on threads, to what the expression gives."""
    x, y = op.domain.integers(0), op.codomain.integers(1)
    backend = linop.backends.get("threads")
    backend.placement = placement
    plan = op.compile(backend)
    forward, backward = plan(x), plan.H(y)
    same_vectors(forward, op(x), tolerance)
    same_vectors(backward, op.H(y), tolerance)
    dot_products(forward, y, x, backward, tolerance)
    for direction in (op, op.H):
        plans = lower_all(direction.stages, placement)
        assert plans == [lower(direction.stages, plan.worker, placement) for plan in plans]
        cost, sends = direction.cost(placement=placement), [s for plan in plans for s in plan.sends]
        assert cost.messages == len(sends)
        assert cost.bytes == sum(s.size for s in sends) * direction.dtype.itemsize
        for form in forms(plans):
            linop.verify_plans(form, direction, placement)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), placement=placements)
def test_plans_for_several_machines_are_their_operator(
    name: str, data: st.DataObject, placement: Placement
) -> None:
    """The choice if latency between machines is all that counts, and if bytes are."""
    op = data.draw(operators(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linop.planning.network.ASSUMED", data.draw(NETWORKS))
        runs(op, placement, 0 if FACTORIES[name].exact else rounding(op))


@pytest.mark.parametrize("make", [all_reduce, replicated_sum])
@pytest.mark.parametrize("n", [7, LONG])
def test_sums_have_the_same_bits_on_every_worker(make: Any, n: int) -> None:
    arrays = np.random.default_rng(5).standard_normal((4, n))

    def main(backend: Backend) -> Any:
        backend.placement = PAIRS
        return make(n, 4).compile(backend)(arrays[backend.worker or 0])

    expected = (arrays[0] + arrays[1]) + (arrays[2] + arrays[3])
    for result in linop.launch(main, workers=4):
        assert (result == expected).all()


def test_a_copy_is_read_from_the_same_machine() -> None:
    """A replicated region with a holder on every machine crosses to nobody."""
    source, target = Region("x", 5, (0, 2)), Region("y", 5, (1, 3))
    op = linop.send_recv(Space([source]), source, target)
    assert op.cost(placement=PAIRS).bytes_between_machines == 0
    assert op.cost(placement=MIXED).bytes_between_machines == 80 / 2
    (movement,) = op.stages.movements
    assert crossing((movement,), PAIRS) == 0
    runs(op, PAIRS)


@pytest.mark.parametrize("placement", [None, PAIRS, MIXED])
@pytest.mark.parametrize("n", [SHORT, LONG])
def test_what_a_later_stage_reads_is_carried_past_factors(
    placement: Placement | None, n: int
) -> None:
    """Factors have regions of their own between them, and another may have the name of one."""
    R = all_reduce(n, 4)
    own = R.domain
    between = [r for m in prepared(R.stages, placement).movements[1:] for r in m.domain]
    space = Space([*own.regions, Region(between[0].name if between else "other", 3, 2)])
    there = out_of_place(space, own, [(region, region) for region in own.regions])
    twice = linop.direct_sum(*[linop.local(r, r, _doubled, _doubled) for r in own.regions])
    before, now = R, twice @ R
    for _ in range(3):
        before, now = now, R @ twice @ R @ now - before
    op = there.H @ now @ there + linop.identity(space)
    for one in (op, op.H):
        stages = prepared(one.stages, placement)
        grew = len(stages.movements) > len(one.stages.movements)
        assert grew == (n == LONG or placement is not None)
        assert any(stages.carried)
        linop.verify_plans(one, placement=placement)
        x = space.integers(1)
        arguments = {w: {r.name: x[r.name] for r in space.on(w)} for w in range(4)}
        wanted = one(x)
        for results in interpret(lower_all(one.stages, placement), arguments).values():
            for name, array in results.items():
                assert (array == wanted[name]).all()


def _doubled(x: Any) -> Any:
    return 2 * x


def test_plans_are_cached_for_a_placement() -> None:
    plans = Plans(1, PAIRS)
    for n in (SHORT, SHORT, 2 * SHORT, LONG):
        for make in (all_reduce, shift):
            stages = make(n, 4).stages
            assert plans.of(stages) == lower(stages, 1, PAIRS)
    stages = all_reduce(SHORT, 4).stages
    assert [name for name, _ in passed(stages, PAIRS)] == ["hierarchy"]
    assert not passed(stages)
