"""The verifier of plans rejects plans that were broken on purpose, each for its own reason.

That it accepts the plans of all operators, `test_lowering` and `test_three_ways` say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import linop
from checks import plans_of
from linop import COPIES, Partition, Region, Space, TensorSpace
from linop.errors import PlanError
from linop.plan import Advance, Alias, Apply, Make, Message, Plan, Put, Receive, Send, Step, Wait
from linop.verify import (
    CycleError,
    DTypeMismatchError,
    DuplicateMessageError,
    MemoryMismatchError,
    MissingReceiveError,
    MissingSendError,
    SizeMismatchError,
    TwoWritersError,
    UnknownRegionError,
    UnwrittenError,
    WorkerError,
)

Edit = Callable[[Step], Sequence[Step]]


def edited(plans: Iterable[Plan], worker: int, edit: Edit) -> list[Plan]:
    """The plans, each step of one worker's replaced by those that `edit` gives."""
    return [
        replace(p, steps=tuple(new for step in p.steps for new in edit(step)))
        if p.worker == worker
        else p
        for p in plans
    ]


def on(kind: type[Step], change: Callable[[Any], Sequence[Step]]) -> Edit:
    """Replace the steps of one kind."""
    return lambda step: change(step) if isinstance(step, kind) else [step]


def dropped(kind: type[Step]) -> Edit:
    return on(kind, lambda step: [])


def changed(kind: type[Step], **fields: Any) -> Edit:
    return on(kind, lambda step: [replace(step, **fields)])


def doubled(kind: type[Step]) -> Edit:
    return on(kind, lambda step: [step, step])


def before(kind: type[Step], *more: Step) -> Edit:
    return on(kind, lambda step: [*more, step])


def from_message(change: Callable[[Put], Sequence[Step]]) -> Edit:
    """Replace the steps that read a message."""
    return on(Put, lambda put: change(put) if isinstance(put.source, Message) else [put])


def gathered() -> list[Plan]:
    """Two blocks of 2 elements gathered on worker 0: one message, from worker 1."""
    return plans_of(linop.gather(TensorSpace((4,), Partition((2,)))))


def summed() -> list[Plan]:
    """Two copies of 2 elements summed on worker 0."""
    copies = TensorSpace((2,), Partition((2,)), axes=(COPIES,))
    return plans_of(linop.sum_reduce(copies, Partition((1,))))


def swapped() -> list[Plan]:
    """Two workers exchange their blocks."""
    return plans_of(linop.shift(TensorSpace((4,), Partition((2,))), 1))


def applied() -> list[Plan]:
    """A local operator between two movements that keep everything."""
    return plans_of(linop.matrix(np.ones((3, 2)), Region("x", 2), Region("y", 3)))


A, B, NEW = Region("x@0", 2, 0), Region("x@1", 2, 1), Region("x@0", 4, 0)
NOWHERE = Region("nowhere", 2, 0)


@dataclass(frozen=True)
class Fault:
    """A way to break a plan, and what the verifier says of it."""

    name: str
    error: type[PlanError]
    text: str
    plans: Callable[[], list[Plan]]
    worker: int
    edit: Edit


FAULTS = [
    Fault("no send", MissingSendError, "worker 1 to worker 0: expected", gathered, 1,
          dropped(Send)),
    Fault("no receive", MissingReceiveError, "worker 1 to worker 0: sent", gathered, 0,
          dropped(Receive)),
    Fault("two sends", DuplicateMessageError, "worker 1: send 2 .* a second", gathered, 1,
          doubled(Send)),
    Fault("two receives", DuplicateMessageError, "worker 0: receive 2 .* a second", gathered, 0,
          doubled(Receive)),
    Fault("short receive", SizeMismatchError, "2 sent, 1 expected", gathered, 0,
          changed(Receive, size=1)),
    Fault("short send", SizeMismatchError, "1 sent, 2 expected", gathered, 1,
          changed(Send, parts=(B[:1],))),
    Fault("past the end", SizeMismatchError, "past the end of message from 1 at 1", gathered, 0,
          from_message(lambda put: [replace(put, source=Message(1, 1))])),
    Fault("other stage", MissingSendError, "stage 0, worker 1 to worker 0", gathered, 1,
          lambda step: [replace(step, stage=9) if isinstance(step, Send) else step]),
    Fault("peer without plan", WorkerError, "worker 7 has no plan", gathered, 1,
          changed(Send, peer=7)),
    Fault("unknown region sent", UnknownRegionError, "no region .*nowhere", gathered, 1,
          changed(Send, parts=(linop.Subset(NOWHERE, (0,), (2,)),))),
    Fault("sent out of bounds", UnknownRegionError, "out of bounds", gathered, 1,
          changed(Send, parts=(linop.Subset(B, (1,), (3,)),))),
    Fault("unknown region kept", UnknownRegionError, "no region .*nowhere", applied, 0,
          changed(Alias, source=NOWHERE)),
    Fault("unknown region applied", UnknownRegionError, "no region 'x'", applied, 0,
          lambda step: [] if isinstance(step, Alias) and step.target.name == "x" else [step]),
    Fault("not made", UnknownRegionError, "'x@0' was not made", gathered, 0, dropped(Make)),
    Fault("written out of bounds", UnknownRegionError, "out of bounds", gathered, 0,
          from_message(lambda p: [replace(p, target=linop.Subset(NEW, (3,), (5,)))])),
    Fault("unknown message", UnknownRegionError, "no message from 5", gathered, 0,
          from_message(lambda put: [replace(put, source=Message(5, 0))])),
    Fault("no wait", UnknownRegionError, "before waiting", gathered, 0, dropped(Wait)),
    Fault("early read", UnknownRegionError, "before waiting", gathered, 0,
          before(Wait, Put(NEW[2:], Message(1, 0), 1, False))),
    Fault("no result", UnknownRegionError, "the result.*no region", gathered, 0,
          dropped(Advance)),
    Fault("set twice", TwoWritersError, "written before", gathered, 0, doubled(Put)),
    Fault("set in part twice", TwoWritersError, "written before", gathered, 0,
          before(Wait, Put(NEW[1:2], A[:1], 1, False))),
    Fault("set around a part", TwoWritersError, "written before", gathered, 0,
          on(Put, lambda p: [p] if isinstance(p.source, Message)
             else [Put(NEW[1:3], A[:], 1, False), p])),
    Fault("made twice", TwoWritersError, "'x@0' exists already", gathered, 0, doubled(Make)),
    Fault("kept twice", TwoWritersError, "'x' exists already", applied, 0, doubled(Alias)),
    Fault("applied twice", TwoWritersError, "'y' exists already", applied, 0, doubled(Apply)),
    Fault("set and added", UnwrittenError, "never set", gathered, 0,
          before(Wait, Put(NEW[2:], A[:], 1, True))),
    Fault("not set", UnwrittenError, "'x@0' were never set", gathered, 0, dropped(Put)),
    Fault("in part not set", UnwrittenError, "'x@0' were never set", gathered, 0,
          from_message(lambda put: [])),
    Fault("added to garbage", UnwrittenError, "never set", summed, 0,
          changed(Put, accumulate=True)),
    Fault("kept elsewhere", MemoryMismatchError, "device memory, and default", applied, 0,
          on(Alias, lambda step: [replace(step, source=Region("x", 2, memory="device"))])),
    # NumPy would broadcast it.
    Fault("one element set to many", PlanError, r"shape|size|elements", gathered, 0,
          on(Put, lambda p: [p if isinstance(p.source, Message) else replace(p, source=A[:1])])),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_broken_plan_is_rejected(fault: Fault) -> None:
    plans = fault.plans()
    linop.verify(plans)
    broken = edited(plans, fault.worker, fault.edit)
    assert broken != plans
    with pytest.raises(fault.error, match=fault.text):
        linop.verify(broken)


def test_every_kind_of_error_is_tried() -> None:
    elsewhere = {DTypeMismatchError, CycleError}
    tried = {fault.error for fault in FAULTS} | elsewhere
    assert set(PlanError.__subclasses__()) <= tried


def test_a_dtype_that_differs_between_workers_is_rejected() -> None:
    first, second = gathered()
    with pytest.raises(DTypeMismatchError, match="float32 sent, float64 expected"):
        linop.verify([first, replace(second, dtype=np.dtype(np.float32))])


def late(plan: Plan) -> Plan:
    """The same plan, sending at the end of the stage what it sent at its beginning."""
    rest = [step for step in plan.steps if not isinstance(step, Send | Advance)]
    sends = [step for step in plan.steps if isinstance(step, Send)]
    return replace(plan, steps=(*rest, *sends, plan.steps[-1]))


def test_workers_that_wait_for_each_other_are_rejected() -> None:
    first, second = swapped()
    linop.verify([late(first), second])
    with pytest.raises(CycleError, match=r"worker 0 waits for \[1\]; worker 1 waits for \[0\]"):
        linop.verify([late(first), late(second)])


def test_workers_may_wait_in_turn() -> None:
    """Each but the last waits for the one after it, and some for several rounds."""
    space = Space([Region(f"x{w}", 2, w) for w in range(4)])
    op = linop.identity(space)
    for w in reversed(range(3)):
        scaled = [linop.diagonal(np.ones(2), Space(region)) for region in space]
        op = linop.copy(space, space[f"x{w + 1}"], space[f"x{w}"]) @ linop.direct_sum(*scaled) @ op
    linop.verify(plans_of(op))


def test_a_wait_for_another_stage_is_rejected() -> None:
    with pytest.raises(CycleError, match=r"worker 0 waits for \[1\]"):
        linop.verify(edited(gathered(), 0, changed(Wait, stage=4)))


def test_a_set_of_plans_without_one_of_the_workers_is_rejected() -> None:
    first, second = gathered()
    with pytest.raises(WorkerError, match="two plans for worker 0"):
        linop.verify([first, second, first])
    with pytest.raises(WorkerError, match="receive 2 elements from 1: worker 1 has no plan"):
        linop.verify([first])


def test_a_region_kept_in_another_shape_is_rejected() -> None:
    keep = Plan(0, np.dtype(float), (A,), (NEW,), (Alias(A, NEW), Advance(0)))
    with pytest.raises(PlanError, match=r"shape|size|elements"):
        linop.verify([keep])


def test_sums_may_be_added_twice_where_they_were_set() -> None:
    """The verifier must not reject what is right: additions in any number."""
    twice = on(Put, lambda put: [put, put] if put.accumulate else [put])
    linop.verify(edited(summed(), 0, twice))
    linop.verify(edited(summed(), 0, lambda s: [] if isinstance(s, Put) and s.accumulate else [s]))
    linop.verify([])
