"""Simulation of schedules drawn at random: against a clock that ticks, and against the checker."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linop.schedules import GENERATORS, Action, Schedule, check, simulate
from linop.schedules.actions import RECEIVES, SENDS
from linop.schedules.schedule_errors import ScheduleDeadlockError, ScheduleError
from support.schedules.drawn import Drawn, broken, greedy

SLOTS = st.sampled_from([None, 0, 1, 2])


def cost(action: Action) -> int:
    """A cost of each action, none of some."""
    return (7 * action.stage + 3 * (action.micro_batch or 0) + 5 * len(action.kind)) % 6


def ticked(schedule: Schedule, edge: int, slots: int | None) -> dict[str, tuple[int, int]]:
    """(start, end) of every action, with messages on the worker: at every tick each worker that is
    free begins its next action if that may begin. Rendezvous excluded."""
    found: dict[str, tuple[int, int]] = {}
    at = [0] * len(schedule.workers)
    tick = 0
    ends: dict[tuple[Any, ...], int] = {}

    def ended(key: tuple[Any, ...]) -> bool:
        return ends.get(key, tick + 1) <= tick

    def key(action: Action, kind: str) -> tuple[Any, ...]:
        own, other = action.stage, action.other
        return kind, action.kind[-1], *((own, other) if "S" in action.kind else (other, own))

    def may_begin(action: Action) -> bool:
        name = key(action, "received")[1:]
        if action.kind in RECEIVES:
            return ended(("sent", *name, action.micro_batch))
        if action.kind in SENDS and slots is not None:
            begun = sum(k[:-1] == ("sent", *name) for k in ends)
            return begun - sum(k[:-1] == ("received", *name) for k in ends) < slots
        return True

    while any(at[w] < len(row) for w, row in enumerate(schedule.workers)):
        moved = False
        for w, row in enumerate(schedule.workers):
            free = at[w] == 0 or found[str(row[at[w] - 1])][1] <= tick
            if at[w] < len(row) and free and may_begin(action := row[at[w]]):
                message = action.kind in SENDS | RECEIVES
                time = 0 if action.kind in RECEIVES else edge if message else cost(action)
                found[str(action)] = tick, tick + time
                if message:
                    kind = "sent" if action.kind in SENDS else "received"
                    ends[(*key(action, kind), action.micro_batch)] = tick + time
                at[w] += 1
                moved = True
        if not moved:
            tick += 1
            assert tick < 10_000
    return found


@given(greedy(), st.integers(0, 3), st.sampled_from([None, 1, 2]))
def test_times_are_those_of_a_clock(drawn: Drawn, edge: int, slots: int | None) -> None:
    pairs = dict.fromkeys(drawn.edges, edge)
    try:
        check(drawn.schedule, edges=drawn.edges, sends="eager" if slots is None else slots)
    except ScheduleError:
        return
    found = simulate(drawn.schedule, cost, edges=pairs, overlap=False, slots=slots)
    expected = ticked(drawn.schedule, edge, slots)
    updates = {str(t.action) for row in found.workers for t in row if t.action.kind == "U"}
    for row in found.workers:
        for timed in row:
            if str(timed.action) not in updates:  # of which a stage has several, with one text
                assert (timed.start, timed.end) == expected[str(timed.action)]


@given(st.one_of(greedy(), broken()), SLOTS)
def test_stands_still_where_the_checker_says_so(drawn: Drawn, slots: int | None) -> None:
    """Deadlock by times is deadlock without them; and other schedules end."""
    sends = "eager" if slots is None else slots
    pairs = dict.fromkeys(drawn.edges, 1)
    try:
        check(drawn.schedule, edges=drawn.edges, sends=sends)
    except ScheduleDeadlockError:
        with pytest.raises(ScheduleDeadlockError):
            simulate(drawn.schedule, cost, edges=pairs, overlap=False, slots=slots)
    except ScheduleError:
        pass
    else:
        simulate(drawn.schedule, cost, edges=pairs, overlap=False, slots=slots)
        simulate(drawn.schedule, cost, edges=pairs, slots=slots)


@given(greedy(), st.booleans())
def test_no_send_waits_with_the_slots_of_the_checker(drawn: Drawn, overlap: bool) -> None:
    pairs = dict.fromkeys(drawn.edges, 2)
    try:
        slots = check(drawn.schedule, edges=drawn.edges).slots
    except ScheduleError:
        return
    one, other = (
        simulate(drawn.schedule, cost, edges=pairs, overlap=overlap, slots=each)
        for each in (None, slots)
    )
    assert one.workers == other.workers


@pytest.mark.parametrize("name", GENERATORS)
def test_no_send_of_the_generators_waits_with_their_slots(name: str) -> None:
    schedule = GENERATORS[name](4, 8)
    slots = check(schedule).slots
    for overlap in (False, True):
        free, held = (
            simulate(schedule, edges=1, overlap=overlap, slots=each) for each in (None, slots)
        )
        assert free.workers == held.workers
