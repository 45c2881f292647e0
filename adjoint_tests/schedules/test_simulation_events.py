"""Simulation of schedules: times by hand, messages, cores, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Partition, TensorSpace
from linop.errors import ArgumentError
from linop.planning.network import Network
from linop.schedules import (
    GENERATORS,
    Action,
    Kind,
    Schedule,
    Simulation,
    Sizes,
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
    with_messages,
    zero_bubble_h1,
)
from linop.schedules.schedule_errors import (
    DuplicateActionError,
    MissingActionError,
    ScheduleDeadlockError,
    UnmatchedMessageError,
)

TWO = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
EQUAL = {"F": 1, "B": 1}


def times(simulation: Simulation) -> dict[str, tuple[Any, Any]]:
    """(start, end) of every action, by its text."""
    return {str(t.action): (t.start, t.end) for row in simulation.workers for t in row}


def test_times_by_hand() -> None:
    found = times(simulate(TWO))
    assert found["0F1"] == (1, 2) and found["1F0"] == (1, 2)
    assert found["1B0"] == (2, 4) and found["0B0"] == (4, 6)
    assert found["1F1"] == (4, 5) and found["1B1"] == (5, 7) and found["0B1"] == (7, 9)


def test_messages_beside_computation() -> None:
    """The second message waits for the first to leave, and the worker for neither."""
    found = times(simulate(TWO, EQUAL, edges=3))
    assert found["0SEND_F0"] == (1, 4) and found["0SEND_F1"] == (4, 7)
    assert found["0F1"] == (1, 2)
    assert found["1F0"] == (4, 5) and found["1F1"] == (7, 8)


def test_messages_on_the_worker() -> None:
    found = simulate(TWO, EQUAL, edges=3, overlap=False)
    when = times(found)
    assert when["0SEND_F0"] == (1, 4) and when["0F1"] == (4, 5)
    assert when["1F0"] == (4, 5) and when["1RECV_F0"] == (4, 4)
    assert found.busy == (4, 4)


def test_slots_make_sends_wait() -> None:
    """Stage 0 runs ahead; with one slot its second message waits until the first is received."""
    one = Schedule.from_csv("0F0,0F1,0F2\n1F0,1F1,1F2")
    costs = {(0, "F"): 1, (1, "F"): 5}
    ahead = times(simulate(one, costs, edges=1))
    assert [ahead[f"0SEND_F{m}"][1] for m in range(3)] == [2, 3, 4]
    held = times(simulate(one, costs, edges=1, slots=1))
    assert [held[f"0SEND_F{m}"][1] for m in range(3)] == [2, 3, 8]
    late = Schedule.from_csv("0F0,0F1\n2F0,1F0,1F1")
    held = times(simulate(late, {(2, "F"): 9, "F": 1}, edges={(0, 1): 1}, slots=1))
    assert held["0SEND_F0"] == (1, 2) and held["0SEND_F1"] == (9, 10)
    blocked = times(simulate(one, costs, edges=1, slots=1, overlap=False))
    assert blocked["0F2"] == (4, 5) and blocked["0SEND_F2"] == (7, 8)
    met = times(simulate(one, costs, edges=1, slots=0))
    assert met["0SEND_F1"] == (7, 8) and met["1F1"] == (8, 13)


def test_fractions_are_exact() -> None:
    third = Fraction(1, 3)
    found = simulate(gpipe(3, 4), {"F": third, "B": 2 * third}, edges=Fraction(1, 7))
    assert found.time == 6 + 4 * Fraction(1, 7)
    assert isinstance(found.bubble_of_total, Fraction)


def test_costs_by_stage_function_and_default() -> None:
    by_stage = simulate(TWO, {"F": 1, (1, "F"): 4, "I": 1, "W": 2})
    assert times(by_stage)["1F0"] == (1, 5)
    assert times(by_stage)["1B0"] == (5, 8)
    by_action = simulate(TWO, lambda action: 1 + (action.micro_batch or 0))
    assert times(by_action)["0F1"] == (1, 3)
    update = Schedule(tuple((*row, Action(s, Kind.UPDATE)) for s, row in enumerate(TWO.workers)))
    assert simulate(update).time == simulate(TWO).time
    assert simulate(update, {"F": 1, "B": 2, "U": 7}).time == simulate(TWO).time + 7
    assert simulate(update, {"F": 1, "B": 2, "U": 7}).busy == (13, 13)


def test_costs_of_edges_by_operator() -> None:
    """A broadcast's predicted time forward, and back that of its adjoint, which adds, on a given
    network."""
    edge = linop.broadcast(TensorSpace((1024,), Partition((1,))), Partition((3,)))
    network = Network(latency=1.0, per_byte_added=1.0)
    forward, back = (linop.simulate(op, network).time for op in (edge, edge.H))
    found = times(simulate(TWO, EQUAL, edges={(0, 1): edge}, network=network))
    assert back > forward > 1
    assert found["1F0"][0] == 1 + forward
    assert found["0B0"][0] == pytest.approx(found["1B0"][1] + back)
    assert times(simulate(TWO, EQUAL, edges=edge, network=network)) == found


def test_edges_of_skipping_stages() -> None:
    """The pairs of a mapping are the graph of the stages."""
    three = gpipe(3, 1)
    skip = simulate(three, edges={(0, 1): 1, (1, 2): 1, (0, 2): 9})
    assert times(skip)["2F0"][0] == 1 + 9
    assert times(skip)["0SEND_F0>2"] == (1, 10)
    aside = simulate(three, edges={(0, 2): 9})
    assert times(aside)["1F0"][0] == 0
    by_send = simulate(three, edges=lambda send: 4 if send.stage == 1 else 0)
    assert times(by_send)["2F0"][0] == 1 + 1 + 4


def test_chunks_of_one_worker_need_no_message() -> None:
    found = simulate(Schedule.from_csv("0F0,1F0,1B0,0B0"), edges=100)
    assert found.time == 6
    assert len(found.workers[0]) == 4


def test_schedules_with_messages_stay_as_they_are() -> None:
    given = with_messages(TWO)
    assert simulate(given).schedule is given
    assert times(simulate(given)) == times(simulate(TWO))


@pytest.mark.parametrize("name", GENERATORS)
def test_one_core_does_all_work_in_turn(name: str) -> None:
    found = simulate(GENERATORS[name](4, 4), cores=1)
    assert found.time == sum(found.busy)
    enough = simulate(GENERATORS[name](4, 4), cores=4)
    assert times(enough) == times(simulate(GENERATORS[name](4, 4)))


def test_workers_wait_for_a_core_in_order() -> None:
    """First come, first served; of those that come together, the lower worker."""
    alone = Schedule.from_csv("0F0,0F1\n1F0,1F1\n2F0,2F1")
    found = times(simulate(alone, {(0, "F"): 2, "F": 3}, edges={}, cores=2))
    assert found["0F0"] == (0, 2) and found["1F0"] == (0, 3) and found["2F0"] == (2, 5)
    assert found["0F1"] == (3, 5)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_bounds(p: int, M: int, cores: int, edge: int, overlap: bool) -> None:
    """No more actions at a time than cores; each worker's actions one after the other; work is as
    given; time is at least work by cores, and fewer cores gain nothing over all."""
    found = simulate(one_forward_one_backward(p, M), edges=edge, overlap=overlap, cores=cores)
    on_core = [
        (t.start, t.end)
        for row in found.workers
        for t in row
        if t.end > t.start and not (overlap and "SEND" in t.action.kind)
    ]
    for at, _ in on_core:
        assert sum(start <= at < end for start, end in on_core) <= cores
    for row in found.workers:
        work = [t for t in row if t.action.kind in ("F", "B")]
        assert all(a.end <= b.start for a, b in pairwise(work))
    assert found.busy == (3 * M,) * p
    assert found.time * cores >= sum(found.busy)
    free = simulate(one_forward_one_backward(p, M), edges=edge, overlap=overlap)
    assert found.time >= free.time


def test_same_schedule_same_times() -> None:
    one, other = (simulate(zero_bubble_h1(4, 9), edges=1, cores=2) for _ in range(2))
    assert times(one) == times(other) and str(one) == str(other)


def test_bytes() -> None:
    """On worker 0 of two chunks, after 0F0 0F1 2F0 2F1 0F2 2B0 0F3; and with recomputation the
    boundaries of all that fly."""
    found = simulate(interleaved(4, 4, 2))
    assert found.peak_bytes(Sizes([10, 1, 1, 1]))[0] == 10 * 4 + 1
    sizes = Sizes([100] * 2, [1000] * 2, boundaries=[1] * 2)
    recomputed = simulate(gpipe(2, 3), recompute=True).peak_bytes(sizes)
    assert recomputed == (1000 + 100 + 3,) * 2


def test_nothing() -> None:
    empty = simulate(Schedule(((), ())))
    assert (empty.time, empty.bubble_of_total, empty.bubble_of_ideal) == (0, 0, 0)
    assert "<svg" in empty.to_svg()


def test_text() -> None:
    lines = str(simulate(one_forward_one_backward(4, 8))).splitlines()
    assert lines[0] == "1f1b: time 33, bubble 27.3% of the total, 37.5% of the ideal"
    assert lines[1].split()[:3] == ["worker", "actions", "work"]
    assert lines[2].split() == ["0", "33", "24", "9", "4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": {"F": 1}}, "costs: none for .B0; expected one of kind B or of"),
        ({"costs": {"B": 1}}, "costs: none for .F0; expected one of kind F .*given B"),
        ({"costs": {"F": -1, "B": 1}}, "finite number, not negative, for .F0; given -1"),
        ({"costs": {"F": float("nan"), "B": 1}}, "given nan"),
        ({"costs": lambda action: "1"}, "given '1'"),
        ({"edges": -1}, "edges: .* not negative, for .SEND_.*; given -1"),
        ({"slots": -1}, "slots: at least 0 expected for each edge, given -1"),
        ({"cores": 0}, "cores: at least 1, or None, expected; given 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        simulate(TWO, **arguments)


def test_edges_without_a_cost() -> None:
    with pytest.raises(ArgumentError, match=r"between stages 0 and 1, of which the mapping has no"):
        simulate(with_messages(TWO), edges={})
    with pytest.raises(
        ArgumentError, match=r"edges: two of the stages 0, 1 expected, given \(1, 2\)"
    ):
        simulate(TWO, edges={(0, 1): 1, (1, 2): 1})


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ("0F0,0F0", DuplicateActionError, "0F0: twice"),
        ("0B0", MissingActionError, "0B0 needs 0F0, which no worker executes"),
        ("0F0\n1F0,1F1", UnmatchedMessageError, "1RECV_F1: no worker sends it"),
        ("0F0,1F0,1F1", MissingActionError, "1F1 needs 0F1, which"),
        ("0F0,0W0", MissingActionError, "0W0 needs 0I0, which"),
        ("0F0\n1RECV_F0,1F0", UnmatchedMessageError, "1RECV_F0: no worker sends it"),
        ("0B0,0F0", ScheduleDeadlockError, "0B0 waits for 0F0|0F0 waits for 0B0"),
    ],
)
def test_wrong_schedules(table: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulate(Schedule.from_csv(table))


def test_sends_without_receives_cannot_have_slots() -> None:
    table = Schedule.from_csv("0F0,0SEND_F0\n1F0")
    assert simulate(table).time == 2
    with pytest.raises(UnmatchedMessageError, match="0SEND_F0: no worker receives it"):
        simulate(table, slots=1)


def test_a_circle_is_named() -> None:
    """1F1B with sends on the worker that wait for their receives (as in pytorch #172668)."""
    with pytest.raises(ScheduleDeadlockError, match="wait for each other: ") as raised:
        simulate(one_forward_one_backward(2, 4), overlap=False, slots=0)
    circle = raised.value.cycle
    assert {worker for worker, _ in circle} == {0, 1}
    assert {action.kind for _, action in circle} <= {Kind.SEND_F, Kind.SEND_B}
    assert simulate(one_forward_one_backward(2, 4), overlap=False, slots=1).time == 15


def test_ten_thousand_actions() -> None:
    schedule = one_forward_one_backward(4, 1250)
    assert sum(map(len, schedule.workers)) > 10_000
    assert simulate(schedule).time == 3 * 1253


def test_skips_of_a_schedule_with_messages() -> None:
    """Receives wait for their messages, without another word of the edges."""
    table = with_messages(gpipe(3, 1), [(0, 1), (1, 2), (0, 2)])
    found = simulate(table, edges=lambda send: 10 if (send.stage, send.other) == (0, 2) else 0)
    assert found.workers[2][2] == (Action(2, Kind.FORWARD, 0), 11, 12)


def test_the_lower_worker_is_first_after_messages_of_no_time() -> None:
    """Workers 0 and 1 are ready at one time, though the message to worker 1 is sent first."""
    edges = {(0, 1): 0, (0, 2): 0}
    table = with_messages(Schedule.from_csv("2F0,2B0\n1F0,1B0\n0F0,0B0"), [*edges])
    found = simulate(table, edges=edges, cores=1)
    assert [row[1].start for row in found.workers[:2]] == [1, 2]  # 2F0, 1F0
