"""Sums that several workers want, taken apart into shares: the same operator, less to send."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, Partition, TensorSpace
from linop.backends.base import Backend
from linop.planning import Network
from linop.planning.lowering import lower
from linop.planning.patterns import Kind
from linop.planning.reduce_scatter_sums import split_sums
from support.operators.catalogue import fewer, operators
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


def test_small_sums_and_those_for_one_are_not() -> None:
    space = total(3).domain
    one = linop.sum_reduce(space, Partition((1,)))
    for op in (total(3, 10), one, one.H, linop.reduce_scatter(space), linop.shift(space, 1)):
        (movement,) = op.stages.movements
        assert split_sums(movement) == (movement,)


@pytest.mark.parametrize("name", ["all_reduce", "random_composition", "sum_of_operators"])
@fewer
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
