"""Ways to break a plan, each with what the verifier says of it, and edits of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import linop
from linop import COPIES, LinearOperator, Partition, Region, Space, TensorSpace
from linop.errors import PlanError
from linop.planning.patterns import Kind
from linop.planning.plan import (
    Advance,
    Alias,
    Apply,
    Collective,
    LoweredPlan,
    Make,
    Message,
    Put,
    Receive,
    Send,
    Step,
    Wait,
)
from linop.planning.verification.plan_errors import (
    CallMismatchError,
    CollectiveMismatchError,
    DTypeMismatchError,
    DuplicateMessageError,
    MemoryMismatchError,
    MisreadError,
    MissingReceiveError,
    MissingSendError,
    OutOfBoundsError,
    SizeMismatchError,
    StageError,
    StepOrderError,
    SumOrderError,
    TwoWritersError,
    UnfinishedError,
    UnknownRegionError,
    UnwrittenError,
    WorkerError,
    WrongCallError,
    WrongRegionError,
    WrongTransferError,
)
from support.operators.properties import plans_of, together

Edit = Callable[[Step], Sequence[Step]]


def edited(plans: Iterable[LoweredPlan], worker: int, edit: Edit) -> list[LoweredPlan]:
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


def gathered() -> LinearOperator:
    """Two blocks of 2 elements gathered on worker 0: one message, from worker 1."""
    return linop.gather(TensorSpace((4,), Partition((2,))))


def of_int8() -> LinearOperator:
    return linop.gather(TensorSpace((4,), Partition((2,)), np.int8))


def summed(terms: int = 2) -> LinearOperator:
    """Copies of 2 elements summed on worker 0."""
    copies = TensorSpace((2,), Partition((terms,)), axes=(COPIES,))
    return linop.sum_reduce(copies, Partition((1,)))


def swapped() -> LinearOperator:
    """Two workers exchange their blocks."""
    return linop.shift(TensorSpace((4,), Partition((2,))), 1)


def applied() -> LinearOperator:
    """A local operator between two movements that keep everything."""
    return linop.local_operators.matrix(np.ones((3, 2)), Region("x", 2), Region("y", 3))


def passed_by() -> LinearOperator:
    """A local operator beside a region that its layer leaves alone."""
    return linop.direct_sum(applied(), linop.identity(Space(Region("p", 2))))


def after(stage: int, **changes: Any) -> Edit:
    """Change the end of a stage."""
    return on(Advance, lambda s: [replace(s, **changes)] if s.stage == stage else [s])


def kept() -> LinearOperator:
    """Two regions of one worker that keep their content."""
    return linop.identity(Space([Region("p", 2), Region("q", 2)]))


def two_maps() -> LinearOperator:
    """Two local operators on one worker, of the same shapes."""
    sides = [(Region(f"x{k}", 2), Region(f"y{k}", 2)) for k in range(2)]
    return linop.direct_sum(
        *(linop.local_operators.matrix(np.ones((2, 2)) * k, *s) for k, s in enumerate(sides))
    )


def exchanged() -> LinearOperator:
    """Each of three workers sends an element to each other."""
    return linop.all_to_all(TensorSpace((3, 3), Partition((3,))), 0, 1)


A, B, NEW = Region("x@0", 2, 0), Region("x@1", 2, 1), Region("x@0", 4, 0)
NOWHERE = Region("nowhere", 2, 0)
P, Q = Region("p", 2), Region("q", 2)


@dataclass(frozen=True)
class Fault:
    """A way to break a plan, and what the verifier says of it."""

    name: str
    error: type[PlanError]
    text: str
    op: Callable[[], LinearOperator]
    worker: int
    edit: Edit


FAULTS = [
    # One worker's plan
    Fault("no last advance", UnfinishedError, r"worker 0, step 0 \(receive .*\): no advance",
          gathered, 0, dropped(Advance)),
    Fault("a step after the end", UnfinishedError, r"step 6 \(wait for messages\): no advance",
          gathered, 0, on(Advance, lambda step: [step, Wait(0)])),
    Fault("send of another stage", StageError, "of stage 9, in stage 0", gathered, 1,
          changed(Send, stage=9)),
    Fault("wait of another stage", StageError, "of stage 4, in stage 0", gathered, 0,
          changed(Wait, stage=4)),
    Fault("stages backwards", StageError, r"worker 0: stages \[0, 0\]; their numbers increase",
          gathered, 0, on(Advance, lambda step: [step, step])),
    Fault("no wait", StepOrderError, "before waiting", gathered, 0, dropped(Wait)),
    Fault("nothing read, no wait", StepOrderError, r"messages from \[1\] are received, and no wait",
          gathered, 0, lambda s: [] if isinstance(s, Wait | Put) else [s]),
    Fault("early read", StepOrderError, "before waiting", gathered, 0,
          before(Wait, Put(NEW[2:], Message(1, 0), 1, False))),
    Fault("receive after the wait", StepOrderError, "comes after the wait", gathered, 0,
          lambda s: [] if isinstance(s, Receive)
          else [s, Receive(0, 1, 2)] if isinstance(s, Wait) else [s]),
    Fault("second wait", StepOrderError, "a second wait", gathered, 0, doubled(Wait)),
    Fault("unknown region sent", UnknownRegionError, "no region .*nowhere", gathered, 1,
          changed(Send, parts=(linop.Subset(NOWHERE, (0,), (2,)),))),
    Fault("unknown region kept", UnknownRegionError, "no region .*nowhere", applied, 0,
          changed(Alias, source=NOWHERE)),
    Fault("unknown region applied", UnknownRegionError, "'x', and there is no such", applied, 0,
          lambda step: [] if isinstance(step, Alias) and step.target.name == "x" else [step]),
    Fault("region taken twice", UnknownRegionError, "'x⟨0⟩', which it has taken", passed_by, 0,
          after(1, taken=("x⟨0⟩", "x⟨0⟩"))),
    Fault("applied, and not taken", UnknownRegionError, "no region 'x⟨0⟩'", passed_by, 0,
          after(1, taken=("p⟨1⟩",))),
    Fault("taken, and not passed on", UnknownRegionError, "no region .*'p⟨1⟩'", passed_by, 0,
          after(1, taken=("x⟨0⟩", "p⟨1⟩"))),
    Fault("made beside one of its name", TwoWritersError, "makes region 'p⟨1⟩', and does not take",
          passed_by, 0, lambda step: [Make(step.source, True)]
          if isinstance(step, Alias) and step.target.name == "p" else
          after(2, taken=("y⟨0⟩",))(step)),
    Fault("not made", UnknownRegionError, "'x@0' was not made", gathered, 0, dropped(Make)),
    Fault("factor of another dtype", DTypeMismatchError, "is no number of float64", gathered, 0,
          from_message(lambda put: [replace(put, coefficient=2 + 0j)])),
    Fault("factor that wraps", DTypeMismatchError, "257 is no number of int8", of_int8, 0,
          from_message(lambda put: [replace(put, coefficient=257)])),
    Fault("unknown message", UnknownRegionError, "no message from 5", gathered, 0,
          from_message(lambda put: [replace(put, source=Message(5, 0))])),
    Fault("region made for another worker", WorkerError, "is not on worker 0", gathered, 0,
          changed(Make, region=Region("x@0", 4, 1))),
    Fault("sent out of bounds", OutOfBoundsError, "out of bounds", gathered, 1,
          changed(Send, parts=(linop.Subset(B, (1,), (3,)),))),
    Fault("written out of bounds", OutOfBoundsError, "out of bounds", gathered, 0,
          from_message(lambda p: [replace(p, target=linop.Subset(NEW, (3,), (5,)))])),
    Fault("past the end", OutOfBoundsError, "elements 1 to 3 of 2 from 1", gathered, 0,
          from_message(lambda put: [replace(put, source=Message(1, 1))])),
    Fault("before the beginning", OutOfBoundsError, "elements -1 to 1 of 2 from 1", gathered, 0,
          from_message(lambda put: [replace(put, source=Message(1, -1))])),
    Fault("kept elsewhere", MemoryMismatchError, "device memory, and default", applied, 0,
          on(Alias, lambda step: [replace(step, source=Region("x", 2, memory="device"))])),
    # NumPy would broadcast it.
    Fault("one element set to many", SizeMismatchError, "shapes", gathered, 0,
          on(Put, lambda p: [p if isinstance(p.source, Message) else replace(p, source=A[:1])])),
    Fault("applied to another shape", CallMismatchError, r"takes .*\(2,\).* and .*\(3,\).* given",
          applied, 0, lambda step: [Make(Region("x", 3), True)]
          if isinstance(step, Alias) and step.target.name == "x" else [step]),
    Fault("applied to nothing", CallMismatchError, r"takes .*, and \[\] given", applied, 0,
          on(Apply, lambda step: [replace(step, call=replace(step.call, inputs=()))])),
    Fault("giving another shape", CallMismatchError, "gives", applied, 0,
          changed(Apply, outputs=(Region("y", 4),))),
    Fault("giving another region", CallMismatchError, "gives .*'z'.* and .*'y'", applied, 0,
          changed(Apply, outputs=(Region("z", 3),))),
    # Elements
    Fault("set twice", TwoWritersError, r"written before, by step \d", gathered, 0, doubled(Put)),
    Fault("set in part twice", TwoWritersError, "written before", gathered, 0,
          before(Wait, Put(NEW[1:2], A[:1], 1, False))),
    Fault("set around a part", TwoWritersError, "written before", gathered, 0,
          on(Put, lambda p: [p] if isinstance(p.source, Message)
             else [Put(NEW[1:3], A[:], 1, False), p])),
    Fault("set after it is added to", TwoWritersError, "written before, by step", summed, 0,
          lambda s: [replace(s, zeroed=True)] if isinstance(s, Make) else
          [replace(s, accumulate=not s.accumulate)] if isinstance(s, Put) else [s]),
    Fault("made twice", TwoWritersError, "'x@0' exists already", gathered, 0, doubled(Make)),
    Fault("kept twice", TwoWritersError, "'x' exists already", applied, 0, doubled(Alias)),
    Fault("applied twice", TwoWritersError, "'y' exists already", applied, 0, doubled(Apply)),
    Fault("set and added", UnwrittenError, "never set", gathered, 0,
          before(Wait, Put(NEW[2:], A[:], 1, True))),
    Fault("not set", UnwrittenError, "4 of 4 elements of 'x@0' were never set", gathered, 0,
          dropped(Put)),
    Fault("in part not set", UnwrittenError, "2 of 4 elements of 'x@0' were never", gathered, 0,
          from_message(lambda put: [])),
    Fault("added to garbage", UnwrittenError, "never set", summed, 0,
          changed(Put, accumulate=True)),
    # All plans together
    Fault("no send", MissingSendError, "worker 1 to worker 0: expected", gathered, 1,
          dropped(Send)),
    Fault("no receive", MissingReceiveError, "worker 1 to worker 0: sent", gathered, 0,
          lambda s: [s] if isinstance(s, Make | Advance) else
          [Put(NEW[:2], A[:], 1, False), Put(NEW[2:], A[:], 1, False)]
          if isinstance(s, Wait) else []),
    Fault("two sends", DuplicateMessageError, r"worker 1.* \(send 2 .* a second", gathered, 1,
          doubled(Send)),
    Fault("two receives", DuplicateMessageError, r"worker 0.* \(receive 2 .* a second", gathered, 0,
          doubled(Receive)),
    Fault("long receive", SizeMismatchError, "2 sent, 3 expected", gathered, 0,
          changed(Receive, size=3)),
    Fault("short send", SizeMismatchError, "1 sent, 2 expected", gathered, 1,
          changed(Send, parts=(B[:1],))),
    Fault("peer without plan", WorkerError, "worker 7 has no plan", gathered, 1,
          changed(Send, peer=7)),
    Fault("peer itself", WorkerError, "worker 1 is this worker", gathered, 1,
          changed(Send, peer=1)),
]  # fmt: skip

OTHERWISE = [
    # Plans that fit together, and compute something else
    Fault("another coefficient", WrongTransferError, r"2 · x@1 given", gathered, 0,
          from_message(lambda put: [replace(put, coefficient=2)])),
    Fault("target moved", WrongTransferError, r"worker 0, stage 0, x@0\[0:2\]: x@0 expected, x@1",
          gathered, 0, on(Put, lambda p: [replace(p, target=NEW[:2] if isinstance(p.source, Message)
                                                  else NEW[2:])])),
    Fault("accumulation dropped", WrongTransferError, "expected, x@0 given", summed, 0,
          on(Put, lambda put: [] if put.accumulate else [put])),
    Fault("accumulation doubled", WrongTransferError, r"x@0 \+ 2 · x@1 given", summed, 0,
          on(Put, lambda put: [put, put] if put.accumulate else [put])),
    Fault("sources exchanged", WrongTransferError, "by step", exchanged, 0,
          on(Put, lambda p: [replace(p, source=replace(p.source, peer=3 - p.source.peer))
                             if isinstance(p.source, Message) else p])),
    Fault("aliases swapped", WrongTransferError, r"p: p expected, q given, by step 0 \(keep q as p",
          kept, 0, on(Alias, lambda a: [replace(a, source=Q if a.source == P else P)])),
    Fault("nothing kept but zeros", WrongTransferError, "expected, 0 given, by no step", kept, 0,
          on(Alias, lambda a: [Make(a.target, zeroed=True)])),
    Fault("maps exchanged", WrongCallError, r"applies A to \('x1⟨1⟩',\), and the operator does not",
          two_maps, 0, on(Apply, lambda s: [replace(s, call=replace(s.call, inputs=tuple(
              name.translate({48: 49, 49: 48}) for name in s.call.inputs)))])),
    Fault("another region made", WrongRegionError, "'w' is Region.*, None expected", kept, 0,
          on(Advance, lambda step: [Make(Region("w", 1), True), step])),
    Fault("map replaced by zeros", WrongCallError, "does not apply", applied, 0,
          on(Apply, lambda step: [Make(step.outputs[0], True)])),
    Fault("map in another stage", StageError, r"stages \[0, 3, 4\], and \[0, 1, 2\] expected",
          applied, 0, lambda s: [replace(s, stage=s.stage + 2 * (s.stage > 0))]
          if isinstance(s, Advance) else [s]),
    Fault("other terms first", SumOrderError, "x@2 is added .* x@1 .* order of workers",
          lambda: summed(3), 0, lambda s: [replace(s, source=Message(3 - s.source.peer, 0))]
          if isinstance(s, Put) and s.accumulate else [s]),
    Fault("half a part", MisreadError, "x@1 comes at 0, and is read as other boxes", gathered, 0,
          from_message(lambda put: [replace(put, target=NEW[2:3]),
                                    replace(put, target=NEW[3:], source=Message(1, 1))])),
]  # fmt: skip


def reduced() -> LinearOperator:
    """A sum of three workers' elements for each of them."""
    return linop.all_reduce(TensorSpace((2,), Partition((3,)), axes=(COPIES,)))


def scattered() -> LinearOperator:
    """Two sums of three workers' elements, one on each of two of them."""
    return linop.all_gather(TensorSpace((3,), Partition((3,)))).H


def pattern(**fields: Any) -> Edit:
    return on(Collective, lambda s: [replace(s, pattern=replace(s.pattern, **fields))])


COLLECTIVE = [
    Fault("not begun", MissingSendError, "worker 1 does not begin it", reduced, 1,
          lambda s: [] if isinstance(s, Collective | Receive | Wait) else
          [replace(s, source=s.target.region[:])] if isinstance(s, Put) else [s]),
    Fault("received, not begun", MissingSendError, "receive 2 .*: and begins no collective",
          reduced, 1, dropped(Collective)),
    Fault("begun twice", DuplicateMessageError, "a second one", reduced, 1, doubled(Collective)),
    Fault("begun after the wait", StepOrderError, "begins after the wait", reduced, 1,
          lambda s: [] if isinstance(s, Collective) else
          [s, began(reduced(), 1)] if isinstance(s, Wait) else [s]),
    Fault("sent to the group", CollectiveMismatchError, "to the group, and no collective", reduced,
          1, on(Collective, lambda s: [Send(s.stage, s.peer, s.parts)])),
    Fault("another kind", CollectiveMismatchError, "worker 1 begins all-gather", reduced, 1,
          pattern(kind=Kind.ALL_GATHER)),
    Fault("another group", CollectiveMismatchError, "no member of that group", reduced, 1,
          pattern(group=(0, 2))),
    Fault("a smaller group", CollectiveMismatchError, r"worker 1 begins .* 0, 1,", reduced,
          1, pattern(group=(0, 1))),
    Fault("no root", CollectiveMismatchError, "has one root", summed, 1, pattern(root=None)),
    Fault("brings less", CollectiveMismatchError, r"brings and gets 1 and 2 .*; 2 and 2 expected",
          reduced, 1, on(Collective, lambda s: [replace(s, parts=(s.parts[0].region[:1],))])),
    Fault("sends another number", CollectiveMismatchError, "worker 1 sends 0 elements, 1 expected",
          exchanged, 1, on(Collective, lambda s: [replace(s, sent=(0, 0, 2))])),
]  # fmt: skip


def began(op: LinearOperator, worker: int) -> Collective:
    (step,) = (s for s in together(plans_of(op))[worker].steps if isinstance(s, Collective))
    return step
