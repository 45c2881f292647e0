"""Predicted messages, bytes and seconds, against those of the plans, one message at a time."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, LinearOperator, Partition, Region, TensorSpace
from linop.planning import Link, Network, Placement, Simulation
from linop.planning.plan import Advance, Send
from linop.planning.prediction.traffic import traffic_matrix
from support.operators.catalogue import NAMES, operators
from support.operators.properties import plans_of

WIRE = Network(latency=1.0, per_byte=0.25, per_byte_added=0, per_byte_copied=0)
"""Messages alone, in numbers that floating point holds exactly."""


def times_of_plans(op: LinearOperator, network: Network) -> dict[int, float]:
    """When each worker is done with its messages, from the plans of all workers."""
    plans = plans_of(op)
    stages: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    for plan in plans:
        for step in plan.steps:
            if isinstance(step, Send):
                stages[step.stage][plan.worker, step.peer] = step.size * plan.dtype.itemsize
            if isinstance(step, Advance):
                stages[step.stage].update({})
    begun = {plan.worker: 0.0 for plan in plans}
    for stage in sorted(stages):
        sent, received = dict(begun), dict(begun)
        for (sender, receiver), size in stages[stage].items():
            sent[sender] += network.latency + network.per_byte * size
            received[receiver] += network.latency + network.per_byte * size
        done = {w: max(sent[w], received[w]) for w in begun}
        for sender, receiver in stages[stage]:
            done[receiver] = max(done[receiver], sent[sender])
        begun = done
    return begun


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_predictions_are_those_of_the_plans(name: str, data: st.DataObject) -> None:
    op = data.draw(operators(name))
    found = linop.simulate(op, WIRE)
    assert dict(zip(found.workers.tolist(), found.seconds, strict=True)) == times_of_plans(op, WIRE)
    cost = op.cost(WIRE)
    assert (found.messages, found.bytes, found.stages) == (cost.messages, cost.bytes, cost.stages)
    assert cost.seconds == found.time
    assert op.cost().seconds is None
    for k, worker in enumerate(found.workers):
        traffic = cost.workers.get(worker, linop.planning.Traffic())
        assert found.messages_sent[k] == traffic.messages_sent
        assert found.messages_received[k] == traffic.messages_received
        assert found.bytes_sent[k] == traffic.bytes_sent
        assert found.bytes_received[k] == traffic.bytes_received


def parts(found: Simulation) -> list[list[float]]:
    """Seconds by worker: sending, waiting, copying, adding."""
    columns = (found.sending, found.waiting, found.copying, found.adding)
    return np.stack(columns, axis=1).tolist()


def test_a_sum_by_hand() -> None:
    Y = TensorSpace((10,), Partition((3,)), np.float32, axes=[COPIES])
    total = linop.sum_reduce(Y, Partition((1,)))
    network = Network(latency=1, per_byte=0.1, per_byte_added=0.01, per_byte_copied=0.001)
    # Workers 1 and 2 send 40 bytes, each 1 + 4 s; worker 0 receives both, copies its own, adds two.
    found = linop.simulate(total, network)
    assert parts(found) == [[0, 10, 0.04, 0.8], [5, 0, 0, 0], [5, 0, 0, 0]]
    assert (found.time, found.messages, found.bytes) == (10.84, 2, 80)
    # Back, worker 0 sends two messages and keeps its own; the others wait for both.
    assert parts(linop.simulate(total.H, network)) == [[10, 0, 0, 0], [0, 10, 0, 0], [0, 10, 0, 0]]


@pytest.mark.filterwarnings("error")
def test_bytes_that_no_float_holds_are_counted_exactly() -> None:
    n = 2**53 + 1
    X = TensorSpace((n,), Partition((2,)), np.int8, axes=[COPIES])
    exchange, total = linop.shift(X, 1), linop.sum_reduce(X, Partition((1,)))
    assert linop.simulate(exchange).bytes_sent.tolist() == [n, n]
    found = linop.simulate(total, placement=Placement(["a", "b"]))
    assert found.bytes_between_machines.tolist() == [0, n]
    assert traffic_matrix(exchange).binned(2)[0].tolist() == [[0, n], [n, 0]]


@pytest.mark.parametrize("first", [1, 2**20, 2**33, 2**62])
def test_workers_of_any_number(first: int) -> None:
    a, b = Region("a", 3, first), Region("b", 3, first + 1)
    both = Region("c", 3, (first - 1, first + 1))
    space = linop.Space([a, b, both])
    assert linop.simulate(linop.add(space, both, b)).messages == 0
    found = linop.simulate(linop.add(space, a, both))
    assert (found.workers - first).tolist() == [-1, 0, 1]
    assert found.messages_sent.tolist() == [0, 2, 0]
    assert found.bytes_received.tolist() == [24, 0, 24]


def test_messages_between_machines_have_their_own_cost() -> None:
    """A ring of four workers of 40 bytes each: those at the ends of a machine send over the
    network, or receive from it."""
    ring = linop.shift(TensorSpace((20,), Partition((4,))), 1)
    network = Network(1, 0.1, 0, 0, between=Link(latency=10, per_byte=0.5))
    found = linop.simulate(ring, network, Placement([0, 0, 1, 1]))
    assert found.bytes_between_machines.tolist() == [0, 40, 0, 40]
    assert found.sending.tolist() == [5, 30, 5, 30]
    assert found.seconds.tolist() == [30, 30, 30, 30]
    assert ring.cost(network, Placement([0, 0, 1, 1])).seconds == 30
    for one in (None, Placement([3, 3, 3, 3])):
        assert linop.simulate(ring, network, one).seconds.tolist() == [5, 5, 5, 5]
    assert linop.simulate(ring, Network(1, 0.1, 0, 0), Placement([0, 1, 2, 3])).time == 5


def test_workers_of_a_machine_share_its_link() -> None:
    """Two machines exchange 40 bytes for each of two workers: 80 bytes at the rate of a machine."""
    swap = linop.shift(TensorSpace((20,), Partition((4,))), 2)
    placement = Placement([0, 0, 1, 1])
    for rate, seconds in ((None, 40), (0.5, 40), (0.25, 30), (0, 30), (1, 80)):
        network = Network(1, 0, 0, 0, between=Link(10, 0.5, rate))
        found = linop.simulate(swap, network, placement)
        assert found.sending.tolist() == [seconds] * 4
        assert found.time == seconds
    # Only those wait that send to other machines, or receive from them.
    total = linop.sum_reduce(TensorSpace((5,), Partition((4,)), axes=[COPIES]), Partition((1,)))
    network = Network(1, 0, 0, 0, between=Link(0, 0.5))
    found = linop.simulate(total, network, Placement([0, 0, 1, 2]))
    assert found.sending.tolist() == [0, 1, 20, 20]
    assert found.time == 1 + 20 + 20


def test_a_hundred_thousand_workers_on_machines() -> None:
    grid = Partition((250, 400))
    halo = linop.halo_exchange(TensorSpace((500, 800), grid, np.float32), 3, padding=1)
    found = linop.simulate(halo, placement=Placement.of_blocks(100_000, 400))
    # A row of the grid is a machine: faces of 2 elements, and corners of 1, go to the next rows.
    assert found.bytes_between_machines.sum() == 4 * 2 * 249 * (400 * 2 + 2 * 399)


def test_a_stage_waits_for_the_one_before_it() -> None:
    here, there, then = (Region(name, 4, k) for k, name in enumerate("abc"))
    space = linop.Space([here, there, then])
    once = linop.send_recv(space, here, there)
    scaled = linop.direct_sum(
        *(linop.local_operators.diagonal(np.ones(4), region) for region in space.regions)
    )
    twice = linop.send_recv(space, there, then) @ scaled @ once
    found = linop.simulate(twice, Network(1, 0, 0, 0))
    assert found.stages == 2
    assert found.seconds.tolist() == [1, 2, 2]


def test_a_region_that_stays_costs_nothing() -> None:
    X = TensorSpace((6, 4), Partition((2, 1)))
    for op in (
        linop.identity(X),
        linop.repartition(X, TensorSpace((6, 4), Partition((2, 1)), name="y")),
    ):
        assert linop.simulate(op).time == 0
    assert linop.simulate(2 * linop.identity(X)).time > 0


def test_nobody_does_nothing() -> None:
    found = linop.simulate(linop.identity(linop.Space([])))
    assert (found.messages, found.bytes, found.time) == (0, 0, 0)
    assert str(found) == "0 workers, 0 stages with messages: 0 messages, 0 bytes, 0 s"


def test_ten_thousand_workers() -> None:
    grid = Partition((100, 100))
    halo = linop.halo_exchange(TensorSpace((800, 400), grid, np.float32), 3, padding=1)
    found = linop.simulate(halo)
    inner, edge, corner = 98 * 98 * 8, 4 * 98 * 5, 4 * 3
    assert found.messages == inner + edge + corner
    # Faces of 8 and 4 elements, and corners, both ways.
    assert found.bytes == 4 * (2 * 99 * 100 * (8 + 4) + 4 * 99 * 99)
    assert (found.bytes_sent == found.bytes_received).all()
    total = linop.simulate(linop.all_reduce(TensorSpace((5,), grid, axes=[COPIES, COPIES])))
    assert (total.messages, total.stages) == (2 * 9999, 2)
    assert total.seconds.argmax() == 0 or total.time == total.seconds[1]


def test_it_prints() -> None:
    Y = TensorSpace((10,), Partition((3,)), axes=[COPIES])
    text = str(linop.simulate(linop.sum_reduce(Y, Partition((1,))), Network(1, 0, 0, 0)))
    head, columns, *rows = text.splitlines()
    assert head == "3 workers, 1 stages with messages: 2 messages, 160 bytes, 2 s"
    assert columns.split("  ")[-1] == "slowest (worker 0)"
    assert rows[0].split() == ["messages", "sent", "0.667", "1", "0"]
    assert rows[4].split() == ["bytes", "between", "memories", "0", "0", "0"]
    assert rows[5].split() == ["bytes", "between", "machines", "0", "0", "0"]
    assert rows[7].split() == ["seconds", "waiting", "0.667", "2", "2"]
    assert len({len(row) for row in (columns, *rows)}) == 1
