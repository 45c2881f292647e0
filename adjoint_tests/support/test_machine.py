"""The machine that proves programs refuses those, made by hand, that are wrong or only right in
some order; whatever the order in which they are given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import linop
from linop import COPIES, LinearOperator, Partition, Region, Space, TensorSpace
from linop.backends.engine.execution.instructions import Flag, Sign
from linop.planning.patterns import Kind, Pattern
from support.planning.exported import (
    Base,
    Complete,
    Exported,
    Join,
    Move,
    Operation,
    Packet,
    Post,
    Room,
    Signal,
    Static,
    Until,
)
from support.planning.machine import Wrong, prove

N, FLOAT = 3, np.dtype(float)
Programs = list[Exported]


def memory(room: Room, *begins: int, n: int = N) -> Static:
    """Arrays of n numbers at these addresses, used in turn."""
    return Static((room,) * len(begins), tuple(np.arange(n) * 8 + b for b in begins), 8)


def own(worker: int, begin: int, n: int = N) -> Static:
    return memory(("own", worker), begin, n=n)


def program(
    worker: int,
    given: dict[str, Base],
    made: dict[str, Base],
    *operations: Operation,
    ready: dict[int, int] | None = None,
) -> Exported:
    return Exported(worker, FLOAT, given, made, operations, ready or {})


def sent(peer: int, where: Base, number: int = 0) -> Packet:
    return Packet(number, peer, False, where)


def received(peer: int, where: Base, number: int = 0) -> Packet:
    return Packet(number, peer, True, where)


a, b, c = Region("a", N), Region("b", N, 1), Region("c", N, 2)
A, B = own(0, 1000), own(1, 2000)
MOVE = linop.move(Space([a]), a, b)
FREE, DONE = Flag(Sign.READY, 1, 0), Flag(Sign.DONE, 0, 1)


def message(*mine: Operation, theirs: Sequence[Operation] | None = None) -> Programs:
    """a becomes b by a message."""
    receives = theirs or (Post((received(0, B),)), Complete((0,)))
    return [program(0, {"a": A}, {}, *mine), program(1, {}, {"b": B}, *receives)]


def window(ahead: int, ready: int, boxes: int = 1, early: bool = False) -> Programs:
    """a becomes b through boxes in worker 1's window."""
    box = memory(("window", 1, 0), *(100 * k for k in range(boxes)))
    done = DONE._replace(turns=boxes)
    write, tell = Move(box, A), Signal((done,))
    mine = (tell, write) if early else (write, tell)
    says = Signal((FREE,), ahead)
    return [
        program(0, {"a": A}, {}, Until((FREE,)), *mine, ready={1: ready}),
        program(1, {}, {"b": B}, Until((done,)), Move(B, box), says),
    ]


def overwritten(early: bool) -> Programs:
    """Worker 1 writes to what worker 0 sends to worker 2, once 0 has said so."""
    box = memory(("window", 0, 0), 0)
    C, leaves, tells = own(2, 3000), Complete((0,)), Signal((DONE,))
    rest = (tells, leaves) if early else (leaves, tells)
    begin = Until((FREE,)), Move(box, A), Post((sent(2, box),))
    then = Until((DONE,)), Move(box, B), Signal((FREE,), 1)
    return [
        program(0, {"a": A}, {}, *begin, *rest, ready={1: 1}),
        program(1, {"b": B}, {"b": B}, *then),
        program(2, {}, {"c": C}, Post((received(0, C),)), Complete((0,))),
    ]


def falling() -> Programs:
    first, second = window(3, 3, 3)
    low = Signal((FREE,), 0)
    operations = low, *second.operations
    return [first, program(1, {}, {"b": B}, *operations)]


TWO = TensorSpace((N,), Partition((2,)), axes=[COPIES])
SUM = linop.all_reduce(TWO)
NAMES = [region.name for region in TWO.regions]


def summed(
    *counts: int, brings: tuple[int, ...] = (N, N), kind: Kind = Kind.ALL_REDUCE
) -> Programs:
    """An all-reduce; counts and sizes are of each member."""
    found: list[Any] = []
    for w in range(2):
        x, y = own(w, 1000), own(w, 5000)
        pattern = Pattern(kind, (0, 1), (counts[w],))
        join = Join(pattern, sent(-1, own(w, 1000, brings[w])), received(-1, y, 1), (), ())
        done = Complete((0, 1))
        found.append(program(w, {NAMES[w]: x}, {NAMES[w]: y}, join, done))
    return found


MOVED = linop.move(Space([a, b]), a, c)
RIGHT: dict[str, tuple[LinearOperator, Programs]] = {
    "message": (MOVE, message(Post((sent(1, A),)), Complete((0,)))),
    "one box": (MOVE, window(1, 1)),
    "boxes in turn": (MOVE, window(3, 3, 3)),
    "overwritten after it has left": (MOVED, overwritten(early=False)),
    "sum": (SUM, summed(N, N)),
}
WRONG: dict[str, tuple[LinearOperator, Programs, str]] = {
    "no end": (
        *(MOVE, message(Post((sent(1, A),)), Complete((0,)), theirs=[Post((received(0, B),))])),
        "nobody waits for",
    ),
    "nothing sent": (MOVE, message(), "in vain"),
    "told before it is written": (MOVE, window(1, 1, early=True), "while written"),
    "a run too early": (MOVE, window(4, 3, 3), "while read"),
    "ready a run too early": (MOVE, window(3, 4, 3), "nobody read it"),
    "overwritten before it has left": (MOVED, overwritten(early=True), "while (it is sent|read)"),
    "a signal that falls": (MOVE, falling(), "does not grow"),
    "other counts": (SUM, summed(N, 2), "different collectives|another size"),
    "counts that are no sizes": (SUM, summed(2, 2), "another size"),
    "one brings nothing": (SUM, summed(N, N, brings=(N, 0)), "another size"),
    "another collective": (SUM, summed(N, N, kind=Kind.ALL_GATHER), "another size"),
    "no results": (MOVE, [program(0, {"a": A}, {}), program(1, {}, {})], "other arguments or"),
    "a worker alone": (MOVE, [program(0, {"a": A}, {})], "is not there"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_accepted(name: str) -> None:
    op, programs = RIGHT[name]
    for each in permutations(programs):
        prove(each, op.stages)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_refused(name: str) -> None:
    op, programs, words = WRONG[name]
    for each in permutations(programs):
        with pytest.raises(Wrong, match=words):
            prove(each, op.stages)
