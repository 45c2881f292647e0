"""A worker's plan costs what the worker does: rows of some regions, and plans from them.

That a known movement is that of its expression, `test_catalogue` says for every operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, LinearOperator, Movement, Partition, TensorSpace
from linop.backends import Backend
from linop.normal_form.boxes import Table
from linop.normal_form.stages import Stages
from linop.planning.lowering import lower, lower_all, workers_of
from linop.planning.plan import Receive, Send
from linop.planning.routing import Routes, routes, routes_into, routes_out_of
from linop.planning.stage_passes import prepared
from linop.spaces.space import Space
from support.operators.catalogue import NAMES, build, describe, operators
from support.operators.properties import backend_agrees, plans_fit, written_out

each = pytest.mark.parametrize("name", NAMES)


def spelled_out(stages: Stages) -> Stages:
    """The same stages from whole tables."""
    movements = (Movement(m.domain, m.codomain, m.table) for m in stages.movements)
    return Stages(tuple(movements), stages.layers)


def variants(op: LinearOperator) -> list[LinearOperator]:
    """An operator, and what the algebra makes of it."""
    return [op, op.H, op.H @ op, op @ op.H @ op, 2 * op + op, op.conj()]


def some_of(data: st.DataObject, space: Space) -> np.ndarray:
    """Numbers of some regions, in order."""
    chosen = data.draw(st.sets(st.integers(0, max(0, len(space) - 1)), max_size=3))
    return np.array(sorted(k for k in chosen if k < len(space)), np.int64)


def same_rows(given: Table, wanted: Table) -> None:
    """Two tables are equal, row by row."""
    for column in ("dst", "src", "at", "of", "extent", "coef"):
        one, other = getattr(given, column), getattr(wanted, column)
        assert one.shape == other.shape
        assert (one == other).all()


@each
@given(data=st.data())
def test_rows_of_some_regions_are_rows_of_the_table(name: str, data: st.DataObject) -> None:
    for op in variants(data.draw(operators(name))):
        for movement in op.stages.movements:
            into, out_of = (some_of(data, s) for s in (movement.codomain, movement.domain))
            coming, leaving = (
                movement.into(into),
                movement.out_of(out_of),
            )  # before the table is made
            table = movement.table
            same_rows(coming, table.take(np.isin(table.dst, into)))
            same_rows(leaving, table.take(np.isin(table.src, out_of)))
            same_rows(movement.into(into), coming)
            same_rows(movement.out_of(out_of), leaving)
            for row in range(len(coming)):
                assert movement.transfer(row, coming) in list(movement)
            dst, src = len(movement.codomain), len(movement.domain)
            assert (
                movement.transfers.counts_into(dst) == np.bincount(table.dst, minlength=dst)
            ).all()
            assert (
                movement.transfers.counts_out_of(src) == np.bincount(table.src, minlength=src)
            ).all()


def entries(found: Routes) -> list[tuple[int, ...]]:
    """Routes as comparable rows: region numbers and starts stand for the transfer."""
    t = found.table.take(found.row)
    columns = (found.receiver, found.sender, t.dst, t.src, *t.at.T, *t.of.T, found.volume)
    return list(zip(*(c.tolist() for c in columns), strict=True))


@each
@given(data=st.data())
def test_plans_from_some_rows_are_plans_from_the_table(name: str, data: st.DataObject) -> None:
    description = data.draw(describe(name))
    for lazy in (build(name, description), build(name, description).H):
        workers = workers_of(lazy.stages)
        plans = [lower(lazy.stages, w) for w in workers]
        whole = spelled_out(lazy.stages)
        assert plans == [lower(whole, w) for w in workers]
        assert plans == lower_all(lazy.stages)
        beyond = range(max(lazy.stages.workers, default=0) + 2)  # some without any region
        assert lower_all(lazy.stages, None, beyond) == [lower(lazy.stages, w) for w in beyond]
        for movement in lazy.stages.movements:
            every = routes(movement)
            for w in workers:
                mine = every.of(every.receiver == w)
                sent = every.of((every.sender == w) & (every.receiver != w))
                assert entries(routes_into(movement, np.array([w]))) == entries(mine)
                assert entries(routes_out_of(movement, np.array([w]))) == entries(sent)


GRID = Partition((64, 64))


def halo() -> LinearOperator:
    return linop.halo_exchange(TensorSpace((512, 256), GRID), 3, padding=1)


def grid_broadcast() -> LinearOperator:
    column = TensorSpace((512, 256), Partition((64, 1)))
    return linop.broadcast(column, GRID)


def repartition() -> LinearOperator:
    return linop.repartition(TensorSpace((4096, 256), GRID), Partition((4096, 1)))


def halo_of_scaled_halo() -> LinearOperator:
    H = halo()
    return 2 * (H.H @ H) + linop.identity(H.domain)


@pytest.mark.parametrize("make", [halo, grid_broadcast, repartition, halo_of_scaled_halo])
def test_a_worker_of_4096_touches_its_own_part(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No table is longer than those of one dimension, but that of the identity; and nobody makes
    the expression, or the regions of the others."""
    lengths: list[int] = []
    made = Table.__init__

    def counting(self: Table, dst: Any, *columns: Any) -> None:
        lengths.append(len(dst))
        made(self, dst, *columns)

    monkeypatch.setattr(Table, "__init__", counting)
    op = make()
    with_identity = make is halo_of_scaled_halo
    for direction in (op, op.H):
        plan = lower(direction.stages, 2080)
        assert direction.stages.digest
        assert len(plan.steps) < 200
        (movement,) = direction.stages.movements
        assert "table" not in vars(movement)
        assert "body" not in vars(direction)
        if not with_identity:
            assert (
                "regions"
                not in vars(movement.domain.numbering).keys()
                | vars(movement.codomain.numbering).keys()
            )
    longest = max(n for n in lengths if not (with_identity and n == 4096))
    assert longest <= (4096 + 64 if make is repartition else 512)


def test_the_whole_table_of_4096_workers() -> None:
    """Nine transfers a worker, at the edges fewer: what nobody has to make."""
    assert len(halo().movement()) == (3 * 64 - 2) ** 2


@each
@given(data=st.data())
def test_equal_digests_mean_equal_operators(name: str, data: st.DataObject) -> None:
    one, other = (data.draw(describe(name)) for _ in range(2))
    first, again, second = (
        build(name, one).stages,
        build(name, one).stages,
        build(name, other).stages,
    )
    assert first.digest == again.digest
    if first.digest == second.digest:
        assert first.fingerprint == second.fingerprint
    assert Stages.adjoint(first).digest != first.digest or first.domain == first.codomain


def test_workers_may_have_made_one_operator_in_two_ways() -> None:
    X = TensorSpace((6, 4), Partition((2, 2)))
    known = linop.halo_exchange(X, 3, padding=1)
    plain = written_out(known)
    assert known.stages.digest != plain.stages.digest
    assert known.stages.fingerprint == plain.stages.fingerprint
    x = X.integers(0)

    def main(backend: Backend) -> bool:
        op = known if backend.worker == 1 else plain
        plan = op.compile(backend)
        mine = plan(backend.vector(X, x.arrays))
        return all((mine[n] == known(x)[n]).all() for n in mine.arrays)

    assert all(linop.launch(main, workers=4, backend="threads"))


def copies(workers: int) -> TensorSpace:
    return TensorSpace((3,), Partition((workers,)), axes=[COPIES])


def test_a_sum_broadcast_to_many_runs_as_a_sum_and_a_broadcast() -> None:
    few, many = (linop.all_reduce(copies(n)).movement() for n in (8, 400))
    assert few.factored() == (few,)
    assert [len(part) for part in many.factored()] == [400, 400]
    for movement in (many.adjoint(), many.scale(2), many.conj()):
        first, second = movement.factored()
        # The whole has 160,000 transfers: compared on some regions, exactly.
        some = np.array([0, 17, 399])
        same_rows((second @ first).into(some), movement.into(some))
    cost = linop.all_reduce(copies(400)).cost()
    assert (cost.messages, cost.stages) == (2 * 399, 2)
    assert "table" not in vars(many)


@pytest.mark.parametrize(
    "name", ["all_reduce", "random_composition", "power", "fft_after_gather", "sum_of_operators"]
)
@given(data=st.data())
def test_products_taken_apart_are_the_same(name: str, data: st.DataObject) -> None:
    """As if every product were far longer than its factors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linop.normal_form.movement.FAR_MORE", -1)
        op = data.draw(operators(name, workers=4))
        squared = op.H @ op
        assert len(prepared(squared.stages).movements) > len(squared.stages.layers)
        for one in (op, squared):
            plans_fit(one)
        if name == "all_reduce":
            backend_agrees(squared)


def test_a_ring_of_primitives_is_never_taken_apart() -> None:
    ring = linop.ring_all_reduce(copies(6)).movement()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linop.normal_form.movement.FAR_MORE", -1)
        assert ring.factored() == (ring,)


def test_tensor_spaces_are_the_spaces_of_their_regions() -> None:
    """Answers of a tensor space from its grid are those from its regions."""
    replicated = (0, linop.REPLICATED), (linop.REPLICATED, COPIES), (COPIES, 0), (1, 0)
    for axes in replicated:
        X = TensorSpace((5, 3), Partition((2, 3), [7, 2, 4, 1, 0, 9]), axes=axes)
        regions = [X.numbering.at(k) for k in range(len(X))]
        plain = Space(regions, X.dtype)
        assert "regions" not in vars(X.numbering)
        assert all(a is b for a, b in zip(X.regions, regions, strict=True))
        assert X.numbering.at(0) is regions[0] is X[regions[0].name]
        assert X == plain
        assert hash(X) == hash(plain)
        assert X.numbering == plain.numbering
        assert (X.numbering.shapes == plain.numbering.shapes).all()
        assert all(
            (a == b).all()
            for a, b in zip(X.numbering.holders, plain.numbering.holders, strict=True)
        )
        assert (X.workers, X.numbering.index) == (plain.workers, plain.numbering.index)
        for worker in range(11):
            assert X.on(worker) == plain.on(worker)
            assert (X.numbering.numbers_on(worker) == plain.numbering.numbers_on(worker)).all()


def test_plans_of_4096_workers_agree_where_they_meet() -> None:
    """Every send has an equal receive at the other worker."""
    for op in (halo(), halo().H, repartition()):
        mine = lower(op.stages, 2080)
        for step in mine.steps:
            if isinstance(step, Send):
                theirs = lower(op.stages, step.peer).steps
                sizes = [s.size for s in theirs if isinstance(s, Receive) and s.peer == 2080]
                assert sizes == [step.size]
