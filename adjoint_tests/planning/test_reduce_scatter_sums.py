"""Sums that several workers want, taken apart into shares: the same operator, less to send."""

from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, Partition, TensorSpace
from linop.backends.engine.base import Backend
from linop.planning import Network, Placement
from linop.planning.lowering import lower, lower_all
from linop.planning.patterns import Kind
from linop.planning.reduce_scatter_sums import split_sums
from support.operators.catalogue import operators
from support.operators.properties import backend_agrees, plans_fit

LARGE = 100_000
"""Numbers, of eight bytes, of which shares are summed."""


def total(workers: int, size: int = LARGE) -> linop.LinearOperator:
    return linop.all_reduce(TensorSpace((size,), Partition((workers,)), axes=[COPIES]))


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deciding network, fixed here whatever is measured later."""
    monkeypatch.setattr("linop.planning.network.ASSUMED", Network(latency=1e-5))


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_large_sum_for_all_is_done_in_shares(workers: int) -> None:
    for op in (total(workers), linop.ring_all_reduce(total(workers).domain), 2 * total(workers)):
        (movement,) = op.stages.movements
        first, second = split_sums(movement)
        assert second @ first == movement
        plan = lower(op.stages, 1)
        assert [one.kind for one in plan.patterns] == [Kind.REDUCE_SCATTER, Kind.ALL_GATHER]
        sent = 2 * (LARGE - len(range(LARGE)[1::workers]))
        assert abs(plan.bytes_sent / 8 - sent) <= 2 * workers


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [2**59, 2**60, 2**62])
def test_sums_of_more_bytes_than_64_bits_count_are_done_in_shares(size: int) -> None:
    (movement,) = total(3, size).stages.movements
    assert len(split_sums(movement)) == 2


def test_small_sums_and_those_for_one_are_not() -> None:
    space = total(3).domain
    one = linop.sum_reduce(space, Partition((1,)))
    for op in (total(3, 10), one, one.H, linop.reduce_scatter(space), linop.shift(space, 1)):
        (movement,) = op.stages.movements
        assert split_sums(movement) == (movement,)


@pytest.mark.parametrize("name", ["all_reduce", "random_composition", "sum_of_operators"])
@given(data=st.data())
def test_the_product_is_the_same(name: str, data: st.DataObject) -> None:
    """As if latency were nothing: then shares are always as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linop.planning.network.ASSUMED", Network(latency=0))
        op = data.draw(operators(name, workers=4))
        for one in (op, op.H @ op):
            for movement in one.stages.movements:
                first, *rest = split_sums(movement)
                for part in rest:
                    first = part @ first
                assert first == movement
            plans_fit(one)
            backend_agrees(one)


def test_sums_have_the_same_bits_on_every_worker() -> None:
    rng = np.random.default_rng(5)
    arrays = rng.standard_normal((3, LARGE))

    def main(backend: Backend) -> Any:
        return total(3).compile(backend)(arrays[backend.worker or 0])

    expected = arrays[0] + arrays[1] + arrays[2]
    for result in linop.launch(main, workers=3):
        assert (result == expected).all()


@pytest.mark.parametrize("workers", [2, 3, 4, 6, 8])
def test_a_short_sum_between_machines_is_done_in_rounds(workers: int) -> None:
    """One message of a worker in each round, if there are 2, 4, 8 ... of them, each on a machine of
    its own; the same bits on all."""
    apart = Placement.of_blocks(workers, per_machine=1)
    for op in (total(workers, 7), linop.ring_all_reduce(total(workers, 7).domain)):
        (movement,) = op.stages.movements
        parts = split_sums(movement, apart)
        assert reduce(lambda first, then: then @ first, parts) == movement
        plans = lower_all(op.stages, apart)
        linop.verify_plans(plans, op, apart)
        rounds = {2: 1, 4: 2, 8: 3}.get(workers)
        assert rounds is None or {len(plan.sends) for plan in plans} == {rounds}
        assert len(parts) == (rounds or 1)
        near = Placement([0, *range(workers - 1)])
        assert workers == 2 or len(split_sums(movement, near)) == 1
    arrays = np.random.default_rng(5).standard_normal((workers, 7))

    def main(backend: Backend) -> Any:
        backend.placement = apart
        return total(workers, 7).compile(backend)(arrays[backend.worker or 0])

    expected = [*arrays]
    while len(expected) > 1 and workers in (2, 4, 8):
        expected = [a + b for a, b in zip(expected[::2], expected[1::2], strict=True)]
    one, *others = linop.launch(main, workers=workers)
    assert all((other == one).all() for other in others)
    if len(expected) == 1:
        assert (one == expected[0]).all()
    np.testing.assert_allclose(one, arrays.sum(0))


@given(data=st.data())
def test_rounds_and_shares_between_machines(data: st.DataObject) -> None:
    """The product is the same, whichever of latency and bytes counts."""
    workers, n = data.draw(st.sampled_from([4, 8, 2, 3])), data.draw(st.integers(1, 9))
    apart = Placement.of_blocks(workers, per_machine=1)
    factor, other = data.draw(st.integers(1, 3)), data.draw(st.integers(-3, 3))
    op = factor * total(workers, n) + other * linop.identity(total(workers, n).domain)
    with pytest.MonkeyPatch.context() as patch:
        one = st.sampled_from([Network(1), Network(0), Network()])
        patch.setattr("linop.planning.network.ASSUMED", data.draw(one))
        for movement in op.stages.movements:
            parts = split_sums(movement, apart)
            assert reduce(lambda first, then: then @ first, parts) == movement
        linop.verify_plans(lower_all(op.stages, apart), op, apart)
