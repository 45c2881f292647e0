"""The check of schedules: each planted fault has its own error; a model that walks every
interleaving agrees on drawn schedules, right and broken."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linop.errors import ArgumentError
from linop.schedules import (
    GENERATORS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    Sizes,
    check,
    gpipe,
    interleaved,
    one_forward_one_backward,
    pipedream,
    pipedream_2bw,
    with_messages,
    zero_bubble_h1,
)
from linop.schedules import schedule_errors as errors
from linop.schedules.actions import GROUP, MESSAGES
from support.schedules.drawn import Drawn, broken, greedy
from support.schedules.model import opinion

TWO = with_messages(one_forward_one_backward(2, 2)).to_csv()
"""0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0U
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1U"""
HALVES = with_messages(zero_bubble_h1(2, 2)).to_csv()
STASHED = pipedream(2, 3).to_csv()
SHARDED = "0UNSHARD,0F0,0F1,0B0,0B1,0RESHARD,0REDUCE_GRAD,0U"


def changed(table: str, *changes: tuple[str, str]) -> Schedule:
    """A table with texts exchanged, each of which it has once."""
    for old, new in changes:
        assert len(re.findall(rf"(?<!\w){re.escape(old)}(?!\w)", table)) == 1, (old, table)
        table = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, table)
    return Schedule.from_csv(table)


PLANTED = {
    "a stage on two workers": (
        changed(TWO, ("1U", "1U,0U")),
        errors.PlacementError,
        "worker 1: 0U, but stage 0 is on worker 0",
    ),
    "a forward twice": (
        changed(TWO, ("0F1", "0F1,0F0")),
        errors.DuplicateActionError,
        "worker 0: 0F0 at positions 0 and 3",
    ),
    "a backward beside its half": (
        changed(TWO, ("1B0", "1B0,1W0")),
        errors.DuplicateActionError,
        "stage 1: 1B0 beside 1W0; expected B, or I and W",
    ),
    "a send twice": (
        changed(TWO, ("0F1", "0SEND_F0,0F1")),
        errors.DuplicateActionError,
        "0SEND_F0 at positions 1 and 2",
    ),
    "no forward": (changed(TWO, ("0F1", "")), errors.MissingActionError, "stage 0: no forward 0F1"),
    "no backward": (changed(TWO, ("1B0", "")), errors.MissingActionError, "no backward 1B0"),
    "half a backward": (changed(HALVES, ("0W1", "")), errors.MissingActionError, "backward 0W1"),
    "a stage without actions": (
        Schedule.from_csv("0F0,0B0\n2F0,2B0"),
        errors.MissingActionError,
        "stage 1: no forward 1F0",
    ),
    "a send dropped": (
        changed(TWO, ("0SEND_F1", "")),
        errors.UnmatchedMessageError,
        "worker 1: 1RECV_F1, but worker 0 lacks 0SEND_F1",
    ),
    "a receive dropped": (
        changed(TWO, ("0RECV_B0", "")),
        errors.UnmatchedMessageError,
        "worker 1: 1SEND_B0, but worker 0 lacks 0RECV_B0",
    ),
    "both dropped": (
        changed(TWO, ("0RECV_B0", ""), ("1SEND_B0", "")),
        errors.UnmatchedMessageError,
        "on workers 1 and 0, but neither 1SEND_B0 nor 0RECV_B0",
    ),
    "a message without an edge": (
        changed(TWO, ("0SEND_F1", "0SEND_F1,0SEND_F1>2")),
        errors.UnmatchedMessageError,
        "0SEND_F1>2, but data between stages 0 and 2 cross no edge",
    ),
    "backward before forward": (
        changed(TWO, ("1F0,1B0", "1B0,1F0")),
        errors.DependencyError,
        "worker 1: 1B0 before 1F0",
    ),
    "weights before input": (
        changed(HALVES, ("0I0,0W0", "0W0,0I0")),
        errors.DependencyError,
        "worker 0: 0W0 before 0I0",
    ),
    "a receive after its use": (
        changed(TWO, ("1RECV_F1,1F1", "1F1,1RECV_F1")),
        errors.DependencyError,
        "worker 1: 1F1 before 1RECV_F1",
    ),
    "a send before its data": (
        changed(TWO, ("0F1,0SEND_F1", "0SEND_F1,0F1")),
        errors.DependencyError,
        "worker 0: 0SEND_F1 before 0F1",
    ),
    "a computation while sharded": (
        changed(SHARDED, ("0B1,0RESHARD", "0RESHARD,0B1")),
        errors.DependencyError,
        "worker 0: 0B1 at position 5, where stage 0 is sharded",
    ),
    "unsharded twice": (
        Schedule.from_csv(SHARDED.replace("0B0", "0UNSHARD,0B0")),
        errors.DependencyError,
        "0UNSHARD at position 3, where stage 0 is unsharded",
    ),
    "no update in the end": (
        changed(TWO, ("0U", "")),
        errors.UpdateError,
        "stage 0: no update after the backwards of micro-batches 0, 1",
    ),
    "an update of nothing": (
        changed(TWO, ("0U", "0U,0U")),
        errors.UpdateError,
        "stage 0: an update without a gradient since the last",
    ),
    "updates of other micro-batches": (
        changed(TWO, ("1B0", "1B0,1U")),
        errors.UpdateError,
        "update 1: of micro-batch 0 on stage 1, of micro-batches 0, 1 on stage 0",
    ),
    "an update before its reduction": (
        changed(SHARDED, ("0REDUCE_GRAD,0U", "0U,0REDUCE_GRAD")),
        errors.UpdateError,
        "stage 0: an update before the reduction of micro-batches 0, 1",
    ),
    "a reduction of nothing": (
        changed(SHARDED, ("0U", "0REDUCE_GRAD,0U")),
        errors.UpdateError,
        "stage 0: 0REDUCE_GRAD without a gradient since the last",
    ),
    "another version in the backward": (
        changed(STASHED, ("0B1@0", "0B1@1")),
        errors.VersionError,
        "worker 0: 0B1@1 reads version 1, its forward read 0; name the version: 0B1@0",
    ),
    "no stash": (
        Schedule.from_csv(re.sub("@.", "", STASHED)),
        errors.VersionError,
        "0B1 reads version 1, its forward read 0",
    ),
    "a version of the future": (
        changed(STASHED, ("1F1@1", "1F1@2"), ("1B1@1", "1B1@2")),
        errors.MissingVersionError,
        "worker 1: 1F1@2 reads version 2, but only 1 updates precede it",
    ),
    "another order of messages": (
        changed(TWO, ("0SEND_F0", ""), ("0SEND_F1", "0SEND_F1,0SEND_F0")),
        errors.MessageOrderError,
        "stage 0 to stage 1: message 0 is sent for micro-batch 1, received for micro-batch 0",
    ),
    "each waits for the other": (
        changed(
            TWO,
            ("0F1,0SEND_F1,0RECV_B0,0B0", "0RECV_B0,0B0,0F1,0SEND_F1"),
            ("1RECV_F1", ""),
            ("1RECV_F0", "1RECV_F0,1RECV_F1"),
        ),
        errors.ScheduleDeadlockError,
        "deadlock with eager sends: worker 0 at 0RECV_B0 waits until worker 1 sends to stage 0; "
        "worker 1 at 1RECV_F1 waits until worker 0 sends to stage 1",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_each_planted_fault_has_its_own_error(fault: str) -> None:
    schedule, kind, text = PLANTED[fault]
    with pytest.raises(kind, match=re.escape(text)) as error:
        check(schedule)
    assert type(error.value) is kind


@pytest.mark.parametrize("table", [TWO, HALVES, STASHED, SHARDED])
def test_unbroken_tables_pass(table: str) -> None:
    assert check(Schedule.from_csv(table)).proven


def test_every_error_class_is_planted() -> None:
    classes = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    leaves = {kind for kind in classes if issubclass(kind, ScheduleError)} - {ScheduleError}
    planted = {kind for _, kind, _ in PLANTED.values()}
    elsewhere = {errors.EdgeMismatchError, errors.GroupOrderError, errors.MemoryLimitError}
    assert planted | elsewhere == leaves


def test_blocked_sends_of_neighbours() -> None:
    """pytorch #172668: two neighbours send to each other before they receive. Buffered sends let
    them, sends that wait for their receives do not."""
    schedule = with_messages(one_forward_one_backward(2, 4))
    assert "no deadlock with eager sends" in check(schedule).proven
    with pytest.raises(errors.ScheduleDeadlockError) as error:
        check(schedule, sends="rendezvous")
    assert str(error.value) == (
        "deadlock with rendezvous sends: worker 0 at 0SEND_F1 waits until worker 1 receives from "
        "stage 0; worker 1 at 1SEND_B0 waits until worker 0 receives from stage 1"
    )
    assert [(w, str(action)) for w, action in error.value.cycle] == [
        (0, "0SEND_F1"),
        (1, "1SEND_B0"),
    ]
    with pytest.raises(errors.ScheduleDeadlockError):
        check(schedule, sends=0)
    assert "no deadlock with slots an edge: 1" in check(schedule, sends=1).proven


def test_slots_may_be_too_few() -> None:
    """Both stages of a worker send twice before they receive."""
    schedule = Schedule.from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2RECV_F1,2F1\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1"
    )
    assert check(schedule, sends=1).slots == {(0, 1): 2, (1, 2): 2}
    late = Schedule.from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2RECV_F1,2F1\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1".replace("1SEND_F0,1RECV_F1", "1RECV_F1")
    )
    with pytest.raises(errors.UnmatchedMessageError):
        check(late)
    crossed = Schedule.from_csv(
        "0F0,0SEND_F0>2,0F1,0SEND_F1>2,1F0,1SEND_F0,1F1,1SEND_F1\n"
        "2RECV_F0,2RECV_F0>0,2F0,2RECV_F1,2RECV_F1>0,2F1"
    )
    edges = [(0, 2), (1, 2)]
    assert check(crossed, edges=edges).slots == {(0, 2): 2, (1, 2): 2}
    check(crossed, edges=edges, sends={(0, 2): 2, (1, 2): 1, (2, 0): 1, (2, 1): 1})
    with pytest.raises(errors.ScheduleDeadlockError, match="with slots an edge: 1: worker 0 at "):
        check(crossed, edges=edges, sends=1)
    with pytest.raises(errors.ScheduleDeadlockError, match="with the given slots"):
        check(crossed, edges=edges, sends={(0, 2): 1, (1, 2): 5, (2, 0): 5, (2, 1): 5})


def test_edges_agree() -> None:
    schedule = gpipe(2, 2)
    sides = ((8, 3), "float32"), ((8, 4), "float32")
    with pytest.raises(errors.EdgeMismatchError, match=re.escape("sends ((8, 3), 'float32'), but")):
        check(schedule, shapes={(0, 1): sides})
    found = check(schedule, shapes={(0, 1): (sides[0], sides[0])})
    assert "shapes and dtypes of the edges agree" in found.proven


def test_replicas_that_wait_for_each_other() -> None:
    """Each may run alone, and their group actions have one order."""
    first = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0F1,0SEND_F1,0RECV_B1,0B1,0REDUCE_GRAD\n"
    text = "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1REDUCE_GRAD,1B1,1SEND_B1,1REDUCE_GRAD\n"
    other = "1RECV_F0,1F0,1B0,1REDUCE_GRAD,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n"
    one, two = Schedule.from_csv(first + text), Schedule.from_csv(first + other)
    check(one, replicas=[one])
    check(two, replicas=[two])
    with pytest.raises(errors.ScheduleDeadlockError, match="worker 1 of replica 0") as found:
        check(one, replicas=[two])
    assert {worker for worker, _ in found.value.cycle} == {0, 1, 2, 3}
    with pytest.raises(errors.UpdateError):
        check(gpipe(1, 1), replicas=[Schedule.from_csv("0F0,0U")])


def test_replicas_have_one_order() -> None:
    first = Schedule.from_csv("0UNSHARD,1UNSHARD,0F0,1F0,1RESHARD,0RESHARD")
    other = Schedule.from_csv("0UNSHARD,1UNSHARD,0F0,1F0,0RESHARD,1RESHARD")
    assert "group actions in one order on all replicas" in check(first, replicas=[first]).proven
    with pytest.raises(
        errors.GroupOrderError,
        match="worker 0: group action 2 is 1RESHARD in replica 0, 0RESHARD in replica 2",
    ):
        check(first, replicas=[first, other])
    fewer = Schedule.from_csv("0UNSHARD,1UNSHARD,0F0,1F0,1RESHARD")
    with pytest.raises(errors.GroupOrderError, match="0RESHARD in replica 0, nothing in replica 1"):
        check(first, replicas=[fewer])
    with pytest.raises(errors.GroupOrderError, match="replica 1: 2 workers, but replica 0 has 1"):
        check(first, replicas=[gpipe(2, 1)])


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_peaks_are_those_of_the_table(p: int, more: int) -> None:
    """Activations and versions that the papers of the schedules count."""
    m = p + more
    stages = range(p)
    assert check(gpipe(p, m)).activations == dict.fromkeys(stages, m)
    assert check(one_forward_one_backward(p, m)).activations == {s: min(m, p - s) for s in stages}
    assert check(zero_bubble_h1(p, m)).activations == dict.fromkeys(stages, min(m, p))
    found = check(pipedream(p, m + p))
    assert found.activations == found.versions == {s: p - s for s in stages}
    found = check(pipedream_2bw(p, m, batches=4), versions=2)
    assert found.activations == {s: p - s for s in stages}
    assert set(found.versions.values()) == {2}


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_peak_of_interleaved(p: int, chunks: int) -> None:
    """p + (p−1)/v activations of a worker's whole model on worker 0, of v chunks each."""
    schedule = interleaved(p * chunks, 4 * p, chunks)
    found = check(schedule, sizes=Sizes([1] * schedule.stages))
    assert found.peak_bytes[0] == p * chunks + p - 1


def test_limit_of_memory() -> None:
    """Activations, versions of the parameters, and slots on the worker that receives."""
    sizes = Sizes([10, 20], [100, 200], {(0, 1): 1000, (1, 0): 3000})
    found = check(pipedream(2, 4), sizes=sizes)
    assert found.slots == {(0, 1): 2, (1, 0): 2}
    assert found.peak_bytes == (2 * 10 + 2 * 100 + 2 * 3000, 20 + 200 + 2 * 1000)
    assert check(pipedream(2, 4), sizes=sizes, sends=1).peak_bytes[1] == 1220
    check(pipedream(2, 4), sizes=sizes, limit=[6220, 2220])
    with pytest.raises(
        errors.MemoryLimitError, match="worker 0: 6,220 bytes live at 0F2@1, 6,219 allowed"
    ):
        check(pipedream(2, 4), sizes=sizes, limit=6219)


def test_kept_versions() -> None:
    check(pipedream(3, 6), versions={0: 3, 1: 2, 2: 1})
    with pytest.raises(
        errors.MissingVersionError,
        match="0B2@0 reads version 0, which is gone: the newest is 2, and stage 0 keeps 2",
    ):
        check(pipedream(3, 6), versions=2)
    with pytest.raises(errors.MissingVersionError, match="stage 0 keeps 1"):
        check(pipedream_2bw(2, 2, 3), versions=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"edges": [(0, 2)]}, "edges: two of the stages 0, 1 expected, given (0, 2)"),
        ({"edges": [(1, 1)]}, "edges: two of the stages"),
        ({"edges": [(0, 1), (0, 1)]}, "edges: each once expected"),
        ({"shapes": {(1, 0): (1, 1)}}, "shapes: (1, 0) is none of the edges [(0, 1)]"),
        ({"sends": "buffered"}, "sends: 'eager', 'rendezvous' or slots expected"),
        ({"sends": -1}, "sends: at least 0 expected for each edge, given -1"),
        ({"sends": {(0, 1): 2}}, "sends: slots of every edge expected, [(1, 0)] lacking"),
        ({"limit": 5}, "limit: sizes expected"),
        ({"sizes": Sizes([1])}, "sizes: 2 activations expected, one a stage, given 1"),
        ({"sizes": Sizes([1, 1], [1])}, "sizes: 2 weights expected, one a stage, given 1"),
        ({"sizes": Sizes([1, 1], [], {(0, 2): 1})}, "sizes: messages (0, 2) are of none of"),
        ({"sizes": Sizes([1, 1]), "limit": [1]}, "limit: 2 numbers expected, one a worker"),
    ],
)
def test_arguments(arguments: dict, text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text)):
        check(gpipe(2, 2), **arguments)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(0, Kind.FORWARD), "worker 0: 0F without a micro-batch"),
        (Action(-1, Kind.FORWARD, 0), "worker 0: numbers from 0 expected, given Action(stage=-1"),
        (Action(0, Kind.FORWARD, 0, -1), "numbers from 0 expected"),
    ],
)
def test_actions_that_no_text_has(action: Action, text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text)):
        check(Schedule(((action,),)))
    with pytest.raises(ArgumentError, match="schedule: expected a Schedule"):
        check([action])


def test_forwards_alone_are_a_schedule() -> None:
    found = check(Schedule.from_csv("0F0,0F1\n1F0,1F1"))
    assert str(found.schedule.workers[0][1]) == "0SEND_F0"


def test_nothing_is_a_schedule() -> None:
    assert check(Schedule(())).slots == {}


SENDS = st.sampled_from([None, 0, 1, 2])
KEPT = st.sampled_from([None, 1, 2])


def agrees(drawn: Drawn, slots: int | None, kept: int | None) -> str:
    """Compare the check with the model; the name of what both say."""
    said = opinion(drawn.schedule, drawn.edges, slots, kept)
    sends = "eager" if slots is None else slots
    try:
        found = check(drawn.schedule, edges=drawn.edges, sends=sends, versions=kept)
    except ScheduleError as error:
        assert type(error).__name__ in said.faults, error
        return type(error).__name__
    assert not said.faults
    assert found.slots == dict(sorted(said.in_flight.items()))
    assert found.activations == said.activations
    assert found.versions == said.versions
    return "right"


MODELLED = [fault for fault, (table, *_) in PLANTED.items() if not table.only(GROUP).workers[0]]


@pytest.mark.parametrize("fault", sorted({*MODELLED} - {"a stage without actions"}))
def test_the_model_finds_what_is_planted(fault: str) -> None:
    schedule, kind, _ = PLANTED[fault]
    edges = [(s, s + 1) for s in range(schedule.stages - 1)]
    if not any(schedule.only(MESSAGES).workers):
        schedule = with_messages(schedule, edges)
    assert kind.__name__ in opinion(schedule, edges, None, None).faults


def test_messages_need_the_stages_of_their_edges() -> None:
    with pytest.raises(ArgumentError, match="stage 1: no actions"):
        with_messages(Schedule.from_csv("0F0\n2F0"))


@given(greedy(), SENDS, KEPT)
def test_drawn_schedules(drawn: Drawn, slots: int | None, kept: int | None) -> None:
    agrees(drawn, slots, kept)


@settings(max_examples=100)
@given(broken(), SENDS, KEPT)
def test_broken_schedules(drawn: Drawn, slots: int | None, kept: int | None) -> None:
    agrees(drawn, slots, kept)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("slots", [None, 0, 1])
def test_generated_schedules(name: str, slots: int | None) -> None:
    schedule = with_messages(GENERATORS[name](2, 2))
    said = agrees(Drawn(schedule, [(0, 1)] if schedule.stages > 1 else []), slots, None)
    assert said == ("ScheduleDeadlockError" if slots == 0 and name not in SAFE else "right")


SAFE = {"gpipe", "interleaved-1f1b"}
"""Names of generators whose messages pass with sends that wait for their receives, if 2 stages: one
of them because one worker has both."""
